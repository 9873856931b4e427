"""Runs of the ranks of test_gradient_values.py."""

from __future__ import annotations

import datetime
from typing import Any
from unittest.mock import patch

from tests.multiprocess import unlike_runs
from tests.multiprocess.unlike_runs import Curve

WITH_BIASES = unlike_runs.MODEL.replace("--disable-bias-linear", "")
"""Biases of experts' second products are whole on every tensor rank."""


def curve_of(words: str, steps: int, save: str | None = None) -> Curve:
    """Losses and gradient norms of a layout, as `unlike_runs.curve_of`."""
    with patch.object(unlike_runs, "MODEL", WITH_BIASES):
        return unlike_runs.curve_of(words, steps, save)


def curves_of(words: dict[str, str], steps: int) -> dict[str, Curve]:
    """The same of several layouts, by name."""
    return {name: curve_of(each, steps) for name, each in words.items()}


def changed_where_nobody_else_is(words: str) -> tuple[int, list[str], float]:
    """Of one process: how many gradients there are, those that completing their reduction changes, and by how much the norm is
    off the one computed here."""
    import torch

    from moe_overlap.runtime.state import update

    finalize, changed, sums = update.finalize_gradients, list[str](), list[float]()
    count = [0]

    def watched(chunks: Any, *more: Any) -> None:
        gradients = {name: p.main_grad for chunk in chunks for name, p in chunk.named_parameters()}
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        finalize(chunks, *more)
        count[0] = len(before)
        changed.extend(name for name, gradient in gradients.items() if not torch.equal(gradient, before[name]))
        sums.append(sum(float(gradient.double().square().sum()) for gradient in before.values()))

    with patch.object(update, "finalize_gradients", watched):
        curve = curve_of(words, 1)
    return count[0], changed, abs(curve[0][1] / sums[0] ** 0.5 - 1.0)


def timeouts_of(words: str) -> set[datetime.timedelta]:
    """The timeouts of all process groups of a run but the default one, which the tests make."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    unlike_runs._assembled(f"{words} --train-iters 1")
    return {
        group._get_backend(torch.device("cpu")).options._timeout
        for group in _world.pg_map
        if group is not dist.group.WORLD
    }
