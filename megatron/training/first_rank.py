"""Work that one process does for all, and checks on which all must agree: an error of one is raised by every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from moe_overlap.describe.errors import ConfigError

T = TypeVar("T")


def on_first_rank(work: Callable[[], T], group: Any = None) -> T:
    """Run `work` on rank 0; every rank returns its result. Without a process group: just run it.

    Collective. The result is pickled.
    Args:
        group: every rank of the run; the default group unless given.
    Raises:
        ConfigError: on every rank, when `work` raised it on rank 0.
        RuntimeError: on the other ranks, when `work` raised anything else.
    """
    if not dist.is_initialized():
        return work()
    message: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            message[0] = work()
        except Exception as error:  # the others wait in the broadcast: they must hear of any failure
            failure, message[1] = error, _portable(error)
    dist.broadcast_object_list(message, src=0, group=group)
    if failure is not None:
        raise failure
    if message[1] is not None:
        raise _restored(message[1])
    result: T = message[0]
    return result


def on_every_rank(work: Callable[[], T], group: Any = None) -> T:
    """Run `work` on every rank and return its own result, or raise one rank's error on all. Collective, as above."""
    if not dist.is_initialized():
        return work()
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:  # as above
        failure = error
    failures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, _portable(failure) if failure is not None else None, group=group)
    if failure is not None:
        raise failure
    for message in failures:
        if message is not None:
            raise _restored(message)
    return result  # type: ignore[return-value]


def _portable(error: Exception) -> tuple[Any, ...]:
    if isinstance(error, ConfigError):
        return (error.subject, str(error.value), error.rule, error.fix)
    return (f"{type(error).__name__}: {error}",)


def _restored(message: tuple[Any, ...]) -> Exception:
    if len(message) == 4:
        return ConfigError(*message)
    return RuntimeError(f"another rank failed: {message[0]}")
