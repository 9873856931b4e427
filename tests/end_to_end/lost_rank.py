"""A rank that is lost, or fails, just before it sends its rows, when the others already wait for them (`tests.ranks.Trouble`).

It comes to grief in place of a chosen dispatch, counted from 1. How: the name of a signal that it sends itself, `raise` for an
exception, or `memory` for an allocation above the limit of its address space. Runs with overlap are met in their dispatcher,
plain ones (the word ends in `-plain`) where the recorder begins the dispatch of layer 0.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.spawn import HANGS_SECONDS

"""A rank that never starts its dispatch is a failure of the test, which then shows what the ranks said."""


PLAIN = "-plain"
"""Ends the word of a failure inside of an operation of a run without overlap."""


def is_plain(how: str) -> bool:
    """Whether the run has no overlap."""
    return how.endswith(PLAIN)


def come_to_grief(how: str) -> None:
    """Fail in the way that a word or the name of a signal says."""
    if how == "raise":
        raise KeyError("no such expert")
    if how == "memory":
        import torch

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 2**26
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        torch.empty(2**31, dtype=torch.uint8)
    os.kill(os.getpid(), signal.Signals[how])


def lose_at(number: int, how: str, others: Sequence[Path]) -> None:
    """Have this process fail at a dispatch, once the files exist by which the other ranks tell that they have started theirs."""

    def fail_inside(start: Callable[[], Any]) -> None:
        start()
        come_to_grief(how.removesuffix(PLAIN))

    def fail(start: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + HANGS_SECONDS
        while not all(path.exists() for path in others) and time.monotonic() < deadline:
            time.sleep(0.005)
        come_to_grief(how)
        return start()

    _replace_dispatch(number, fail_inside if is_plain(how) else fail, is_plain(how))


def tell_at(number: int, path: Path) -> None:
    """Have this process make a file when it has started a dispatch of a run with overlap."""

    def tell(start: Callable[[], Any]) -> Any:
        started = start()
        path.touch()
        return started

    _replace_dispatch(number, tell)


def _replace_dispatch(number: int, instead: Callable[[Callable[[], Any]], Any], plain: bool = False) -> None:
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    cpu_backend.install()
    from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher
    from moe_overlap.runtime.spans import SpanRecorder

    left = [number]

    def replaced(before: Callable[..., Any], is_dispatch: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not is_dispatch(*arguments):
                return before(*arguments)
            left[0] -= 1
            return instead(lambda: before(*arguments)) if left[0] == 0 else before(*arguments)

        return call

    if plain:
        is_dispatch = lambda recorder, name, *rest: name == "L0.moe.dispatch"  # noqa: E731
        SpanRecorder._switch = replaced(SpanRecorder._switch, is_dispatch)  # type: ignore[method-assign]
    else:
        start = IrregularDispatcher.start_dispatch
        IrregularDispatcher.start_dispatch = replaced(start, lambda *_: True)  # type: ignore[method-assign]
