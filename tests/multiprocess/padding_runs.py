"""Runs of the ranks of test_padded_vocabulary.py."""

from __future__ import annotations

import contextlib
import io

from tests.multiprocess.unlike_runs import Curve, trained


def told(words: str, log: str) -> tuple[Curve, str]:
    """Losses and gradient norms of a whole run, and what this rank prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        curve = trained(words, log)
    return curve, printed.getvalue()
