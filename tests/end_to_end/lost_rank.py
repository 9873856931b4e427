"""pretrain_moe.py with a rank that is lost, or fails, just before it sends its rows, when the others already wait for them.

    lost_rank.py RANK DISPATCH HOW [flags of pretrain_moe.py]

Rank RANK comes to grief in place of its dispatch number DISPATCH, counted from 1. HOW is the name of a signal that it sends
itself, `raise` for an exception, or `memory` for an allocation above the limit of its address space. Runs with overlap are met in
their dispatcher, plain ones (HOW ends in `-plain`) where the recorder begins the dispatch of layer 0.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_overlap.commands import train as pretrain_moe  # noqa: E402


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


def lose_at(number: int, how: str) -> None:
    """Have this process fail at a dispatch."""
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    cpu_backend.install()
    from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher
    from moe_overlap.runtime.spans import SpanRecorder

    left, plain = [number], how.endswith("-plain")

    def failing(before: Callable[..., Any], is_dispatch: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            left[0] -= is_dispatch(*arguments)
            if left[0] == 0 and is_dispatch(*arguments):
                if plain:
                    # The failure is inside of the operation.
                    before(*arguments)
                come_to_grief(how.removesuffix("-plain"))
            return before(*arguments)

        return call

    if plain:
        is_dispatch = lambda recorder, name, *rest: name == "L0.moe.dispatch"  # noqa: E731
        SpanRecorder._switch = failing(SpanRecorder._switch, is_dispatch)  # type: ignore[method-assign]
    else:
        start = IrregularDispatcher.start_dispatch
        IrregularDispatcher.start_dispatch = failing(start, lambda *_: True)  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, dispatch, how, *words = sys.argv[1:]
    if os.environ["RANK"] == rank:
        lose_at(int(dispatch), how)
    pretrain_moe.end_process(pretrain_moe.main(words))
