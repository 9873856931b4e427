"""Two ranks train with Transformer Engine's modules, by a stand-in for the package (tests/stand_ins/engine.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.engine_runs import MICRO_BATCHES, STEPS, engine_run

DEFER = "--defer-weight-gradients --max-deferred-bytes 1000000000"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TENSORWISE, BLOCKWISE, MXFP8 = (
    f"--fp8-format {form} --fp8-recipe {recipe}"
    for form, recipe in (("hybrid", "tensorwise"), ("e4m3", "blockwise"), ("e4m3", "mxfp8"))
)
PARTS = "--moe-overlap-partitions 2 --moe-overlap-range around"
BF16_ENDS = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 0"
CASES = {
    "plain": "",
    "deferred": DEFER,
    "tensorwise, plain": TENSORWISE,
    "tensorwise, recomputed, two micro-batches": f"{TENSORWISE} {DEFER} {FULL} --moe-overlap-micro-batches 2",
    "blockwise, plain": f"{BLOCKWISE} {BF16_ENDS}",
    "blockwise, recomputed, first layer in bf16": f"{BLOCKWISE} {BF16_ENDS} {DEFER} {FULL}",
    "mxfp8, plain": MXFP8,
    "mxfp8, partitions": f"{MXFP8} {DEFER} {PARTS}",
    "mxfp8, partitions, recomputed": f"{MXFP8} {DEFER} {PARTS} {FULL}",
}
LISTED = {
    "tensorwise, recomputed, two micro-batches": ("tensorwise, plain", "Float8CurrentScaling", "HYBRID"),
    "blockwise, recomputed, first layer in bf16": ("blockwise, plain", "Float8BlockScaling", "E4M3"),
    "mxfp8, partitions": ("mxfp8, plain", "MXFP8BlockScaling", "E4M3"),
    "mxfp8, partitions, recomputed": ("mxfp8, plain", "MXFP8BlockScaling", "E4M3"),
}
"""Listed runs, the plain run of the same products, the recipe and its format."""
PRODUCTS = {"attention": ("qkv", "proj"), "moe.shared": ("fc1", "fc2"), "moe.experts": ("fc1", "fc2")}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return engine_run(CASES)


def test_the_librarys_split_of_weight_gradients_drives_the_queue(found: dict[str, dict[str, Any]]) -> None:
    deferred = found["deferred"]
    assert (found["plain"]["runner"], deferred["runner"]) == ("MegatronStepRunner", "PlanExecutor")
    engines = {f"L{layer}.{place}.{name}.dW" for layer in (0, 1) for place in PRODUCTS for name in PRODUCTS[place]}
    # The plan leaves what has no all-to-all behind it where it was.
    driven = engines & deferred["drained"].keys()
    assert driven >= {"L1.attention.qkv.dW", "L1.moe.shared.fc2.dW", "L0.moe.experts.fc1.dW", "L1.moe.experts.fc2.dW"}
    assert {deferred["drained"][name] for name in driven} == {MICRO_BATCHES * STEPS}
    # Every product that the library put aside for the queue, and none that it computed itself.
    assert deferred["left_to_the_queue"] == sorted(driven) and found["plain"]["left_to_the_queue"] == []
    for plain, later in zip(found["plain"]["steps"], deferred["steps"], strict=True):
        assert later == pytest.approx(plain, rel=2e-6)


@pytest.mark.parametrize("name", LISTED)
def test_each_forward_operator_of_a_layer_runs_in_one_context(found: dict[str, dict[str, Any]], name: str) -> None:
    case, (_, recipe, kind) = found[name], LISTED[name]
    assert case["runner"] == "PlanExecutor" and case["operators"]
    assert {tuple(context) for context in case["kinds_of_contexts"]} == {(recipe, kind, True)}
    first_narrow = 1 if "first layer" in name else 0
    for operator in case["operators"]:
        in_layer = operator["layer"] is not None and operator["phase"] in ("FORWARD", "RECOMPUTE")
        assert operator["contexts"] == (in_layer and operator["layer"] >= first_narrow), operator
        assert in_layer or operator["calls"] == 0, operator
    # Nothing outside of compute instructions: no step, no update, no exchange, no deferred gradient opens one or calls a module.
    assert case["contexts"] == sum(operator["contexts"] for operator in case["operators"])
    assert len(case["calls"]) == sum(operator["calls"] for operator in case["operators"])
    assert {call["depth"] for call in case["calls"] if call["recipe"] is not None} == {1}
    assert {call["recipe"] for call in case["calls"]} == ({recipe, None} if first_narrow else {recipe})
    recomputed = "recomputed" in name
    assert any(operator["phase"] == "RECOMPUTE" for operator in case["operators"]) == recomputed
    assert {call["phase"] for call in case["calls"]} == ({"forward", "first", "again"} if recomputed else {"forward"})
    assert case["left_to_the_queue"] and not any(case["built"])


@pytest.mark.parametrize("name", LISTED)
def test_losses_are_those_of_megatron_cores_schedule(found: dict[str, dict[str, Any]], name: str) -> None:
    case, plain = found[name], found[LISTED[name][0]]
    assert plain["runner"] == "MegatronStepRunner" and plain["contexts"] > 0
    # The first loss has met no update. Blocks of 32 along a row do not see how rows are cut.
    assert case["steps"][0][0] == pytest.approx(plain["steps"][0][0], rel=2e-6)
    for kind in ("steps", "evaluations"):
        for listed, other in zip(case[kind], plain[kind], strict=True):
            assert listed == pytest.approx(other, rel=2e-5), kind


@pytest.mark.parametrize("name", LISTED)
def test_weights_are_quantized_once_in_a_step_and_in_an_evaluation(found: dict[str, dict[str, Any]], name: str) -> None:
    """Copies of the step before are of other weights. Partitions keep none (model/build.py)."""
    case = found[name]
    calls = [call["quantizes"] for call in case["calls"] if call["recipe"] is not None]
    products = len(case["built"]) // (2 if "first layer" in name else 1)
    assert sum(calls) == (len(calls) if "partitions" in name else 2 * STEPS * products)


def test_eight_bits_differ_from_more(found: dict[str, dict[str, Any]]) -> None:
    # Losses and norms of all steps behind the first: a single loss may be the same to five digits.
    names = ("plain", "tensorwise, plain", "blockwise, plain", "mxfp8, plain")
    runs = [[round(value, 5) for step in found[name]["steps"][1:] for value in step] for name in names]
    assert len({tuple(run) for run in runs}) == 4
