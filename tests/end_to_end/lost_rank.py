"""pretrain_moe.py with a rank that is lost just before it sends its rows, when the others already wait for them.

    lost_rank.py RANK DISPATCH SIGNAL [flags of pretrain_moe.py]

Rank RANK sends itself SIGNAL in place of its dispatch number DISPATCH, counted from 1.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from moe_overlap.commands import train as pretrain_moe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def lose_at(number: int, how: signal.Signals) -> None:
    """Have this process lost at a dispatch."""
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    cpu_backend.install()
    from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher

    start, left = IrregularDispatcher.start_dispatch, [number]

    def start_dispatch(self: Any, *rest: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), how)
        return start(self, *rest)

    IrregularDispatcher.start_dispatch = start_dispatch  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, dispatch, how, *words = sys.argv[1:]
    if os.environ["RANK"] == rank:
        lose_at(int(dispatch), signal.Signals[how])
    pretrain_moe.end_process(pretrain_moe.main(words))
