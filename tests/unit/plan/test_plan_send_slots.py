"""Weight gradients behind the send that ends a backward pass: the list, what lists compute, and slots that cannot be."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.deferral import gradient_name, sends_of, split_weights
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import from_json, to_json
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.dataflow import Interpreter
from tests.unit.plan.list_twins import run_together
from tests.unit.plan.test_plan_gradient_gaps import is_piece, made_plan
from tests.unit.plan.test_plan_partitions import EP2, RECOMPUTES, uncut, with_words

SEND = "send.S0>S1.backward"
LATER = ("head.loss.output.dW", "L1.moe.experts.fc1.dW", "L1.attention.qkv.dW")
STAGE_1 = """
receive.S0>S1 m0            L1.attention m0             L1.moe.gate m0              L1.moe.experts m0
L1.moe.merge m0             head.norm m0                head.loss m0
head.loss.backward m0       head.norm.backward m0       L1.moe.merge.backward m0    L1.moe.experts.backward m0
L1.moe.gate.backward m0     L1.attention.backward m0    send.S0>S1.backward m0      receive.S0>S1 m1
head.loss.output.dW m0      L1.moe.experts.fc1.dW m0    L1.attention.qkv.dW m0
L1.attention m1             L1.moe.gate m1              L1.moe.experts m1
L1.moe.merge m1             head.norm m1                head.loss m1
head.loss.backward m1       head.norm.backward m1       L1.moe.merge.backward m1    L1.moe.experts.backward m1
L1.moe.gate.backward m1     L1.attention.backward m1    send.S0>S1.backward m1
head.loss.output.dW m1      L1.moe.experts.fc1.dW m1    L1.attention.qkv.dW m1
"""


def with_slots(plan: Plan, index: int, slots: dict[str, tuple[str, ...]], layer: int) -> Plan:
    """Slots in the entry of one layer, the only one of its stage."""
    overlap = StageOverlap(max_deferred_bytes=1 << 40, layers=(LayerOverlap(layer=layer, weight_gradient_slots=slots),))
    stages = list(plan.stages)
    stages[index] = dataclasses.replace(stages[index], overlap=overlap)
    return dataclasses.replace(plan, stages=tuple(stages))


def filled(plan: Plan, model: ModelDescription) -> Plan:
    """The plan with every second weight gradient of its stages' backward passes moved behind the send."""
    stages = []
    for index, stage in enumerate(plan.stages):
        layers = {one.layer: one for one in stage.overlap.layers}
        for send, chunk in zip(sends_of(plan, index), stage.chunks, strict=True):
            names = inside(stage, range(*chunk), model)[::2]
            first = next((n for n in range(*chunk) if model.moe_layers[n]), None)
            if send and names and first is not None:
                entry = layers.get(first, LayerOverlap(layer=first))
                layers[first] = dataclasses.replace(
                    entry, weight_gradient_slots={**entry.weight_gradient_slots, send: names}
                )
        bound = int(any(one.weight_gradient_slots for one in layers.values())) << 40
        overlap = dataclasses.replace(
            stage.overlap, max_deferred_bytes=bound, layers=tuple(layers[n] for n in sorted(layers))
        )
        stages.append(dataclasses.replace(stage, overlap=overlap))
    return dataclasses.replace(plan, stages=tuple(stages))


def inside(stage: StagePlan, layers: range, model: ModelDescription) -> tuple[str, ...]:
    """Weight gradients of layers that stand in no slot, in backward order."""
    placed = {name for one in stage.overlap.layers for names in one.weight_gradient_slots.values() for name in names}
    parts = {True: ("moe.experts", "moe.gate", "attention"), False: ("mlp", "attention")}
    names = [
        gradient_name(part, weight, layer)
        for layer in reversed(layers)
        for part in parts[model.moe_layers[layer]]
        for weight in reversed(split_weights(part, model))
    ]
    return tuple(name for name in names if name not in placed)


def test_list_written_by_hand() -> None:
    """Two stages, two micro-batches, one expert rank: what the second one sends waits for no weight gradient in the slot."""
    plan = with_slots(plan_samples.plan(2, stages=2, micro_batches=2), 1, {SEND: LATER}, layer=1)
    model = plan_samples.model("mm")
    validate_plan(plan, model)
    made = lower(plan, model, 1)
    words = [word for i in made if i.micro_batch is not None for word in (i.name, f"m{i.micro_batch}")]
    assert words == STAGE_1.split()
    check_races(made)
    sent = [i for i in made if i.name == SEND]
    assert [made[number].name for i in sent for number in i.after] == ["L1.attention.backward"] * 2
    kept = [i.writes for i in made if i.kind == "weight-gradient" and i.micro_batch == 1]
    assert kept == [("gradient.head",), ("gradient.L1",), ("gradient.L1",)]
    # The stage without slots follows the same list; it is the executor that starts it now, not megatron-core's schedule.
    followed, reference = (lower(one, model, 0) for one in (plan, uncut(plan)))
    assert [dataclasses.replace(i, after=()) for i in followed] == [dataclasses.replace(i, after=()) for i in reference]
    assert from_json(to_json(plan)) == plan


SHAPES = (("mm", 2, 1), ("mdmm", 2, 1), ("mdmmdmmm", 2, 2), ("mmmm", 4, 1))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            shape,
            OverlapWords(
                partitions=parts, range_word="around", gate="topk", defer=defer, max_deferred_bytes=defer << 40
            ),
        )
        for shape, parts, defer in itertools.product(SHAPES, (1, 2), (0, 1))
    ]
    + [(SHAPES[1], OverlapWords(gate="topk", micro_batches=2, defer=True, max_deferred_bytes=1 << 40))],
)
def test_lists_are_sound_and_compute_the_same(shape: tuple[str, int, int], words: OverlapWords) -> None:
    letters, stages, chunks = shape
    stage = {**EP2, "recompute": RECOMPUTES[len(letters) % len(RECOMPUTES)]}
    before, model = with_words(
        words, letters, stages=stages, chunks=chunks, micro_batches=2 * words.micro_batches, stage=stage
    )
    plan = filled(before, model)
    validate_plan(plan, model)
    lists = {rank: lower_rank(plan, model, rank) for rank in range(plan.world_size)}
    for rank in range(2, plan.world_size, 2):
        made = lists[rank]
        check_races(made)
        assert (
            Interpreter(made, 2, model).outcome == Interpreter(lower_rank(uncut(plan), model, rank), 2, model).outcome
        )
        assert has_gradient_behind_a_send(made) and not has_gradient_behind_a_send(lower_rank(before, model, rank))
        for name in {i.name for i in made if i.kind == "weight-gradient"}:
            order = [i.micro_batch for i in made if i.name == name]
            assert order == sorted(order, key=lambda number: number or 0), "sums over micro-batches keep their order"
    assert run_together({rank: list(made) for rank, made in lists.items()})
    assert lower(plan, model, 0) == lists[0]


def has_gradient_behind_a_send(made: Sequence[Instruction]) -> bool:
    """Whether a weight gradient stands behind a send of the same micro-batch and chunk."""
    sent: set[tuple[int | None, int | None]] = set()
    for i in made:
        if i.name.startswith("send.") and i.name.endswith(".backward"):
            sent.add((i.chunk, i.micro_batch))
        if i.kind == "weight-gradient" and (i.chunk, i.micro_batch) in sent:
            return True
    return False


def test_a_pair_ends_with_what_stands_behind_both_sends() -> None:
    words = OverlapWords(gate="topk", micro_batches=2)
    before, model = with_words(words, "mmm", stages=3, micro_batches=8, stage=EP2)
    made = [f"{i.name} {i.micro_batch}" for i in lower(filled(before, model), model, 2)]
    backward, forward = made.index("send.S0>S1.backward 0"), made.index("send.S1>S2 3")
    assert backward < forward < made.index("receive.S0>S1 4") < made.index("L1.moe.experts.fc2.dW 0")
    assert made.index("L1.moe.experts.fc2.dW 0") < made.index("L1.attention 4")


@pytest.mark.parametrize("partitions", [1, 2])
def test_gradients_are_reduced_behind_what_completes_them(partitions: int) -> None:
    before, model = made_plan(partitions, "around", True, (2, 1), 2, data=4)
    plan = filled(before, model)
    made = lower(plan, model, plan.stages[1].devices.ranks[0])
    check_races(made)
    for part in ("L2", "L3"):
        reduced = min(i.id for i in made if is_piece(i) and i.name == f"gradients.{part}")
        assert reduced > max(i.id for i in made if f"gradient.{part}" in i.writes and i.micro_batch is not None)
    assert min(i.id for i in made if i.name == "gradients.L2") > max(i.id for i in made if i.name == SEND)


@pytest.mark.parametrize(
    ("index", "layer", "slots", "message"),
    [
        (0, 0, {SEND: ("L0.attention.qkv.dW",)}, f'["{SEND}"]: the chunk of layer 0 sends its input\'s gradient nowhere; '
         "remove the slot"),
        (1, 1, {"send.S1>S2.backward": ("L1.attention.qkv.dW",)}, '["send.S1>S2.backward"]: the chunk of layer 1 sends '
         f"its input's gradient by {SEND}; write that"),
        (1, 1, {"send.S0>S1": ("L1.attention.qkv.dW",)}, '["send.S0>S1"]: a slot is a backward all-to-all such as '
         "L0.moe.dispatch.backward, or the chunk's send of gradients; name one"),
        (1, 1, {SEND: ()}, f'["{SEND}"] []: has no effect; remove the slot or name weight gradients'),
        (1, 1, {SEND: ("L0.attention.qkv.dW",)}, f'["{SEND}"][0] L0.attention.qkv.dW: not a layer of this stage; remove it'),
        (1, 1, {SEND: ("L1.attention.qkv.dW",) * 2}, f'["{SEND}"][1] L1.attention.qkv.dW: stands already in {SEND}; '
         "place it once"),
        (1, 1, {"L1.moe.combine.backward": LATER[:1]}, " (1 slots): nothing to compute under: the stage has one expert rank "
         "and exchanges nothing; write {}"),
    ],
)  # fmt: skip
def test_slots_that_cannot_be(index: int, layer: int, slots: dict[str, tuple[str, ...]], message: str) -> None:
    plan = with_slots(plan_samples.plan(2, stages=2), index, slots, layer)
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan, plan_samples.model("mm"))
    assert str(caught.value) == f"plan.json stages[{index}].overlap.layers[0].weight_gradient_slots{message}"


def test_a_chunk_has_one_slot_behind_its_send_and_other_chunks_their_own() -> None:
    plan, model = plan_samples.plan(8, 2, 2), plan_samples.model("m" * 8)
    assert [sends_of(plan, index) for index in (0, 1)] == [("", "send.S1>S0.backward"), (SEND, SEND)]
    stage = plan.stages[1]
    entries = {n: LayerOverlap(layer=n, weight_gradient_slots={SEND: (f"L{n}.attention.qkv.dW",)}) for n in (2, 3, 6)}
    for layers, is_valid in (((2, 6), True), ((2, 3), False)):
        overlap = StageOverlap(max_deferred_bytes=1 << 40, layers=tuple(entries[n] for n in layers))
        made = dataclasses.replace(plan, stages=(plan.stages[0], dataclasses.replace(stage, overlap=overlap)))
        if is_valid:
            validate_plan(made, model)
            places = [
                (i.name, i.chunk) for i in lower(made, model, 1) if i.kind == "weight-gradient" and i.micro_batch == 0
            ]
            assert sorted(places) == [("L2.attention.qkv.dW", 0), ("L6.attention.qkv.dW", 1)]
            continue
        with pytest.raises(
            ConfigError, match=r'layers\[1\].*\["send.S0>S1.backward"\]: stands already in .*layers\[0\]'
        ):
            validate_plan(made, model)
