"""How a field of the configuration says more about its flag than name, type and default."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

Need = Literal["CUDA", "Transformer Engine"]


def flag(
    default: Any,
    *names: str,
    off: str | None = None,
    needs: Need | None = None,
    of: str | None = None,
) -> Any:
    """A field whose flag is not just `--field-name`.

    Args:
        default: the field's default.
        names: the flag's names, the documented one first; none for `--field-name`.
        off: for a field that is true by default: the flag that turns it off.
        needs: what a machine must have to carry out another value than the default.
        of: the field ("group.field") whose setting this is: without effect while that one has its default.
    """
    return field(default=default, metadata={"names": names, "off": off, "needs": needs, "of": of})
