"""Recipes of 8-bit products, of the stand-in for Transformer Engine. The library's are dataclasses of pydantic."""

from __future__ import annotations

import dataclasses
import functools
from enum import Enum
from typing import Any, TypeVar, dataclass_transform

import torch

T = TypeVar("T")


@dataclass_transform()
def _recipe(kind: type[T]) -> type[T]:
    """A dataclass that ignores arguments that it does not know, as pydantic's do."""
    made = dataclasses.dataclass(kind)
    known, construct = {field.name for field in dataclasses.fields(made)}, made.__init__  # type: ignore[arg-type]

    @functools.wraps(construct)
    def ignoring(self: T, **values: Any) -> None:
        construct(self, **{name: value for name, value in values.items() if name in known})

    made.__init__ = ignoring  # type: ignore[method-assign]
    return made


class Format(Enum):
    """8-bit types: forward, backward."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


@_recipe
class DelayedScaling:
    """A scale from the maxima of earlier passes. Its products are not rounded here."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@_recipe
class Float8CurrentScaling:
    """A scale for each tensor."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@_recipe
class Float8BlockScaling:
    """A scale for 128 elements of a row."""

    fp8_format: Format = Format.E4M3
    backward_override: str | None = None


@_recipe
class MXFP8BlockScaling:
    """A power of two for 32 elements of a row."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None


class NVFP4BlockScaling:
    """4 bits; megatron-core asks for the name alone."""
