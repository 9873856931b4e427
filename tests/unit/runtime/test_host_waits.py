"""Tests of the executor's host waits: where it would wait for the device in a step, by instruction on one rank of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_overlap.plan.lowering import lower
from moe_overlap.plan.operators import BACKWARD, COMBINE, COUNT, DISPATCH, FORWARD, MERGE
from moe_overlap.runtime import step
from moe_overlap.runtime.dispatch.irregular import CountAllToAll, IrregularDispatcher
from moe_overlap.runtime.executor import execute
from tests.unit.runtime.fake_ranks import READ, DeviceMode, HostCopies, executor_of, run_step, two_ranks

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")

PARTITIONED = "--moe-overlap-partitions 2 --defer-weight-gradients"
RUNS = {
    "partitions around": f"{PARTITIONED} --moe-overlap-range around --moe-grouped-gemm",
    "capacity, full recompute": f"{PARTITIONED} --moe-overlap-range around --moe-expert-capacity-factor 0.75 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "sums in order": f"{PARTITIONED} --moe-overlap-range around --deterministic-mode",
    "experts choose more than k": f"{PARTITIONED} --moe-overlap-range after --moe-gate expert_choice "
    "--moe-expert-capacity-factor 1.5 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0",
}
STATIC = "--moe-expert-capacity-factor 0.75 --moe-pad-expert-input-to-capacity"
WITHOUT_COUNTS = {
    "two micro-batches, deferred": f"{STATIC} --moe-overlap-micro-batches 2 --defer-weight-gradients",
    "chunks of capacity": f"{STATIC} --moe-overlap-capacity-chunks 2",
}


@pytest.mark.parametrize("name", WITHOUT_COUNTS)
def test_with_a_static_capacity_the_host_waits_for_nothing(name: str) -> None:
    device, instructions = run_step(WITHOUT_COUNTS[name])
    in_layers = [i for i in instructions if i.operator.layer is not None and not i.operator.is_update]
    assert any(i.operator.kind is DISPATCH for i in in_layers) and not any(i.operator.kind is COUNT for i in in_layers)
    assert [operator for i in in_layers for operator in device.waits_of(i)] == []


def test_the_bytes_of_a_list_with_a_static_capacity_are_those_that_travel() -> None:
    runner, instructions, feed = executor_of(WITHOUT_COUNTS["two micro-batches, deferred"])
    runner.run(instructions, feed, 0)
    rows = [i for i in instructions if i.operator.kind in (DISPATCH, COMBINE)]
    # A row of 32 elements takes its probability along, in 16 bytes, where it is dispatched, and its gradient on the way back.
    packed = {DISPATCH: 36, COMBINE: 32}
    assert runner.dispatcher.wires.sent_bytes == sum(i.bytes * packed[i.operator.kind] // 32 for i in rows)


def test_memory_of_counts_is_there_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every partition of the micro-batches under way, and one more."""
    prepared: list[tuple[int, int]] = []
    monkeypatch.setattr(CountAllToAll, "prepare", lambda counts, device, *sizes: prepared.append(sizes))
    executor_of(RUNS["partitions around"])
    executor_of("--moe-overlap-micro-batches 2")
    executor_of(WITHOUT_COUNTS["chunks of capacity"])
    assert prepared == [(4, 3), (4, 3)]


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


def test_computation_is_queued_in_front_of_every_wait() -> None:
    """Gate p+1 in front of the wait for the counts of partition p, the experts of a partition in front of the last wait."""
    device, _ = run_step(RUNS["partitions around"])
    assert device.issued.count(READ) >= 4 and device.bare_reads() == []


def test_a_wait_that_is_moved_before_the_gate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "counts_read_late", lambda drafts: drafts)
    device, _ = run_step(RUNS["partitions around"])
    assert len(device.bare_reads()) == device.issued.count(READ)


def test_one_number_that_is_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    unpermute = IrregularDispatcher.unpermute

    def reading(dispatcher: IrregularDispatcher, returned: torch.Tensor, handle: Any) -> torch.Tensor:
        returned.sum().item()
        return unpermute(dispatcher, returned, handle)

    monkeypatch.setattr(IrregularDispatcher, "unpermute", reading)
    device, instructions = run_step(RUNS["partitions around"])
    merges = [i for i in instructions if i.operator.kind is MERGE and i.operator.phase is FORWARD]
    assert all(device.waits_of(i) == ["_local_scalar_dense"] for i in merges)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_bounded_rows_train_as_counted_rows_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    # Bounded or counted rows, and lists for devices that queue and for those that do not: both orders give the same bits.
    for takes_bounds, runs_ahead in ((False, False), (False, True), (True, True)):
        monkeypatch.setattr(execute, "computes_later", lambda device, answer=takes_bounds: answer)
        monkeypatch.setattr(step, "computes_later", lambda device, answer=runs_ahead: answer)
        runner, instructions, feed = executor_of(RUNS[name])
        assert runner.dispatcher.takes_bounds is takes_bounds
        results = [runner.run(instructions, feed, number) for number in range(2)]
        steps.append([(result.loss, result.grad_norm) for result in results])
    assert steps[0] == steps[1] == steps[2]  # bitwise: rows past the routed ones carry no gradient


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
