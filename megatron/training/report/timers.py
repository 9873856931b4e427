"""Timers of --timing-log-level: seconds per step on every rank, shown as --timing-log-option says.

What is timed is told by the caller, name by name; a window adds steps up and is emptied when it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

NAME_WIDTH = 32


class TimerWindow:
    """Sums of timers over the steps since they were last taken, on this rank."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, seconds: Mapping[str, float]) -> None:
        """The timers of one step."""
        self._steps += 1
        for name, value in seconds.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def take(self) -> dict[str, tuple[float, ...]]:
        """Seconds per step by name, one for each rank (0 where a rank has no such timer); the window is empty then.

        Collective over the default group; names come in the order of the first rank that has them.
        """
        mine = {name: value / self._steps for name, value in self._sums.items()}
        self._sums, self._steps = {}, 0
        ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: tuple(rank.get(name, 0.0) for rank in ranks) for name in names}


def slowest(timers: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """The largest of all ranks by curve name (`forward-backward-time`), as upstream names them."""
    return {f"{name}-time": max(values) for name, values in timers.items()}


def timer_lines(timers: Mapping[str, tuple[float, ...]], option: str) -> list[str]:
    """What the console shows, in milliseconds.

    Args:
        option: `max`, `minmax` or `all`.
    """
    heads = {"max": "max time across ranks", "minmax": "(min, max) time across ranks", "all": "times of the ranks"}
    return [f"{heads[option]} (ms):"] + [
        f"    {name} {'.' * (NAME_WIDTH - len(name))} {_shown(values, option)}" for name, values in timers.items()
    ]


def _shown(values: tuple[float, ...], option: str) -> str:
    if option == "max":
        return f"{max(values) * 1e3:.2f}"
    if option == "minmax":
        return f"({min(values) * 1e3:.2f}, {max(values) * 1e3:.2f})"
    return " ".join(f"{rank}: {value * 1e3:.2f}" for rank, value in enumerate(values))
