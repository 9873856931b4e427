"""One line of a terminal that is rewritten in place: the progress of slow work.

Without a terminal nothing is shown. Call `clear` before printing a line that stays.
"""

from __future__ import annotations

import os
import shutil
from typing import TextIO

ERASE = "\r\x1b[K"
"""Moves to the start of the line and deletes it."""


class LiveLine:
    """The last line of a terminal.

    Args:
        stream: standard output or error; shows nothing if it is no terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_text = False

    def show(self, text: str) -> None:
        """Replace the line, cut to the width of the terminal: of a longer one the first part would stay."""
        if self.is_shown:
            self._write(ERASE + text[: shutil.get_terminal_size().columns - 1])
            self._has_text = True

    def clear(self) -> None:
        """Clear the line for the next output."""
        if self._has_text:
            self._write(ERASE)
            self._has_text = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
