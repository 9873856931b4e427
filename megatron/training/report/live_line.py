"""One line of a terminal that is written over and over: how far something is that takes a while.

Where there is no terminal nothing is shown. Whoever prints a line that stays calls `clear` before.
"""

from __future__ import annotations

import os
import shutil
from typing import TextIO

ERASE = "\r\x1b[K"
"""To the start of the line, and everything behind it away."""


class LiveLine:
    """The last line of a terminal.

    Args:
        stream: standard output or error; what is no terminal shows nothing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_shown = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_text = False

    def show(self, text: str) -> None:
        """Replace the line, cut to the width of the terminal: a longer one would be two, of which one stays."""
        if self.is_shown:
            self._write(ERASE + text[: shutil.get_terminal_size().columns - 1])
            self._has_text = True

    def clear(self) -> None:
        """Leave an empty line for what is printed next."""
        if self._has_text:
            self._write(ERASE)
            self._has_text = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
