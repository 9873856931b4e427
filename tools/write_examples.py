"""Write the generated files of examples/, or with --check say which ones are out of date.

- `examples/clusters/NAME.json`: eight nodes of every GPU type of moe_overlap/describe/gpus.json, to start from.
- `examples/NAME.args`: the facts of `examples/models/NAME.json` in the form that pretrain_moe.py reads.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from moe_overlap.describe.cluster import known_gpus, node_group
from moe_overlap.describe.readers.model_file import flags_with_values

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CLUSTERS = EXAMPLES / "clusters"
NODES = 8


def cluster_files() -> dict[str, str]:
    """Text by file name."""
    files = {}
    for name, row in known_gpus().items():
        if name != row["name"]:
            continue
        content = {"name": name, "groups": [node_group(row, NODES, row["gpus_per_node"])]}
        stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        files[f"{stem}.json"] = json.dumps(content, indent=2) + "\n"
    return files


def argument_file(description: dict[str, Any]) -> str:
    """The text of an argument file.

    Args:
        description: name, source, and flags by name without dashes: a value, a list of values, or true for a switch.
    """
    lines = [f"# {description['name']}: {description['source']}", "# written by tools/write_examples.py"]
    for flag, values in flags_with_values(description["flags"]):
        lines.append(" ".join([flag, *map(shlex.quote, values)]))
    return "\n".join(lines) + "\n"


def argument_files() -> dict[str, str]:
    """Text by file name."""
    models = sorted((EXAMPLES / "models").glob("*.json"))
    return {f"{path.stem}.args": argument_file(json.loads(path.read_text(encoding="utf-8"))) for path in models}


def main() -> int:
    """Write every file, or with --check say which ones are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    check = parser.parse_args().check
    files = {CLUSTERS / name: text for name, text in cluster_files().items()}
    files |= {EXAMPLES / name: text for name, text in argument_files().items()}
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        print(f"out of date: {', '.join(path.name for path in stale)}; run tools/write_examples.py", file=sys.stderr)
        return 1
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
