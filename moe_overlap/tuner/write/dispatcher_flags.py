"""The flags of a dispatcher: which dispatchers a search tries, and the flags of the one that a layout uses."""

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
"""Dispatcher -> the flags that select it, in this fork and in unmodified Megatron-LM."""
DECIDING = {arguments[0] for arguments in FLAGS.values()} | {"--moe-enable-deepep", "--moe-flex-dispatcher-backend"}
"""Flags that name a dispatcher."""
OF_ONE = ("--moe-deepep-", "--moe-hybridep-")
"""Prefixes of flags that adjust one library."""


def with_dispatcher(bare: Sequence[str], cluster: Cluster, is_free: bool) -> tuple[list[str], tuple[Dispatcher, ...]]:
    """The flags with the first dispatcher of a search, and the other dispatchers of the search.

    Without a search the flags are unchanged and there are no others: the flags name a dispatcher, the model has no experts, or
    the cluster was measured, with one dispatcher.

    Args:
        bare: flags of the job.
        is_free: search all dispatchers, even if the flags name one (`--search-dispatcher`).
    Raises:
        ConfigError: a flag adjusts one library, and several dispatchers are searched; or `is_free`, and no search is possible.
    """
    flags = grouped(bare)
    if is_free and "--num-experts" not in flags:
        raise ConfigError("--search-dispatcher", "", "the model has no experts to dispatch tokens to", "drop it")
    if is_free and cluster.measured is not None:
        rule = "a measured cluster has the prices of the dispatcher that it was measured with"
        raise ConfigError("--search-dispatcher", "", rule, "drop it, or describe the machines by --gpu")
    named = {name for name in flags if name in DECIDING}
    if "--num-experts" not in flags or cluster.measured is not None or (named and not is_free):
        return list(bare), ()
    for name in flags:
        if name.startswith(OF_ONE):
            rule = "adjusts one dispatcher, and several are searched"
            raise ConfigError(
                name, " ".join(flags[name]), rule, "drop it, or name the dispatcher and leave --search-dispatcher out"
            )
    others = [word for name, values in flags.items() if name not in named for word in (name, *values)]
    return [*others, *FLAGS[FIRST]], tuple(name for name in dispatchers_of(cluster.group_of(0)) if name != FIRST)


def by_dispatcher(bare: Sequence[str], dispatcher: str) -> list[str]:
    """The flags with a layout's dispatcher; unchanged if it names none."""
    flags = grouped(bare) | (grouped(FLAGS[cast(Dispatcher, dispatcher)]) if dispatcher else {})
    return [word for name, values in flags.items() for word in (name, *values)]
