"""The executor against megatron-core's schedule: parts, deferred weight gradients and recomputation keep losses and gradients."""

from __future__ import annotations

import pytest

from tests.multiprocess.partition_runs import GPT_OSS, curves, dense_passes, peak_bytes, write_plan
from tests.spawn import run

RANKS, GATE, PP = "--expert-model-parallel-size 2", "--moe-gate topk", "--pipeline-model-parallel-size 2"
EP = f"{RANKS} {GATE}"
CAPACITY = "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
DEFER, TWO, PER_TOKEN = "--defer-weight-gradients", "--moe-overlap-partitions 2", "--calculate-per-token-loss"
PAIRS, PIECES = "--moe-overlap-micro-batches 2", "--overlap-grad-reduce --ddp-bucket-size 1500"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
CONTEXT = "--context-parallel-size 2"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
OVERLAPPED = {
    "two parts around": f"{EP} --moe-overlap-partitions 2",
    "four parts of the experts": f"{EP} --moe-overlap-partitions 4 --moe-overlap-range experts",
    "deferred": f"{EP} --defer-weight-gradients",
    "two parts around, deferred": f"{EP} --moe-overlap-partitions 2 --defer-weight-gradients",
    "two micro-batches": f"{EP} --moe-overlap-micro-batches 2",
    "all": f"{EP} --moe-overlap-micro-batches 2 --moe-overlap-partitions 2 --defer-weight-gradients",
    "two chunks of capacity": f"{EP} --moe-overlap-capacity-chunks 2",
    "two parts around, deferred, recomputed": f"{EP} {TWO} {DEFER} {UNIFORM} 3",
}
WITH_CAPACITY = {
    "two parts around": f"{EP} {CAPACITY} --moe-overlap-partitions 2",
    "four parts around, deferred": f"{EP} {CAPACITY} --moe-overlap-partitions 4 --defer-weight-gradients",
}
PAD = "--moe-pad-expert-input-to-capacity"
PADDED = {
    "whole": f"{EP} {CAPACITY} {PAD}",
    "two micro-batches, deferred": f"{EP} {CAPACITY} {PAD} {PAIRS} {DEFER}",
}
PRIORITIZED = f"{EP} --moe-gate batch_prioritized --moe-expert-capacity-factor"
CHOICE = f"{EP} --moe-gate expert_choice --moe-expert-capacity-factor 1 --moe-aux-loss-coeff 0"
BEHIND_WHOLE_GATE = f"{TWO} --moe-overlap-range after {DEFER}"
CROWDED = {
    "two parts around, deferred": "--moe-overlap-partitions 2 --defer-weight-gradients",
    "two chunks of capacity": "--moe-overlap-capacity-chunks 2",
}
WHOLE = {"mechanism": "none", "partitions": None, "first_operator": None, "last_operator": None, "axis": None}
FOUR_EXPERTS = {"partitions": 4, "first_operator": "L1.moe.gate", "last_operator": "L1.moe.merge"}
PLANS = {
    "two parts, four, uncut, deferred": (
        f"{EP} --moe-overlap-partitions 2 --defer-weight-gradients",
        {1: {"partitions": 4}, 2: WHOLE},
    ),
    "two parts to the next attention, four parts of the experts": (
        f"{EP} --moe-overlap-partitions 2 --moe-overlap-range after",
        {1: FOUR_EXPERTS},
    ),
    "two parts, chunks of capacity, four parts": (
        f"{EP} --moe-overlap-partitions 2",
        {1: WHOLE | {"mechanism": "tutel", "tutel_degree": 2}, 2: {"partitions": 4}},
    ),
}
"""Flags whose plan is written to a file, and what is changed there: neighbours that are cut otherwise."""


OTHER_PLAIN = {
    "loss per token": (f"{EP} {PER_TOKEN}", f"{TWO} {DEFER}"),
    "shared sequences": (f"{EP} {CONTEXT}", f"{TWO} {DEFER} --moe-overlap-micro-batches 2"),
    "dropout": (f"{RANKS} {DROPOUT}", f"{DEFER} {UNIFORM} 1"),
}
"""Flags of a plain run, and what the overlapped run adds to them."""


def pairs(variants: dict[str, tuple[str, str]]) -> dict[str, str]:
    plain = {f"plain: {name}": flags for name, (flags, _) in variants.items()}
    return plain | {name: f"{flags} {added}" for name, (flags, added) in variants.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    variants = {"plain": EP, "plain with capacity": f"{EP} {CAPACITY}"} | pairs(OTHER_PLAIN)
    variants["dropout, nothing recomputed"] = f"{RANKS} {DROPOUT} {DEFER}"
    variants |= OVERLAPPED | {f"capacity: {name}": flags for name, flags in WITH_CAPACITY.items()}
    variants |= {f"padded: {name}": flags for name, flags in PADDED.items()}
    variants |= pairs({"whole gate": (f"{PRIORITIZED} 1", BEHIND_WHOLE_GATE)})
    for number, (name, (flags, layers)) in enumerate(PLANS.items()):
        variants[name] = f"{EP} --plan {write_plan(folder / f'{number}.json', flags, layers)}"
    crowded = {"crowded": EP} | {f"crowded: {name}": f"{EP} {flags}" for name, flags in CROWDED.items()}
    first, second = run(2, curves, variants, crowded, 2)
    assert first == second, "loss and norm are known to every rank"
    return first


def assert_same(curve, reference):
    for (loss, norm), (expected_loss, expected_norm) in zip(curve, reference, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_keeps_the_training(found, name):
    assert_same(found[name], found["plain"])


@pytest.mark.parametrize("name", WITH_CAPACITY)
def test_capacity_passes_from_part_to_part(found, name):
    """The same tokens are dropped as in the whole micro-batch: another C/K split would move the loss."""
    assert found["plain"] != found["plain with capacity"], "the capacity drops nothing, so this shows nothing"
    assert_same(found[f"capacity: {name}"], found["plain with capacity"])


@pytest.mark.parametrize("name", PADDED)
def test_a_static_capacity_trains_as_counted_rows_do(found, name):
    """Empty places travel and are computed, and change nothing but the order of sums inside products."""
    assert_same(found[f"padded: {name}"], found["plain with capacity"])


def test_parts_travel_behind_a_gate_of_the_whole_micro_batch(found):
    assert found["plain: whole gate"] != found["plain"]
    assert_same(found["whole gate"], found["plain: whole gate"])


@pytest.mark.parametrize("name", PLANS)
def test_neighbours_that_are_cut_otherwise(found, name):
    assert_same(found[name], found["plain"])


@pytest.mark.parametrize("name", CROWDED)
def test_all_tokens_to_one_expert_and_none_to_a_rank(found, name):
    assert_same(found[f"crowded: {name}"], found["crowded"])


def test_deferral_is_bitwise(found):
    assert found["two parts around, deferred"] == found["two parts around"]


def test_interleaved_micro_batches_are_bitwise(found):
    assert found["all"] == found["two parts around"]
    assert found["two micro-batches"] == found["deferred"]


def test_what_is_recomputed_is_bitwise_what_was_computed(found):
    assert found["two parts around, deferred, recomputed"] == found["two parts around"]


def test_tokens_weigh_alike_in_unequal_micro_batches(found):
    assert found["plain: loss per token"] != found["plain"], (
        "every micro-batch has as many tokens, so this shows nothing"
    )
    assert_same(found["loss per token"], found["plain: loss per token"])


def test_sequences_shared_by_ranks(found):
    assert_same(found["shared sequences"], found["plain: shared sequences"])


def test_a_recomputation_draws_the_same_dropout(found):
    assert found["dropout"] == found["dropout, nothing recomputed"]
    # megatron-core adds three gradients of an embedding in another order (test_runner_bits.py); masks are the same.
    assert_same(found["dropout"], found["plain: dropout"])
    assert found["dropout"][0] != found["plain"][0]


RECOMPUTED = {
    "deferred": f"{DEFER} {UNIFORM} 1",
    "two parts around": f"{TWO} {UNIFORM} 3",
    "two parts around, deferred": f"{TWO} {DEFER} {BLOCK} 2",
    "two parts after": f"{TWO} --moe-overlap-range after {UNIFORM} 1",
    "four parts of the experts, deferred": f"--moe-overlap-partitions 4 --moe-overlap-range experts {DEFER} {BLOCK} 1",
    "deferred, MoE layers": f"{DEFER} {SELECTIVE} moe core_attn",
    "two parts around, MoE layers": f"{TWO} {SELECTIVE} moe",
    "two parts around, attention": f"{TWO} {DEFER} {SELECTIVE} core_attn",
}
MIXED = "--moe-layer-freq [1,0,1]"
LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --position-embedding-type learned_absolute"
WINDOWS, NARROW = "--window-size 7,0 --window-attn-skip-freq 2 --softmax-type learnable", "--moe-latent-size 20"
SPLIT = f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 {RANKS} {DROPOUT}"
BIAS = "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
LOSSES = "--moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-2"
VARIED = {
    "dense layers": (f"{EP} {MIXED}", f"{TWO} {DEFER} {SELECTIVE} moe mlp"),
    "capacity": (f"{EP} {CAPACITY}", f"--moe-overlap-partitions 4 {UNIFORM} 3"),
    "every balancing": (f"{EP} {BIAS} {LOSSES}", f"{TWO} {UNIFORM} 1"),
    "megatron-core's router": (f"{RANKS} {BIAS} --moe-input-jitter-eps 0.1", f"{DEFER} {UNIFORM} 1"),
    "random routing": (f"{RANKS} --moe-router-force-load-balancing", f"{DEFER} {UNIFORM} 1"),
    "random gate": (f"{RANKS} --moe-gate random --moe-aux-loss-coeff 0", f"{TWO} {UNIFORM} 1"),
    "dropout, MoE layers": (f"{RANKS} {DROPOUT}", f"{DEFER} {SELECTIVE} moe core_attn"),
    "dropout on a split sequence": (SPLIT, f"{DEFER} {BLOCK} 2"),
    "documents apart": (f"{EP} {DOCUMENTS}", "--moe-overlap-partitions 4 --moe-overlap-range after"),
    "documents apart, recomputed": (f"{EP} {DOCUMENTS}", f"{TWO} {SELECTIVE} core_attn"),
    "no positions": (f"{EP} --position-embedding-type none", TWO),
    "windows and sinks": (f"{EP} {WINDOWS}", f"{TWO} {DEFER} {SELECTIVE} core_attn"),
    "windows and sinks, documents apart": (f"{EP} {WINDOWS} {DOCUMENTS}", f"{TWO} {DEFER} {UNIFORM} 1"),
    "windows and sinks, split sequence": (f"{SPLIT} {NO_DROPOUT} {GATE} {WINDOWS}", f"{TWO} {DEFER}"),
    "windows and sinks, shared sequences": (f"{EP} {CONTEXT} {WINDOWS}", f"{TWO} {DEFER} {PAIRS}"),
    "experts in a latent space": (f"{EP} {NARROW}", f"{TWO} {DEFER} {PAIRS}"),
    "experts in a latent space, split sequence": (f"{SPLIT} {NO_DROPOUT} {GATE} {NARROW}", f"{TWO} {DEFER}"),
    "experts in a latent space, chunks": (f"{EP} {NARROW}", f"--moe-overlap-capacity-chunks 2 {DEFER}"),
    "experts in a latent space, recomputed": (f"{EP} {NARROW}", f"{TWO} --moe-overlap-range after {UNIFORM} 1"),
    "latent attention": (f"{EP} {LATENT}", f"{TWO} {DEFER} {UNIFORM} 1"),
    "latent attention, projections": (f"{EP} {LATENT}", f"{TWO} {DEFER} {SELECTIVE} mla_up_proj"),
    "split sequence": (f"{SPLIT} {NO_DROPOUT} {GATE}", f"{TWO} {DEFER}"),
    "no gate named": (f"{RANKS} {BIAS}", f"{TWO} {DEFER}"),
    "switch": (f"{EP} --moe-gate switch --moe-router-topk 1 --moe-router-pre-softmax", f"{TWO} {DEFER}"),
    "hash": (f"{EP} --moe-gate hash --moe-aux-loss-coeff 0", f"{TWO} {DEFER}"),
    "whole gate, recomputed": (f"{PRIORITIZED} 1", f"{TWO} --moe-overlap-range after {UNIFORM} 1"),
    "whole gate, shared experts": (f"{PRIORITIZED} 1", f"{TWO} --moe-overlap-range after {SELECTIVE} shared_experts"),
    "shared experts": (EP, f"{TWO} {DEFER} {SELECTIVE} shared_experts"),
    "norms": (EP, f"{PAIRS} {DEFER} {SELECTIVE} layernorm"),
    "pairs, recomputed": (EP, f"{PAIRS} {UNIFORM} 1"),
    "pairs, MoE layers": (EP, f"{PAIRS} {TWO} {DEFER} {SELECTIVE} moe"),
    "pieces, recomputed": (EP, f"{DEFER} {UNIFORM} 1 {PIECES}"),
    "pieces, loss per token": (f"{EP} {PER_TOKEN}", f"{DEFER} {PIECES}"),
    "four parts": (EP, "--moe-overlap-partitions 4"),
    "two parts after": (EP, f"{TWO} --moe-overlap-range after"),
    "two parts after, recomputed": (EP, f"{TWO} --moe-overlap-range after {SELECTIVE} moe core_attn"),
    "eight chunks": (EP, f"--moe-overlap-capacity-chunks 8 {DEFER}"),
    "chunks of one sample": (
        f"{EP} --micro-batch-size 1 --global-batch-size 4",
        f"--moe-overlap-capacity-chunks 2 {DEFER}",
    ),
    "sums in order": (f"{EP} {CAPACITY}", f"{PAD} --moe-overlap-capacity-chunks 2 --deterministic-mode"),
    "whole gate, four parts": (f"{PRIORITIZED} 0.5", "--moe-overlap-partitions 4 --moe-overlap-range experts"),
    "experts that choose": (CHOICE, f"{TWO} --moe-overlap-range after"),
}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.sweep)])
def test_every_recomputation_keeps_the_training(steps):
    base = f"{EP} --train-iters {steps}"
    variants = {"plain": base} | {name: f"{base} {flags}" for name, flags in RECOMPUTED.items()}
    answers = run(2, curves, variants, None, steps)
    for name in RECOMPUTED:
        assert_same(answers[0][name], answers[0]["plain"])


@pytest.mark.slow
def test_what_a_model_may_have_survives_the_cut():
    answers = run(2, curves, pairs(VARIED))
    for name in VARIED:
        assert_same(answers[0][name], answers[0][f"plain: {name}"])


OF_GPT_OSS = {
    "parts, deferred": (EP, f"{TWO} {DEFER}"),
    "pairs of parts, recomputed": (EP, f"{PAIRS} {TWO} {DEFER} {UNIFORM} 1"),
    "experts in parts": (EP, f"--moe-overlap-partitions 4 --moe-overlap-range experts {DEFER}"),
    "chunks of capacity": (EP, f"--moe-overlap-capacity-chunks 2 {DEFER}"),
    "parts after, attention recomputed": (EP, f"{TWO} --moe-overlap-range after {DEFER} {SELECTIVE} core_attn moe"),
}


@pytest.mark.slow
def test_gpt_oss_survives_the_cut():
    answers = run(2, curves, pairs(OF_GPT_OSS), None, 3, GPT_OSS)
    for name in OF_GPT_OSS:
        assert_same(answers[0][name], answers[0][f"plain: {name}"])


def test_overlap_holds_what_megatron_core_holds():
    """But for rows under way, operands of deferred weight gradients, and of a pair the layers at work."""
    overlaps = {"plain": "", "deferred": DEFER, "two parts": TWO, "pairs": PAIRS}
    held = run(2, peak_bytes, {name: f"{EP} --num-layers 8 {flags}" for name, flags in overlaps.items()})[0]
    for name in ("deferred", "two parts", "pairs"):
        assert held[name] < 1.05 * held["plain"], held


@pytest.mark.slow
def test_recomputed_activations_are_not_kept():
    """With recomputation, too, the executor holds what megatron-core holds."""
    deep = f"{EP} --num-layers 8"
    recomputes = {"nothing": "", "layers": f"{UNIFORM} 1", "MoE layers": f"{SELECTIVE} moe"}
    overlaps = {"plain": "", "deferred": DEFER, "two parts": TWO}
    variants = {f"{o}, {r}": f"{deep} {overlaps[o]} {recomputes[r]}" for o in overlaps for r in recomputes}
    held = run(2, peak_bytes, variants)[0]
    for name in ("deferred", "two parts"):
        for again in ("layers", "MoE layers"):
            assert held[f"{name}, {again}"] < 1.05 * held[f"plain, {again}"], held
        assert held[f"{name}, layers"] < 0.3 * held[f"{name}, nothing"], held
        assert held[f"{name}, MoE layers"] < 0.6 * held[f"{name}, nothing"], held


@pytest.mark.slow
def test_what_is_recomputed_runs_twice_and_not_more():
    """megatron-core's own checkpoint would run it a third time."""
    dense_first = f"{EP} --moe-layer-freq [0,1,1] --global-batch-size 8 {DEFER}"
    assert run(2, dense_passes, dense_first) == [1, 1]
    assert run(2, dense_passes, f"{dense_first} {SELECTIVE} mlp") == [2, 2]
    assert run(2, dense_passes, f"{dense_first} {UNIFORM} 1") == [2, 2]


@pytest.mark.slow
def test_a_pipeline_of_four_ranks():
    overlap = f"{TWO} {DEFER}"
    every, late = f"{EP} {PP} --num-layers 4", f"{EP} {PP} --num-layers 4 --moe-layer-freq [0]*2+[1]*2"
    # A first stage without a MoE layer has nothing to overlap, and still runs like the stage after it.
    both = {"every": (every, overlap), "late": (late, overlap)}
    both |= {"two micro-batches": (every, "--moe-overlap-micro-batches 2")}
    both |= {"all": (every, f"{overlap} --moe-overlap-micro-batches 2")}
    virtual = f"{every} --num-virtual-stages-per-pipeline-rank 2"
    both |= {"virtual": (virtual, "--moe-overlap-capacity-chunks 2 --defer-weight-gradients")}
    gate = f"{every} --moe-gate batch_prioritized --moe-expert-capacity-factor 1"
    both |= {"whole gate": (gate, f"{overlap} --moe-overlap-range after")}
    answers = run(4, curves, pairs(both))
    for name in both:
        assert_same(answers[0][name], answers[0][f"plain: {name}"])


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.sweep)])
def test_an_interleaved_pipeline_of_four_ranks(every):
    virtual = f"{RANKS} {PP} --num-virtual-stages-per-pipeline-rank 2 --num-layers 8 --global-batch-size 32"
    gated = f"{virtual} {GATE}"
    variants = {
        "parts around": (gated, TWO),
        "parts after, deferred": (gated, f"{TWO} --moe-overlap-range after {DEFER}"),
        "deferred": (gated, DEFER),
        "recomputed": (gated, f"{TWO} {DEFER} {BLOCK} 1"),
        "loss per token": (f"{gated} {PER_TOKEN}", f"{TWO} {DEFER}"),
        "dropout": (f"{virtual} {DROPOUT}", f"{DEFER} {SELECTIVE} moe core_attn"),
        "late": (f"{gated} --moe-layer-freq [0]*4+[1]*4", f"{TWO} {DEFER}"),
        "two micro-batches": (f"{gated} --global-batch-size 64", PAIRS),
        "all": (gated, f"{PAIRS} {TWO} {DEFER}"),
        "pairs that send late": (gated, f"{PAIRS} {DEFER} --moe-overlap-forward-send late"),
    }
    variants = {name: variants[name] for name in [*variants][every - 1 :: every]}
    answers = run(4, curves, pairs(variants))
    for name in variants:
        assert_same(answers[0][name], answers[0][f"plain: {name}"])
