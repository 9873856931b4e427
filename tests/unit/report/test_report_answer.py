"""The answer in ten lines: its figures are the prediction's, and runners-up name what costs them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from pathlib import Path

import pytest

from megatron.training.cli.arguments import expand_files
from moe_overlap.api import leeway_of, predict, predict_job, read_job
from moe_overlap.describe.cluster import GIB, Cluster, shipped_cluster
from moe_overlap.describe.figures import difference
from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
from moe_overlap.plan.plan import Offload, Plan, Recompute
from moe_overlap.plan_search.results import TIE, Leeway
from moe_overlap.plan_search.results import Change as Decision
from moe_overlap.report.answer import (
    Answer,
    RunnerUp,
    answer_lines,
    beware_lines,
    cost_terms,
    devices,
    exposed_seconds,
    plan_sentence,
    runner_up,
    shown_tokens,
    suggestions,
)
from moe_overlap.report.balance import balance_of
from moe_overlap.report.changes import helpful
from moe_overlap.report.prediction import prediction_text
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.expected_error import ExpectedError
from moe_overlap.tuner.cost.feasibility import Alternative, ChangeKind, MemoryChange, MemoryQuantiles, Remedy
from moe_overlap.tuner.cost.hardware import Software
from tests.unit.tuner.cost.test_cost_predict import by_hand

ROOT = Path(__file__).resolve().parents[3]
WORDS = (f"@{ROOT / 'examples/mixtral-8x7b.args'}",)
CLUSTER = shipped_cluster("H100", 64)


@pytest.fixture(autouse=True)
def hand_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_overlap.api.cached_graphs", by_hand)


@functools.cache
def predicted(*changed: str) -> Prediction:
    return dataclasses.replace(
        predict([*WORDS, *changed], CLUSTER),
        expected_error=ExpectedError(0.1, 5, 5, "H100 MoE", spread=0.2),
        not_modelled=(),
        alternatives=(),
    )


def planned(*changed: str) -> Plan:
    return read_job([*WORDS, *changed], 64).plan


def figures(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def lines_of(**changes: object) -> dict[str, str]:
    """The lines of an answer by their name; a name that stands twice has the last."""
    answer = Answer(plan=planned(), prediction=predicted(), cluster=CLUSTER, **changes)  # type: ignore[arg-type]
    return {line[:12].strip(): line[12:] for line in answer_lines(answer)}


def of_laptop() -> Prediction:
    """A prediction whose figures are a thousandth of a cluster's, and whose error nobody knows."""
    prediction = predicted()
    stage = prediction.predicted.stages[0]
    peaks = {name: round(size / 1000) for name, size in dataclasses.asdict(stage.peak_bytes_by_category).items()}
    of_stage = dataclasses.replace(
        stage, peak_bytes=sum(peaks.values()), peak_bytes_by_category=type(stage.peak_bytes_by_category)(**peaks)
    )
    small = dataclasses.replace(
        prediction.predicted,
        tokens_per_second_per_gpu=4.26,
        model_tflops_per_gpu=0.0213,
        stages=(of_stage,) * len(prediction.predicted.stages),
    )
    return dataclasses.replace(prediction, predicted=small, expected_error=None, extrapolating=())


def test_small_figures_are_not_nothing() -> None:
    """`0 TFLOP/s`, `0 GPU-hours`, `0.0 of` and `0.0 hours`, as a laptop's answer had them."""
    small = of_laptop()
    answer = Answer(plan=planned(), prediction=small, cluster=CLUSTER, train_tokens=30_000)
    step, speed, training, memory = (line[12:] for line in answer_lines(answer)[1:5])
    assert "4.3 tokens/s and 0.021 TFLOP/s per GPU" in speed and "±" not in step
    assert training == "30,000 tokens in 1.8 minutes, 2 GPU-hours"
    needed, high = small.fullest.needed_bytes / GIB, small.fullest.high_bytes / GIB
    assert 0 < needed < 0.1
    assert f"needs {needed:.2f} GiB, at most {high:.2f} (95 %), of " in memory


def test_a_machine_whose_error_nobody_knows_says_so() -> None:
    """A measured machine has constants and no published steps: its figures look as sure as a calibrated GPU's."""
    (line,) = beware_lines(dataclasses.replace(of_laptop(), assumed=(), computed_early=(), software=Software()))
    assert "error not known" in line
    known = dataclasses.replace(of_laptop(), expected_error=predicted().expected_error, assumed=(), computed_early=())
    assert not beware_lines(dataclasses.replace(known, software=Software()))


def test_the_figures_are_those_of_the_prediction() -> None:
    prediction = predicted()
    shown = lines_of(train_tokens=3e11)
    step = prediction.predicted.step_seconds
    rate = prediction.predicted.tokens_per_second_per_gpu
    low, high = step * math.exp(-0.2), step * math.exp(0.2)
    assert figures(shown["step"])[:7] == pytest.approx([step, 10, low, high, 9, 10, 5], rel=5e-3)
    assert "(from 5 published runs of H100 MoE)" in shown["step"]
    assert figures(shown["speed"])[0] == pytest.approx(rate, rel=1e-3)
    assert f"MFU {100 * prediction.mfu:.1f} % on 64 × H100" in shown["speed"]
    days = 3e11 / (rate * 64) / 86400
    assert figures(shown["training"]) == pytest.approx([300, days, days * 24 * 64], rel=1e-2)
    fullest = prediction.fullest
    assert shown["memory"] == (
        f"{prediction.memory_verdict}: stage {fullest.stage}, the fullest, needs {fullest.needed_bytes / GIB:.1f} GiB, "
        f"at most {fullest.high_bytes / GIB:.1f} (95 %), of {prediction.available_bytes / GIB:.1f} GiB that CUDA and NCCL leave "
        f"of 80; largest part: {fullest.category}, {fullest.category_bytes / GIB:.1f}"
    )
    exposed = exposed_seconds(prediction.breakdown)
    assert prediction.launching is not None
    *waiting, launches = figures(shown["waiting"])
    assert waiting[0] == pytest.approx(100 * sum(exposed.values()) / step, abs=0.06)
    assert waiting[-1] == pytest.approx(100 * prediction.breakdown["bubble_seconds"] / step, abs=0.06)
    assert launches == pytest.approx(100 * prediction.launching.seconds / step, abs=0.06)
    assert sum(waiting[1:-1]) == pytest.approx(waiting[0], abs=0.3)


def test_the_release_of_the_software_is_said() -> None:
    median = Software(release="26.04", is_median=True)
    for software, said in (
        (Software(), "× H100"),
        (median, "× H100; NVIDIA software release 26.04 assumed"),
        (dataclasses.replace(median, is_median=False), "× H100; NVIDIA software release 26.04 as requested"),
    ):
        answer = Answer(plan=planned(), prediction=dataclasses.replace(predicted(), software=software), cluster=CLUSTER)
        assert answer_lines(answer)[2].endswith(f" on 64 {said}")


def test_a_run_of_one_stage_has_no_bubble() -> None:
    one_stage = ("--pipeline-model-parallel-size", "1")
    answer = Answer(plan=planned(*one_stage), prediction=predicted(*one_stage), cluster=CLUSTER)
    waiting = next(line for line in answer_lines(answer) if line.startswith("waiting"))
    assert "for communication" in waiting and "bubble" not in waiting


def test_a_release_that_was_replaced_is_said_behind_another_reason() -> None:
    replaced = "no calibration run of release 99.01 on Hopper; that of 26.04, its median release, is assumed"
    reasons = ("no calibration run of Ours", "no calibration run of long sequences", replaced)
    software = Software(release="26.04", extrapolating=(replaced,), is_median=True)
    said = beware_lines(dataclasses.replace(predicted(), extrapolating=reasons, software=software))
    assert [line[12:] for line in said if "calibration" in line] == [
        f"{reasons[0]}; expect larger errors",
        f"{replaced}; expect larger errors (and 1 more: --verbose)",
    ]
    again = beware_lines(dataclasses.replace(predicted(), extrapolating=(replaced,), software=software))
    assert sum(replaced in line for line in again) == 1


def test_an_answer_is_about_ten_lines() -> None:
    others = [RunnerUp(f"plan {index}", 3.5 + index, "bubble +0.1 s") for index in range(9)]
    answer = Answer(
        plan=planned(), prediction=predicted(), cluster=CLUSTER, train_tokens=1e12, runners_up=others, try_next=["x"]
    )
    lines = answer_lines(answer)
    assert [line.split("  ")[0] for line in lines] == [
        "plan",
        "step",
        "speed",
        "training",
        "memory",
        "waiting",
        "runner-up",
        "try next",
    ]


def test_runners_up_name_the_term_that_costs_most() -> None:
    chosen, other = predicted(), predicted("--pipeline-model-parallel-size", "8")
    difference = {name: other.breakdown[name] - chosen.breakdown[name] for name in chosen.breakdown}
    dearest = max(difference, key=lambda name: difference[name])
    line = runner_up("PP 8", other, chosen)
    name = dearest.removesuffix("_seconds").replace("_", " ")
    assert line.seconds == other.predicted.step_seconds and line.why.startswith(f"{name} {difference[dearest]:+.3f} s")
    slower = other.predicted.step_seconds / chosen.predicted.step_seconds - 1
    shown = lines_of(runners_up=[RunnerUp("PP 16", None, "a stage holds no layer"), line])
    assert shown["runner-up"] == "PP 16: a stage holds no layer"
    one = lines_of(runners_up=[line])["runner-up"]
    assert one.startswith(f"PP 8: {other.predicted.step_seconds:.3f} s ({100 * slower:+.1f} %")
    assert (", a tie" in one) == (abs(slower) <= TIE)
    assert cost_terms(chosen.breakdown, chosen.breakdown) == "no term costs it more"
    small = chosen.breakdown | {
        "bubble_seconds": chosen.breakdown["bubble_seconds"] + 0.0009 * sum(chosen.breakdown.values())
    }
    assert cost_terms(small, chosen.breakdown) == "no term costs it more"


def test_the_percentage_of_a_runner_up_is_that_of_the_seconds_beside_it() -> None:
    """Simulated steps decide the rank, and may differ more or less than the predicted ones, which are printed."""
    other = runner_up("PP 8", predicted("--pipeline-model-parallel-size", "8"), predicted())
    assert other.seconds is not None
    change = 100 * (other.seconds / predicted().predicted.step_seconds - 1)
    simulated = dataclasses.replace(other, simulated_change=0.029)
    line = lines_of(runners_up=[simulated])["runner-up"]
    assert line.startswith(f"PP 8: {other.seconds:.3f} s ({change:+.1f} %, +2.9 % as simulated")


def test_a_faster_runner_up_says_the_memory_that_speaks_against_it() -> None:
    """Of plans that predictions do not tell apart the one that needs the least leads; a slower one needs no such reason."""
    chosen, faster = predicted(), predicted("--pipeline-model-parallel-size", "2")
    more = faster.fullest.needed_bytes - chosen.fullest.needed_bytes
    other = runner_up("PP 2", faster, chosen)
    assert other.more_bytes == more > GIB
    for share, said in ((0.995, f", a tie, needs {more / GIB:.1f} GiB more)"), (1.005, ", a tie)"), (1.02, "+2.0 %)")):
        at = dataclasses.replace(other, seconds=share * chosen.predicted.step_seconds)
        assert f"{said}: " in lines_of(runners_up=[at])["runner-up"]
    lean = dataclasses.replace(other, seconds=0.995 * chosen.predicted.step_seconds, more_bytes=-more)
    assert "GiB" not in lines_of(runners_up=[lean])["runner-up"]


def test_small_differences_are_not_nothing() -> None:
    """`compute -0.000 s` and `-0.0 GiB`, as answers about steps of a tenth of a second had them."""
    terms = {"compute_seconds": 0.1, "bubble_seconds": 0.02}
    other = {"compute_seconds": 0.0997, "bubble_seconds": 0.0212}
    assert cost_terms(other, terms) == "bubble +1.2 ms, but compute -0.3 ms"
    baseline = predicted()
    faster = dataclasses.replace(baseline.predicted, step_seconds=baseline.predicted.step_seconds - 0.0071)
    alone = dataclasses.replace(baseline, predicted=faster)
    change = Decision(name="a", before={}, after={}, prediction=alone)
    assert [difference(seconds) for seconds in (-0.0, 1e-17, -4e-7, 0.0101)] == ["+0 ms", "+0 ms", "+0 ms", "+0.010 s"]
    assert change.effect(baseline) == "this change alone: -7.1 ms a step and the same memory"


def test_a_change_that_alone_does_not_fit_is_not_the_first_that_is_told() -> None:
    baseline = predicted()

    def change(name: str, saved: float, fits: bool = True) -> Decision:
        faster = dataclasses.replace(baseline.predicted, step_seconds=baseline.predicted.step_seconds - saved)
        memory = baseline.memory if fits else MemoryQuantiles(high=9.0, low=8.0)
        return Decision(
            name=name, before={}, after={}, prediction=dataclasses.replace(baseline, predicted=faster, memory=memory)
        )

    refused = Decision(name="refused", before={}, after={}, prediction=None, rule="a rule")
    changes = [
        change("large", 0.3, fits=False),
        change("small", 0.1),
        refused,
        change("none", 0.0),
        change("slower", -0.1),
    ]
    assert [each.name for each in helpful(changes, baseline)] == ["small", "large"]


def test_a_runner_up_that_does_not_fit_says_so() -> None:
    chosen = predicted()
    tight = dataclasses.replace(chosen, memory=MemoryQuantiles(high=9.0, low=8.0))
    assert runner_up("tight", tight, chosen).why.startswith("does not fit: stage 0 needs ")


def test_what_does_not_fit_names_the_change() -> None:
    small: Cluster = shipped_cluster("L4", 64)
    prediction = predict([*WORDS], small)
    assert not prediction.fits
    lines = answer_lines(Answer(plan=planned(), prediction=prediction, cluster=small))
    assert any(line.startswith("memory      does not fit: ") for line in lines)
    advice = next(line for line in lines if line.startswith("try next"))
    assert "then it fits" in advice or "no single change makes it fit" in advice


def test_a_change_that_this_fork_refuses_says_who_runs_it() -> None:
    sharded = Remedy(change=MemoryChange(kind=ChangeKind.SHARD_ALL), step_seconds=1.0, slower_by=0.1, high_bytes=2**30)
    on_host = dataclasses.replace(sharded, change=MemoryChange(kind=ChangeKind.HOST_OPTIMIZER))
    said = [suggestions(planned(), dataclasses.replace(predicted(), remedy=it))[0] for it in (sharded, on_host)]
    assert said[0].endswith(" optim_grads_params --ckpt-format fsdp_dtensor (Megatron-LM runs it, this fork does not)")
    assert (
        "; --optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer (Megatron-LM"
        in said[1]
    )
    assert said[1].endswith("longer than is counted)")


def test_suggestions_follow_the_largest_term() -> None:
    step = predicted().predicted.step_seconds
    terms = predicted().breakdown

    def with_terms(**shares: float) -> Prediction:
        none = dict.fromkeys(terms, 0.0)
        changed = none | {f"{name}_seconds": share * step for name, share in shares.items()}
        return dataclasses.replace(predicted(), breakdown=changed)

    assert suggestions(planned(), with_terms(bubble=0.04, exposed_expert=0.03)) == []
    assert suggestions(planned(), with_terms(bubble=0.2)) == [
        "model chunks on every stage (--num-virtual-stages-per-pipeline-rank 2), or more micro-batches, "
        "since bubble takes 20.0 % of the step"
    ]
    interleaved = planned("--num-virtual-stages-per-pipeline-rank", "2")
    assert suggestions(interleaved, with_terms(bubble=0.2))[0].startswith("more micro-batches or fewer stages, since ")
    (for_upstream,) = suggestions(planned(), with_terms(exposed_expert=0.3, bubble=0.2), is_upstream=True)
    assert "--overlap-only" not in for_upstream and "--target both" in for_upstream
    (overlap,) = suggestions(planned(), with_terms(exposed_expert=0.3, bubble=0.2))
    assert overlap.endswith("all-to-alls, since exposed expert takes 30.0 % of the step")


def test_no_flag_is_advised_that_the_job_has_or_that_is_refused() -> None:
    """And no search for an overlap that rules leave nothing to find."""

    def advice(term: str, *words: str) -> str:
        job = predict_job([*WORDS, *words], CLUSTER, {})
        seconds = 0.3 * job.prediction.predicted.step_seconds
        terms = dict.fromkeys(job.prediction.breakdown, 0.0) | {f"{term}_seconds": seconds}
        plain = dataclasses.replace(
            job.prediction, breakdown=terms, launching=None, remedy=None, tried=(), alternatives=()
        )
        (said,) = suggestions(job.problem.plan, plain, leeway=job.leeway)
        return said.removesuffix(f", since {term.replace('_', ' ')} takes 30.0 % of the step")

    # The flags of the example hide reductions and gathers already.
    assert advice("exposed_data") == advice("exposed_data", "--use-megatron-fsdp") == "a larger global batch"
    without = ("--num-layers", "31", "--decoder-first-pipeline-num-layers", "7")
    assert advice("bubble", *without) == "more micro-batches or fewer stages", "8 layers divide into chunks, 7 do not"
    assert "--num-virtual-stages-per-pipeline-rank 2" in advice("bubble")
    assert advice("exposed_expert") == "tools/autotune.py --overlap-only, which overlaps all-to-alls"
    ruled_out = "an overlap of all-to-alls, which the flags rule out ("
    assert advice("exposed_expert", "--fp8-format", "hybrid").startswith(f"{ruled_out}--fp8-recipe delayed: ")
    assert advice("exposed_expert", "--use-megatron-fsdp").startswith(f"{ruled_out}--use-megatron-fsdp: not supported")
    job = predict_job(WORDS, CLUSTER, {})
    ahead = dataclasses.replace(job.problem, listed=dataclasses.replace(job.problem.listed, prediction_layers=1))
    rule = "--mtp-num-layers 1: an instruction list overlaps the layers of the decoder alone"
    assert leeway_of(WORDS, job.job, ahead).no_overlap == rule
    pairs = "--moe-overlap-micro-batches 2 --moe-gate topk --moe-token-dispatcher-type irregular".split()
    chunks = ("--num-virtual-stages-per-pipeline-rank", "2")
    assert advice("exposed_expert", *pairs, *chunks).startswith("tools/autotune.py, which compares overlaps")


def test_a_job_without_overlapped_reductions_is_told_their_flags() -> None:
    words = [word for word in expand_files(WORDS) if word not in ("--overlap-grad-reduce", "--overlap-param-gather")]
    flags = ("--overlap-grad-reduce", "--overlap-param-gather")
    assert predict_job(words, CLUSTER, {}).leeway.data_flags == flags
    assert predict_job([*words, flags[0]], CLUSTER, {}).leeway.data_flags == flags[1:]
    # What is not sharded is not gathered.
    whole = [word for word in words if word != "--use-distributed-optimizer"]
    assert predict_job(whole, CLUSTER, {}).leeway.data_flags == flags[:1]


def alternative(name: str, share: float, **changed: object) -> Alternative:
    """A change after which a step takes a share of its seconds."""
    values: dict[str, object] = {"flags": f"--{name}", "high_bytes": 40 * GIB}
    step = share * predicted().predicted.step_seconds
    return Alternative(name=name, step_seconds=step, **values | changed)  # type: ignore[arg-type]


def test_the_change_that_gains_most_and_fits_is_suggested_with_its_step() -> None:
    def advice(*alternatives: Alternative, **changed: bool) -> list[str]:
        return suggestions(planned(), dataclasses.replace(predicted(), alternatives=alternatives), **changed)  # type: ignore[arg-type]

    half = f"{0.5 * predicted().predicted.step_seconds:.3f} s (-50.0 %)"
    assert advice(alternative("half", 0.5), alternative("most", 0.9)) == [f"half: {half}, at most 40.0 GiB; --half"]
    assert advice(alternative("graphs", 0.5, high_bytes=None)) == [f"graphs: {half}, memory not counted; --graphs"]
    # Those that do not fit come last, and a gain that predictions do not tell from none is none.
    for few in (alternative("small", 0.995), alternative("full", 0.5, fits=False)):
        assert advice(few) == [
            "no single change gains 1 % (1 tried: --verbose); let tools/autotune.py search other layouts"
        ]
    assert "half" not in "".join(advice(alternative("half", 0.5), is_searched=True))
    text = prediction_text(dataclasses.replace(predicted(), alternatives=(alternative("half", 0.5),)), CLUSTER)
    assert "half " in text and "-50.0%  at most 40.0 GiB; --half" in text


def test_a_search_advises_nothing_that_it_decides() -> None:
    """Layout and overlap were searched: what is left are the batch, and who runs the plan."""
    step = predicted().predicted.step_seconds

    def advice(is_upstream: bool = False, **shares: float) -> list[str]:
        terms = dict.fromkeys(predicted().breakdown, 0.0) | {
            f"{name}_seconds": part * step for name, part in shares.items()
        }
        prediction = dataclasses.replace(predicted(), breakdown=terms)
        return suggestions(planned(), prediction, is_upstream, is_searched=True)

    assert advice(exposed_expert=0.3) == advice(exposed_tensor=0.3) == advice(exposed_transfer=0.2) == []
    assert advice(bubble=0.2) == [
        "a larger global batch, if the training allows it, since bubble takes 20.0 % of the step"
    ]
    assert advice(exposed_expert=0.3, is_upstream=True)[0].startswith(
        "this fork's overlap of all-to-alls (--target both"
    )
    # Where no search of this fork finds one, or the search has compared it, that is no advice.
    ruled_out = Leeway(no_overlap="--fp8-recipe delayed: ...")
    terms = dict.fromkeys(predicted().breakdown, 0.0) | {"exposed_expert_seconds": 0.3 * step}
    waiting = dataclasses.replace(predicted(), breakdown=terms)
    assert suggestions(planned(), waiting, is_upstream=True, is_searched=True, leeway=ruled_out) == []
    # A search that kept the layout leaves other layouts to try, as a prediction of the plan would say.
    kept = Leeway(no_overlap="it is decided", keeps_layout=True)
    (said,) = suggestions(planned(), waiting, is_searched=True, leeway=kept)
    assert said.startswith(
        "tools/autotune.py without --overlap-only, which searches other layouts, too, since exposed expert "
    )


def test_a_plan_in_a_sentence() -> None:
    plan = planned()
    assert plan_sentence(plan) == (
        "64 GPUs = 4 pipeline stages × TP 2 × DP 8; experts over EP 8 × 2 replicas; 32 micro-batches of 1 sample; ZeRO-1; "
        "no recomputation"
    )
    layers = (
        LayerOverlap(layer=0, mechanism="partitioned"),
        LayerOverlap(layer=1, weight_gradient_slots={"a": ("b",)}),
    )
    stages = tuple(
        dataclasses.replace(
            stage,
            recompute=Recompute(layers=3, granularity="full"),
            offload=Offload(optimizer=0.5),
            zero_level=2,
            overlap=StageOverlap(layers=layers),
        )
        for stage in plan.stages
    )
    assert plan_sentence(dataclasses.replace(plan, stages=stages)) == (
        "64 GPUs = 4 pipeline stages × TP 2 × DP 8; experts over EP 8 × 2 replicas; 32 micro-batches of 1 sample; ZeRO-2; "
        "recompute 3 of 8 layers a chunk; 50 % of optimizer states on the host; "
        "overlap: partitions of a micro-batch and deferred weight gradients"
    )
    paired = StageOverlap(layers=(LayerOverlap(layer=0, mechanism="tutel"),), micro_batches_in_flight=2)
    stages = tuple(dataclasses.replace(stage, overlap=paired) for stage in plan.stages)
    assert plan_sentence(dataclasses.replace(plan, stages=stages)).endswith(
        "overlap: capacity chunks and two micro-batches at a time"
    )
    unlike = (dataclasses.replace(plan.stages[0], zero_level=3, offload=Offload(weights=0.5)), *plan.stages[1:])
    sentence = plan_sentence(dataclasses.replace(plan, stages=unlike))
    assert "; ZeRO-3+1+1+1; no recomputation; weights on the host: 50 % in stage 0" in sentence
    shares = (Offload(), Offload(optimizer=1.0), Offload(optimizer=1.0), Offload(optimizer=0.5))
    stages = tuple(dataclasses.replace(s, offload=o) for s, o in zip(plan.stages, shares, strict=True))
    sentence = plan_sentence(dataclasses.replace(plan, stages=stages))
    assert "; optimizer states on the host: 100 % in stages 1-2, 50 % in stage 3" in sentence


def test_sizes_of_a_plan_multiply_to_its_gpus() -> None:
    """`TP 2 EP 8 DP 8, 4 stages` on 64 GPUs multiplied to 512: experts share the ranks of tensor and data parallelism."""
    for words in (
        (),
        ("--pipeline-model-parallel-size", "1"),
        ("--context-parallel-size", "2"),
        ("--num-virtual-stages-per-pipeline-rank", "2"),
        ("--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "2"),
    ):
        layout, experts, *_ = plan_sentence(planned(*words)).split("; ")
        gpus, sizes = layout.split(" GPUs = ")
        factors = [int(re.findall(r"\d+", part)[0]) for part in sizes.split(" × ")]
        assert math.prod(factors) == int(gpus) == 64, layout
        stage = planned(*words).stages[0]
        spread = [int(re.findall(r"\d+", part)[0]) for part in experts.removeprefix("experts over ").split(" × ")]
        assert math.prod(spread) == stage.tensor * stage.context * stage.data, experts
    dense = plan_sentence(planned("--expert-model-parallel-size", "1", "--expert-tensor-parallel-size", "1"))
    assert "experts" not in dense


def test_tokens_and_devices_for_a_reader() -> None:
    assert [shown_tokens(tokens) for tokens in (1.5e13, 3e11, 2.5e6, 900)] == ["15 T", "300 B", "2.5 M", "900"]
    both = Cluster(name="two", groups=(*CLUSTER.groups, *shipped_cluster("L4", 8).groups))
    assert devices(both) == "64 × H100 and 8 × L4"


def with_stages(seconds: tuple[float, ...], layers: tuple[int, ...]) -> tuple[Plan, Prediction]:
    """Stages of so many layers that take so many seconds for a micro-batch, of a step that waits for nothing else."""
    plan, prediction = planned(), predicted()
    ends = list(itertools.accumulate(layers, initial=0))
    stages = tuple(
        dataclasses.replace(plan.stages[0], chunks=((first, end),)) for first, end in itertools.pairwise(ends)
    )
    of_stages = tuple(
        dataclasses.replace(prediction.predicted.stages[0], stable_seconds=of_stage) for of_stage in seconds
    )
    step = sum(seconds) * stages[0].gradient_accumulation_steps
    whole = dataclasses.replace(prediction.predicted, stages=of_stages, step_seconds=step)
    none = dict.fromkeys(prediction.breakdown, 0.0)
    given = dataclasses.replace(prediction, predicted=whole, breakdown=none, launching=None)
    return dataclasses.replace(plan, stages=stages), given


def test_a_slow_stage_is_told_with_the_cut_that_would_help() -> None:
    """No term of a step shows what all stages wait for the slowest one."""
    plan, prediction = with_stages((1.0, 1.0, 1.0, 1.6), (4, 4, 4, 4))
    lines = answer_lines(Answer(plan=plan, prediction=prediction, cluster=CLUSTER))
    assert next(line for line in lines if line.startswith("waiting")).endswith(
        "; uneven stages: stage 3 is 39.1 % slower than the average, and the others wait"
    )
    advice = (
        "a layer fewer on stage 3 (--pipeline-model-parallel-layout), since waiting for the slowest stage takes 9.8 % of the "
        "step"
    )
    assert suggestions(plan, prediction) == [advice]
    # A search has chosen the cuts; and where the others have no room for a layer more, none helps.
    assert suggestions(plan, prediction, is_searched=True) == []
    for seconds, layers in (
        ((1.0, 1.0, 1.0, 1.2), (4, 4, 4, 4)),
        ((1.0, 1.0, 1.0, 1.6), (1, 1, 1, 4)),
        ((0.8, 1.6, 1.6), (1, 4, 4)),
        ((1.0, 1.0, 1.0, 1.6), (4, 4, 4, 1)),
    ):
        tight, slow = with_stages(seconds, layers)
        assert suggestions(tight, slow) == []
    (both,) = suggestions(*with_stages((1.0, 1.0, 1.6, 1.6), (4, 4, 4, 4)))
    assert both.startswith("a layer each fewer on stages 2, 3 (--pipeline-model-parallel-layout), since waiting")
    assert (
        balance_of(*with_stages((1.0, 1.6, 1.6), (4, 4, 4))).sentence
        == "uneven stages: 2 stages are 14.3 % slower than the average, and the others wait"
    )
    even, alike = with_stages((1.0, 1.04), (4, 4))
    assert "uneven" not in "".join(answer_lines(Answer(plan=even, prediction=alike, cluster=CLUSTER)))
