"""No GPU is faster than itself: rates stay below peaks under every release; what was not calibrated is extrapolated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_overlap.api import predict, predict_job
from moe_overlap.describe.cluster import known_gpus, shipped_cluster
from moe_overlap.plan.plan import Precision
from moe_overlap.report.answer import beware_lines
from moe_overlap.report.prediction import prediction_json, prediction_text, seconds_text
from moe_overlap.tuner.cost.expected_error import (
    ENOUGH_FAMILIES,
    ENOUGH_RUNS,
    ComparedRun,
    Errors,
    ExpectedError,
    errors_json,
    errors_of,
    group_names,
    read_errors,
    shape_of,
    shipped_errors,
)
from moe_overlap.tuner.cost.hardware import (
    LOSSY,
    CommonConstants,
    Constants,
    ReleaseConstants,
    effective,
    release_order,
    shipped_constants,
)
from moe_overlap.tuner.cost.layer import PassCost
from moe_overlap.tuner.cost.links import all_to_all_seconds, axis_group, collective_seconds
from moe_overlap.tuner.cost.machine import machine_of
from moe_overlap.tuner.cost.operators import low_precision_rate
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand, predicted

SHIPPED = shipped_constants()
PRECISIONS = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
GPUS = [name for name in known_gpus() if not name.startswith("_")]
RELEASES = (None, *sorted(SHIPPED.releases, key=release_order))


@pytest.mark.parametrize("gpu", GPUS)
def test_no_rate_exceeds_its_peak_under_any_release(gpu: str) -> None:
    cluster = shipped_cluster(gpu, 16)
    described = cluster.group_of(0).gpu
    peaks = {"fp8": described.fp8_tflops, "mxfp8": described.fp8_tflops, "nvfp4": described.fp4_tflops}
    for release in RELEASES:
        for precision in PRECISIONS:
            for is_moe in (False, True):
                machine, _ = machine_of(cluster, SHIPPED, release, precision=precision, is_moe=is_moe)
                constants = machine.constants
                assert all(0 < getattr(constants, name) <= 1 for name in (*LOSSY, "domain", "network")), release
                peak = peaks.get(precision) or described.fp8_tflops or described.bf16_tflops
                assert low_precision_rate(described, precision, constants) <= peak * 1e12


def test_links_carry_no_more_than_their_rate() -> None:
    size = float(1 << 30)
    for gpu in GPUS:
        machine, _ = machine_of(shipped_cluster(gpu, 64), SHIPPED)
        links = machine.cluster.group_of(0)
        fastest = max(links.domain_gb_per_s or 0.0, links.node_gb_per_s, links.network_gb_per_s) * 1e9
        for ranks in (2, 8, 64):
            group = axis_group(ranks, 1, 64, links)
            moved = size * (ranks - 1) / ranks
            for kind in ("all_gather", "all_reduce"):
                # A ring passes through every card of a domain at once.
                at_once = max(1, group.per_node) * links.network_gb_per_s * 1e9
                assert moved / collective_seconds(kind, size, group, machine.constants.link_rates) <= max(
                    fastest, at_once
                )
            assert moved / all_to_all_seconds(size, group, machine.constants.link_rates) <= 2 * fastest


def test_a_release_acts_on_what_is_lost_beyond_the_peak() -> None:
    rng = np.random.default_rng(0)
    for efficiency, loss in zip(rng.uniform(1e-3, 1, 1000), rng.uniform(0, 5, 1000), strict=True):
        reached = effective(efficiency, loss)
        assert 0 < reached <= 1
        assert (reached >= efficiency) == (loss <= 1)
    assert effective(0.5, 1.0) == 0.5
    assert effective(1.0, 3.0) == 1.0
    assert effective(0.01, 0.0) == 1.0


def released(**losses: float) -> Constants:
    releases = {
        name.replace("_", ".")[1:]: {"Hopper": ReleaseConstants(loss=loss, measured=("bf16 MoE",))}
        for name, loss in losses.items()
    }
    return dataclasses.replace(CONSTANTS, releases=releases)


def test_a_release_acts_only_on_what_was_measured_under_it() -> None:
    constants = released(r26_02=1.3, r26_04=1.0, r26_08=0.5)
    chosen = constants.of_release("26.08", "Hopper", "bf16", True)
    assert (chosen.release, chosen.is_median, chosen.extrapolating) == ("26.08", False, ())
    for architecture, precision, is_moe in (
        ("Ampere", "bf16", True),
        ("Hopper", "fp8", True),
        ("Hopper", "bf16", False),
    ):
        other = constants.of_release("26.08", architecture, precision, is_moe)
        assert other.constants.loss == 1.0
        assert other.extrapolating[0].startswith(f"no calibration run of release 26.08 on {architecture}")
    assert constants.of_release("26.05", "Hopper", "bf16", True).extrapolating


def test_without_a_release_the_median_one_counts_and_the_answer_says_so() -> None:
    constants = released(r26_02=1.3, r26_04=1.0, r26_08=0.5)
    prediction = predicted(constants=constants)
    assert prediction.software.is_median
    assert prediction_json(prediction)["software"] == {"release": "26.04", "is_median": True, "loss": 1.0}
    text = prediction_text(prediction, shipped_cluster("H100", 32))
    assert "26.04, the median release of Hopper: as efficient as the reference release" in text
    seconds = prediction.predicted.step_seconds
    assert predicted(constants=constants, software="26.08").predicted.step_seconds < seconds
    assert predicted(constants=constants, software="26.02").predicted.step_seconds > seconds


def test_what_was_never_calibrated_is_extrapolated() -> None:
    constants = released(r26_04=1.0)
    gpu = shipped_cluster("H100", 8).group_of(0).gpu
    assert constants.uncalibrated(gpu, "bf16", True) == ()
    assert constants.uncalibrated(gpu, "fp8", True) == ("no calibration run of fp8 MoE models on Hopper",)


def compared(relative: float, model: str = "a", is_test: bool = True, **changed: object) -> ComparedRun:
    """A run of a model of 8 layers on H100."""
    values: dict[str, object] = {
        "rows": "2",
        "gpu": "H100",
        "architecture": "Hopper",
        "precision": "bf16",
        "routing": "forced",
        "model": model,
        "shape": (8,),
        "release": "26.04",
        "is_test": is_test,
        "relative": relative,
    }
    return ComparedRun(**values | changed)  # type: ignore[arg-type]


H100 = shipped_cluster("H100", 8).group_of(0).gpu


def test_the_error_is_that_of_the_narrowest_group_with_enough_runs_of_enough_families() -> None:
    # Many runs of few models count as few: what the cost model misses of one it misses of all.
    natural = [compared(0.1, routing="natural")] * ENOUGH_RUNS
    forced = [compared(-0.3, f"{family}") for family in range(ENOUGH_FAMILIES)] * 2
    errors = errors_of([*natural, *forced])

    def found(is_moe: bool, is_natural: bool) -> tuple[float, int, int, str]:
        group = errors.expected(H100, is_moe, is_natural)
        assert group is not None
        return round(group.relative, 4), group.rows, group.families, group.group

    assert found(True, False) == (0.3, 10, 5, "MoE models with balanced routing on H100")
    assert found(True, True) == (0.2, 20, 6, "MoE models")
    assert found(False, False) == (0.2, 20, 6, "all models")
    few = errors_of(forced[: ENOUGH_RUNS - 1])
    assert few.expected(H100, True) is None and Errors((), {}).expected(H100, True) is None


@pytest.mark.parametrize("test, left_out", [(0.1, 0.3), (0.3, 0.1)])
def test_the_error_is_the_larger_of_test_runs_and_of_left_out_ones(test: float, left_out: float) -> None:
    """One row of either sort would be lost in the mean of both."""
    families = [str(family) for family in range(ENOUGH_FAMILIES)]
    runs = [*(compared(test, name) for name in families), *(compared(-left_out, name, False) for name in families)]
    group = errors_of(runs).expected(H100, True)
    assert group is not None and group.relative == pytest.approx(0.3)
    assert (group.rows, group.tested) == (10, 5)


def test_an_interval_holds_nine_of_ten_runs_of_its_group() -> None:
    for count in (10, 11, 20, 29):
        runs = [compared(np.expm1(sign * 0.01 * size), f"{size}") for size in range(1, count + 1) for sign in (1,)]
        group = errors_of(runs).groups["MoE models with balanced routing on H100"]
        held = [run for run in runs if group.holds(run.relative)]
        assert 0.9 <= len(held) / count < 0.9 + 1 / count, count
    # Errors are not centred: a bias widens the interval on both sides.
    assert group.spread == pytest.approx(0.27) and group.interval(2.0) == pytest.approx(
        (2 * np.exp(-0.27), 2 * np.exp(0.27))
    )


def test_an_interval_is_wider_beyond_what_was_calibrated() -> None:
    near = [compared(np.expm1(0.1), name) for name in "ab"]
    far = [compared(np.expm1(-0.25), name, is_beyond=True) for name in "cd"]
    assert errors_of([*near, *far]).beyond == 2.5
    assert errors_of(near).beyond == 1.0
    # That far runs happened to err less narrows nothing.
    swapped = [dataclasses.replace(run, is_beyond=not run.is_beyond) for run in (*near, *far)]
    assert errors_of(swapped).beyond == 1.0
    assert read_errors(errors_json([*near, *far])) == errors_of([*near, *far])
    group = ExpectedError(0.1, 5, 5, "all", spread=0.2)
    assert group.interval(2.0) == pytest.approx((2.0 * np.exp(-0.2), 2.0 * np.exp(0.2)))
    assert group.widened(2.0).interval(1.0)[1] == pytest.approx(np.exp(0.4))
    # Half of what was predicted is further away than half as much again.
    assert not group.holds(-0.19) and group.holds(-0.18) and group.holds(0.22) and not group.holds(0.23)
    # What it misses in the mean grows alike.
    assert group.widened(2.0) == dataclasses.replace(group, relative=0.2, spread=0.4)


def test_neighbours_share_the_precision_then_model_and_gpu_then_one_of_them() -> None:
    model = predict_job(JOB, shipped_cluster("H100", 32), {"graphs": by_hand}).job.model
    other_gpu, other_model = {"gpu": "B200", "shape": shape_of(model)}, {"model": "b"}
    nearest = compared(-0.5, shape=shape_of(model))
    runs = [
        compared(0.1, **other_gpu),
        compared(0.2, **other_model),
        compared(0.3, precision="fp8", shape=shape_of(model)),
    ]

    def found(*among: ComparedRun, precision: str = "bf16") -> tuple[str, list[float]] | None:
        neighbours = errors_of(among).neighbours(H100, precision, model)
        return None if neighbours is None else (neighbours.kind, [run.relative for run in neighbours.runs])

    assert found(nearest, *runs) == found(nearest, *runs, precision="fp16") == ("model and GPU", [-0.5])
    assert found(*runs) == ("model", [0.1])
    assert found(*runs[1:]) == ("GPU", [0.2])
    assert found(*runs, precision="nvfp4") is None
    assert found(compared(0.2, routing="")) is None, "a dense model is no neighbour of one with experts"
    # Measured over predicted seconds: half of the time was predicted.
    (kind, expected) = errors_of([nearest, nearest]).neighbours(H100, "bf16", model), ExpectedError(0.1, 9, 9, "", 0.69)
    assert kind is not None and kind.ratio == pytest.approx(2.0)
    assert kind.are_missed(expected) and not kind.are_missed(dataclasses.replace(expected, spread=0.70))


def test_a_run_with_a_trait_that_no_calibration_run_had_is_extrapolated() -> None:
    known = dataclasses.replace(CONSTANTS, traits={"Hopper": ("MoE models without CUDA graphs",)})
    plain, elsewhere = predicted(constants=known), predicted(constants=dataclasses.replace(CONSTANTS, traits={}))
    assert plain.extrapolating == elsewhere.extrapolating == ()
    for words, trait in (
        (
            ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn"),
            "MoE models with partial CUDA graphs",
        ),
        (("--overlap-moe-expert-parallel-comm",), "MoE models with all-to-alls beside another micro-batch"),
        (
            ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
            "MoE models that compute whole layers again",
        ),
    ):
        far = predicted(*words, constants=known)
        assert f"no calibration run of {trait} on Hopper" in far.extrapolating
        near, wide = plain.expected_error, far.expected_error
        assert near is not None and wide is not None
        assert wide == near.widened(shipped_errors().beyond)
        assert not predicted(*words, constants=dataclasses.replace(CONSTANTS, traits={})).extrapolating


def test_every_prediction_on_a_described_gpu_says_its_error() -> None:
    prediction = predicted()
    assert prediction.expected_error is not None
    assert prediction.expected_error.group in group_names("H100", "Hopper", "forced")
    answer = prediction_json(prediction)
    assert answer["expected_error"]["relative"] > 0
    assert answer["interval"]["level"] == 0.9
    assert 0 < answer["interval"]["low_seconds"] < answer["step_seconds"] < answer["interval"]["high_seconds"]
    text = prediction_text(prediction, shipped_cluster("H100", 32))
    assert f"± {prediction.expected_error.relative * 100:.0f} %" in text
    low, high = answer["interval"]["low_seconds"], answer["interval"]["high_seconds"]
    assert f"{seconds_text(low)} to {seconds_text(high)} s in 9 of 10 runs" in text


def test_shipped_intervals_hold_nine_of_ten_runs_of_every_group() -> None:
    """Groups, means and intervals come from the runs in the file alone."""
    errors = shipped_errors()
    assert errors.beyond >= 1.0 and errors == errors_of(errors.runs)
    for run in errors.runs:
        gpu = shipped_cluster(run.gpu, 8).group_of(0).gpu
        assert gpu.architecture == run.architecture
        group = errors.expected(gpu, bool(run.routing), run.routing == "natural")
        assert group is not None
        members = [
            other for other in errors.runs if group.group in group_names(other.gpu, other.architecture, other.routing)
        ]
        assert run in members and len(members) == group.rows
        assert sum(group.holds(member.relative) for member in members) >= 0.9 * len(members)
        for is_test in (True, False):
            sizes = [abs(member.relative) for member in members if member.is_test == is_test]
            assert not sizes or group.relative >= np.mean(sizes) - 1e-9


def test_a_run_whose_published_neighbours_are_missed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worst rows of the table: DeepSeek-V3 in bf16 on GB200 takes twice what is predicted."""
    model = predict_job(JOB, shipped_cluster("H100", 32), {"graphs": by_hand}).job.model
    compared_runs = [compared(0.01 * size, f"{size}") for size in range(10)]
    twins = [compared(-0.5, "twin", shape=shape_of(model), release=release) for release in ("25.10", "25.05")]
    monkeypatch.setattr(
        "moe_overlap.tuner.cost.machine.shipped_errors", lambda: errors_of([*compared_runs * 3, *twins])
    )
    prediction = predicted()
    warning = (
        "two published bf16 runs of this model on this GPU (releases 25.05, 25.10) took 2 times what is predicted: "
    )
    warning += f"expect {seconds_text(2 * prediction.predicted.step_seconds)} s rather than the interval"
    assert prediction_json(prediction)["missed"] == [warning]
    assert f"beware      {warning}" in beware_lines(prediction)
    assert warning in prediction_text(prediction, shipped_cluster("H100", 32))
    near = [dataclasses.replace(run, relative=0.01) for run in twins]
    monkeypatch.setattr("moe_overlap.tuner.cost.machine.shipped_errors", lambda: errors_of([*compared_runs * 3, *near]))
    assert prediction_json(predicted())["missed"] == []
    # What counts is the interval of the answer, which is wider beyond the calibration.
    far = dataclasses.replace(errors_of([*compared_runs * 3, *twins]), beyond=100.0)
    monkeypatch.setattr("moe_overlap.tuner.cost.machine.shipped_errors", lambda: far)
    known = dataclasses.replace(CONSTANTS, traits={"Hopper": ("MoE models without CUDA graphs",)})
    assert predicted(constants=known).missed is not None
    assert predicted("--overlap-moe-expert-parallel-comm", constants=known).missed is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00001, "0.0000100"), (0.0345, "0.0345"), (3.741, "3.74"), (37.44, "37.4"), (999.6, "1,000"), (3741.2, "3,741")],
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_host_is_hidden_while_the_device_has_work_and_graphs_remove_it() -> None:
    seconds = predicted().predicted.step_seconds
    slow = dataclasses.replace(CONSTANTS.gpus["H100"], host_seconds=1e-3)
    hosted = dataclasses.replace(CONSTANTS, gpus={"H100": slow})
    none, partial, full = (
        predicted(*words, constants=hosted).predicted.step_seconds
        for words in (
            (),
            ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn"),
            ("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"),
        )
    )
    # Behind every wait for counts the device is idle for a little, however fast the host is.
    assert none > partial > full and full < seconds == pytest.approx(full, rel=1e-5)
    library = dataclasses.replace(hosted, common=CommonConstants(transformer_engine=5.0))
    assert predicted(constants=library).predicted.step_seconds >= none


def test_the_host_launches_on_while_the_device_waits_for_a_collective() -> None:
    exposed = {"expert": 2.0}
    for host, compute, whole in ((1.0, 3.0, 5.0), (4.0, 3.0, 5.0), (6.0, 4.0, 6.0)):
        cost = PassCost(device_seconds=3.0, host_seconds=host, exposed=exposed)
        assert (cost.compute_seconds, cost.seconds) == (compute, whole)
        # Hidden collectives are no time for the host.
        assert cost.paced_seconds == max(3.0, host)


def test_no_list_beats_the_host() -> None:
    """Where the host sets the pace overlap gains nothing: what it hides was time in which the host launched."""
    base = [word for word in JOB if word not in ("--overlap-param-gather", "--overlap-grad-reduce")]
    base += "--moe-gate topk --moe-token-dispatcher-type irregular --pipeline-model-parallel-size 1".split()
    slow = dataclasses.replace(CONSTANTS.gpus["H100"], host_seconds=1e-2)
    hosted = dataclasses.replace(CONSTANTS, gpus={"H100": slow})

    def seconds(*words: str) -> float:
        cluster = shipped_cluster("H100", 32)
        return predict([*base, *words], cluster, graphs=by_hand, constants=hosted).predicted.step_seconds

    plain = seconds()
    assert seconds("--defer-weight-gradients") >= plain * (1 - 1e-9)


def test_every_partition_of_our_executor_is_launched_by_the_host() -> None:
    base = [word for word in JOB if word not in ("--overlap-param-gather", "--overlap-grad-reduce")]
    base += (
        "--micro-batch-size 4 --moe-gate topk --moe-token-dispatcher-type irregular --moe-overlap-range around".split()
    )
    slow = dataclasses.replace(CONSTANTS.gpus["H100"], host_seconds=1e-2)
    hosted = dataclasses.replace(CONSTANTS, gpus={"H100": slow})

    def seconds(partitions: int) -> float:
        words = [*base, "--pipeline-model-parallel-size", "1", "--moe-overlap-partitions", str(partitions)]
        cluster = shipped_cluster("H100", 32)
        return predict(words, cluster, graphs=by_hand, constants=hosted).predicted.step_seconds

    # Operators inside the range are launched once for each partition, and nothing on the device is as slow as that.
    assert seconds(4) > 1.5 * seconds(2)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_products_of_a_gpu_without_narrow_units_take_as_long_as_in_bf16(precision: Precision) -> None:
    def compute(gpu: str, chosen: Precision) -> float:
        return predict(JOB, shipped_cluster(gpu, 32), graphs=by_hand, precision=chosen).breakdown["compute_seconds"]

    # The host still launches what the library would quantize, so they may take longer.
    assert compute("A100", precision) >= compute("A100", "bf16") * (1 - 1e-9)
    assert compute("H100", precision) < compute("H100", "bf16"), "the job tells the formats apart"


def test_units_that_a_gpu_has_not_and_unlike_groups_are_named() -> None:
    _, reasons = machine_of(shipped_cluster("H100", 16), SHIPPED, precision="nvfp4")
    assert reasons[0].startswith("no nvfp4 rate of H100 is known")
    _, reasons = machine_of(shipped_cluster("H100", 16), SHIPPED, precision="mxfp8")
    assert reasons[0] == "H100 has no units for mxfp8: products are priced at its fp8 rate"
    for gpu in ("B200", "MI355X"):
        assert not any(
            "has no units" in reason for reason in machine_of(shipped_cluster(gpu, 16), SHIPPED, precision="mxfp8")[1]
        )
    cluster = shipped_cluster("H100", 16)
    (group,) = cluster.groups
    slower = dataclasses.replace(group, gpu=shipped_cluster("L4", 16).group_of(0).gpu)
    _, reasons = machine_of(dataclasses.replace(cluster, groups=(group, slower)), SHIPPED)
    assert any(reason.startswith("groups of unlike GPUs") for reason in reasons)
    _, reasons = machine_of(dataclasses.replace(cluster, groups=(group, group)), SHIPPED)
    assert not any(reason.startswith("groups of unlike GPUs") for reason in reasons)


def test_a_description_with_the_name_of_a_gpu_and_other_rates_is_extrapolated() -> None:
    cluster = shipped_cluster("H100", 16)
    (group,) = cluster.groups
    for changed, reasons in (
        ({}, ()),
        ({"memory_gib": 40.0}, ()),
        ({"bf16_tflops": 5000.0}, ("no calibration run of H100 with another bf16_tflops",)),
        (
            {"bf16_tflops": 5000.0, "memory_gb_per_s": 1e4},
            ("no calibration run of H100 with another bf16_tflops and memory_gb_per_s",),
        ),
    ):
        other = dataclasses.replace(group, gpu=dataclasses.replace(group.gpu, **changed))  # type: ignore[arg-type]
        _, said = machine_of(dataclasses.replace(cluster, groups=(other,)), SHIPPED, is_moe=True)
        assert said == reasons, changed
