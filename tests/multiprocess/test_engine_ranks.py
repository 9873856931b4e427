"""Two ranks train with Transformer Engine's modules, by a stand-in for the package (tests/stand_ins/engine.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.engine_runs import MICRO_BATCHES, STEPS, engine_run

DEFER = "--defer-weight-gradients --max-deferred-bytes 1000000000"
CASES = {"plain": "", "deferred": DEFER}
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
