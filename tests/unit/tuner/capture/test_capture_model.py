"""Captured graphs of the real model: against real runs, against single batches, against the analytic parameter counts."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from moe_overlap.describe.model import (
    Share,
    embedding_parameters,
    layer_parameters,
    norm_parameters,
    prediction_parameters,
)
from moe_overlap.plan.operators import ATTENTION, EXPERTS, GATE, PROJECT
from moe_overlap.plan.operators import SHARED as SHARED_EXPERTS
from moe_overlap.tuner.capture.build import config_for
from moe_overlap.tuner.capture.capture import capture
from moe_overlap.tuner.capture.expression import Expression, evaluate
from moe_overlap.tuner.capture.graph import CapturedPart
from moe_overlap.tuner.capture.kernels import UnregisteredKernelError
from moe_overlap.tuner.capture.record import Recording
from tests.unit.tuner.capture.capture_cases import (
    AHEAD,
    CP2,
    DENSE,
    GATED,
    LATENT,
    MOE,
    SHARED,
    TP2,
    TP2_EP2,
    recorded,
    request,
    running,
)
from tests.unit.tuner.cost.part_memory import kept_bytes

FAST = {
    "te, TP2 EP2, shared expert": (f"{MOE} {SHARED} {TP2_EP2} --bf16", "te", "none"),
}
SLOW = {
    "torch, TP2 EP2": (f"{MOE} {TP2_EP2} --bf16", "torch", "none"),
    "torch, dense with biases, TP2": (f"{DENSE} {TP2}", "torch", "none"),
    "torch, latent attention, TP2": (f"{LATENT} {TP2}", "torch", "none"),
    "torch, capacity, padded": (
        f"{MOE} --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity --expert-model-parallel-size 2",
        "torch",
        "none",
    ),
    "te, dense with biases, TP2": (f"{DENSE} {TP2}", "te", "none"),
    "te, CP2 EP2": (f"{MOE} {CP2} --expert-model-parallel-size 2 --bf16", "te", "none"),
    "te, latent attention, TP2": (f"{LATENT} {TP2} --bf16", "te", "none"),
    "te, ETP2": (f"{MOE} {TP2} --bf16", "te", "none"),
    "te, allgather": (f"{MOE} {TP2_EP2} --bf16 --moe-token-dispatcher-type allgather", "te", "none"),
    "te, full": (f"{MOE} {TP2_EP2} --bf16", "te", "full"),
    "torch, full": (f"{MOE} {TP2_EP2}", "torch", "full"),
    "te, prediction, TP2 EP2": (f"{MOE} {TP2_EP2} {AHEAD} --bf16", "te", "none"),
    "torch, prediction, CP2": (f"{MOE} {CP2} {AHEAD}", "torch", "none"),
    "te, prediction, latent attention, full": (f"{LATENT} {TP2} {AHEAD} --bf16", "te", "full"),
    "te, prediction, modules": (f"{MOE} {SHARED} {AHEAD} --bf16", "te", "core_attn+moe_act+shared_experts"),
}
FLEX = {
    backend: f"{MOE} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend} --moe-router-dtype fp32"
    for backend in ("deepep", "hybridep")
}
SLOW |= {f"te, {backend}, TP2 EP2": (f"{flags} {TP2_EP2} --bf16", "te", "none") for backend, flags in FLEX.items()}
COSTLY = ("torch, latent attention, TP2", "torch, prediction, CP2", "torch, TP2 EP2")
"""What they have is in other cases, too; no other beside the same."""
SWEPT = (pytest.mark.slow, pytest.mark.sweep)
POINTS = [(1, 320), (2, 192), (4, 320), (7, 192)]
"""Longer than what the expressions are made from."""


def numbers(part: CapturedPart) -> list[Expression]:
    """Every number of a part, in order."""
    found = [storage.bytes for storage in part.storages]
    for op in part.ops:
        found += [op.bytes, op.flops, *op.shape, *([op.collective.payload_bytes] if op.collective else [])]
    return found


def structure(part: CapturedPart) -> list[Any]:
    """Everything else of its operators."""
    return [
        (op.name, op.phase, op.operator, op.module, op.reads, op.writes, op.after, op.dtype, op.cost_class)
        for op in part.ops
    ]


@pytest.mark.parametrize(
    "case",
    [*FAST, *(pytest.param(name, marks=SWEPT if name in COSTLY else pytest.mark.slow) for name in SLOW)],
)
def test_expressions_give_the_numbers_of_single_batches(case: str) -> None:
    flags, implementation, variant = (FAST | SLOW)[case]
    asked = request(flags, implementation, variant)  # type: ignore[arg-type]
    captured = capture(asked)
    single = recorded(asked, POINTS)
    kinds = {part.kind for part in captured.parts}
    assert kinds == (set(single) if variant == "none" else {*captured.layer_kinds, *captured.mtp_kinds})
    for kind in kinds:
        for (b, s), batch in zip(POINTS, single[kind], strict=True):
            part = captured.part(kind, variant, b)
            assert structure(part) == structure(batch), (kind, b, s)
            found, expected = evaluate(numbers(part), b, s), evaluate(numbers(batch), b, s)
            assert (found == expected).all(), (kind, b, s)


@pytest.mark.parametrize("flags", [f"{MOE} {SHARED} {AHEAD}", f"{DENSE} --bf16"], ids=["moe", "dense"])
def test_operators_without_values_equal_those_of_a_real_run(flags: str) -> None:
    asked = request(flags)
    points = [(2, 128)]
    fake, real = recorded(asked, points), recorded(asked, points, really=True)
    assert set(fake) == set(real)
    for kind in fake:
        (left,), (right,) = fake[kind], real[kind]
        assert structure(left) == structure(right), kind
        assert numbers(left) == numbers(right), kind
        assert left.saved == right.saved and left.storages == right.storages, kind


@pytest.mark.parametrize("flags", [f"{DENSE} --bf16", f"{MOE} {SHARED}"], ids=["dense", "moe"])
def test_saved_bytes_are_those_that_autograd_keeps_in_a_real_run(flags: str) -> None:
    asked = request(flags)
    part = recorded(asked, [(2, 128)])[asked_kind(flags)][0]
    with running(asked, really=True) as (runner, _):
        piece = runner.runnable_parts[asked_kind(flags)]
        runner.record(piece, 2, 128)
        (x,) = piece.inputs(2, 128)
        held = {p.untyped_storage()._cdata for module in piece.modules.values() for p in module.parameters()}
        kept: dict[int, Any] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in held:
                kept[storage._cdata] = weakref.ref(storage)
            return tensor

        with runner._recorder, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = piece.run(x)
        # The dispatcher keeps what it routed by until the next micro-batch, beside autograd.
        dispatcher = getattr(piece.modules[""].mlp, "token_dispatcher", None)
        for name in ("probs", "routing_map", "reversed_local_input_permutation_mapping"):
            if isinstance(tensor := getattr(dispatcher, name, None), torch.Tensor):
                keep(tensor)
        for tensor in (output, runner._rotary(128)):
            if tensor is not None:
                kept.pop(tensor.untyped_storage()._cdata, None)
        # A node whose result nobody used has gone, and with it what it had kept.
        storages = [storage for reference in kept.values() if (storage := reference()) is not None]
        assert sum(storage.nbytes() for storage in storages) == float(kept_bytes(part, 2, 128))


def asked_kind(flags: str) -> str:
    """The kind of its layers."""
    return "moe" if "--num-experts" in flags else "dense"


@pytest.mark.parametrize("case", ["torch, TP2 EP2", "te, dense with biases, TP2", "te, prediction, TP2 EP2"])
def test_parameters_are_those_of_the_closed_formulas(case: str) -> None:
    flags, implementation, _ = (FAST | SLOW)[case]
    asked = request(flags, implementation)  # type: ignore[arg-type]
    width = 2 if asked.layout.precision == "bf16" else 4
    share = Share(
        chunks=((0, 2),),
        tensor=asked.layout.tensor,
        expert=asked.layout.expert,
        expert_tensor=asked.layout.expert_tensor,
        split_latents=implementation == "torch",
    )
    parts = {kind: batches[0] for kind, batches in recorded(asked, [(2, 128)]).items()}
    held = {
        kind: sum(float(storage.bytes.value(1, 1)) for storage in part.storages if storage.role == "parameter") / width
        for kind, part in parts.items()
    }
    assert ("mtp.moe" in held) == (asked.model.mtp_layers > 0)
    for kind in set(held) - {"embedding", "head"}:
        if kind == "mtp.moe":
            assert held.pop(kind) == prediction_parameters(asked.model, share)
            continue
        layer = asked.model.moe_layers.index(kind == "moe")
        assert held[kind] == layer_parameters(asked.model, layer, share)
    tied = asked.model.vocab_size // share.tensor * asked.model.hidden_size if asked.model.tied_embeddings else 0
    ends = embedding_parameters(asked.model, share) + norm_parameters(asked.model, asked.model.hidden_size)
    assert held["embedding"] + held["head"] - tied == ends
    experts = [s for s in parts.get("moe", parts[next(iter(parts))]).storages if ".experts." in s.name]
    assert all(storage.replicas == "edp" for storage in experts) or asked.layout.expert == 1


def test_libraries_exchange_each_row_once_for_a_rank_and_spare_permutations() -> None:
    """Against the all-to-all dispatcher: the same rows reach the experts, fewer bytes travel, less moves in memory."""
    tokens, hidden, experts, choices, ranks = 2 * 128, 64, 4, 2, 2
    ways = [(first, second) for first in range(ranks) for second in range(ranks)]
    copies = sum(len(set(way)) for way in ways) / len(ways)
    scores = {"deepep": choices, "hybridep": experts}
    parts = {}
    for backend, flags in {"alltoall": MOE, **FLEX}.items():
        asked = request(f"{flags} --expert-model-parallel-size {ranks} --bf16", "te")
        parts[backend] = recorded(asked, [(2, 128)])["moe"][0]
    products, moved = ({}, {})
    for backend, part in parts.items():
        grouped = [op for op in part.ops if op.cost_class == "grouped_gemm"]
        products[backend] = [[float(size.value(1, 1)) for size in op.shape] for op in grouped]
        moved[backend] = sum(op.name == "te.move_rows" for op in part.ops)
        if backend == "alltoall":
            continue
        exchanges = [op for op in part.ops if op.name.startswith(f"{backend}.") and op.collective]
        assert [(op.phase, op.name.partition(".")[2]) for op in exchanges] == [
            ("forward", "dispatch"),
            ("forward", "combine"),
            ("backward", "dispatch"),
            ("backward", "combine"),
        ]
        sent = [float(op.collective.payload_bytes.value(1, 1)) for op in exchanges if op.collective]
        row = 2 * hidden
        assert sent[1] == sent[2] == tokens * copies * row
        assert sent[0] == tokens * copies * (row + 4 * scores[backend])
    assert products["deepep"] == products["hybridep"] == products["alltoall"]
    assert moved == {"alltoall": 8, "deepep": 4, "hybridep": 0}


def test_clamped_gates_are_one_kernel_and_biases_another() -> None:
    parts = recorded(request(f"{GATED} --bf16", "te"), [(2, 128)])
    part = next(batches[0] for kind, batches in parts.items() if kind.startswith("moe"))
    of_experts = [op.name for op in part.ops if op.operator == EXPERTS and op.phase == "forward"]
    first = of_experts.index("te.grouped_gemm")
    assert of_experts[first : first + 6] == [
        "te.grouped_gemm",
        "te.add_bias",
        "clamp",
        "clamp",
        "cat",
        "compiled.weighted_quick_geglu",
    ]
    assert any(op.name == "te.bias_gradients" for op in part.ops)


def test_the_projection_of_a_prediction_layer_is_an_operator_of_its_own() -> None:
    """The product of hidden state and embedding side by side, [T, 2H] · [2H, H]: once forward, twice backward."""
    part = recorded(request(f"{MOE} {AHEAD} --bf16", "te"), [(2, 128)])["mtp.moe"][0]
    products = [op for op in part.ops if op.operator == PROJECT and op.cost_class == "gemm"]
    assert [(op.phase, op.module.rpartition(".")[2]) for op in products if op.phase == "forward"] == [
        ("forward", "eh_proj")
    ]
    assert [op.is_weight_gradient for op in products] == [False, False, True]
    assert [float(op.flops.value(1, 1)) for op in products] == [2.0 * 256 * 128 * 64] * 3
    (weight,) = (storage for storage in part.storages if storage.role == "parameter" and "eh_proj" in storage.name)
    assert float(weight.bytes.value(1, 1)) == 2 * 128 * 64


def test_work_of_experts_and_their_all_to_alls_grow_with_the_rows_of_the_busiest_rank() -> None:
    """In both passes; products of weight gradients, too, which Transformer Engine writes to the gradient itself."""
    (part,) = recorded(request(f"{MOE} {TP2_EP2} {SHARED}", "te"), [(2, 128)])["moe"]
    for phase in ("forward", "backward"):
        ops = [op for op in part.ops if op.phase == phase]
        sent = [op for op in ops if op.collective is not None and op.collective.kind == "all_to_all"]
        products = [op for op in ops if op.cost_class == "grouped_gemm"]
        assert len(sent) >= 2 and len(products) >= 2 and all(op.scales_with_load for op in (*products, *sent)), phase
        assert not any(op.scales_with_load for op in ops if op.operator in (ATTENTION, GATE, SHARED_EXPERTS))


def test_a_kernel_that_is_not_registered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(request(f"{DENSE} --bf16", "torch")) as (runner, _):
        piece = runner.runnable_parts["dense"]
        attention = piece.modules[""].self_attention.core_attention
        stock = attention.forward
        foreign = torch.library.Library("some_library", "DEF")
        foreign.define("flash(Tensor q) -> Tensor")
        foreign.impl("flash", lambda q: q.clone(), "CompositeExplicitAutograd")
        monkeypatch.setattr(attention, "forward", lambda q, *a, **k: stock(torch.ops.some_library.flash(q), *a, **k))
        with pytest.raises(UnregisteredKernelError, match="some_library::flash in self_attention.*kernels.py"):
            runner.record(piece, 2, 64)


def test_a_recording_goes_with_its_model() -> None:
    """Storages that outlive the model keep none: a process captures dozens of layouts."""
    with running(request(MOE, "te")) as (runner, _):
        for _ in range(2):
            runner.record(runner.runnable_parts["moe"], 2, 128)
    del runner
    gc.unfreeze()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Recording and thing.ops]


def test_a_mask_of_documents_is_no_part_of_what_is_captured() -> None:
    """Training takes other modules for it on a GPU; a graph that is kept for all jobs of a layout has one kind of attention."""
    asked = request(f"{DENSE} --bf16 --reset-attention-mask", "te", "none")
    assert asked.config.data.reset_attention_mask
    assert not config_for(asked.config, asked.layout, "none").data.reset_attention_mask
    masked, plain = (capture(each).parts for each in (asked, request(f"{DENSE} --bf16", "te", "none")))
    assert masked == plain
