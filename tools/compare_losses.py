"""`python tools/compare_losses.py`: the program is moe_overlap/commands/compare.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.compare import compare_losses  # noqa: E402

if __name__ == "__main__":
    sys.exit(compare_losses())
