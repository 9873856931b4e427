"""`python tools/import_flags.py`: the program is moe_overlap/commands/import_flags.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.import_flags import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
