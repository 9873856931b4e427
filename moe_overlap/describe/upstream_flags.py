"""The flags of upstream Megatron-LM, from a generated table: a flag that we do not have is then known by name."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class UpstreamFlag:
    """One action of upstream's parser, with its values as text."""

    names: tuple[str, ...]
    dest: str
    type: str | None
    default: str | None
    choices: tuple[str, ...] | None
    nargs: str | None
    """`0`, `+`, `*`, a number, or None for exactly one value."""
    kind: str
    """argparse's action: Store, StoreTrue, StoreFalse, BooleanOptional, Help."""
    in_core_0_16_1: bool
    in_head_2026_08: bool

    def is_default(self, values: tuple[str, ...]) -> bool:
        """Whether these values leave the flag at upstream's default, or switch its feature off."""
        if self.kind == "BooleanOptional":
            return self.names[0].startswith("--no-")
        if self.kind != "Store":
            return False
        if self.default in (None, "False", "[]"):
            return values in ((), ("0",), ("none",), ("None",))
        given = values[0] if len(values) == 1 else str(list(values))
        return given == self.default or _same_number(given, self.default)

    def reads(self, text: str) -> bool:
        """Whether upstream's parser reads this value: numbers are checked, other types are not; `${...}` is its user's."""
        if self.type not in ("int", "float") or text.startswith("$"):
            return True
        try:
            int(text) if self.type == "int" else float(text)
        except ValueError:
            return False
        return True


def _same_number(left: str, right: str) -> bool:
    try:
        return float(left) == float(right)
    except ValueError:
        return False


@functools.cache
def load_upstream_flags() -> Mapping[str, UpstreamFlag]:
    """Every upstream flag by name (`--num-layers`); 905 actions, some with several names."""
    table = json.loads(resources.files(__package__).joinpath("upstream_flags.json").read_text(encoding="utf-8"))
    flags = [_row(row) for row in table["flags"]]
    return MappingProxyType({name: flag for flag in flags for name in flag.names})


def _row(row: list[object]) -> UpstreamFlag:
    names, dest, kind_of_value, default, choices, nargs, kind, in_core, in_head = row
    assert isinstance(names, list) and (choices is None or isinstance(choices, list))
    return UpstreamFlag(
        names=tuple(names),
        dest=str(dest),
        type=None if kind_of_value is None else str(kind_of_value),
        default=None if default is None else str(default),
        choices=None if choices is None else tuple(choices),
        nargs=None if nargs is None else str(nargs),
        kind=str(kind),
        in_core_0_16_1=bool(in_core),
        in_head_2026_08=bool(in_head),
    )
