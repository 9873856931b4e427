"""The output of a solver's own C code, kept away from the answer.

HiGHS sometimes prints a debug line (`transformNewIntegerFeasibleSolution: …`), even if its parameters ask for silence. The line
goes to the process's standard output, where a search may print its answer as JSON.
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
    """Redirect standard output to standard error inside the block."""
    sys.stdout.flush()
    try:
        saved_output = os.dup(OUTPUT)
    except OSError:  # the parent process closed standard output: nobody reads it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            os.dup2(ERRORS, OUTPUT)
        yield
    finally:
        # C buffers its output unless it is a terminal.
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved_output, OUTPUT)
        os.close(saved_output)
