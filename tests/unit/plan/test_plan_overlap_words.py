"""Range words, default slots, and what is refused about ranges and slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import LatentAttention
from moe_overlap.plan import operators
from moe_overlap.plan.capabilities import ListedRun
from moe_overlap.plan.lowering.deferral import default_slots, split_weights
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.overlap import NO_OVERLAP, LayerOverlap, RangeWord, StageOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.uniform_overlap import OverlapWords, overlap_from_words, with_uniform_overlap
from tests.unit.plan import plan_samples

EP2 = {"data": 2, "expert": 2, "micro_batch_size": 4}
LATENT = LatentAttention(q_lora_rank=8, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8)


def overlap(words: OverlapWords, letters: str = "mm", stage: dict[str, Any] = EP2, **changes: Any) -> StageOverlap:
    model = plan_samples.model(letters, **changes)
    return overlap_from_words(words, plan_samples.plan(len(letters), stage=stage).stages[0], model)


@pytest.mark.parametrize(
    ("word", "ranges"),
    [
        (
            "experts",
            [("L0.moe.gate", "L0.moe.merge"), ("L2.moe.gate", "L2.moe.merge"), ("L3.moe.gate", "L3.moe.merge")],
        ),
        ("after", [("L0.moe.gate", "L1.attention"), ("L2.moe.gate", "L3.attention"), ("L3.moe.gate", "L3.moe.merge")]),
        (
            "around",
            [("L0.attention", "L0.moe.merge"), ("L2.attention", "L2.moe.merge"), ("L3.attention", "L3.moe.merge")],
        ),
    ],
)
def test_words_as_ranges(word: RangeWord, ranges: list[tuple[str, str]]) -> None:
    made = overlap(OverlapWords(partitions=4, range_word=word, gate="hash", dispatcher="irregular"), "mdmm")
    assert [(layer.first_operator, layer.last_operator) for layer in made.layers] == ranges
    assert [layer.layer for layer in made.layers] == [0, 2, 3]
    assert made.layers[0].partitions == 4
    assert (made.layers[0].gate, made.layers[0].dispatcher, made.layers[0].axis) == ("hash", "irregular", "batch")
    assert made.max_deferred_bytes == 0


def test_nothing_asked_is_no_overlap() -> None:
    assert overlap(OverlapWords()) == NO_OVERLAP
    assert overlap(OverlapWords(), stage={}) == NO_OVERLAP
    chunked = {**EP2, "overlap": StageOverlap(gradient_chunk_bytes=7)}
    assert overlap(OverlapWords(), stage=chunked) == StageOverlap(gradient_chunk_bytes=7)


@pytest.mark.parametrize(
    ("expert", "expert_tensor", "domain", "expected"),
    [
        (4, 1, 8, True),
        (4, 1, 4, True),
        (4, 2, 8, True),
        (4, 2, 4, False),
        (8, 1, 4, False),
        (2, 1, 1, False),
        (4, 1, 16, False),  # Replicas are neighbours, too.
    ],
)
def test_reductions_need_no_gaps_where_they_alone_cross_the_network(
    expert: int, expert_tensor: int, domain: int, expected: bool
) -> None:
    sizes = {"data": 8, "expert": expert, "expert_tensor": expert_tensor, "tensor": 2}
    plan, words = plan_samples.plan(stage=sizes), OverlapWords(defer=True, max_deferred_bytes=1 << 30)
    run = ListedRun(gate="topk", gradient_bucket_bytes=4096, domain=domain)
    (stage,) = with_uniform_overlap(plan, plan_samples.model(), words, run).stages
    assert stage.overlap.reduce_at_once is expected
    (stage,) = with_uniform_overlap(
        plan, plan_samples.model(), words, dataclasses.replace(run, gradient_bucket_bytes=0)
    ).stages
    assert not stage.overlap.reduce_at_once


@pytest.mark.parametrize(
    ("stages", "domain", "micro_batches", "expected"),
    [
        (2, 4, 2, True),  # Experts of eight ranks cross the network.
        (2, 8, 2, False),
        (1, 4, 2, False),  # Nothing is sent.
        (2, 4, 1, False),
    ],
)
def test_pairs_send_late_where_their_all_to_alls_cross_the_network(
    stages: int, domain: int, micro_batches: int, expected: bool
) -> None:
    shape = {"stages": stages, "micro_batches": 4, "stage": {"data": 8, "expert": 8}}
    plan, model = plan_samples.plan(4, **shape), plan_samples.model("mmmm")
    words = OverlapWords(gate="topk", micro_batches=micro_batches, defer=True, max_deferred_bytes=1 << 30)
    made = with_uniform_overlap(plan, model, words, ListedRun(gate="topk", domain=domain))
    assert {stage.overlap.sends_late for stage in made.stages} == {expected}
    validate_plan(made, model)


def test_deferral_alone() -> None:
    made = overlap(OverlapWords(defer=True, max_deferred_bytes=9))
    assert made.max_deferred_bytes == 9
    assert {layer.mechanism for layer in made.layers} == {"none"}
    validate_plan(plan_samples.plan(stage={**EP2, "overlap": made}), plan_samples.model())


def test_every_gradient_goes_under_the_next_exchange() -> None:
    """Dense layers give theirs to the all-to-all before them in the model; what no all-to-all follows stays inside."""
    slots = default_slots(range(4), plan_samples.model("dmdm", shared_expert_hidden_size=64), True, holds_head=True)
    assert slots == {
        3: {
            "L3.moe.combine.backward": ("head.loss.output.dW",),
            "L3.moe.dispatch.backward": (
                "L3.moe.experts.fc2.dW", "L3.moe.experts.fc1.dW", "L3.moe.shared.fc2.dW", "L3.moe.shared.fc1.dW",
            ),
        },
        1: {
            "L1.moe.combine.backward": (
                "L3.moe.gate.router.dW", "L3.attention.proj.dW", "L3.attention.qkv.dW", "L2.mlp.fc2.dW",
                "L2.mlp.fc1.dW", "L2.attention.proj.dW", "L2.attention.qkv.dW",
            ),
            "L1.moe.dispatch.backward": (
                "L1.moe.experts.fc2.dW", "L1.moe.experts.fc1.dW", "L1.moe.shared.fc2.dW", "L1.moe.shared.fc1.dW",
            ),
        },
    }  # fmt: skip
    assert default_slots(range(4), plan_samples.model("dddd"), True, holds_head=True) == {}


def test_latent_attention_has_other_weights() -> None:
    model = plan_samples.model("m", latent_attention=LATENT)
    assert split_weights("attention", model) == ("q_down", "q_up", "kv_down", "kv_up", "proj")
    for part, weights in operators.WEIGHTS.items():
        assert set(split_weights(part, model)) <= set(weights)


def test_a_tied_head_on_the_stage_of_its_embedding_is_not_deferred() -> None:
    words = OverlapWords(defer=True, max_deferred_bytes=9)

    def slots(**changes: Any) -> str:
        return str([layer.weight_gradient_slots for layer in overlap(words, **changes).layers])

    assert "head.loss" in slots()
    assert "head.loss" not in slots(tied_embeddings=True)
    stage = plan_samples.plan(stage=EP2).stages[0]
    later = overlap_from_words(words, stage, plan_samples.model(tied_embeddings=True), holds_embedding=False)
    assert "head.loss" in str(later)


@pytest.mark.parametrize(
    ("words", "letters", "stage", "message"),
    [
        (
            OverlapWords(partitions=3),
            "mm",
            EP2,
            "--moe-overlap-partitions 3: does not divide the micro-batch of 4; use 2 or 4",
        ),
        (
            OverlapWords(partitions=8),
            "mm",
            EP2,
            "--moe-overlap-partitions 8: does not divide the micro-batch of 4; use 2 or 4",
        ),
        (
            OverlapWords(partitions=2),
            "mm",
            {**EP2, "micro_batch_size": 1},
            "--moe-overlap-partitions 2: does not divide the micro-batch of 1; enlarge the micro-batch",
        ),
        (OverlapWords(partitions=0), "mm", EP2, "--moe-overlap-partitions 0: must be at least 1; use 1 to cut nothing"),
        (
            OverlapWords(partitions=2),
            "mm",
            {"micro_batch_size": 2},
            "--moe-overlap-partitions 2: nothing to hide: one expert rank exchanges no tokens; "
            "drop the flag or use --expert-model-parallel-size 2 or more",
        ),
        (
            OverlapWords(defer=True, max_deferred_bytes=1),
            "mm",
            {},
            "--defer-weight-gradients: nothing to hide: one expert rank exchanges no tokens; "
            "drop the flag or use --expert-model-parallel-size 2 or more",
        ),
        (
            OverlapWords(partitions=2),
            "dd",
            EP2,
            "--moe-overlap-partitions 2: tiny has no mixture-of-experts layer; drop the flag",
        ),
        (
            OverlapWords(capacity_chunks=3),
            "mm",
            EP2,
            "--moe-overlap-capacity-chunks 3: must be 1, 2, 4 or 8; choose one of them",
        ),
        (
            OverlapWords(capacity_chunks=2, partitions=2),
            "mm",
            EP2,
            "--moe-overlap-capacity-chunks 2: --moe-overlap-partitions cuts the same all-to-alls another way; "
            "drop one of them",
        ),
        (
            OverlapWords(capacity_chunks=2),
            "mm",
            {},
            "--moe-overlap-capacity-chunks 2: nothing to hide: one expert rank exchanges no tokens; "
            "drop the flag or use --expert-model-parallel-size 2 or more",
        ),
        (
            OverlapWords(partitions=2, range_word="around", gate="expert_choice"),
            "mm",
            EP2,
            "--moe-overlap-range around: the gate expert_choice lets experts choose among the tokens of the whole "
            "micro-batch, which can then not be partitioned before the MoE layer; use after or experts, or --moe-gate "
            "topk or switch or random or hash",
        ),
        (
            OverlapWords(defer=True),
            "mm",
            EP2,
            "--max-deferred-bytes 0: deferred weight gradients hold their inputs; allow at least 1 byte",
        ),
    ],
)
def test_flags_that_cannot_be_followed(words: OverlapWords, letters: str, stage: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overlap(words, letters, stage)
    assert str(caught.value) == message


def cut(layer: int, first: str, last: str, **changes: Any) -> LayerOverlap:
    values: dict[str, Any] = {"mechanism": "partitioned", "partitions": 2, "axis": "batch", "gate": "topk"}
    values |= {"first_operator": first, "last_operator": last} | changes
    return LayerOverlap(layer=layer, **values)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (cut(0, "L0.attention", "L1.attention"), cut(1, "L1.attention", "L1.moe.merge")),
            "layers[1].first_operator L1.attention: the range overlaps that of layers[0]; begin later, or end the "
            "other earlier",
        ),
        (
            (cut(1, "L0.moe.gate", "L1.moe.merge"), cut(0, "L0.attention", "L0.moe.merge")),
            "layers[0].first_operator L0.moe.gate: the range overlaps that of layers[1]; begin later, or end the "
            "other earlier",
        ),
        (
            (cut(0, "L0.moe.gate", "L1.moe.dispatch"),),
            "layers[0].last_operator L1.moe.dispatch: the range cuts through the mixture of experts of layer 1; "
            "end at L1.moe.merge",
        ),
        (
            (cut(1, "L0.moe.experts", "L1.moe.merge"),),
            "layers[0].first_operator L0.moe.experts: the range cuts through the mixture of experts of layer 0; "
            "begin at L0.moe.gate",
        ),
        (
            (cut(0, "L0.moe.gate", "L2.moe.gate"),),
            "layers[0].last_operator L2.moe.gate: tiny has no such operator; use one of L2.attention, L2.mlp",
        ),
        (
            (cut(0, "L0.moe.merge", "L0.moe.gate"),),
            "layers[0].first_operator L0.moe.merge: the range must begin at L0.moe.gate or earlier; begin earlier",
        ),
        (
            (cut(0, "L0.attention", "L0.moe.merge", gate="batch_prioritized"),),
            "layers[0].first_operator L0.attention: the gate batch_prioritized needs the whole micro-batch: nothing "
            "before it can run in partitions; begin at L0.moe.gate or choose another gate",
        ),
        (
            (cut(0, "L0.moe.gate", "L1.moe.merge"), LayerOverlap(layer=1, gate="expert_choice")),
            "layers[1].gate expert_choice: needs the whole micro-batch, and the layer runs in the partitions of "
            "layers[0]; choose another gate or end that range before it",
        ),
        (
            (
                cut(0, "L0.moe.gate", "L1.moe.merge"),
                LayerOverlap(layer=1, mechanism="tutel", tutel_degree=2),
            ),
            "layers[1].mechanism tutel: the layer runs in the partitions of layers[0]; "
            "write none or end that range before it",
        ),
        (
            (cut(0, "L0.moe.gate", "L0.moe.merge", partitions=8),),
            "layers[0].partitions 8: does not divide the micro-batch of 4; use 2 or 4",
        ),
    ],
)
def test_ranges_that_cannot_be(layers: tuple[LayerOverlap, ...], message: str) -> None:
    plan = plan_samples.plan(3, stage={**EP2, "overlap": StageOverlap(layers=layers)})
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan, plan_samples.model("mmd"))
    assert str(caught.value) == f"plan.json stages[0].overlap.{message}"


def test_a_range_may_hold_several_layers() -> None:
    wide = StageOverlap(layers=(cut(0, "L0.attention", "L2.mlp"), LayerOverlap(layer=1, gate="hash")))
    plan, model = plan_samples.plan(3, stage={**EP2, "overlap": wide}), plan_samples.model("mmd")
    validate_plan(plan, model)
    layers = {i.operator.layer for i in lower(plan, model, 0) if i.partition and i.kind == "compute"}
    assert layers == {0, 1, 2}, "every layer of the range runs in partitions"


COMBINE, DISPATCH = "L1.moe.combine.backward", "L1.moe.dispatch.backward"


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({COMBINE: ()}, f'["{COMBINE}"] []: has no effect; remove the slot or name weight gradients'),
        (
            {COMBINE: ("L1.moe.experts.fc1.dW",)},
            f'["{COMBINE}"][0] L1.moe.experts.fc1.dW: its backward pass has not run when the all-to-all starts; '
            "move it to an all-to-all that starts later",
        ),
        (
            {DISPATCH: ("L1.moe.gate.router.dW",)},
            f'["{DISPATCH}"][0] L1.moe.gate.router.dW: its backward pass has not run when the all-to-all starts; '
            "move it to an all-to-all that starts later",
        ),
        (
            {DISPATCH: ("L0.moe.experts.fc1.dW",)},
            f'["{DISPATCH}"][0] L0.moe.experts.fc1.dW: its backward pass has not run when the all-to-all starts; '
            "move it to an all-to-all that starts later",
        ),
        (
            {DISPATCH: ("L2.mlp.dW",)},
            f'["{DISPATCH}"][0] L2.mlp.dW: tiny computes no such gradient apart; use L2.mlp.fc1.dW or L2.mlp.fc2.dW',
        ),
        (
            {DISPATCH: ("L2.attention.norm.dW",)},
            f'["{DISPATCH}"][0] L2.attention.norm.dW: tiny computes no such gradient apart; '
            "use L2.attention.qkv.dW or L2.attention.proj.dW",
        ),
        (
            {DISPATCH: ("L2.moe.experts.fc1.dW",)},
            f'["{DISPATCH}"][0] L2.moe.experts.fc1.dW: layer 2 of tiny has no such operator; remove it',
        ),
        (
            {DISPATCH: ("L1.moe.shared.fc1.dW",)},
            f'["{DISPATCH}"][0] L1.moe.shared.fc1.dW: layer 1 of tiny has no such operator; remove it',
        ),
        (
            {DISPATCH: ("embedding.word.dW",)},
            f'["{DISPATCH}"][0] embedding.word.dW: its gradient is not computed apart; remove it',
        ),
        (
            {COMBINE: ("L2.mlp.fc1.dW",), DISPATCH: ("L2.mlp.fc1.dW",)},
            f'["{DISPATCH}"][0] L2.mlp.fc1.dW: stands already in {COMBINE}; place it once',
        ),
        (
            {COMBINE: ("head.loss.output.dW",)},
            f'["{COMBINE}"][0] head.loss.output.dW: no head with a weight of its own ends the chunk of the slot; '
            "remove it",
        ),
    ],
)
def test_slots_that_cannot_be(slots: dict[str, tuple[str, ...]], message: str) -> None:
    layers = (LayerOverlap(layer=1, weight_gradient_slots=slots),)
    stage = {**EP2, "overlap": StageOverlap(max_deferred_bytes=1, layers=layers)}
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan_samples.plan(3, stage=stage), plan_samples.model("mmd", tied_embeddings=True))
    assert str(caught.value) == f"plan.json stages[0].overlap.layers[0].weight_gradient_slots{message}"


def test_slots_of_another_pass_and_of_no_exchange() -> None:
    slots: dict[str, tuple[str, ...]] = {"L0.moe.combine.backward": ("L4.attention.qkv.dW",)}
    given = StageOverlap(max_deferred_bytes=1, layers=(LayerOverlap(layer=0, weight_gradient_slots=slots),))
    plan = plan_samples.plan(8, 2, 2, stage={**EP2, "overlap": given})
    with pytest.raises(ConfigError, match="runs in another pass than layer 0: not a layer of its chunk; move it"):
        validate_plan(plan, plan_samples.model("m" * 8))
    alone = plan_samples.plan(8, stage={"overlap": given})
    with pytest.raises(ConfigError, match=r"weight_gradient_slots \(1 slots\): nothing to compute under: the stage"):
        validate_plan(alone, plan_samples.model("m" * 8))


def test_the_gradient_of_the_head_is_placed_in_the_chunk_that_it_ends() -> None:
    """Of two chunks on the last stage the second."""

    def with_head(layer: int) -> Plan:
        slots = {f"L{layer}.moe.combine.backward": ("head.loss.output.dW",)}
        given = StageOverlap(max_deferred_bytes=1, layers=(LayerOverlap(layer=layer, weight_gradient_slots=slots),))
        plan = plan_samples.plan(8, 2, 2, stage=EP2)
        return dataclasses.replace(plan, stages=(plan.stages[0], dataclasses.replace(plan.stages[1], overlap=given)))

    model = plan_samples.model("m" * 8)
    validate_plan(with_head(6), model)
    with pytest.raises(ConfigError, match="no head with a weight of its own ends the chunk of the slot"):
        validate_plan(with_head(2), model)
