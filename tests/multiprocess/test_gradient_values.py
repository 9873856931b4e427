"""Gradients of every kind of weight, by value: Adam hides a constant factor, and so does one layout beside another."""

from __future__ import annotations

import datetime
from itertools import chain
from pathlib import Path

import pytest

from tests.multiprocess.gradient_runs import changed_where_nobody_else_is, curve_of, curves_of, timeouts_of
from tests.multiprocess.unlike_runs import UNTIED
from tests.spawn import run

SGD = f"{UNTIED} --optimizer sgd --lr 1e-1 --micro-batch-size 1 --moe-token-dispatcher-type alltoall"
LAYOUTS = {
    "data": "",
    "experts": "--expert-model-parallel-size 2",
    "experts in tensor ranks": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
    "distributed optimizer": "--expert-model-parallel-size 2 --use-distributed-optimizer",
}
ROUNDING = 5e-6


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    """The weights that one process begins with, and its curve."""
    folder = tmp_path_factory.mktemp("start") / "saved"
    return folder, run(1, curve_of, f"{SGD} --make-vocab-size-divisible-by 128", 3, str(folder))[0]


def test_every_layout_has_the_norms_and_losses_of_one_process(
    started: tuple[Path, list[tuple[float, float]]],
) -> None:
    folder, expected = started
    words = {
        name: f"{SGD} {flags} --finetune --ckpt-step 0 --load {folder} "
        f"--make-vocab-size-divisible-by {64 if 'tensor' in name else 128}"
        for name, flags in LAYOUTS.items()
    }
    for name, curve in run(2, curves_of, words, 3)[0].items():
        apart = [value / other - 1.0 for value, other in zip(chain(*curve), chain(*expected), strict=True)]
        assert max(map(abs, apart)) < ROUNDING, name


def test_one_process_has_nothing_to_complete_and_the_norm_of_all_its_gradients() -> None:
    ((count, changed, off),) = run(1, changed_where_nobody_else_is, f"{SGD} --make-vocab-size-divisible-by 128")
    assert count > 20 and changed == [] and off < 1e-6


def test_every_group_has_the_timeout_of_the_flag() -> None:
    words = f"{SGD} --expert-model-parallel-size 2 --distributed-timeout-minutes 7"
    assert run(2, timeouts_of, words) == [{datetime.timedelta(minutes=7)}] * 2
