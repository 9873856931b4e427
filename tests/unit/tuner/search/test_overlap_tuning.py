"""`tools/autotune.py --overlap-only`: what is chosen, what is written, and that the run accepts it."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

import moe_overlap.api as api
from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model, known_vocab_size
from megatron.training.cli.validation import validate
from megatron.training.plan_argument import with_plan
from megatron.training.plan_flags import plan_of_run
from moe_overlap.api import problem_of, read_job, tune
from moe_overlap.commands.autotune import main
from moe_overlap.describe.cluster import Cluster, shipped_cluster
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan_search.results import Tuned
from moe_overlap.report.answer import UNTRIED
from moe_overlap.report.tuning import tuned_details, tuned_lines
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.search.hidden import Way
from moe_overlap.tuner.search.layer.candidates import DEFERRED, PLAIN, Candidate, Candidates
from moe_overlap.tuner.search.layer.overlap import WORTH, choose
from moe_overlap.tuner.write.slurm import WRITTEN_BY
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand

JOB = """--use-distributed-optimizer
    --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
    --vocab-size 32000 --micro-batch-size 4 --global-batch-size 128 --bf16 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --train-iters 10 --lr 1e-4 --pipeline-model-parallel-size 2 --num-experts 16
    --moe-router-topk 2 --moe-ffn-hidden-size 1024 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none --overlap-grad-reduce""".split()
LIMITS = SearchLimits(max_partitions=4, group_seconds=0.0, range_limit=12)


def slow_links(slower: float) -> Cluster:
    """So much slower than an H100's, of GPUs that compute in 4 bits, too."""
    cluster = shipped_cluster("H100", 16)
    group = cluster.groups[0]
    gpu = dataclasses.replace(group.gpu, fp4_tflops=4000.0)
    slow = dataclasses.replace(group, gpu=gpu, domain_gb_per_s=group.domain_gb_per_s / slower)
    return dataclasses.replace(cluster, groups=(slow,))


@functools.cache
def tuned(slower: float, *words: str) -> Tuned:
    """Over links so much slower than an H100's."""
    return tune([*JOB, *words], slow_links(slower), LIMITS, graphs=by_hand, constants=CONSTANTS)


def test_slow_links_are_worth_hiding_and_the_fastest_is_chosen() -> None:
    found = tuned(8.0)
    assert found.chosen.name != PLAIN and found.chosen.seconds < 0.9 * found.plain_seconds
    predicted = [one for one in found.others if one.prediction is not None]
    assert {PLAIN, "partitions", "two micro-batches at a time"} <= {one.name for one in predicted} | {found.chosen.name}
    assert all(found.chosen.seconds <= one.seconds for one in predicted)
    assert [one.seconds for one in predicted] == sorted(one.seconds for one in predicted)


def test_what_is_no_better_than_predictions_err_is_left() -> None:
    found = tuned(0.01, "--pipeline-model-parallel-size", "1")
    fastest = min(one.seconds for one in (found.chosen, *found.others) if one.prediction is not None)
    assert found.chosen.name == PLAIN and fastest > found.plain_seconds * (1 - WORTH)


def test_layers_are_cut_alike_and_beside_another_micro_batch_too() -> None:
    found = tuned(8.0)
    named = {one.name: one for one in (found.chosen, *found.others) if one.prediction is not None}
    # Where the search of ranges ends at the same plan, it stands under that name alone.
    for name in ("4 equal partitions", "two micro-batches at a time in 4 equal partitions"):
        named.setdefault(name, named[name.replace("4 equal ", "")])
    task = problem_of(JOB, slow_links(8.0), {"graphs": by_hand, "constants": CONSTANTS})
    own = [*JOB, "--moe-gate", "topk", "--moe-token-dispatcher-type", "irregular"]
    for parts in (2, 4):
        alike, paired = (
            named[f"{parts} equal partitions"],
            named[f"two micro-batches at a time in {parts} equal partitions"],
        )
        for plan, several in ((alike.decided, 1), (paired.decided, 2)):
            assert {stage.overlap.micro_batches_in_flight for stage in plan.stages} == {several}
            cut = {layer.partitions for stage in plan.stages for layer in stage.overlap.layers} - {None}
            assert cut == {parts}
        words = [
            [*own, "--moe-overlap-partitions", str(parts), "--moe-overlap-range", word]
            for word in ("experts", "after", "around")
        ]
        steps = [
            predict_plan(read_job(said, 16, host_runs_ahead=True).plan, task).predicted.step_seconds for said in words
        ]
        assert alike.seconds == pytest.approx(min(steps)) and min(steps) < max(steps)


@pytest.mark.parametrize(("stages", "expected"), [("1", True), ("2", False)])
def test_gradients_are_reduced_at_once_where_they_alone_cross_the_network(stages: str, expected: bool) -> None:
    """Experts of eight stay inside a node; replicas do where a stage has but one."""
    found = tuned(8.0, "--pipeline-model-parallel-size", stages, "--overlap-grad-reduce")
    listed = [one.decided.stages[0].overlap for one in (found.chosen, *found.others) if one.prediction is not None]
    assert {overlap.reduce_at_once for overlap in listed if overlap.is_listed} == {expected}


@pytest.mark.parametrize(("slower", "late"), [(0.5, False), (8.0, True)])
def test_pairs_send_at_the_time_that_is_predicted_to_be_faster(slower: float, late: bool) -> None:
    """All-to-alls inside a node suggest an early send, which slow links overrule; the other time is slower in both cases."""
    words = [*JOB, *"--num-layers 8 --num-layers-per-virtual-pipeline-stage 2".split()]
    problem = problem_of(words, slow_links(slower), {"graphs": by_hand, "constants": CONSTANTS})
    candidates = Candidates(problem, LIMITS, 1.0)
    (deferring,) = candidates.deferred(candidates.simplest(Way.PAIRS))
    overlaps = [stage.overlap for stage in deferring.decided.stages]
    assert {overlap.sends_late for overlap in overlaps} == {late}
    others = (dataclasses.replace(overlap, sends_late=not late) for overlap in overlaps)
    stages = zip(deferring.decided.stages, others, strict=True)
    other = tuple(dataclasses.replace(stage, overlap=overlap) for stage, overlap in stages)
    seconds = candidates.predicted(dataclasses.replace(deferring.decided, stages=other)).predicted.step_seconds
    assert deferring.seconds < seconds


def test_one_sample_cannot_be_cut_and_the_reason_is_told() -> None:
    found = tuned(8.0, "--micro-batch-size", "1")
    (refused,) = [one for one in found.others if one.refused and DEFERRED not in one.name]
    assert refused.name == "partitions"
    assert "--moe-overlap-partitions 2: does not divide the micro-batch of 1" in refused.refused


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--fp8-format e4m3", "--fp8-recipe delayed: overlap cuts passes into operators, "),
        ("--fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather", "--fp8-param-gather: overlap "),
        ("--fp4-format e2m1", "--fp4-format e2m1: "),
    ],
)
def test_a_precision_that_lists_do_not_execute_is_not_overlapped(words: str, refused: str) -> None:
    """A plan that the runtime refuses to start is not chosen, however slow the links: megatron-core's schedule stays."""
    found = tuned(100.0, "--bf16", *words.split())
    assert found.chosen.name == "plain megatron-core"
    assert found.others and all(other.refused.startswith(refused) for other in found.others)


def test_products_in_8_bits_are_overlapped() -> None:
    found = tuned(8.0, "--bf16", *"--fp8-format hybrid --fp8-recipe tensorwise".split())
    assert found.chosen.name != PLAIN and found.chosen.decided.precision == "fp8"
    assert found.chosen.seconds < 0.95 * found.plain_seconds


def test_what_does_not_fit_is_not_chosen_and_the_plain_run_has_to_fit_too() -> None:
    found = tuned(8.0)
    everything = sorted(
        (one for one in (found.chosen, *found.others) if one.prediction is not None), key=lambda one: one.seconds
    )

    def fits(one: Candidate, does: bool) -> Candidate:
        assert one.prediction is not None
        prediction = dataclasses.replace(one.prediction, capacity_bytes=10**15 if does else 0)
        return dataclasses.replace(one, prediction=prediction)

    (plain,) = (one for one in everything if one.name == PLAIN)
    last = everything[-1]
    assert last is plain
    for first_fits, plain_fits, expected in ((True, True, 0), (False, True, 1), (False, False, 1)):
        ones = [fits(one, True) for one in everything]
        ones[0], ones[-1] = fits(everything[0], first_fits), fits(plain, plain_fits)
        assert choose(ones[-1], ones) is ones[expected]
    slower = dataclasses.replace(fits(everything[0], True), name="slower")
    nothing = [fits(plain, False), slower]
    assert choose(nothing[0], sorted(nothing, key=lambda one: -one.seconds)) is slower
    assert choose(fits(plain, True), [fits(plain, True), slower][:1]).name == PLAIN


def test_the_answer_is_about_ten_lines_and_the_rest_is_told_on_demand() -> None:
    found = tuned(8.0)
    cluster = shipped_cluster("H100", 16)
    files = ["plan.json", "megatron_args.txt", "launch.sbatch", "report.html", "trace.json"]
    lines = tuned_lines(found, Path("tuned"), cluster, files)
    assert len(lines) <= 12 and all(len(line.split(maxsplit=1)[0]) <= 11 for line in lines)
    # The same lines as of a search: the error, the rates, the verdict.
    assert [line.split(maxsplit=1)[0] for line in lines[:5]] == ["plan", "step", "speed", "memory", "waiting"]
    assert lines[1].startswith(f"step        {found.chosen.seconds:.3f} s ± ")
    gained = found.plain_seconds / found.chosen.seconds
    (overlap,) = (line for line in lines if line.startswith("overlap"))
    assert overlap.startswith(f"overlap     {found.chosen.name}: {gained:.2f} times as fast as ")
    assert f"{PLAIN} ({found.plain_seconds:.3f} s)" in overlap
    predicted = [one for one in found.others if one.prediction is not None]
    shown = [line for line in lines if line.startswith("runner-up")]
    assert len(shown) == 1 and shown[0].startswith(f"runner-up   {predicted[0].name}: ")
    assert f"; {1 + len(predicted)} ways" in overlap
    assert lines[-2] == f"written     tuned: {', '.join(files)}"
    assert lines[-3] == f"beware      {UNTRIED}" and lines[-1].startswith("next        sbatch tuned/launch.sbatch")
    assert tuned_lines(found, None, cluster)[-1].startswith("written     nothing; --output DIR ")
    details = tuned_details(found)
    assert all(any(line.startswith(f"not         {one.name}: ") for line in details) for one in found.others)
    assert found.mix is not None and any("by class of layers" in line for line in details)
    # A run that overlaps nothing has no plan, and beats nobody.
    plain = tuned(0.01, "--pipeline-model-parallel-size", "1")
    lines = tuned_lines(plain, Path("tuned"), cluster, ["megatron_args.txt"])
    assert any(line.startswith(f"overlap     none is faster than {PLAIN}; ") for line in lines)
    assert lines[-1].startswith("next        python pretrain_moe.py ")


def write_job(folder: Path, *words: str) -> list[str]:
    (folder / "job.args").write_text(" ".join([*JOB, *words]))
    files = ["--megatron-args", str(folder / "job.args"), "--output", str(folder / "tuned")]
    return ["--overlap-only", *files, "--gpu", "H100", "--num-gpus", "16"]


def test_what_is_written_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    words = ("--overlap-grad-reduce", "--overlap-param-gather")
    # The script of an earlier answer would start another run beside this plan.
    script = tmp_path / "tuned" / "launch.sbatch"
    script.parent.mkdir()
    script.write_text(WRITTEN_BY)
    assert main([*write_job(tmp_path, *words), "--json"]) == 0
    said = capsys.readouterr()
    assert len(script.read_text().splitlines()) > 50 and "#SBATCH --nodes=2" in script.read_text()
    assert "stage" in (tmp_path / "tuned" / "report.html").read_text()
    answer = json.loads(said.out)
    assert answer["dropped_flags"] == []
    assert answer["layer_classes"]["complete"] and len(answer["layer_classes"]["classes"]) == 4
    assert answer["chosen"] != PLAIN and answer["step_seconds"] < answer["plain_step_seconds"]
    lines = (tmp_path / "tuned" / "megatron_args.txt").read_text().splitlines()
    assert "--plan plan.json" in lines
    assert [line for line in lines if "dispatcher-type" in line] == ["--moe-token-dispatcher-type irregular"]
    written = (tmp_path / "tuned").rename(tmp_path / "moved") / "megatron_args.txt"
    config = with_plan(
        parse([f"@{written}"]), 16
    ).config  # The plan is of these flags' model, whatever their file is called.
    validate(config, 16)
    plan = plan_of_run(config, describe_model(config, known_vocab_size(config), "job"), 16)
    assert plan.stages[0].overlap.is_listed and plan.stages[0].overlap.overlap_param_gather and plan.host_runs_ahead
    assert plan.predicted is not None and plan.predicted.step_seconds == answer["step_seconds"]
    assert json.loads((tmp_path / "moved" / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("job", "tool", "message"),
    [
        ("--defer-weight-gradients --max-deferred-bytes 9 --moe-token-dispatcher-type irregular", "", "by hand"),
        ("--expert-model-parallel-size 1", "", "one expert rank exchanges no tokens"),
        ("", "--overlap-max-partitions 0", "--overlap-max-partitions 0: must be at least 1"),
        ("", "--overlap-range-limit 0", "--overlap-range-limit 0: must be at least 1"),
        ("", "--time-limit -1", "--time-limit -1.0: must be greater than 0"),
    ],
)
def test_mistakes_are_one_line(
    job: str,
    tool: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    assert main([*write_job(tmp_path, *job.split()), *tool.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said
