"""How a prediction answers a change: step time and every stage's memory move in the right direction, within a bound."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.api import predict, read_job
from moe_overlap.describe.cluster import Cluster, NodeGroup, shipped_cluster
from moe_overlap.plan.plan import Offload
from moe_overlap.plan.serialize import save_plan
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.expected_error import group_names
from moe_overlap.tuner.cost.hardware import Constants
from tests.unit.tuner.cost.test_cost_predict import BASE, CONSTANTS, JOB, SECONDS, by_hand, predicted

H100 = shipped_cluster("H100", 32)


def with_group(**fields: Any) -> Cluster:
    """The cluster with other fields of its nodes."""
    return dataclasses.replace(H100, groups=(dataclasses.replace(H100.groups[0], **fields),))


def slower(field: str) -> NodeGroup:
    """The nodes with half of a rate, which may be one of their GPUs."""
    group = H100.groups[0]
    if hasattr(group, field):
        return dataclasses.replace(group, **{field: getattr(group, field) / 2})
    return dataclasses.replace(group, gpu=dataclasses.replace(group.gpu, **{field: getattr(group.gpu, field) / 2}))


def peaks(prediction: Prediction) -> list[int]:
    """Bytes of every stage."""
    return [stage.peak_bytes for stage in prediction.predicted.stages]


def activations(prediction: Prediction) -> list[int]:
    """Bytes of every stage that micro-batches in flight keep."""
    return [stage.peak_bytes_by_category.activations for stage in prediction.predicted.stages]


def test_twice_the_layers_take_nearly_twice_as_long_and_as_much() -> None:
    double, triple = predicted("--num-layers", "32"), predicted("--num-layers", "48")
    # Embedding, head and temporaries stay, everything else is there again.
    assert 1.8 < double.predicted.step_seconds / SECONDS < 2.0
    for held, before in zip(peaks(double), peaks(BASE), strict=True):
        assert 1.7 < held / before < 2.0
    more = double.predicted.step_seconds - SECONDS
    assert triple.predicted.step_seconds - double.predicted.step_seconds == pytest.approx(more, rel=1e-9)
    for base, twice, thrice in zip(peaks(BASE), peaks(double), peaks(triple), strict=True):
        assert thrice - twice == pytest.approx(twice - base, abs=2)


def test_more_micro_batches_dilute_the_bubble_and_hold_no_more() -> None:
    double = predicted("--global-batch-size", "256")
    assert 1.8 < double.predicted.step_seconds / SECONDS < 2.0
    assert double.breakdown["bubble_seconds"] == pytest.approx(BASE.breakdown["bubble_seconds"])
    assert peaks(double) == peaks(BASE)


def test_micro_batches_are_held_until_the_pipeline_is_full() -> None:
    one, two = (predicted("--global-batch-size", str(16 * count)) for count in (1, 2))
    first, last = zip(activations(one), activations(two), strict=True)
    assert first[1] == pytest.approx(2 * first[0], rel=1e-9) and last[1] == last[0]
    # Beside what it keeps, a micro-batch in flight has its hidden states on the way.
    grown = [after - before for before, after in zip(peaks(one), peaks(two), strict=True)]
    assert first[0] <= grown[0] < 1.05 * first[0] and grown[1] == 0
    assert 1 < two.predicted.step_seconds / one.predicted.step_seconds < 2


@pytest.mark.parametrize("field", ["network_gb_per_s", "domain_gb_per_s"])
def test_half_the_bandwidth_costs_at_most_twice_the_communication(field: str) -> None:
    slow = predicted(cluster=with_group(**{field: getattr(slower(field), field)}))
    exposed = sum(value for name, value in BASE.breakdown.items() if name.startswith("exposed"))
    more = slow.predicted.step_seconds - SECONDS
    assert more > 0
    # What was hidden may come out, but no more than all of it: nothing computes slower.
    assert slow.breakdown["compute_seconds"] == pytest.approx(BASE.breakdown["compute_seconds"])
    assert more < 2 * exposed + 0.05 * SECONDS
    assert peaks(slow) == peaks(BASE)


@pytest.mark.parametrize("field", ["memory_gb_per_s", "bf16_tflops"])
def test_half_the_rate_of_a_gpu_costs_less_than_twice_the_computation(field: str) -> None:
    slow = predicted(cluster=dataclasses.replace(H100, groups=(slower(field),)))
    assert 1.1 < slow.breakdown["compute_seconds"] / BASE.breakdown["compute_seconds"] < 2
    assert 1.05 < slow.predicted.step_seconds / SECONDS < 2
    assert peaks(slow) == peaks(BASE)


def test_copies_to_a_slower_host_cost_at_most_both_ways_again(tmp_path: Path) -> None:
    plan = read_job(JOB, 32).plan
    stages = tuple(dataclasses.replace(stage, offload=Offload(optimizer=1.0)) for stage in plan.stages)
    save_plan(dataclasses.replace(plan, stages=stages), tmp_path / "plan.json")
    near = predicted(plan=str(tmp_path / "plan.json"))
    slow_host = dataclasses.replace(H100, groups=(slower("host_gb_per_s"),))
    slow = predicted(plan=str(tmp_path / "plan.json"), cluster=slow_host)
    states = [stage.peak_bytes_by_category.optimizer for stage in BASE.predicted.stages]
    # States on their way back may still be there when activations are: those of two parts at most.
    for held, before, whole in zip(peaks(slow), peaks(near), states, strict=True):
        assert before <= held <= before + whole
    moved = max(states)
    one_way = moved / H100.groups[0].host_gb_per_s / 1e9
    # Out and back, beside one another or one after the other, at 0.8 of the link's rate.
    more = slow.predicted.step_seconds - near.predicted.step_seconds
    assert 0 < one_way < more < 2 / 0.8 * one_way


def test_experts_over_a_slower_tier_cost_more_and_hold_the_same() -> None:
    wide = ("--expert-model-parallel-size", "16", "--num-experts", "32")
    group = H100.groups[0]
    assert group.domain_gb_per_s is not None
    near, far = predicted(*wide, cluster=with_group(domain_gpus=32)), predicted(*wide)
    ratio = far.breakdown["exposed_expert_seconds"] / near.breakdown["exposed_expert_seconds"]
    # Half of the tokens leave a node of 8 ranks; both tiers reach the same part of their rates.
    assert 2 < ratio <= group.domain_gb_per_s / group.network_gb_per_s
    assert far.predicted.step_seconds > near.predicted.step_seconds
    assert peaks(far) == peaks(near)


def test_more_ranks_share_the_experts() -> None:
    near = predicted("--num-experts", "32")
    far = predicted("--num-experts", "32", "--expert-model-parallel-size", "16")
    assert far.breakdown["exposed_expert_seconds"] > 2 * near.breakdown["exposed_expert_seconds"]
    assert all(held < before for held, before in zip(peaks(far), peaks(near), strict=True))


def test_names_of_gpus_and_clusters_change_nothing() -> None:
    alias = dataclasses.replace(shipped_cluster("H100-SXM", 32), name="ours")
    assert predicted(cluster=alias).predicted == BASE.predicted
    renamed = with_group(gpu=dataclasses.replace(H100.groups[0].gpu, name="Ours"))
    constants = Constants({"Ours": CONSTANTS.gpus["H100"]}, CONSTANTS.releases)
    answer = predict(JOB, renamed, graphs=by_hand, constants=constants)
    # Errors are known by GPU type: those of a type that nobody has measured are its architecture's, or all MoE models' where
    # too few models were measured on it.
    assert answer.expected_error is not None
    assert answer.expected_error.group in group_names("Ours", "Hopper", "forced")[1:3]
    assert dataclasses.replace(answer, expected_error=BASE.expected_error) == BASE
    # Without constants of its own it takes those of the nearest type, and says so.
    assert predicted(cluster=renamed).predicted == BASE.predicted
    assert predicted(cluster=renamed).extrapolating == ("no calibration run of Ours",)


def test_names_of_models_change_nothing(tmp_path: Path) -> None:
    answers = []
    for name in ("mixtral-8x7b", "deepseek-v3"):
        (tmp_path / f"{name}.args").write_text(" ".join(JOB))
        answers.append(predict([f"@{tmp_path}/{name}.args"], H100, graphs=by_hand, constants=CONSTANTS))
    assert answers == [BASE, BASE]
