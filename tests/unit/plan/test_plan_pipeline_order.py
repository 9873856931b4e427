"""Pipeline orders equal megatron-core's own; the check rejects what no run can have, and shows where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import ScheduleError
from moe_overlap.plan.lowering.pipeline_order import (
    Step,
    check_orders,
    format_grid,
    interleaved,
    one_f_one_b,
    pipeline_order,
)
from tests.unit.plan import plan_samples

INTERLEAVED = [
    (stages, chunks, micro_batches)
    for stages in (2, 3, 4, 8)
    for chunks in (2, 3, 4)
    for micro_batches in range(stages, 4 * stages + 1, stages)
]


def reference(
    stages: int, stage: int, chunks: int, micro_batches: int, group: int | None, in_group: int
) -> list[tuple[int, int, str]]:
    """(chunk, micro-batch, direction) in the order of megatron-core's table; `group` None: not interleaved."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order

    process_group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    communicator: Any = SimpleNamespace(
        pp_group=process_group, virtual_pipeline_model_parallel_size=None if group is None else chunks
    )
    _, _, ahead, _ = schedules.get_pp_rank_microbatches(micro_batches, chunks, group, p2p_communicator=communicator)
    table = schedules.get_schedule_table(micro_batches, chunks, in_group)
    signs = convert_schedule_table_to_order(ahead, chunks, table)
    counts: dict[int, int] = {}
    order = []
    for sign in signs:
        chunk = abs(sign) - 1
        order.append((chunk, counts.get(sign, 0), "forward" if sign > 0 else "backward"))
        counts[sign] = counts.get(sign, 0) + 1
    return order


def plain(order: tuple[Step, ...]) -> list[tuple[int, int, str]]:
    return [(step.chunk, step.micro_batch, step.direction) for step in order]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_1f1b_is_that_of_megatron_core(stages: int) -> None:
    for micro_batches in (1, 2, 3, stages, 2 * stages + 1):
        for stage in range(stages):
            expected = reference(stages, stage, 1, micro_batches, None, micro_batches)
            assert plain(one_f_one_b(stages, stage, micro_batches)) == expected


def test_interleaving_is_that_of_megatron_core() -> None:
    for stages, chunks, micro_batches in INTERLEAVED:
        for stage in range(stages):
            expected = reference(stages, stage, chunks, micro_batches, stages, stages)
            assert plain(interleaved(stages, stage, chunks, micro_batches)) == expected


@pytest.mark.parametrize(("stages", "chunks", "micro_batches", "group"), [(2, 2, 5, 3), (2, 2, 8, 4), (3, 2, 9, 5)])
def test_other_group_sizes(stages: int, chunks: int, micro_batches: int, group: int) -> None:
    for stage in range(stages):
        expected = reference(stages, stage, chunks, micro_batches, group, group)
        assert plain(interleaved(stages, stage, chunks, micro_batches, group)) == expected


def test_as_many_micro_batches_as_stages_is_not_all_warm_up() -> None:
    assert " ".join(map(str, interleaved(2, 1, 2, 2))) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"
    assert " ".join(map(str, interleaved(2, 0, 2, 2))) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"


@pytest.mark.parametrize(("stages", "micro_batches", "group"), [(2, 1, None), (4, 6, None), (2, 4, 1), (3, 8, 6)])
def test_numbers_that_megatron_core_refuses(stages: int, micro_batches: int, group: int | None) -> None:
    with pytest.raises(ConfigError, match=f"gradient_accumulation_steps {micro_batches}: interleaving over {stages}"):
        interleaved(stages, 0, 2, micro_batches, group)


def test_order_of_a_plan() -> None:
    assert " ".join(map(str, pipeline_order(plan_samples.plan(stages=2), 0))) == "0F0 0F1 0B0 0B1"
    plan = plan_samples.plan(layers=4, stages=2, chunks=2)
    assert pipeline_order(plan, 1) == interleaved(2, 1, 2, 2)


def test_own_orders_are_sound() -> None:
    for stages, chunks, micro_batches in INTERLEAVED:
        check_orders([interleaved(stages, s, chunks, micro_batches) for s in range(stages)], chunks, micro_batches)
    for stages in (1, 2, 5):
        check_orders([one_f_one_b(stages, s, 4) for s in range(stages)], 1, 4)


def orders() -> list[list[Step]]:
    return [list(one_f_one_b(2, stage, 2)) for stage in range(2)]


def test_grid_marks_the_wrong_cell() -> None:
    wrong = orders()
    wrong[1][2] = wrong[1][0]
    with pytest.raises(ScheduleError) as caught:
        check_orders(wrong, 1, 2)
    assert str(caught.value) == (
        "stage 1: 0F0 runs twice\n"
        "S0  0F0   0F1   0B0   0B1\n"
        "S1  0F0   0B0   [0F0] 0B1"
    )  # fmt: skip


def test_a_step_that_is_missing() -> None:
    wrong = orders()
    del wrong[0][3]
    with pytest.raises(ScheduleError, match=r"^stage 0: 0B1 never runs\nS0  0F0 0F1 0B0 \[\]\n"):
        check_orders(wrong, 1, 2)


def test_a_backward_before_its_forward() -> None:
    wrong = orders()
    wrong[1][2], wrong[1][3] = wrong[1][3], wrong[1][2]
    with pytest.raises(ScheduleError, match=r"^stage 1: 0B1 runs before its forward pass\n(.|\n)*\[0B1\]"):
        check_orders(wrong, 1, 2)


def test_a_step_that_does_not_exist() -> None:
    wrong = orders()
    wrong[0].append(Step("forward", 1, 0))
    with pytest.raises(ScheduleError, match=r"^stage 0: 1F0 does not exist\n"):
        check_orders(wrong, 1, 2)


def test_stages_that_wait_for_each_other() -> None:
    wrong = orders()
    wrong[0] = [Step("forward", 0, 0), Step("backward", 0, 0), Step("forward", 0, 1), Step("backward", 0, 1)]
    check_orders(wrong, 1, 2)
    wrong[1] = [Step("forward", 0, 1), Step("backward", 0, 1), Step("forward", 0, 0), Step("backward", 0, 0)]
    with pytest.raises(ScheduleError, match=r"^stage 0: 0B0 waits for ever for 0B0 of stage 1\n(.|\n)*\[0B0\]"):
        check_orders(wrong, 1, 2)


def test_grid_of_nothing() -> None:
    assert format_grid([[], []]) == "S0\nS1"
