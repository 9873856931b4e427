"""`python tools/show_plan.py`: the program is moe_overlap/commands/show_plan.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.missing import says_what_is_missing  # noqa: E402

if __name__ == "__main__":
    with says_what_is_missing():
        from moe_overlap.commands.show_plan import main

        sys.exit(main())
