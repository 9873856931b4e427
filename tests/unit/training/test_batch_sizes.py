"""Batches that grow: against megatron-core's own calculator, step by step."""

from __future__ import annotations

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import BatchSizes, batch_sizes
from moe_overlap.describe.errors import ConfigError

SIZES = "--micro-batch-size 2 --seq-length 1000"


def sizes_of(words: str, data_size: int = 1) -> BatchSizes:
    return batch_sizes(parse(f"{SIZES} {words}".split()).config, data_size)


def test_a_constant_batch() -> None:
    assert sizes_of("--global-batch-size 6") == BatchSizes((0,), (6,))
    assert sizes_of("", data_size=4) == BatchSizes((0,), (8,))
    assert sizes_of("--global-batch-size 6").steps(20) == 3


@pytest.mark.parametrize(("start", "increment", "samples", "last"), [(2, 2, 8, 8), (4, 4, 100, 32), (8, 8, 7, 8)])
def test_an_even_rise_is_megatron_cores(start: int, increment: int, samples: int, last: int) -> None:
    sizes = sizes_of(f"--rampup-batch-size {start} {increment} {samples} --global-batch-size {last}")
    if start == last:
        assert sizes == BatchSizes((0,), (last,))
        return
    theirs = RampupBatchsizeNumMicroBatchesCalculator(last, 2, 1, False, 1, start, increment, samples)
    for trained in range(3 * samples):
        theirs.update(trained, consistency_check=False)
        assert sizes.at(trained) == theirs.current_global_batch_size, trained


def test_steps_are_counted_one_by_one() -> None:
    sizes = sizes_of("--rampup-batch-size 2 2 30 --global-batch-size 12")
    for samples in range(120):
        steps = trained = 0
        while trained + sizes.at(trained) <= samples:
            trained, steps = trained + sizes.at(trained), steps + 1
        assert sizes.steps(samples) == steps, samples


def test_a_schedule_of_tokens() -> None:
    words = "--step-batch-size-schedule 0:4 20K:8 0.1M:16"
    assert sizes_of(words) == BatchSizes((0, 20, 100), (4, 8, 16))
    assert parse(["--step-batch-size-schedule", "0:4 20K:8"]).config.training.step_batch_size_schedule == ("0:4 20K:8",)
    digits = "9" * 5000
    for wrong in ("4 20K:8", "20K:8", "0:4 20Q:8", "0:4 20K:0", "0:4 0:8", f"0:{digits}", "0:²", f"{digits}:8", "²:8"):
        with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
            sizes_of(f"--step-batch-size-schedule {wrong}")
