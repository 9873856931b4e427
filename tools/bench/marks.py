"""Tables that a tool writes into a page between marks; what stands around them is a person's, and is kept."""

from __future__ import annotations

from pathlib import Path


def write_between_marks(path: Path, mark: str, text: str) -> None:
    """Replace the text between `<!-- mark -->` and `<!-- /mark -->`; the program ends if the page lacks these marks."""
    before, opening, rest = path.read_text().partition(f"<!-- {mark} -->\n")
    _, closing, after = rest.partition(f"<!-- /{mark} -->")
    if not opening or not closing:
        raise SystemExit(f"error: {path}: has no <!-- {mark} --> … <!-- /{mark} -->")
    path.write_text(before + opening + text + closing + after)
