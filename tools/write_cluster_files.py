"""Write examples/clusters/NAME.json, eight nodes of every GPU type of moe_overlap/describe/gpus.json, to start from."""

from __future__ import annotations

import json
import re
from pathlib import Path

from moe_overlap.describe.cluster import known_gpus, node_group

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "clusters"
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


def main() -> None:
    """Write every file."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in cluster_files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
