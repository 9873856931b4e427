"""`--refine`: a world whose prices differ from the model's by known factors, traces of it, and what is chosen with them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import moe_overlap.api as api
from moe_overlap.api import Options, problem_of, read_job, tune
from moe_overlap.commands.autotune import main
from moe_overlap.describe.cluster import Cluster, Measured, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import COMPUTING, Span
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.trace import PREDICTED, about_run, write_ranks
from moe_overlap.plan_search.results import Tuned
from moe_overlap.tuner.calibrate.observe import Kind, Observed, SimulatedKind, fit, observe
from moe_overlap.tuner.calibrate.refine import Refinement, refine
from moe_overlap.tuner.cost.hardware import NOT_REFINED, Refined
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.profile.database import Database, Device
from moe_overlap.tuner.search.layer.candidates import PLAIN, Candidate
from moe_overlap.tuner.search.layer.overlap import WORTH, keep_measured
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.search.test_overlap_tuning import JOB, write_job

ONE_STAGE = [*JOB, "--pipeline-model-parallel-size", "1", "--num-layers", "2"]
LIMITS = SearchLimits(max_partitions=2, group_seconds=0.0, range_limit=8)
EXECUTED = ["--moe-gate", "topk", "--moe-token-dispatcher-type", "irregular"]
PARTS = (
    "--moe-overlap-partitions 2 --moe-overlap-range experts --defer-weight-gradients --max-deferred-bytes 100000000000"
)
COMPUTED = {
    "attention": 1.5,
    "attention.backward": 1.7,
    "attention.dW": 1.2,
    "moe.experts": 2.0,
    "moe.experts.backward": 0.8,
    "moe.experts.dW": 1.1,
    "moe.gate": 3.0,
    "head.loss": 0.7,
    "optimizer": 1.4,
}
EXCHANGED = ("moe.count", "moe.dispatch", "moe.dispatch.backward", "moe.combine", "moe.combine.backward")


def links(slower: float) -> Cluster:
    """An H100's, so much slower."""
    cluster = shipped_cluster("H100", 16)
    group = cluster.groups[0]
    assert group.domain_gb_per_s is not None
    slow = dataclasses.replace(group, domain_gb_per_s=group.domain_gb_per_s / slower)
    return dataclasses.replace(cluster, groups=(slow,))


def truth_of(exchanges: float) -> Refined:
    factors = COMPUTED | dict.fromkeys(EXCHANGED, exchanges)
    return Refined(
        {(kind, cut): factor for kind, factor in factors.items() for cut in (False, True)}, NOT_REFINED.unpriced
    )


def task(slower: float, words: Sequence[str] = ONE_STAGE) -> Problem:
    return problem_of(words, links(slower), {"graphs": by_hand, "constants": CONSTANTS})


def recorded(step: SimulatedStep, rank: int) -> list[Span]:
    """The spans that the runtime would record: that of an all-to-all ends where its rank has waited for it."""
    mine = [one for one in step.simulation.ran if one.rank == rank]
    starts: dict[int, float] = {}
    for one in mine:
        for number in one.instruction.after:
            starts[number] = min(one.start, starts.get(number, one.start))
    spans = []
    for one in mine:
        i = one.instruction
        ends = one.end if i.channel in COMPUTING else max(one.end, starts.get(i.id, one.end))
        spans.append(Span(i.name, i.channel, i.chunk or 0, i.micro_batch or 0, one.start, ends))
    return spans


def measure(path: Path, world: Problem, truth: Refined, plan: Plan) -> float:
    """Write the trace of a run in a world of these prices; the seconds of its step."""
    real = world.refined_by(truth)
    step = simulate_step(plan, real)
    ranks = {stage.devices.ranks[0]: recorded(step, stage.devices.ranks[0]) for stage in plan.stages}
    write_ranks(path, ranks, about=about_run(plan, world.model))
    return step.simulation.step_seconds


@pytest.mark.parametrize(("flags", "slower"), [("", 8.0), (PARTS, 40.0)], ids=["plain", "in parts"])
def test_factors_are_found_again(tmp_path: Path, flags: str, slower: float) -> None:
    """Factors of computation are found to a hundredth, also beside all-to-alls; those of awaited all-to-alls to a twentieth."""
    many = [*ONE_STAGE, "--global-batch-size", "512"]
    world, truth = task(slower, many), truth_of(1.5)
    words = [*many, *EXECUTED, *flags.split()] if flags else many
    plan = read_job([word for word in words if word != "--overlap-grad-reduce"], 16).plan
    measure(tmp_path / "run.json", world, truth, plan)
    after, found = refine(world, [tmp_path / "run.json"])
    refined = after.machine.refined
    kinds = {one.kind: one for one in found.kinds if one.measured_seconds and one.predicted_seconds}
    assert {"attention", "moe.experts.backward", "moe.dispatch.backward"} <= {kind for kind, _ in kinds}
    assert any(cut for _, cut in kinds) == bool(flags)
    for (kind, cut), one in kinds.items():
        right = truth.factor(kind, cut)
        mixed = not flags and kind.endswith(".backward")  # holds weight gradients, whose factor is another
        if one.is_bound:
            assert refined.factor(kind, cut) <= 1.0
        elif not mixed:
            assert refined.factor(kind, cut) == pytest.approx(right, rel=0.05 if kind in EXCHANGED else 0.01), kind
    (step,) = found.steps
    assert step.after_seconds == pytest.approx(step.seconds, rel=0.01)
    assert abs(step.before_seconds / step.seconds - 1.0) > 0.1


def tuned(world: float, traces: Sequence[Path] = ()) -> Tuned:
    given = {"graphs": by_hand, "constants": CONSTANTS}
    return tune(ONE_STAGE, links(world), LIMITS, 1.0, traces, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("slower", "exchanges"), [(0.02, 400.0), pytest.param(8.0, 2.0, marks=pytest.mark.slow)])
def test_the_second_choice_is_that_of_the_true_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, exchanges: float
) -> None:
    """Links that are far slower than described: nothing is hidden at first. Or only somewhat: then the first choice stays, or
    another is as good."""
    first, truth, world = tuned(slower).chosen, truth_of(exchanges), task(slower)
    before = measure(tmp_path / "run.json", world, truth, first.decided)
    second = tuned(slower, [tmp_path / "run.json"])
    right = world.refined_by(truth)
    monkeypatch.setattr(api, "refine", lambda *_: (right, Refinement((), ())))
    best = tuned(slower, [tmp_path / "run.json"]).chosen
    taken = predict_plan(second.chosen.decided, right).predicted.step_seconds
    assert taken == pytest.approx(best.seconds, rel=WORTH)
    assert taken <= before * (1.0 + 1e-9)
    assert (first.name == PLAIN) == (slower < 1) and second.chosen.name != PLAIN
    (measured,) = [one for one in (second.chosen, *second.others) if one.measured_seconds is not None]
    assert measured.decided.stages[0].overlap.layers == first.decided.stages[0].overlap.layers
    assert measured.measured_seconds == pytest.approx(before)


def test_a_measured_cluster_keeps_what_was_refined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In its database, by job: later predictions of the job find it, those of another do not; a later trace counts."""
    path, trace = tmp_path / "here.jsonl", tmp_path / "run.json"
    device = Device("cuda", "another GPU", 1, "2.13.0")
    Database.open(path, device)
    here = Measured(database=str(path), device="cuda", latency_seconds=0.0, constants={})
    cluster = dataclasses.replace(links(1.0), measured=here)
    given: Options = {"graphs": by_hand, "constants": CONSTANTS}
    for exchanges in (2.0, 3.0):
        world = problem_of(ONE_STAGE, cluster, given)
        measure(trace, world, truth_of(exchanges), world.plan)
        after, found = refine(world, [trace])
        again = problem_of([*ONE_STAGE, "--lr", "1"], cluster, given)
        assert again.machine.refined == after.machine.refined != NOT_REFINED
        assert again.machine.refined.factor("moe.dispatch", False) == pytest.approx(exchanges, rel=0.05)
        assert predict_plan(world.plan, again).predicted.step_seconds == found.steps[0].after_seconds
        assert "prices refined by traces of this job" in capsys.readouterr().err
    assert found.steps[0].before_seconds == predict_plan(world.plan, task(1.0)).predicted.step_seconds
    with path.open("a") as file:
        file.write('{"job": "damaged", "factors": [["attention", false, -1.0]], "unpriced": {}}\n')
    kept = Database.open(path, device).jobs
    assert list(kept.values()) == [after.machine.refined] and "damaged" not in path.read_text()
    assert problem_of([*ONE_STAGE, "--hidden-size", "1024"], cluster, given).machine.refined == NOT_REFINED
    assert "prices refined" not in capsys.readouterr().err


def test_buckets_keep_their_price_beside_the_instruction_that_completes_them() -> None:
    """The instruction that completes the gradients has no price, takes 10 us, and has the name of the buckets."""
    plan = read_job([*ONE_STAGE, "--expert-model-parallel-size", "2"], 2).plan
    buckets, completing = ("gradients", True), ("gradients", False)
    measured = Observed(plan, {buckets: 4e-3, completing: 1e-5}, frozenset(), 0.0, 5e-3)

    def simulate(_: Plan, refined: Refined) -> dict[Kind, SimulatedKind]:
        seconds = {kind: refined.seconds(*kind, alone) for kind, alone in ((buckets, 2e-3), (completing, 0.0))}
        return {kind: SimulatedKind(taken, 1.0) for kind, taken in seconds.items()}

    refined, _ = fit([measured], simulate)
    assert refined.factors[buckets] == pytest.approx(2.0) and "gradients" not in refined.unpriced


def test_ranks_that_wait_for_a_slower_one(tmp_path: Path) -> None:
    """Exchanges of 3 ms behind 4 ms of computation on one rank and 6 ms on the other, whose clock is another."""
    plan = read_job([*ONE_STAGE, "--expert-model-parallel-size", "2"], 2).plan

    def rank(computed: float, clock: float) -> list[Span]:
        return [
            Span("L0.attention", "compute", 0, 0, clock + 6e-3 * (computed < 0), clock + computed),
            Span("L0.moe.dispatch", "ep", 0, 0, clock + computed, clock + 9e-3),
            Span("optimizer.norm", "dp", 0, 0, clock + 9e-3, clock + 10e-3),
        ]

    seen = observe(plan, {0: rank(4e-3, 0.0), 1: rank(6e-3, 100.0)}, ())
    assert seen.seconds["moe.dispatch", False] == pytest.approx(3e-3) and not seen.bounds
    assert seen.waiting == pytest.approx(1 / 5)
    assert seen.seconds["attention", False] == pytest.approx(6e-3)
    assert seen.step_seconds == pytest.approx(10e-3) == pytest.approx(sum(seen.seconds.values()))
    after_each_other = [
        Span("L0.moe.dispatch", "ep", 0, 0, 0.0, 4e-3),
        Span("L0.moe.dispatch", "ep", 0, 0, 1e-3, 6e-3),
    ]
    assert observe(plan, {0: after_each_other}, ()).seconds["moe.dispatch", False] == pytest.approx(6e-3)
    hidden = [Span("L0.attention", "compute", 0, 0, 0.0, 9e-3), Span("L0.moe.dispatch", "ep", 0, 0, 1e-3, 9.01e-3)]
    assert observe(plan, {0: hidden}, ()).bounds == {("moe.dispatch", False)}


def test_what_was_measured_stays_unless_another_is_faster_than_it_and_than_its_prediction() -> None:
    world = task(1.0)
    prediction = predict_plan(world.plan, world)
    plain = Candidate(name=PLAIN, plan=world.plan, prediction=prediction)

    def one(name: str, seconds: float, measured: float | None = None) -> Candidate:
        step = dataclasses.replace(prediction.predicted, step_seconds=seconds)
        slower = dataclasses.replace(prediction, predicted=step)
        return dataclasses.replace(plain, name=name, prediction=slower, measured_seconds=measured)

    for before, other, expected in ((1.0, 0.5, "new"), (0.49, 0.5, "old"), (1.0, 0.995, "old"), (2.0, 1.2, "old")):
        old, new = one("old", before, measured=1.1), one("new", other)
        assert keep_measured(plain, sorted([new, old], key=lambda one: one.seconds)).name == expected
    slower, little, much = (one(name, seconds) for name, seconds in (("plain", 0.5), ("little", 0.496), ("much", 0.4)))
    assert keep_measured(slower, [little, slower, one("old", 1.0, measured=1.1)]) is slower
    assert keep_measured(slower, [much, slower, one("old", 1.0, measured=1.1)]) is much
    assert keep_measured(slower, [little, slower]) is slower


def test_plans_in_pieces_and_whole_ones_lend_each_other_factors() -> None:
    refined = Refined({("moe.experts", True): 2.0, ("moe.experts", False): 3.0, ("attention.backward", True): 4.0})
    assert [refined.factor("moe.experts", cut) for cut in (True, False)] == [2.0, 3.0]
    assert refined.factor("attention.dW", False) == refined.factor("attention.recompute", True) == 4.0
    assert refined.factor("attention", False) == refined.factor("moe.merge.dW", True) == 1.0


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        ("", None, "cannot be read: No such file or directory"),
        ("", {"traceEvents": []}, "has no spans"),
        ("", {"otherData": {}}, "does not say which plan was measured; write it with pretrain_moe.py --trace"),
        ("--hidden-size 1024", {}, "model hidden_size 1024: the flags say 2048: the trace is of another job"),
        (
            "--micro-batch-size 2",
            {},
            "stages[0] micro_batch_size 2: the flags say 4: the trace is of another job",
        ),
        ("--global-batch-size 256", {}, "the trace is of another job"),
        (
            f"{' '.join(EXECUTED)} --moe-gate random {PARTS}",
            {},
            "gate random: plans of these flags have topk; add --moe-gate",
        ),
        ("--pipeline-model-parallel-size 1", {}, "plan loss_stage 0: the flags say 1"),
    ],
)
def test_traces_of_other_jobs_are_one_line(
    words: str,
    change: dict[str, object] | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    job = read_job([*[word for word in JOB if word != "--overlap-grad-reduce"], *words.split()], 16)
    path = tmp_path / "run.json"
    if change is not None:
        spans = {rank: [Span("L0.attention", "compute", 0, 0, 0.0, 1.0)] for rank in (0, 8)}
        write_ranks(path, spans, about=about_run(job.plan, job.model))
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main([*write_job(tmp_path), "--refine", str(path)]) == 2
    said = capsys.readouterr().err
    flag = "--refine " if change is None or "traceEvents" in change else ""  # It is no trace at all.
    assert said.startswith(f"error: {flag}{path}") and said.count("\n") == 1 and message in said


def test_files_of_other_ranks_and_batches(tmp_path: Path) -> None:
    """A stage that nobody measured, a file that an older run left, a step of a smaller batch."""
    world, path = task(1.0, JOB), tmp_path / "run.json"
    about, spans = about_run(world.plan, world.model), [Span("L0.attention", "compute", 0, 0, 0.0, 1.0)]
    write_ranks(path, {0: spans}, about=about | {PREDICTED: True})
    with pytest.raises(ConfigError, match=r"run.json: is a prediction, not a measurement; write it with pretrain_moe"):
        refine(world, [path])
    write_ranks(path, {0: spans}, about=about)
    with pytest.raises(ConfigError, match=r"run.json: no rank of stage 1 is beside it; bring the files of all ranks"):
        refine(world, [path])
    write_ranks(tmp_path / "run.json.rank8", {8: spans}, about=about | {"plan": {}})
    with pytest.raises(ConfigError, match=r"run.json.rank8: is of another run than run.json; remove it"):
        refine(world, [path])
    write_ranks(tmp_path / "run.json.rank8", {8: spans}, about=about)
    with pytest.raises(ConfigError, match=r"run.json: has 1 micro-batches, its plan 4"):
        refine(world, [path])


def test_collectives_inside_operators_count_as_their_computation() -> None:
    """A price of attention has its tensor ranks' collectives; one that is hidden under other work counts once."""
    plan = read_job([*ONE_STAGE, "--expert-model-parallel-size", "2"], 2).plan
    parts = [("compute", 0.0, 2e-3), ("tp", 1e-3, 5e-3), ("compute", 5e-3, 9e-3)]
    split = [Span("L0.attention", channel, 0, 0, start, end) for channel, start, end in parts]
    assert observe(plan, {0: split}, ()).seconds["attention", False] == pytest.approx(9e-3)
