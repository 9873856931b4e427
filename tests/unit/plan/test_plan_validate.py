"""Every invariant of a plan: the example holds them all; one change breaks one, and the error says which."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import PeakBytes, Predicted, PredictedStage, Provenance, Recompute
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.serialize import as_values, from_json
from tests.unit.plan import plan_samples

EXAMPLE = (plan_samples.GOLDEN / "example_plan.json").read_text()
LAYER = "stages.0.overlap.layers.0"
SLOT = "L0.moe.dispatch.backward"


def lowered(first: str, most: int) -> dict[str, Any]:
    """Limits of a search on the first stage, one of them lowered for a range."""
    limit = {"first_operator": first, "last_operator": "L0.moe.merge", "max_partitions": most}
    limits = {"max_partitions": 8, "group_seconds": 0.0, "range_limit": 1, "lowered": [limit]}
    return {"stages.0.overlap.search_limits": limits}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stages": []}, "stages []: a plan has at least one stage; add a stage"),
    ({"sequence_length": 0}, "sequence_length 0: must be at least 1; write a positive number"),
    ({"global_batch_size": -8}, "global_batch_size -8: must be at least 1; write a positive number"),
    ({"loss_stage": 2}, "loss_stage 2: the stages are 0 to 1; name one of them"),
    ({"mtp_stage": 5}, "mtp_stage 5: the stages are 0 to 1; name one of them"),
    (
        {"embedding_stage": 1, "loss_stage": 0},
        "embedding_stage 1: the embedding runs before the loss (stage 0); write 0",
    ),
    ({"stages.0.data": 0}, "stages[0].data 0: must be at least 1; write a positive number"),
    (
        {"stages.1.micro_batch_size": 3},
        "stages[1].gradient_accumulation_steps 2: micro_batch_size · data · gradient_accumulation_steps = 3 · 1 · "
        "2 = 6 "
        "must be the global batch of 8; change one of the three",
    ),
    (
        {"stages.0.devices.mesh": [2, 2]},
        "stages[0].devices.mesh [2, 2]: tensor · context · data = 1 · 1 · 2 = 2 devices are needed; give a mesh "
        "of 2 devices",
    ),
    ({"stages.0.devices.ranks": [0]}, "stages[0].devices.ranks (1 ranks): the mesh has 2 devices; list 2"),
    (
        {"stages.1.devices.ranks": [2, 1]},
        "stages[1].devices.ranks[1] 1: stands already in stages[0]; list every rank once",
    ),
    (
        {"stages.1.devices.ranks": [2, 4]},
        "stages[1].devices.ranks[1] 4: the plan has 4 devices, its ranks are 0 to 3; number the ranks without gaps",
    ),
    (
        {"stages.0.expert": 4},
        "stages[0].expert 4: expert · expert_tensor = 4 does not divide the 2 ranks of the stage; use divisors of 2",
    ),
    (
        {"sequence_length": 255},
        "stages[1].tensor 2: the sequence of 255 does not divide into tensor and context pieces (2); "
        "use a divisor of the sequence",
    ),
    (
        {"sequence_length": 254, "stages.0.context": 2, "stages.0.data": 1, "stages.0.micro_batch_size": 4},
        "stages[0].context 2: the sequence of 254 does not divide into tensor and context pieces (4); "
        "use a divisor of the sequence",
    ),
    ({"stages.0.zero_level": 4}, "stages[0].zero_level 4: must be 0, 1, 2 or 3; write 1"),
    (
        {"stages.1.offload.optimizer": 1.4},
        "stages[1].offload.optimizer 1.4: must lie in [0, 1]; write a share of the state",
    ),
    (
        {"stages.0.offload.weights": -0.1},
        "stages[0].offload.weights -0.1: must lie in [0, 1]; write a share of the state",
    ),
    (
        {"stages.0.recompute.layers": 1},
        "stages[0].recompute.layers 1: nothing is recomputed (granularity none); write 0",
    ),
    (
        {"stages.1.recompute.layers": 2},
        "stages[1].recompute.layers 2: must lie between 1 and the layers of a chunk (1); "
        "write granularity none to recompute nothing",
    ),
    (
        {"stages.1.recompute.granularity": "selective"},
        "stages[1].recompute.modules []: selective recomputation needs modules; name a module",
    ),
    (
        {"stages.1.recompute.modules": ["moe"]},
        "stages[1].recompute.modules moe: only granularity selective reads modules (here full); write []",
    ),
    (
        {"stages.1.recompute": {"layers": 1, "granularity": "selective", "modules": ["attention"]}},
        "stages[1].recompute.modules[0] attention: unknown module; use core_attn, moe_act, layernorm, "
        "mla_up_proj, mlp, "
        "moe, shared_experts",
    ),
    (
        {"stages.1.recompute": {"layers": 1, "granularity": "selective", "modules": ["moe", "moe"]}},
        "stages[1].recompute.modules[1] moe: stands twice; remove one",
    ),
    (
        {"stages.0.chunks": [[0, 1], [1, 2]]},
        "stages[0].chunks (2 chunks): 1f1b has one chunk per stage; use interleaved-1f1b",
    ),
    (
        {"pipeline_schedule": "interleaved-1f1b"},
        "stages[0].chunks (1 chunks): interleaved-1f1b has at least 2 chunks per stage, on every stage as many; "
        "use 1f1b or cut every stage into as many chunks",
    ),
    (
        {"stages.1.chunks": [[2, 3]]},
        "stages[1].chunks[0] [2, 3]: chunks hold every layer once, in model order, at least one each but the ends; layer 1 "
        "is next; start with 1",
    ),
    (
        {"stages.0.chunks": [[0, 2]], "stages.1.chunks": [[2, 2]], "embedding_stage": 0, "loss_stage": 0},
        "stages[1].chunks[0] [2, 2]: chunks hold every layer once, in model order, at least one each but the ends; layer 2 "
        "is next; start with 2",
    ),
    (
        {"transfers": []},
        "transfers: stages 0 and 1 differ in micro_batch_size (2, 4), and no transfer joins them; "
        "add one that says which rank sends what",
    ),
    (
        {"transfers.0.to_stage": 0},
        "transfers[0].to_stage 0 -> 0: these stages have no common boundary; join neighbours",
    ),
    (
        {"transfers.0.tiles.1.source": 2},
        "transfers[0].tiles[1].source 2: no rank of stages[0]; name one of its ranks",
    ),
    (
        {"transfers.0.tiles.1.target": 0},
        "transfers[0].tiles[1].target 0: no rank of stages[1]; name one of its ranks",
    ),
    (
        {"transfers.0.tiles.2.batch": [2, 5]},
        "transfers[0].tiles[2].batch [2, 5]: a range inside [0, 4] is needed, not empty; write [first, last)",
    ),
    (
        {"transfers.0.tiles.2.batch": [1, 4]},
        "transfers[0].tiles[2]: overlaps tiles[0]; every element crosses once; cut the tiles apart",
    ),
    (
        {"transfers.0.tiles.3.sequence": [129, 256]},
        "transfers[0].tiles: the tiles cover 1022 of 1024 (batch 4 · sequence 256) places; let every element "
        "cross once",
    ),
    (
        {"transfers.0.all_gather": {"axis": "sequence", "groups": [[2, 1]]}},
        "transfers[0].all_gather.groups[0] 1: not a rank of the receiving stage; name its ranks",
    ),
    (
        {"transfers.0.all_gather": {"axis": "sequence", "groups": [[2, 3], [3]]}},
        "transfers[0].all_gather.groups[1] 3: stands in two groups; list every rank once",
    ),
    (
        {"stages.0.overlap.gradient_chunk_bytes": -1},
        "stages[0].overlap.gradient_chunk_bytes -1: must be at least 0; write 0",
    ),
    (
        {"stages.0.overlap.reduce_at_once": True, "stages.0.overlap.gradient_chunk_bytes": 0},
        "stages[0].overlap.reduce_at_once True: gradients are reduced at the end of the step (gradient_chunk_bytes 0); "
        "write false, or the bytes of a reduction",
    ),
    (
        {"stages.0.overlap.overlap_param_gather": True, "stages.0.overlap.gradient_chunk_bytes": 0},
        "stages[0].overlap.overlap_param_gather True: weights are gathered by the parameter groups that gradient_chunk_bytes "
        "reduces; write false, or the bytes of a reduction",
    ),
    (
        {"stages.0.overlap.sends_late": True, "stages.0.overlap.micro_batches_in_flight": 1},
        "stages[0].overlap.sends_late True: micro-batches run one after the other (micro_batches_in_flight 1); "
        "write false, or two micro-batches at a time",
    ),
    (
        {"stages.0.overlap.search_limits": {"max_partitions": 0, "group_seconds": 0.0, "range_limit": 1}},
        "stages[0].overlap.search_limits.max_partitions 0: must be at least 1; write 1",
    ),
    (
        lowered("L0.attention", 8),
        "stages[0].overlap.search_limits.lowered[0].max_partitions 8: must be at least 1 and below the limit of the search (8); "
        "write 1 or remove the entry",
    ),
    (
        lowered("L9.attention", 2),
        "stages[0].overlap.search_limits.lowered[0].first_operator L9.attention: no operator of a layer of this stage; name one",
    ),
    (
        {"stages.0.overlap.max_deferred_bytes": 0},
        "stages[0].overlap.max_deferred_bytes 0: weight gradients are deferred (weight_gradient_slots); "
        "allow bytes for them or remove the slots",
    ),
    (
        {"stages.1.overlap.max_deferred_bytes": 5},
        "stages[1].overlap.max_deferred_bytes 5: has no effect: no layer has weight_gradient_slots; write 0 or "
        "add slots",
    ),
    (
        {
            f"{LAYER}.mechanism": "cross_micro_batch",
            **{f"{LAYER}.{field}": None for field in ("partitions", "first_operator", "last_operator", "axis")},
        },
        "stages[0].overlap.micro_batches_in_flight 1: mechanism cross_micro_batch needs at least 2 micro-batches "
        "in flight; write 2 or use another mechanism",
    ),
    (
        {f"{LAYER}.layer": 1},
        "stages[0].overlap.layers[0].layer 1: not a layer of this stage; move it to the layer's stage",
    ),
    (
        {f"{LAYER}.tutel_degree": 2},
        "stages[0].overlap.layers[0].tutel_degree: mechanism partitioned does not read it; write null",
    ),
    ({f"{LAYER}.axis": None}, "stages[0].overlap.layers[0].axis null: mechanism partitioned needs it; give a value"),
    (
        {f"{LAYER}.partitions": 1},
        "stages[0].overlap.layers[0].partitions 1: must be at least 2; write mechanism none for 1",
    ),
    (
        {f"{LAYER}.partitions": 3},
        "stages[0].overlap.layers[0].partitions 3: does not divide the micro-batch of 2; use 2",
    ),
    (
        {"stages.0.expert": 1},
        "stages[0].overlap.layers[0].mechanism partitioned: nothing to overlap: the stage has one expert rank; "
        "write none",
    ),
    (
        {f"{LAYER}.first_operator": "L0.attn"},
        "stages[0].overlap.layers[0].first_operator L0.attn: not an operator name; "
        "use a name such as L0.attention, L3.moe.dispatch.backward or head.loss",
    ),
    (
        {f"{LAYER}.first_operator": "embedding"},
        "stages[0].overlap.layers[0].first_operator embedding: a range runs between forward operators of layers; "
        "name one",
    ),
    (
        {f"{LAYER}.last_operator": "L1.attention"},
        "stages[0].overlap.layers[0].last_operator L1.attention: layer 1 is not in the chunk of layer 0; "
        "stay in layers 0 to 0",
    ),
    (
        {f"{LAYER}.first_operator": "L0.moe.experts"},
        "stages[0].overlap.layers[0].first_operator L0.moe.experts: the range must begin at L0.moe.gate or "
        "earlier; begin earlier",
    ),
    (
        {f"{LAYER}.last_operator": "L0.moe.experts"},
        "stages[0].overlap.layers[0].last_operator L0.moe.experts: the range must end at L0.moe.merge or later; "
        "end later",
    ),
    (
        {f"{LAYER}.weight_gradient_slots": {"L0.moe.experts.backward": []}},
        'stages[0].overlap.layers[0].weight_gradient_slots["L0.moe.experts.backward"]: a slot is a backward '
        "all-to-all such as "
        "L0.moe.dispatch.backward, or the chunk's send of gradients; name one",
    ),
    (
        {f"{LAYER}.weight_gradient_slots": {"L1.moe.combine.backward": []}},
        'stages[0].overlap.layers[0].weight_gradient_slots["L1.moe.combine.backward"]: a slot of layer 1 in the '
        "entry of "
        "layer 0; move it",
    ),
    (
        {f"{LAYER}.weight_gradient_slots": {SLOT: ["L0.attention"]}},
        f'stages[0].overlap.layers[0].weight_gradient_slots["{SLOT}"][0] L0.attention: not a weight gradient; '
        "use a name that ends in .dW",
    ),
    (
        {f"{LAYER}.weight_gradient_slots": {SLOT: ["L1.attention.qkv.dW"]}},
        f'stages[0].overlap.layers[0].weight_gradient_slots["{SLOT}"][0] L1.attention.qkv.dW: not a layer of this '
        "stage; "
        "remove it",
    ),
    (
        {f"{LAYER}.weight_gradient_slots": {SLOT: ["L0.moe.experts.fc2.dW"] * 2}},
        f'stages[0].overlap.layers[0].weight_gradient_slots["{SLOT}"][1] L0.moe.experts.fc2.dW: stands already in '
        f"{SLOT}; "
        "place it once",
    ),
]


def changed(changes: dict[str, Any]) -> str:
    """The example as JSON text with some values set, by dotted path."""
    values = json.loads(EXAMPLE)
    for path, value in changes.items():
        *way, last = path.split(".")
        target: Any = values
        for key in way:
            target = target[int(key) if key.isdigit() else key]
        target[int(last) if last.isdigit() else last] = value
    return json.dumps(values)


def test_the_example_holds() -> None:
    validate_plan(from_json(EXAMPLE), plan_samples.model())


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[:70] for _, message in WRONG])
def test_one_broken_invariant(changes: dict[str, Any], message: str) -> None:
    plan = from_json(changed(changes))
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan)
    assert str(caught.value) == f"plan.json {message}"


def test_source_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^runs/p\.json sequence_length 0: "):
        validate_plan(from_json(changed({"sequence_length": 0})), source="runs/p.json")


@pytest.mark.parametrize(
    ("letters", "model", "stage", "message"),
    [
        ("mmm", {}, {}, "stages[0].chunks: the chunks hold 2 layers, tiny has 3; cover the layers once"),
        ("mm", {"mtp_layers": 1}, {}, "mtp_stage null: tiny has 1 multi-token-prediction layers; write 0"),
        ("dd", {}, {"expert": 2, "data": 2}, "stages[0].expert 2: tiny has no experts; write 1"),
        (
            "mm",
            {"num_experts": 6},
            {"expert": 4, "data": 4},
            "stages[0].expert 4: 6 experts are not divisible; use 1, 2, 3, 6",
        ),
        (
            "mm",
            {"num_attention_heads": 3},
            {"tensor": 2},
            "stages[0].tensor 2: attention heads 3 is not divisible; use a divisor of 3",
        ),
        (
            "md",
            {"ffn_hidden_size": 9},
            {"tensor": 2},
            "stages[0].tensor 2: MLP width 9 is not divisible; use a divisor of 9",
        ),
        (
            "mm",
            {"moe_ffn_hidden_size": 9},
            {"data": 2, "expert_tensor": 2},
            "stages[0].expert_tensor 2: expert width 9 is not divisible; use a divisor of 9",
        ),
        (
            "mm",
            {"shared_expert_hidden_size": 9},
            {"tensor": 2},
            "stages[0].tensor 2: shared expert width 9 is not divisible; use a divisor of 9",
        ),
        (
            "mm",
            {"learned_positions": True, "max_position_embeddings": 128},
            {},
            "sequence_length 256: tiny has 128 positions; shorten the sequence",
        ),
    ],
)
def test_against_the_model(letters: str, model: dict[str, Any], stage: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_plan(plan_samples.plan(stage=stage), plan_samples.model(letters, **model))
    assert str(caught.value) == f"plan.json {message}"


def test_overlap_of_a_dense_layer() -> None:
    with pytest.raises(ConfigError, match=r"layers\[0\]\.layer 0: not a mixture-of-experts layer; remove the entry"):
        validate_plan(from_json(EXAMPLE), plan_samples.model("dm"))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (3, 4), (4, 3)])
def test_micro_batches_that_cannot_be_interleaved(stages: int, micro_batches: int) -> None:
    plan = plan_samples.plan(layers=2 * stages, stages=stages, chunks=2, micro_batches=micro_batches)
    with pytest.raises(
        ConfigError, match=rf"stages\[0\]\.gradient_accumulation_steps {micro_batches}: interleaving over"
    ):
        validate_plan(plan)


def test_interleaving_needs_stages() -> None:
    with pytest.raises(ConfigError, match="pipeline_schedule interleaved-1f1b: needs at least 2 stages; use 1f1b"):
        validate_plan(plan_samples.plan(layers=2, chunks=2))


def test_chunks_follow_the_model_across_stages() -> None:
    plan = plan_samples.plan(layers=8, stages=2, chunks=2)
    validate_plan(plan, plan_samples.model("m" * 8))
    swapped = tuple(
        dataclasses.replace(stage, chunks=chunks)
        for stage, chunks in zip(plan.stages, (((0, 2), (2, 4)), ((4, 6), (6, 8))), strict=True)
    )
    with pytest.raises(ConfigError, match=r"stages\[1\]\.chunks\[0\] \[4, 6\]: .*layer 2 is next"):
        validate_plan(dataclasses.replace(plan, stages=swapped))


def test_ends_may_stand_in_chunks_without_layers() -> None:
    recompute = Recompute(layers=1, granularity="uniform")
    plan = plan_samples.plan(layers=6, stages=2, chunks=2, stage={"recompute": recompute}, mtp_stage=1)
    ends = tuple(
        dataclasses.replace(stage, chunks=chunks)
        for stage, chunks in zip(plan.stages, (((0, 0), (3, 6)), ((0, 3), (6, 6))), strict=True)
    )
    validate_plan(dataclasses.replace(plan, stages=ends), plan_samples.model("m" * 6, mtp_layers=1))
    alone = plan_samples.plan(layers=2, stages=2, stage={"recompute": recompute})
    for chunks in ([((0, 2),), ((2, 2),)], [((0, 0),), ((0, 2),)]):
        stages = (dataclasses.replace(s, chunks=c) for s, c in zip(alone.stages, chunks, strict=True))
        validate_plan(dataclasses.replace(alone, stages=tuple(stages)), plan_samples.model())


def test_uneven_uniform_groups() -> None:
    plan = plan_samples.plan(layers=3, stage={"recompute": Recompute(layers=2, granularity="uniform")})
    with pytest.raises(ConfigError, match=r"layers 2: a chunk of 3 layers does not divide into groups of 2"):
        validate_plan(plan)


def test_prediction_of_another_plan() -> None:
    provenance = Provenance(measured=1.0, interpolated=0.0, roofline=0.0)
    predicted = Predicted(
        step_seconds=1.0, tokens_per_second_per_gpu=1.0, model_tflops_per_gpu=1.0, stages=(), provenance=provenance
    )
    with pytest.raises(ConfigError, match=r"predicted\.stages 0: the plan has 1 stages; predict again"):
        validate_plan(plan_samples.plan(predicted=predicted))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"step_seconds": -1.0}, "step_seconds -1.0: must be greater than 0; predict again"),
        ({"tokens_per_second_per_gpu": 0.0}, "tokens_per_second_per_gpu 0.0: must be greater than 0; predict again"),
        ({"stages.0.last_seconds": -1e-7}, "stages[0].last_seconds -1e-07: must not be negative; predict again"),
        ({"stages.1.peak_bytes": -1}, "stages[1].peak_bytes -1: must not be negative; predict again"),
        (
            {"stages.0.peak_bytes_by_category.optimizer": -3},
            "stages[0].peak_bytes_by_category.optimizer -3: must not be negative; predict again",
        ),
        ({"step_seconds": float("nan")}, "step_seconds NaN: must be a finite number; write a finite number"),
    ],
)
def test_predicted_figures_of_a_file_are_no_less_than_nothing(changed: dict[str, Any], said: str) -> None:
    peaks = PeakBytes(
        parameters=1, gradients=2, optimizer=3, activations=4, temporaries=5, communication=6, fragmentation=7
    )
    provenance = Provenance(measured=0.5, interpolated=0.25, roofline=0.25)
    seconds = {"stable_seconds": 0.1, "first_seconds": 0.2, "last_seconds": 0.0, "exposed_communication_seconds": -1e-9}
    stage = PredictedStage(**seconds, peak_bytes=28, peak_bytes_by_category=peaks, provenance=provenance)
    rates = {"step_seconds": 1.0, "tokens_per_second_per_gpu": 1.0, "model_tflops_per_gpu": 1.0}
    plan = plan_samples.plan(stages=2, predicted=Predicted(**rates, stages=(stage, stage), provenance=provenance))
    validate_plan(plan)
    values = as_values(plan)
    for path, value in changed.items():
        *parents, last = path.split(".")
        place = values["predicted"]
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        place[last] = value
    with pytest.raises(ConfigError) as caught:
        validate_plan(from_json(json.dumps(values)))
    assert str(caught.value) == f"plan.json predicted.{said}"
