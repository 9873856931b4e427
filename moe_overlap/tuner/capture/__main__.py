"""`python -m moe_overlap.tuner.capture`: reads requests from stdin, one JSON line each, and writes each answer to its `path`.

It writes one line to stdout after every answer, and ends at the end of stdin.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Capture the requests one after the other."""
    # A line that a library prints must not count as an answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    cpu_backend.install()
    from moe_overlap.tuner.capture.cache import save_captured
    from moe_overlap.tuner.capture.capture import capture
    from moe_overlap.tuner.capture.request import Request

    for line in sys.stdin:
        values = json.loads(line)
        path = Path(values.pop("path"))
        save_captured(capture(Request.from_values(values)), path)
        print(path, file=answers, flush=True)


if __name__ == "__main__":
    main()
