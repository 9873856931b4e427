"""`python -m moe_overlap.tuner.capture`: reads a JSON list of requests from stdin, writes each answer to its `path`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Capture all, one after the other."""
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    cpu_backend.install()
    from moe_overlap.tuner.capture.cache import save_captured
    from moe_overlap.tuner.capture.capture import capture
    from moe_overlap.tuner.capture.request import Request

    for values in json.load(sys.stdin):
        path = Path(values.pop("path"))
        save_captured(capture(Request.from_values(values)), path)


if __name__ == "__main__":
    main()
