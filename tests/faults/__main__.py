"""Kills by hand: `python -m tests.faults --kills 50 [--seed N] [--folder DIR]`.

The status is 1 where a run that resumed was not the same run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.faults.kills import killed_job


def main() -> int:
    """Kill a job as often as asked for, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keeps what the job wrote; default a temporary one")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcome = killed_job(
            words.kills, words.seed, words.folder or Path(temporary), lambda line: print(line, flush=True)
        )
    print(
        f"{outcome.kills} kills, {outcome.resumes} resumes, {outcome.repeated} steps executed again, "
        f"{outcome.steps} steps in all, {len(outcome.problems)} problems"
    )
    for problem in outcome.problems:
        print(problem)
    return 1 if outcome.problems or outcome.kills < words.kills else 0


if __name__ == "__main__":
    sys.exit(main())
