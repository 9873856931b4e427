"""Folded lists against whole ones, exact where nothing shares a link: whatever instructions and transfers take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.lowering.pipeline_order import PipelineStep, pipeline_blocks
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.uniform_overlap import OverlapWords
from moe_overlap.tuner.cost.interference import NO_INTERFERENCE
from moe_overlap.tuner.cost.simulate.compress import Compressed, compress, compressed_list, run_alone, sample_blocks
from moe_overlap.tuner.cost.simulate.engine import simulate
from tests.unit.plan import plan_samples
from tests.unit.plan.test_plan_partitions import with_words

EP2: dict[str, Any] = {"data": 2, "expert": 2, "micro_batch_size": 2}
DEFERRED = {"gate": "topk", "defer": True, "max_deferred_bytes": 1 << 30}
WORDS = OverlapWords(partitions=2, range_word="around", **DEFERRED)  # type: ignore[arg-type]
PAIRS = OverlapWords(partitions=2, range_word="around", micro_batches=2, **DEFERRED)  # type: ignore[arg-type]
WHOLE = Recompute(layers=1, granularity="full")


def seconds_of(seed: int) -> Any:
    """Drawn by what an instruction does, the same for every micro-batch; transfers are long."""

    def seconds(rank: int, i: Instruction) -> float:
        if i.name == "optimizer.norm":
            return 1.0
        if i.kind == "point-to-point":
            return 6.0
        return random.Random(f"{seed} {rank} {i.name} {i.partition}").random()

    return seconds


def folded_step(plan: Plan, model: ModelDescription, seconds: Any, micro_batches: Plan) -> float:
    """Folded from one plan, simulated for another number of micro-batches."""
    lists, priced = {}, {}
    for index, stage in enumerate(plan.stages):
        rank = stage.devices.ranks[0]
        blocks = sample_blocks(plan, index)
        made = lower_rank(plan, model, rank, blocks=blocks)
        alone = run_alone(made, rank, lambda i, rank=rank: seconds(rank, i), NO_INTERFERENCE)  # type: ignore[misc]
        folded: Compressed = compress(index, blocks, made, alone)
        lists[rank], priced[rank] = compressed_list(folded, micro_batches)
    return simulate(lists, lambda rank, i: priced[rank].get(i.id, seconds(rank, i))).step_seconds


def whole_step(plan: Plan, model: ModelDescription, seconds: Any) -> float:
    lists = {stage.devices.ranks[0]: lower(plan, model, stage.devices.ranks[0]) for stage in plan.stages}
    return simulate(lists, seconds).step_seconds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (WORDS, {"stages": 1}),
        (WORDS, {"stages": 2}),
        (WORDS, {"stages": 2, "chunks": 2}),
    ],
    ids=["1 stage", "2 stages", "interleaved"],
)
def test_a_folded_step_takes_as_long_as_the_whole_one(words: OverlapWords, changes: dict[str, Any], seed: int) -> None:
    stage = {**EP2, **changes.get("stage", {})}
    plan, model = with_words(words, "mmdm", 64, **{**changes, "stage": stage, "micro_batches": 8})
    seconds = seconds_of(seed)
    assert folded_step(plan, model, seconds, plan) == pytest.approx(whole_step(plan, model, seconds))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("words", "recompute", "chunks"),
    [(PAIRS, Recompute(), 1), (PAIRS, Recompute(), 2), (WORDS, WHOLE, 1)],
    ids=["pairs", "pairs of chunks", "recomputed"],
)
def test_little_is_lost_where_a_block_waits_inside(
    words: OverlapWords, recompute: Recompute, chunks: int, seed: int
) -> None:
    """Exchanges under way while the rest of a block waits for its input are not taken off it."""
    changes = {"stages": 2, "chunks": chunks, "micro_batches": 8, "stage": {**EP2, "recompute": recompute}}
    plan, model = with_words(words, "mmdm", 64, **changes)
    seconds = seconds_of(seed)
    whole = whole_step(plan, model, seconds)
    assert whole <= folded_step(plan, model, seconds, plan) + 1e-9 <= 1.002 * whole


def test_samples_hold_every_kind_of_block() -> None:
    shapes = ((1, 1, 1), (4, 1, 1), (4, 1, 8), (2, 2, 4), (2, 2, 2), (4, 1, 32), (4, 3, 12), (8, 2, 64))
    for (stages, chunks, micro_batches), in_flight in product(shapes, (1, 2)):
        overlap = StageOverlap(micro_batches_in_flight=in_flight)
        plan = plan_samples.plan(stages * chunks, stages, chunks, micro_batches, stage={"overlap": overlap})
        for stage in range(stages):
            blocks, sample = pipeline_blocks(plan, stage), sample_blocks(plan, stage)
            assert kinds(blocks) <= kinds(sample)
            passes = [step for block in sample for step in block]
            assert len({*passes}) == len(passes) == 2 * chunks * (1 + max(step.micro_batch for step in passes))
            for step in passes:
                before = PipelineStep("forward", step.chunk, step.micro_batch)
                assert step == before or passes.index(before) < passes.index(step)


def kinds(blocks: Sequence[Sequence[PipelineStep]]) -> set[tuple[tuple[str, int, bool], ...]]:
    last = max(step.micro_batch for block in blocks for step in block)
    return {
        tuple((step.direction, step.chunk, step.direction == "backward" and step.micro_batch == last) for step in block)
        for block in blocks
    }
