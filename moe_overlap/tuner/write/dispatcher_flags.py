"""The flags of a dispatcher: whether a search decides it, and the flags of a layout's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.tuner.cost.hardware import Dispatcher
from moe_overlap.tuner.search.dispatchers import FIRST, dispatchers_of

FLAGS: Mapping[Dispatcher, tuple[str, ...]] = MappingProxyType(
    {
        "alltoall": ("--moe-token-dispatcher-type", "alltoall"),
        "allgather": ("--moe-token-dispatcher-type", "allgather"),
        "deepep": ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"),
        "hybridep": ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"),
    }
)
"""Dispatcher -> the flags that say it, to this fork and to unmodified Megatron-LM."""
DECIDING = {words[0] for words in FLAGS.values()} | {"--moe-enable-deepep", "--moe-flex-dispatcher-backend"}
"""Flags that name a dispatcher."""
OF_ONE = ("--moe-deepep-", "--moe-hybridep-")
"""Flags that adjust one library; prefixes."""


def with_dispatcher(bare: Sequence[str], cluster: Cluster, is_free: bool) -> tuple[list[str], tuple[Dispatcher, ...]]:
    """The flags with the dispatcher that is searched first, and those that are searched behind it.

    There are none where the flags name theirs, or layers have no experts. On a measured machine nothing bounds a layout.

    Raises:
        ConfigError: a flag adjusts one library, and several dispatchers are searched; or none is searched, whatever was asked.
    """
    flags = grouped(bare)
    if is_free and "--num-experts" not in flags:
        raise ConfigError("--search-dispatcher", "", "the model has no experts to dispatch tokens to", "drop it")
    if is_free and cluster.measured is not None:
        rule = "a measured cluster has the prices of the dispatcher that it was measured with"
        raise ConfigError("--search-dispatcher", "", rule, "drop it, or describe the machines by --gpu")
    said = {name for name in flags if name in DECIDING}
    if "--num-experts" not in flags or cluster.measured is not None or (said and not is_free):
        return list(bare), ()
    for name in flags:
        if name.startswith(OF_ONE):
            rule = "adjusts one dispatcher, and several are searched"
            raise ConfigError(
                name, " ".join(flags[name]), rule, "drop it, or name the dispatcher and leave --search-dispatcher out"
            )
    others = [word for name, values in flags.items() if name not in said for word in (name, *values)]
    return [*others, *FLAGS[FIRST]], tuple(name for name in dispatchers_of(cluster.group_of(0)) if name != FIRST)


def by_dispatcher(bare: Sequence[str], dispatcher: str) -> list[str]:
    """The flags with those of a layout's dispatcher."""
    flags = grouped(bare) | (grouped(FLAGS[cast(Dispatcher, dispatcher)]) if dispatcher else {})
    return [word for name, values in flags.items() for word in (name, *values)]
