"""Where the executor's host would wait for the device in a step, counted by instruction on one rank of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_overlap.plan.operators import BACKWARD, COUNT
from moe_overlap.runtime.executor import execute
from tests.unit.runtime.fake_ranks import DeviceMode, HostCopies, executor_of, run_step, two_ranks

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")

PARTITIONED = "--moe-overlap-partitions 2 --defer-weight-gradients"
RUNS = {
    "partitions around": f"{PARTITIONED} --moe-overlap-range around --moe-grouped-gemm",
    "capacity, full recompute": f"{PARTITIONED} --moe-overlap-range around --moe-expert-capacity-factor 0.75 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "experts choose more than k": f"{PARTITIONED} --moe-overlap-range after --moe-gate expert_choice "
    "--moe-expert-capacity-factor 1.5 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0",
}


@pytest.mark.parametrize("name", RUNS)
def test_the_host_waits_for_counts_alone(name: str) -> None:
    device, instructions = run_step(RUNS[name])
    in_layers = [i for i in instructions if i.operator.layer is not None and not i.operator.is_update]
    counts = [i for i in in_layers if i.operator.kind is COUNT]
    assert counts, "nothing leaves the rank: the test would show nothing"
    # The pairs of dispatch and combine of one count take its numbers as they are, backward too.
    waited_in = Counter((i.name, i.micro_batch, i.partition) for i in in_layers for _ in device.waits_of(i))
    assert set(waited_in.values()) <= {1}
    assert sorted(operator for i in in_layers for operator in device.waits_of(i)) == ["counts"] * len(counts)
    assert not any(device.waits_of(i) for i in in_layers if i.operator.phase is BACKWARD)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_bounded_rows_train_as_counted_rows_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for takes_bounds in (False, True):
        monkeypatch.setattr(execute, "computes_later", lambda device, answer=takes_bounds: answer)
        runner, instructions, feed = executor_of(RUNS[name])
        assert runner.dispatcher.takes_bounds is takes_bounds
        results = [runner.run(instructions, feed, step) for step in range(2)]
        steps.append([(result.loss, result.grad_norm) for result in results])
    assert steps[0] == steps[1]  # bitwise: rows past the routed ones carry no gradient


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (lambda x: int(x.sum()), ["_local_scalar_dense"]),
        (lambda x: x[x > 1], ["index"]),
        (lambda x: x.repeat_interleave(x), ["repeat_interleave"]),
        (lambda x: x.to("cpu"), ["copy"]),
        (lambda x: x.nonzero(), ["nonzero"]),
        (lambda x: x.to("cpu", non_blocking=True), []),
        (lambda x: x.masked_fill(x > 1, 0).index_select(0, x), []),
        (lambda x: x.repeat_interleave(x, output_size=3), []),
        (lambda x: x.clone().__setitem__(x > 1, 0), []),
    ],
)
def test_what_counts_as_a_wait(reads: Callable[[torch.Tensor], Any], expected: list[str]) -> None:
    device = DeviceMode()
    numbers = torch.tensor([0, 1, 2])
    with HostCopies(device), device:
        reads(numbers)
    assert [operator for _, operator in device.waits] == expected
