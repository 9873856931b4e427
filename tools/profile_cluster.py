"""`python tools/profile_cluster.py`: the program is moe_overlap/commands/profile_cluster.py.

A source checkout has the benchmark's jobs beside it, so a CPU's host time per step is measured, too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.missing import says_what_is_missing  # noqa: E402

if __name__ == "__main__":
    with says_what_is_missing():
        from moe_overlap.commands.profile_cluster import run
        from tools.bench.machine import measure_host_time_here

        run(measure_host_time_here)
