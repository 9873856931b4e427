"""What the executor runs in the place of captured operators: its rotation, held against the executor's own, and cut products."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.runtime.executor.rotary import RotateProjection
from moe_overlap.tuner.capture.expression import Expression, evaluate
from moe_overlap.tuner.capture.graph import CapturedPart, Implementation, Op
from moe_overlap.tuner.cost import instruction_seconds
from moe_overlap.tuner.cost.listed_operators import ROTATION, as_listed, quantizing_seconds
from moe_overlap.tuner.cost.operators import tabulate
from moe_overlap.tuner.cost.simulate.step import simulate_step
from tests.unit.tuner.capture.capture_cases import LATENT, MOE, recorded, request
from tests.validation import golden_prices
from tests.validation.golden_graphs import golden_graphs
from tests.validation.golden_prices import Case, prices

SAMPLES, TOKENS, WIDTH, GROUPS, HEADS = 3, 128, 16, 2, 4
CASES = {"fp32": ("", torch.float32, WIDTH), "bf16": ("--bf16", torch.bfloat16, WIDTH)}
CASES["half of a head"] = ("--rotary-percent 0.5", torch.float32, WIDTH // 2)
ALLOCATED = ("empty", "new_empty", "empty_like", "_reshape_alias", "_unsafe_view")


def layer(flags: str, implementation: Implementation = "torch", variant: str = "none", base: str = MOE) -> CapturedPart:
    """The mixture-of-experts layer at one batch."""
    (part,) = recorded(request(f"{base} {flags}", implementation, variant), [(SAMPLES, TOKENS)])["moe"]
    return part


class Kernels(TorchDispatchMode):
    """Name and bytes of each kernel: what it reads and writes, each tensor once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in ALLOCATED:
            tensors = [x for x in (*arguments, *(named or {}).values()) if isinstance(x, torch.Tensor)]
            outputs = [] if "out" in (named or {}) or name == "copy_" else [found]
            self.seen.append((name, sum(x.numel() * x.element_size() for x in (*tensors, *outputs))))
        return found


def executed(dtype: torch.dtype, width: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Kernels of the executor's rotation, forward and backward; the copy of the queries is the projection's own."""
    mixed = torch.randn(TOKENS, SAMPLES, GROUPS, HEADS // GROUPS + 2, WIDTH, dtype=dtype, requires_grad=True)
    table = torch.randn(TOKENS, 1, 1, 1, 2, 2, width // 2, dtype=dtype)
    with Kernels() as forward:
        outputs = RotateProjection.apply(mixed, table)
    gradients = [torch.randn(x.shape, dtype=dtype) for x in outputs]
    with Kernels() as backward:
        torch.autograd.backward(outputs, gradients)
    return forward.seen, backward.seen


def listed(part: CapturedPart, backward: bool) -> list[tuple[str, int]]:
    ops = [op for op in as_listed(part).ops if rotates(op) and (op.phase == "backward") == backward]
    return [
        (op.name, int(moved))
        for op, moved in zip(ops, evaluate([op.bytes for op in ops], SAMPLES, TOKENS), strict=True)
    ]


def rotates(op: Op) -> bool:
    in_attention = op.operator == "attention" and op.module == "self_attention"
    return in_attention and op.name in {*ROTATION, "copy_"} and op.cost_class != "free"


@pytest.mark.parametrize("case", CASES)
def test_a_listed_rotation_is_the_executors(case: str) -> None:
    flags, dtype, width = CASES[case]
    part = layer(flags)
    forward, backward = executed(dtype, width)
    # Flattening the queries copies them, there as in megatron-core: a kernel of its own that stays in the graph.
    assert sorted(listed(part, False)) == sorted(entry for entry in forward if entry[0] != "clone")
    assert sorted(listed(part, True)) == sorted(backward)
    before = [op for op in part.ops if rotates(op)]
    assert len(before) > 30 and len(listed(part, False)) < 4 and len(listed(part, True)) < 8


@pytest.mark.parametrize("flags", ["--rotary-interleaved", "--qk-layernorm", "--position-embedding-type none"])
def test_other_rotations_stay(flags: str) -> None:
    part = layer(flags)
    assert as_listed(part) == part


def test_what_transformer_engine_rotates_stays() -> None:
    for part in (layer("--bf16", "te"), layer("", base=LATENT)):
        assert as_listed(part) is part


def test_a_recomputed_layer_rotates_three_times() -> None:
    part = layer("", variant="full")
    again = [op for op in as_listed(part).ops if rotates(op) and op.is_recomputed]
    assert sorted(op.name for op in again) == ["add", "mul"]


# In the prices of lists


def step_seconds(flags: str, gpu: str = "H100") -> float:
    return prices(Case(f"{golden_prices.MOE} {golden_prices.EIGHT} {golden_prices.LISTED} {flags}", gpu=gpu))[
        "step_seconds"
    ]


def without_copies(part: CapturedPart) -> CapturedPart:
    """A stand-in for the rotation of a graph that has none: whatever attention moves is left out."""
    left_out = (op.operator == "attention" and op.cost_class == "memory" for op in part.ops)
    free = {"cost_class": "free", "shape": (), "bytes": Expression(), "flops": Expression()}
    ops = (replace(op, **free) if out else op for op, out in zip(part.ops, left_out, strict=True))
    return replace(part, ops=tuple(ops))


@pytest.mark.parametrize("flags", ["--moe-overlap-partitions 2", "--defer-weight-gradients"])
def test_lists_alone_are_priced_so(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its list is simulated for a trace, and megatron-core's schedule executes it.
    words, cluster = f"{golden_prices.MOE} {golden_prices.EIGHT}".split(), shipped_cluster("H100", Case("").gpus)
    plain = problem_of(words, cluster, {"graphs": golden_graphs, "expert_load": None})
    before, unlisted = step_seconds(flags), simulate_step(plain.plan, plain).simulation.step_seconds
    monkeypatch.setattr(instruction_seconds, "as_listed", without_copies)
    assert step_seconds(flags) < before * (1 - 1e-4)
    assert simulate_step(plain.plan, plain).simulation.step_seconds == unlisted


def test_modules_that_are_cut_quantize_their_weights_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = "--fp8-format e4m3 --fp8-recipe mxfp8"
    flags = {cut: f"{cut} {narrow}" for cut in ("--moe-overlap-partitions 2", "--defer-weight-gradients")}
    found = {cut: step_seconds(words, "B200") for cut, words in flags.items()}
    wide = step_seconds("--moe-overlap-partitions 2", "B200")
    monkeypatch.setattr(instruction_seconds, "quantizing_seconds", lambda table, setting: 0.0)
    whole, cut = (
        step_seconds(flags["--defer-weight-gradients"], "B200"),
        step_seconds(flags["--moe-overlap-partitions 2"], "B200"),
    )
    assert found["--defer-weight-gradients"] == whole and found["--moe-overlap-partitions 2"] > cut * (1 + 1e-3)
    assert step_seconds("--moe-overlap-partitions 2", "B200") == wide


def test_seconds_of_quantizing_follow_from_the_weights() -> None:
    """Two grouped products of four experts, forward: 4 bytes for each weight, and a kernel for each matrix."""
    part = layer("--bf16", "te")
    table = tabulate(part, SAMPLES, TOKENS)
    constants = SimpleNamespace(memory=0.5, kernel_seconds=1e-6)
    setting: Any = SimpleNamespace(
        gpu=SimpleNamespace(memory_gb_per_s=1e-6), constants=constants, features=SimpleNamespace(precision="fp8")
    )
    seconds = quantizing_seconds(table, setting)
    experts = [op.id for op in part.ops if op.operator == "moe.experts" and op.cost_class == "grouped_gemm"]
    assert [float(seconds[number]) for number in experts if seconds[number]] == pytest.approx(
        [4 * (4 * 192 * 64 / 500 + 1e-6), 4 * (4 * 64 * 96 / 500 + 1e-6)]
    )
    qkv = next(op.id for op in part.ops if op.module.endswith("linear_qkv") and op.name == "mm")
    assert seconds[qkv] == pytest.approx(4 * 128 * 64 / 500 + 1e-6)
    assert not any(seconds[op.id] for op in part.ops if op.phase == "backward" or op.operator == "moe.gate")
    setting.features.precision = "bf16"
    assert not quantizing_seconds(table, setting).any()
