"""Whether plans fit, how certain that is, and the change that makes one fit; on graphs written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_overlap import api
from moe_overlap.api import predict, problem_of
from moe_overlap.describe.cluster import GIB, Cluster, shipped_cluster
from moe_overlap.plan.plan import PeakBytes, Plan, PredictedStage, Provenance
from moe_overlap.report.answer import _memory
from moe_overlap.report.prediction import change_name, prediction_json, prediction_text
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import (
    ChangeKind,
    MemoryChange,
    MemoryQuantiles,
    fullest_stage,
    overflow_counts,
    overflow_lines,
    verdict_of,
)
from moe_overlap.tuner.search.fitting import memory_changes
from moe_overlap.tuner.write.memory_changes import change_flags
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand

pytestmark = pytest.mark.usefixtures("whole_memory")

QUANTILES = MemoryQuantiles(low=0.95, high=1.1)


def stage(needed: float, fragmentation: float = 0.0) -> PredictedStage:
    """A stage that needs so many GiB, three quarters of them activations."""
    peaks = [needed / 4, 0, 0, needed * 3 / 4, 0, 0, fragmentation]
    names = (field.name for field in dataclasses.fields(PeakBytes))
    by_category = PeakBytes(**{name: int(size * GIB) for name, size in zip(names, peaks, strict=True)})
    return PredictedStage(
        stable_seconds=1.0,
        first_seconds=1.0,
        last_seconds=1.0,
        peak_bytes=int((needed + fragmentation) * GIB),
        peak_bytes_by_category=by_category,
        exposed_communication_seconds=0.0,
        provenance=Provenance(measured=0.0, interpolated=0.0, roofline=1.0),
    )


@pytest.mark.parametrize(
    ("needed", "verdict"),
    [(72, "fits"), (73, "may not fit"), (84, "may not fit"), (85, "does not fit")],
)
def test_the_verdict_follows_the_quantiles_of_the_fullest_stage(needed: float, verdict: str) -> None:
    assert verdict_of([stage(10), stage(needed)], 80 * GIB, QUANTILES) == verdict


def test_what_the_allocator_gives_back_is_not_needed() -> None:
    assert verdict_of([stage(72, fragmentation=20)], 80 * GIB, QUANTILES) == "fits"


def test_stages_that_do_not_fit_are_counted_apart_from_those_that_may_not() -> None:
    stages = [stage(85), stage(40), stage(75), stage(90)]
    assert overflow_counts(stages, 80 * GIB, QUANTILES) == (2, 1)
    answered = predicted(NEEDED / 4, "--pipeline-model-parallel-size", "2")
    assert _memory(answered).endswith("; 2 stages do not fit")


def test_the_fullest_stage_and_those_that_may_not_fit_are_named() -> None:
    stages = [stage(75, fragmentation=90), stage(40), stage(76)]
    fullest = fullest_stage(stages, QUANTILES)
    assert (fullest.stage, fullest.category, fullest.needed_bytes) == (2, "activations", 76 * GIB)
    assert (fullest.low_bytes, fullest.high_bytes) == (round(76 * GIB * 0.95), round(76 * GIB * 1.1))
    fuller = [*stages, stage(90)]
    lines = overflow_lines(fuller, 80 * GIB, QUANTILES)
    assert [line.partition(" needs ")[0] for line in lines] == [
        "does not fit: stage 3",
        "may not fit: stage 2",
        "may not fit: stage 0",
    ]
    assert (
        lines[1] == "may not fit: stage 2 needs 76.0 GiB, at most 83.6 (95 %), of 80.0; largest part: activations, 57.0"
    )


def cluster_of(gib: float) -> Cluster:
    """32 H100 of another memory capacity."""
    cluster = shipped_cluster("H100", 32)
    (group,) = cluster.groups
    return dataclasses.replace(
        cluster, groups=(dataclasses.replace(group, gpu=dataclasses.replace(group.gpu, memory_gib=gib)),)
    )


def predicted(gib: float, *words: str, **options: Any) -> Prediction:
    job = [*JOB, "--micro-batch-size", "2", "--use-distributed-optimizer", *words]
    return predict(job, cluster_of(gib), graphs=by_hand, constants=CONSTANTS, **options)


NEEDED = predicted(80).fullest.needed_bytes / GIB


def test_quantiles_of_the_constants_decide() -> None:
    sure = dataclasses.replace(CONSTANTS, memory=MemoryQuantiles(low=0.9, high=1.2))
    assert predicted(NEEDED * 1.01).fits
    job = [*JOB, "--micro-batch-size", "2", "--use-distributed-optimizer"]
    unsure = predict(job, cluster_of(NEEDED * 1.01), graphs=by_hand, constants=sure)
    assert not unsure.fits and unsure.memory_verdict == "may not fit"


def test_the_cheapest_change_that_fits_is_predicted_and_named() -> None:
    """Each candidate as its own command line says; the fastest that fits is the answer."""
    gib = NEEDED * 0.85
    failing = predicted(gib)
    assert not failing.fits and failing.remedy is not None
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers".split()
    candidates = {f"{' '.join(block)} {k}": predicted(gib, *block, str(k)) for k in range(1, 9)}
    candidates["--micro-batch-size 1"] = predicted(gib, "--micro-batch-size", "1")
    fitting = {flags: each.predicted.step_seconds for flags, each in candidates.items() if each.fits}
    best = min(fitting, key=lambda flags: fitting[flags])
    assert len(fitting) >= 2 and len(fitting) < len(candidates)
    assert failing.remedy.step_seconds <= fitting[best] * (1 + 1e-12)
    flags = change_flags(failing.remedy.change)
    if flags in candidates:
        assert flags == best
        assert failing.remedy.step_seconds == pytest.approx(fitting[best])
    assert failing.remedy.slower_by == pytest.approx(failing.remedy.step_seconds / failing.predicted.step_seconds - 1)
    assert failing.remedy.high_bytes <= gib * GIB


def test_what_is_offered_for_unlike_stages_is_accepted_as_flags() -> None:
    """No number above the six layers of the first stage, but all of them at once; with the step that its flags have."""
    unlike = ["--decoder-first-pipeline-num-layers", "6"]
    problem = problem_of([*JOB, *unlike], cluster_of(80), {"graphs": by_hand, "constants": CONSTANTS})
    offered = [
        degree
        for degrees in memory_changes(problem.plan, problem.model, problem.features)
        for degree in degrees
        if degree[0].kind in (ChangeKind.LAYERS, ChangeKind.EVERY_LAYER)
    ]
    assert [change.number for change, _ in offered] == [1, 2, 3, 4, 5, 6, 0]
    for change, plan in offered:
        again = problem_of(
            [*JOB, *unlike, *change_flags(change).split()],
            cluster_of(80),
            {"graphs": by_hand, "constants": CONSTANTS},
        )
        assert again.plan.stages == plan.stages
    gib = min(predicted(80, *unlike, *change_flags(change).split()).fullest.needed_bytes for change, _ in offered) / GIB
    remedy = predicted(gib * 1.001, *unlike).remedy
    assert remedy is not None and remedy.change.kind is ChangeKind.EVERY_LAYER


HALF_ON_HOST = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"
ONE_STAGE = "--pipeline-model-parallel-size 1"


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("", ""),
        (ONE_STAGE, ""),
        (HALF_ON_HOST, ""),
        (f"{ONE_STAGE} {FSDP} no_shard", "shard the optimizer's states"),
        ("--optimizer sgd", "keep the optimizer's states in host memory"),
        ("--fp8-format hybrid --fp8-recipe delayed", "recompute layernorm, moe_act"),
    ],
)
def test_flags_of_every_change_make_the_run_that_is_predicted(
    words: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing that Megatron-LM refuses beside them, as far as its rules are known; others are not tried."""
    said: list[tuple[MemoryChange, Plan]] = []
    given = api._features_with
    monkeypatch.setattr(api, "_features_with", lambda *args: said.append(args[:2]) or given(*args))  # type: ignore[func-returns-value]
    job = [*JOB, "--micro-batch-size", "2", *words.split()]
    options: dict[str, Any] = {"graphs": by_hand, "constants": CONSTANTS}
    failing = predict(job, cluster_of(0.1), **options)
    tried = [change_name(change) for change in failing.tried]
    assert len(tried) >= 2 and left_out not in tried
    assert left_out in ("", *(change_name(change) for change, _ in said))
    for change, plan in said:
        if change not in failing.tried:
            continue
        again = predict([*job, *change_flags(change).split()], cluster_of(80), **options)
        problem = problem_of([*job, *change_flags(change).split()], cluster_of(80), options)  # type: ignore[arg-type]
        assert problem.plan.stages == plan.stages
        assert set(again.not_run) <= set(failing.not_run), change_flags(change)


def test_a_named_change_has_the_step_and_the_bytes_of_its_flags() -> None:
    """Beside a share that is on the host already, and without the overlap that FSDP brings along."""
    for words in (
        HALF_ON_HOST,
        f"{ONE_STAGE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ):
        job = [word for word in JOB if not word.startswith("--overlap-")] + words.split()
        options: dict[str, Any] = {"graphs": by_hand, "constants": CONSTANTS}
        needed = predict(job, cluster_of(80), **options).fullest.needed_bytes / GIB
        remedy = predict(job, cluster_of(needed * 0.9), **options).remedy
        assert remedy is not None
        again = predict([*job, *change_flags(remedy.change).split()], cluster_of(needed * 0.9), **options)
        assert again.fits and again.fullest.high_bytes == remedy.high_bytes
        assert again.predicted.step_seconds == pytest.approx(remedy.step_seconds)


def test_no_change_is_named_where_none_fits_alone_and_none_is_tried_where_the_plan_fits() -> None:
    hopeless = predicted(NEEDED * 0.2)
    assert hopeless.remedy is None and len(hopeless.tried) >= 3
    assert predicted(NEEDED * 1.5).tried == ()


def test_the_answer_says_so_as_text_and_as_json() -> None:
    gib = NEEDED * 0.85
    failing, hopeless = predicted(gib), predicted(NEEDED * 0.2)
    content = prediction_json(failing)
    assert (content["fits"], content["memory_verdict"]) == (False, "does not fit")
    assert content["fullest_stage"]["needed_bytes"] == failing.fullest.needed_bytes
    assert content["cheapest_change_that_fits"]["flags"] == change_flags(failing.remedy.change)  # type: ignore[union-attr]
    text = prediction_text(failing, cluster_of(gib))
    assert "\ndoes not fit: stage 0 needs " in text and f"\nwould fit: {change_name(failing.remedy.change)}: " in text  # type: ignore[union-attr]
    assert "\nno single change makes it fit: " in prediction_text(hopeless, cluster_of(NEEDED * 0.2))
    assert prediction_json(predicted(80))["cheapest_change_that_fits"] is None
