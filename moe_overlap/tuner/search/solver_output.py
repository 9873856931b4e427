"""The output of a solver's own C code, kept away from the answer.

HiGHS prints a debug line now and then (`transformNewIntegerFeasibleSolution: …`), whatever its parameters say. It goes to the
process's standard output, where a search may print its answer in JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

OUTPUT, ERRORS = 1, 2


@contextlib.contextmanager
def output_among_errors() -> Iterator[None]:
    """Have what is written to standard output inside the block arrive at standard error."""
    sys.stdout.flush()
    try:
        kept = os.dup(OUTPUT)
    except OSError:  # closed by whoever started this process: nobody reads it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            os.dup2(ERRORS, OUTPUT)
        yield
    finally:
        # C keeps lines back where its output is no terminal.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, OUTPUT)
        os.close(kept)
