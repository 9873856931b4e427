"""Pipeline orders equal megatron-core's own, and all stages together can run them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lowering.pipeline_order import PipelineStep, format_grid, interleaved, one_f_one_b
from tests.unit.plan import plan_samples
from tests.unit.plan.pass_orders import fault_of, pass_order

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


def plain(order: tuple[PipelineStep, ...]) -> list[tuple[int, int, str]]:
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


def test_as_many_micro_batches_as_stages_is_not_all_warm_up() -> None:
    assert " ".join(map(str, interleaved(2, 1, 2, 2))) == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"
    assert " ".join(map(str, interleaved(2, 0, 2, 2))) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 0), (2, 1), (4, 6), (3, 8)])
def test_numbers_that_megatron_core_refuses(stages: int, micro_batches: int) -> None:
    with pytest.raises(ConfigError, match=f"gradient_accumulation_steps {micro_batches}: interleaving over {stages}"):
        interleaved(stages, 0, 2, micro_batches)


def test_order_of_a_plan() -> None:
    assert " ".join(map(str, pass_order(plan_samples.plan(stages=2), 0))) == "0F0 0F1 0B0 0B1"
    plan = plan_samples.plan(layers=4, stages=2, chunks=2)
    assert pass_order(plan, 1) == interleaved(2, 1, 2, 2)


def test_own_orders_are_sound() -> None:
    for stages, chunks, micro_batches in INTERLEAVED:
        orders = [interleaved(stages, s, chunks, micro_batches) for s in range(stages)]
        assert not fault_of(orders, chunks, micro_batches)
    for stages in (1, 2, 5):
        assert not fault_of([one_f_one_b(stages, s, 4) for s in range(stages)], 1, 4)


def test_orders_that_no_run_can_have_are_found() -> None:
    first, last = (list(one_f_one_b(2, stage, 2)) for stage in range(2))
    in_turn, swapped = last, [*last[2:], *last[:2]]
    assert not fault_of([first, last], 1, 2) and not fault_of([in_turn, last], 1, 2)
    for wrong in ([*last, last[0]], last[:3], [*last, PipelineStep("forward", 1, 0)]):
        assert fault_of([first, wrong], 1, 2) == "stage 1 does not run every pass once"
    assert fault_of([first, [*last[:2], last[3], last[2]]], 1, 2) == "stage 1: 0B1 runs before its forward pass"
    assert fault_of([in_turn, swapped], 1, 2) == "stage 0: 0B0 waits for ever"


def test_grid_marks_a_cell() -> None:
    orders = [one_f_one_b(2, stage, 2) for stage in range(2)]
    assert format_grid(orders, (1, 2)) == (
        "S0  0F0   0F1   0B0   0B1\n"
        "S1  0F0   0B0   [0F1] 0B1"
    )  # fmt: skip
    assert format_grid([orders[0][:3]], (0, 3)) == "S0  0F0 0F1 0B0 []"


def test_grid_of_nothing() -> None:
    assert format_grid([[], []]) == "S0\nS1"
