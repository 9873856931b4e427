"""Signals for child processes that a test interrupts.

A shell ignores SIGINT for what it runs in the background, and `nohup` ignores SIGHUP; children inherit both. Python installs no
handler for a signal that is ignored at its start, so a test's child would be deaf to the very signal that the test sends.
"""

from __future__ import annotations

import signal


def restore_interruptions() -> None:
    """Give SIGINT and SIGHUP back their default effect; meant as `preexec_fn` of a process that a test interrupts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
