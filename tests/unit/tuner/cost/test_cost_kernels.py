"""What single kernels take on a device, and what fused ones leave of the captured operators, on parts written by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.operators import GATE, HEAD_LOSS, LOSS
from moe_overlap.tuner.capture.graph import Layout
from moe_overlap.tuner.cost.hardware import CommonConstants, Features
from moe_overlap.tuner.cost.operators import (
    LOSS_BYTES,
    QUANTIZED_BYTES,
    QUANTIZED_KERNELS,
    ROUTER_KERNELS,
    OpTable,
    device_seconds,
    fused_share,
    tabulate,
)
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS
from tests.unit.tuner.hand_made import Pass

PLAIN = CONSTANTS.gpus["H100"]


def begun() -> Pass:
    return Pass(Layout(tensor=1, context=1, expert=1, expert_tensor=1))


def table_of(run: Pass, modules: tuple[str, ...] = ()) -> OpTable:
    ops = [
        dataclasses.replace(op, module=module)
        for op, module in zip(run.ops, modules or ("",) * len(run.ops), strict=True)
    ]
    return tabulate(dataclasses.replace(run.part("moe", "none"), ops=tuple(ops)), 1, 1)


def seconds_of(
    table: OpTable, gpu: str = "H100", common: CommonConstants | None = None, **features: object
) -> np.ndarray:
    described = shipped_cluster(gpu, 8).group_of(0).gpu
    run = Features(**features)  # type: ignore[arg-type]
    return device_seconds(table, described, run, PLAIN, common or CommonConstants())[0]


def test_a_fused_router_leaves_its_norm_and_the_permutation_alone() -> None:
    run = begun()
    for name in ("te.norm", *(f"score{i}" for i in range(8)), "te.move_rows"):
        run.stream(name, GATE, 100)
    modules = ("pre_mlp_layernorm", *("mlp.router",) * 8, "mlp")
    share = fused_share(table_of(run, modules), Features(fused_router=True))
    assert list(share) == [1.0, *(ROUTER_KERNELS / 8,) * 8, 1.0]
    assert set(fused_share(table_of(run, modules), Features())) == {1.0}


@pytest.mark.parametrize("operator", [HEAD_LOSS, LOSS])
def test_the_fused_loss_is_that_of_the_head_and_of_prediction_layers(operator: str) -> None:
    run = begun()
    run.gemm(operator, 64, 512, 32)  # type: ignore[arg-type]
    for _ in range(10):
        run.stream("exp", operator, 64 * 512)
    table = table_of(run)
    share = fused_share(table, Features(fused_loss=True))
    assert table.logits == 64 * 512
    assert share[0] == 1.0
    assert float((share * table.bytes)[1:].sum()) == pytest.approx(LOSS_BYTES * 64 * 512)


def test_grouped_products_below_bf16_have_a_rate_of_their_own() -> None:
    run = begun()
    run.grouped(4, 4096, 4096, 4096)  # type: ignore[arg-type]
    run.gemm("attention", 4096, 4096, 4096)  # type: ignore[arg-type]
    table, half = table_of(run), CommonConstants(grouped_low=0.5)
    assert (seconds_of(table, common=half) == seconds_of(table)).all()
    slow, fast = (seconds_of(table, common=each, precision="fp8") for each in (half, None))
    rate = 1979e12 * PLAIN.fp8
    assert slow[0] - fast[0] == pytest.approx(2.0 * 4096**3 / rate) and slow[1] == fast[1]


def test_every_group_is_quantized_by_itself() -> None:
    """Bytes as often as there are rows, kernels as often as there are groups; a fused kernel does it on the way."""
    few, many = begun(), begun()
    few.grouped(1, 4096, 1024, 1024)  # type: ignore[arg-type]
    many.grouped(16, 4096, 1024, 1024)  # type: ignore[arg-type]
    tables = [table_of(run) for run in (few, many)]
    of_one, of_many = (seconds_of(table, precision="mxfp8")[0] for table in tables)
    read = 15 * 1024 * 1024 / (3350e9 * PLAIN.memory)
    assert of_many - of_one == pytest.approx(15 * QUANTIZED_KERNELS * PLAIN.kernel_seconds + read)
    fused = seconds_of(tables[0], precision="mxfp8", fused_experts=True)[0]
    quantized = QUANTIZED_BYTES * 4096 * 1024 / (3350e9 * PLAIN.memory) + QUANTIZED_KERNELS * PLAIN.kernel_seconds
    assert of_one - fused == pytest.approx(quantized)


def attention(width: int, length: int = 4096) -> OpTable:
    run = begun()
    shape = (1, 8, 8, length, length, width, width, 0)
    run.op("te.attention", "attention", "attention", shape, 2 * 8 * length * length * width, 8 * length * width * 8)
    return table_of(run)


def test_narrow_heads_wait_for_exponentials_the_more_the_faster_products_are() -> None:
    """Per score 16 times the width is multiplied or added in eight heads, half of it masked, beside one exponential."""

    def penalty(gpu: str) -> float:
        narrow, usual = (seconds_of(attention(width), gpu)[0] - PLAIN.kernel_seconds for width in (64, 128))
        return float(2 * narrow / usual)

    def expected(tflops: float, exponentials: float) -> float:
        extra = tflops / exponentials
        return (1 + extra / 256) / (1 + extra / 512)

    assert penalty("H100") == pytest.approx(expected(989, 3.9))
    assert penalty("GB200") == pytest.approx(expected(2450, 3.9))
    assert penalty("GB300") == pytest.approx(expected(2450, 8.8))
    assert penalty("A100") < penalty("H100") < penalty("GB300") < penalty("GB200")


def test_fused_attention_reads_while_it_multiplies() -> None:
    table = attention(128)
    product = 2 * 8 * 4096**2 * 128 / (989e12 * PLAIN.attention_forward)
    assert seconds_of(table)[0] == pytest.approx(product + PLAIN.kernel_seconds)
    short = attention(128, 32)
    read = 8 * 32 * 128 * 8 / (3350e9 * PLAIN.memory)
    assert seconds_of(short)[0] == pytest.approx(read + PLAIN.kernel_seconds)
