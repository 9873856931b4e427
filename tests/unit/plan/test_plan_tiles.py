"""Stages of unlike shape: pieces of tiles, their lists against golden files, order, and time against cases by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.capabilities import refuse_what_cannot_be_lowered
from moe_overlap.plan.instructions import Instruction, format_list
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import AllGather, Devices, Plan, Tile, Transfer
from moe_overlap.plan.rules import resharding
from moe_overlap.plan.rules.resharding import boundary_batch, passes_ahead, pieces_of
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, read_record
from moe_overlap.tuner.cost.simulate.engine import Simulation, simulate
from tests.unit.plan import plan_samples
from tests.unit.plan.pass_orders import pass_order

LENGTH, WIDTH = 256, 128 * 4
SHAPES = [
    ((2, 2, 1), (4, 1, 2)),
    ((1, 2, 1), (4, 1, 1)),
    ((4, 1, 2), (1, 2, 1)),
    ((2, 1, 1), (3, 1, 1)),
    ((1, 1, 1), (1, 1, 2)),
    ((1, 4, 1), (2, 1, 2), (2, 2, 1)),
]
"""Micro-batch size, data and tensor ranks of every stage."""


def unlike(shapes: tuple[tuple[int, int, int], ...], batch: int = 24) -> tuple[Plan, ModelDescription]:
    """A layer on every stage; every rank sends what its targets have of its samples."""
    base = plan_samples.plan(len(shapes), len(shapes), 1, 1)
    stages, first = [], 0
    for stage, (size, data, tensor) in zip(base.stages, shapes, strict=True):
        ranks = tuple(range(first, first := first + data * tensor))
        sizes = {"micro_batch_size": size, "data": data, "tensor": tensor}
        steps = batch // (size * data)
        devices = Devices(mesh=(1, len(ranks)), ranks=ranks)
        stages.append(dataclasses.replace(stage, devices=devices, gradient_accumulation_steps=steps, **sizes))
    plan = dataclasses.replace(base, stages=tuple(stages), global_batch_size=batch)
    transfers = tuple(Transfer(from_stage=i, to_stage=i + 1, tiles=tiles(plan, i)) for i in range(len(shapes) - 1))
    return dataclasses.replace(plan, transfers=transfers), plan_samples.model("d" * len(shapes))


def tiles(plan: Plan, index: int) -> tuple[Tile, ...]:
    """Sample by sample and token by token, joined to runs along the sequence: the obvious way."""
    before, behind = plan.stages[index : index + 2]
    found = []
    for sample in range(boundary_batch(before, behind)):
        owners = []
        for stage in (before, behind):
            data = sample % (stage.micro_batch_size * stage.data) // stage.micro_batch_size
            ranks = stage.devices.ranks[data * stage.tensor : (data + 1) * stage.tensor]
            owners.append([ranks[token * stage.tensor // LENGTH] for token in range(LENGTH)])
        pairs = list(zip(*owners, strict=True))
        starts = [token for token in range(LENGTH) if token == 0 or pairs[token] != pairs[token - 1]]
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            source, target = pairs[start]
            found.append(Tile(source=source, target=target, batch=(sample, sample + 1), sequence=(start, end)))
    return tuple(found)


def lists_of(plan: Plan, model: ModelDescription) -> dict[int, tuple[Instruction, ...]]:
    return {rank: lower(plan, model, rank) for rank in range(plan.world_size)}


def simulation_of(plan: Plan, model: ModelDescription, one_way: float = 0.0) -> Simulation:
    """Every stage takes 1 second forward and 2 backward for every sample of a rank."""

    def seconds(_: int, i: Instruction) -> float:
        if i.kind == "point-to-point":
            return one_way
        samples = plan.stages[i.stage].micro_batch_size
        return samples * {"attention": 1.0, "backward": 2.0}.get(i.name.rpartition(".")[2], 0.0) * ("atten" in i.name)

    return simulate(lists_of(plan, model), seconds)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_example_is_lowered(rank: int) -> None:
    """Written by `tools/show_plan.py example_plan.json --model pp2_ep2_model.json --list --rank R` in tests/golden."""
    plan = load_plan(plan_samples.GOLDEN / "example_plan.json")
    values = json.loads((plan_samples.GOLDEN / "pp2_ep2_model.json").read_text())
    model = read_record(ModelDescription, values, "pp2_ep2_model.json")
    validate_plan(plan, model)
    assert format_list(lower(plan, model, rank)) == (plan_samples.GOLDEN / f"example_plan_rank{rank}.txt").read_text()


@pytest.mark.parametrize("shapes", SHAPES)
def test_everything_crosses_once_and_all_ranks_finish(shapes: Any) -> None:
    plan, model = unlike(shapes)
    validate_plan(plan, model)
    refuse_what_cannot_be_lowered(plan)
    lists = lists_of(plan, model)
    for made in lists.values():
        check_races(made)
    for index in range(len(shapes) - 1):
        for name in (f"send.S{index}>S{index + 1}", f"send.S{index}>S{index + 1}.backward"):
            sent = [i.bytes for made in lists.values() for i in made if i.name == name]
            assert sum(sent) == plan.global_batch_size * LENGTH * WIDTH
    assert len(simulation_of(plan, model).ran) == sum(map(len, lists.values()))


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_piece_belongs_to_the_micro_batches_of_its_samples(shapes: Any) -> None:
    """The tokens that a rank sends of a micro-batch are all that it has of it."""
    plan, model = unlike(shapes)
    for transfer in plan.transfers:
        for side, number in (("source", transfer.from_stage), ("target", transfer.to_stage)):
            stage = plan.stages[number]
            tokens: dict[tuple[int, int], int] = {}
            for piece in pieces_of(plan, transfer):
                key = getattr(piece, side), getattr(piece, f"{side}_micro_batch")
                tokens[key] = tokens.get(key, 0) + piece.tokens
            assert set(tokens.values()) == {stage.micro_batch_size * LENGTH // stage.tensor}
            assert len(tokens) == stage.gradient_accumulation_steps * len(stage.devices.ranks)


def test_a_step_by_hand() -> None:
    """Four samples, one at a time, then two at a time in as much time.

    Stage 0 runs F0 F1 F2 F3 B0 B1 B2 B3, stage 1 F0 B0 F1 B1 from 2 s on, when two samples are there, until 8 s. Its first
    gradients are there at 5 s; four backward passes of 2 s follow. A transfer of 0.25 s is waited for once each way on devices
    that queue: what comes second comes while the first is worked on. Where the host computes, it starts a receive when its turn
    comes: B2 and B3 wait for theirs; those of B0 and B1 are asked for together, in front of what is sent behind them.
    """
    plan, model = unlike(((1, 1, 1), (2, 1, 1)), batch=4)

    def step(one_way: float, host_runs_ahead: bool = True) -> float:
        def seconds(_: int, i: Instruction) -> float:
            if i.kind == "point-to-point":
                return one_way
            return {"attention": 1.0, "backward": 2.0}.get(i.name.rpartition(".")[2], 0.0) * ("atten" in i.name)

        queued = dataclasses.replace(plan, host_runs_ahead=host_runs_ahead)
        return simulate(lists_of(queued, model), seconds).step_seconds

    assert step(0.0) == step(0.0, False) == pytest.approx(13.0)
    assert step(0.25) == pytest.approx(13.5) and step(0.25, False) == pytest.approx(14.0)


def test_like_stages_run_ahead_as_in_1f1b() -> None:
    plan, _ = unlike(((2, 1, 1),) * 4)
    assert [passes_ahead(plan, stage) for stage in range(4)] == [3, 2, 1, 0]
    bare = dataclasses.replace(plan, transfers=())
    assert [pass_order(plan, stage) for stage in range(4)] == [pass_order(bare, stage) for stage in range(4)]
    model = plan_samples.model("dddd")
    assert simulation_of(plan, model).step_seconds == simulation_of(bare, model).step_seconds == (12 + 3) * 6.0


def test_parts_that_are_gathered() -> None:
    """One of two tensor ranks may receive what both then share."""
    plan, model = unlike(((2, 1, 1), (2, 1, 2)))
    gather = AllGather(axis="sequence", groups=((1, 2),))
    plan = dataclasses.replace(plan, transfers=(dataclasses.replace(plan.transfers[0], all_gather=gather),))
    validate_plan(plan, model)
    made = lower(plan, model, 1)
    check_races(made)
    gathers = [i for i in made if i.name == "gather.S0>S1"]
    assert len(gathers) == 12 and {i.kind for i in gathers} == {"collective"}
    assert gathers[0].reads == ("tiles.h.L1.m0",) and gathers[0].writes == ("h.L1.m0",)
    assert not [i for i in lower(plan, model, 0) if i.name.startswith("gather")]
    assert simulation_of(plan, model).step_seconds > 0


def test_tiles_of_other_ranks_samples_are_refused() -> None:
    plan, model = unlike(((1, 2, 1), (2, 1, 1)))
    (transfer,) = plan.transfers
    swapped = tuple(dataclasses.replace(tile, source=1 - tile.source) for tile in transfer.tiles)
    wrong = dataclasses.replace(plan, transfers=(dataclasses.replace(transfer, tiles=swapped),))
    with pytest.raises(ConfigError) as caught:
        validate_plan(wrong, model)
    message = "plan.json transfers[0].tiles[0].source 1: sample 0 belongs to data rank 0, but the source is data rank 1"
    assert str(caught.value) == f"{message}; name a rank that has the samples"


def test_the_last_stage_sends_the_first_its_next_chunk() -> None:
    """Interleaved stages have a boundary more than others; what crosses it is the first stage's second chunk's."""
    crossing = (Tile(source=1, target=0, batch=(0, 2), sequence=(0, LENGTH)),)
    transfers = (Transfer(from_stage=1, to_stage=0, tiles=crossing),)
    validate_plan(plan_samples.plan(8, 2, 2, transfers=transfers))
    with pytest.raises(ConfigError, match=r"to_stage 1 -> 0: these stages have no common boundary; join neighbours"):
        validate_plan(plan_samples.plan(8, 2, transfers=transfers))


@pytest.mark.parametrize("samples", [8_000_000, 2])
def test_pieces_are_counted_before_they_are_made(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one large tile, and in a small one that is repeated."""
    batch = 8_000_000
    plan, model = unlike(((2, 1, 1), (1, 1, 1)))
    (transfer,) = plan.transfers
    stages = tuple(
        dataclasses.replace(stage, micro_batch_size=size, gradient_accumulation_steps=batch // size)
        for stage, size in zip(plan.stages, (samples, 1), strict=True)
    )
    tile = dataclasses.replace(transfer.tiles[0], batch=(0, samples))
    large = dataclasses.replace(plan, stages=stages, global_batch_size=batch)
    large = dataclasses.replace(large, transfers=(dataclasses.replace(transfer, tiles=(tile,)),))
    monkeypatch.setattr(resharding, "_cut", lambda *_: pytest.fail("pieces are made"))
    with pytest.raises(ConfigError) as caught:
        validate_plan(large, model)
    message = "plan.json transfers[0].tiles: ends of micro-batches cut a step into 8000000 pieces, more than 2000000"
    assert str(caught.value) == f"{message}; raise micro_batch_size, or lower global_batch_size"


def test_a_tile_is_cut_from_its_own_first_sample_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every sample looked at, with as many pieces as are counted."""
    plan, _ = unlike(((2, 1, 1), (3, 1, 1)))
    before, behind = plan.stages
    looked: list[int] = []

    def recorded(*places: int) -> range:
        looked.append(len(range(*places)))
        return range(*places)

    monkeypatch.setattr(resharding, "range", recorded, raising=False)
    for first, last in ((0, 6), (1, 2), (1, 9), (2, 3), (3, 5), (600, 612), (601, 613)):
        looked.clear()
        tile = dataclasses.replace(plan.transfers[0].tiles[0], batch=(first, last))
        ends = [first, *(n for n in range(first + 1, last) if n % 2 == 0 or n % 3 == 0), last]
        assert resharding._cut(tile, before, behind) == list(itertools.pairwise(ends))
        assert resharding._cuts(tile, before, behind) == len(ends) - 1
        assert sum(looked) < last - first + 1


def test_unlike_stages_run_1f1b_only() -> None:
    plan, _ = unlike(((1, 2, 1), (2, 1, 1)))
    pairs = StageOverlap(micro_batches_in_flight=2)
    stages = tuple(dataclasses.replace(stage, overlap=pairs) for stage in plan.stages)
    with pytest.raises(ConfigError, match=r"transfers \(1 entries\): stages of unlike shape run 1f1b"):
        refuse_what_cannot_be_lowered(dataclasses.replace(plan, stages=stages))
