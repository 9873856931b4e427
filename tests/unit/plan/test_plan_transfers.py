"""Tiles between stages of unlike shape: against a count of every element, on random meshes, and through rules, lists and JSON."""

from __future__ import annotations

import dataclasses
import random
from math import lcm
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.lowering.rendezvous import check_rendezvous
from moe_overlap.plan.plan import Devices, Plan, StagePlan, Transfer
from moe_overlap.plan.rules.resharding import boundary_batch, samples_of
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import load_plan, save_plan
from moe_overlap.plan.tiles import transfer_between, with_transfers
from moe_overlap.tuner.search.layer.slots import shortened
from tests.unit.plan import plan_samples

Shape = tuple[int, int, int, int]
"""Micro-batch size, tensor, context and data ranks."""
TWINS = 200


def unlike(shapes: list[Shape], rounds: int = 1, sequence: int | None = None) -> Plan:
    """A layer on every stage."""
    base = plan_samples.plan(len(shapes), len(shapes), 1, 1)
    length = sequence or lcm(*(tensor * context * 2 for _, tensor, context, _ in shapes))
    batch = lcm(*(size * data for size, *_, data in shapes)) * rounds
    stages, first = [], 0
    for stage, (size, tensor, context, data) in zip(base.stages, shapes, strict=True):
        ranks = tuple(range(first, first := first + tensor * context * data))
        stages.append(
            dataclasses.replace(
                stage,
                devices=Devices(mesh=(1, len(ranks)), ranks=ranks),
                micro_batch_size=size,
                gradient_accumulation_steps=batch // (size * data),
                tensor=tensor,
                context=context,
                data=data,
            )
        )
    return dataclasses.replace(base, stages=tuple(stages), global_batch_size=batch, sequence_length=length)


def has(stage: StagePlan, rank: int, sample: int, token: int, length: int, repeated: bool) -> bool:
    """Whether a rank has one element: Megatron's numbering of ranks, token by token."""
    place = stage.devices.ranks.index(rank)
    own = place % stage.tensor, place // stage.tensor % stage.context, place // stage.tensor // stage.context
    data = sample % samples_of(stage) // stage.micro_batch_size
    context, index = 0, token
    if stage.context > 1:
        piece = length // (2 * stage.context)
        number = token // piece
        context = min(number, 2 * stage.context - 1 - number)
        index = token % piece + (piece if number >= stage.context else 0)
    tensor = index * stage.tensor * stage.context // length
    return own[1:] == (context, data) and (repeated or own[0] == tensor)


def random_shape(draw: random.Random) -> Shape:
    sizes = [draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3])]
    return sizes[0], sizes[1], sizes[2], sizes[3]


def crossings(plan: Plan, transfer: Transfer) -> dict[tuple[int, int, int], list[int]]:
    """The senders of every (target, sample, token)."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for tile in transfer.tiles:
        for sample in range(*tile.batch):
            for token in range(*tile.sequence):
                found.setdefault((tile.target, sample, token), []).append(tile.source)
    return found


def elements_by_link(transfer: Transfer) -> dict[tuple[int, int], int]:
    """Samples times tokens from rank to rank in one round of the tiles."""
    sent: dict[tuple[int, int], int] = {}
    for tile in transfer.tiles:
        elements = (tile.batch[1] - tile.batch[0]) * (tile.sequence[1] - tile.sequence[0])
        sent[tile.source, tile.target] = sent.get((tile.source, tile.target), 0) + elements
    return sent


def test_every_element_reaches_each_rank_that_needs_it_once() -> None:
    draw = random.Random(14)
    gathered = balanced = apart = 0
    for _ in range(TWINS):
        repeated = draw.random() < 0.5, draw.random() < 0.5
        plan = unlike([random_shape(draw), random_shape(draw)])
        before, behind = plan.stages
        try:
            transfer = transfer_between(plan, 0, repeated)
        except ConfigError:
            apart += 1
            assert behind.tensor > 1 and repeated[1]
            continue
        crossed, length = crossings(plan, transfer), plan.sequence_length
        groups = {rank: (rank,) for rank in behind.devices.ranks}
        if transfer.all_gather is not None:
            gathered += 1
            groups |= {rank: group for group in transfer.all_gather.groups for rank in group}
        for sample in range(boundary_batch(before, behind)):
            for token in range(length):
                arrived = [
                    (t, crossed[t, sample, token]) for t in behind.devices.ranks if (t, sample, token) in crossed
                ]
                # The element crosses once in all, from a rank that has it, to one of those that then gather it.
                ((target, senders),) = arrived
                (source,) = senders
                assert has(before, source, sample, token, length, repeated[0])
                needs = {r for r in behind.devices.ranks if has(behind, r, sample, token, length, repeated[1])}
                assert needs == set(groups[target])
        links = elements_by_link(transfer)
        sent = [sum(n for (source, _), n in links.items() if source == rank) for rank in before.devices.ranks]
        assert sum(sent) == boundary_batch(before, behind) * length
        balanced += repeated[0] and before.tensor > 1 and max(sent) < sum(sent) / before.context / before.data
    assert gathered > 20 and balanced > 20 and apart < TWINS / 10


def test_replicas_take_turns() -> None:
    """Two senders have everything, and four receivers a quarter each: two tiles from either."""
    transfer = transfer_between(unlike([(4, 2, 1, 1), (1, 1, 1, 4)]), 0, (True, False))
    sent = elements_by_link(transfer)
    assert sorted(source for source, _ in sent) == [0, 0, 1, 1] and set(sent.values()) == {4}


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 1, 1, 2), (4, 2, 1, 1)],
        [(1, 2, 2, 1), (1, 1, 1, 1), (1, 1, 2, 2)],
        [(2, 1, 1, 1), (1, 4, 1, 2), (2, 2, 2, 1)],
        [(3, 1, 1, 1), (1, 1, 1, 3), (1, 1, 1, 3)],
    ],
)
def test_generated_transfers_are_valid_lowered_and_read_again(shapes: list[Shape], tmp_path: Path) -> None:
    plan, model = unlike(shapes, rounds=2, sequence=256), plan_samples.model("d" * len(shapes))
    with pytest.raises(ConfigError, match="no transfer joins them"):
        validate_plan(plan, model)
    plan = with_transfers(plan)
    validate_plan(plan, model)
    lists = {rank: lower(plan, model, rank) for rank in range(plan.world_size)}
    for made in lists.values():
        check_races(made)
    check_rendezvous(lists)
    for transfer in plan.transfers:
        name = f"send.S{transfer.from_stage}>S{transfer.to_stage}"
        sent = sum(i.bytes for made in lists.values() for i in made if i.name == name)
        assert sent == plan.global_batch_size * plan.sequence_length * model.hidden_size * 4
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_equal_neighbours_have_no_tiles() -> None:
    plan = with_transfers(unlike([(1, 2, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2)]))
    assert [(each.from_stage, each.to_stage) for each in plan.transfers] == [(1, 2)]


def test_the_worked_example_is_generated() -> None:
    plan = load_plan(plan_samples.GOLDEN / "example_plan.json")
    assert with_transfers(plan).transfers == plan.transfers


@pytest.mark.parametrize("shapes", [[(2, 1, 1, 2), (8, 1, 1, 1)], [(1, 1, 1, 2), (3, 2, 1, 1)], [(2, 1, 1, 1)] * 2])
def test_shortened_steps_have_whole_micro_batches_on_every_stage(shapes: list[Shape]) -> None:
    """Stages that cut 8 samples into 2 and 1 micro-batches had 4 each, which no global batch has."""
    plan = with_transfers(unlike(shapes, rounds=4))
    own = plan.stages[0].gradient_accumulation_steps
    assert plan.with_micro_batches(own) == shortened(plan, 2 * own) == plan
    for count in range(1, own + 1):
        few = shortened(plan, count)
        validate_plan(few, plan_samples.model("d" * len(shapes)))
        assert count <= few.stages[0].gradient_accumulation_steps <= own
        assert few.with_global_batch(plan.global_batch_size) == plan
