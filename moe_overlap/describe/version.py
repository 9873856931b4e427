"""The release of this package, as `--version` prints it and as files record it."""

from __future__ import annotations

__version__ = "0.1.0"
VERSION_LINE = f"megatron-moe-overlap {__version__}"
"""The line that `--version` prints."""
