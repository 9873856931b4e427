"""One line for a command started by a Python without its packages, usually the one outside of `.venv`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from moe_overlap.commands.exits import INTERRUPTED, ROOT, missing_package


@contextlib.contextmanager
def says_what_is_missing(root: Path = ROOT, answers_ctrl_c: bool = True) -> Iterator[None]:
    """End with one line and status 2 if the block imports a missing package, with status 130 after Ctrl-C.

    Args:
        root: the checkout, in which `make train` creates `.venv`.
        answers_ctrl_c: whether Ctrl-C ends the block with a line; training handles Ctrl-C separately.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"error: {missing_package(error, root)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if not answers_ctrl_c:
            raise
        # Commands handle Ctrl-C themselves; this is for the second in which their packages are loaded.
        if os.environ.get("RANK", "0") == "0":
            print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
