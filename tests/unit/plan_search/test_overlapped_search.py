"""Layouts that are fast once they hide their all-to-alls: a closed form that is a bound, and the plans that it leads to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_overlap.api import predict
from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan_search import overlapped as overlapped_search
from moe_overlap.plan_search import search as plan_search
from moe_overlap.plan_search.flags import PlansAsFlags, without_layout
from moe_overlap.plan_search.overlapped import DECIDED, Overlapped, OverlapSearch, decide_overlaps
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import Finalist, PlanSearch, Screened
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import EARLY, closing_lines, detail_lines, refused_lines, search_json, write_search
from moe_overlap.tuner.cost.pipeline import lone_share
from moe_overlap.tuner.problem import OURS, Problem
from moe_overlap.tuner.search.hidden import HiddenCosts, Way, goes_with, search_hidden, with_cuttable_modules
from moe_overlap.tuner.search.layer.candidates import PLAIN, Candidates
from moe_overlap.tuner.search.space import MemoryChoice, UniformLayout, chunks_of
from moe_overlap.tuner.search.uniform_cost import UniformCosts
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL, searched
from tests.unit.tuner.search.test_search_uniform import MODULE, Case, case_of, graphs_of, least_memory, with_modules

pytestmark = pytest.mark.usefixtures("whole_memory")

# Tokens travel slowly, and as hand-made graphs gather no rows over expert-tensor ranks, experts are not split.
SLOW = case_of("--moe-ffn-hidden-size", "4095", domain_gb_per_s=20.0, node_gb_per_s=20.0)
LIMITS = SearchSettings().overlap_limits


def sound(case: Case, way: Way) -> list[UniformLayout]:
    batch, gpus = case.template.global_batch_size, case.template.world_size
    return [layout for layout in case.sound if goes_with(way, layout, batch, gpus)]


def simplest(case: Case, layout: UniformLayout, way: Way, memory: MemoryChoice) -> tuple[float, float] | None:
    """Seconds and bytes of the simplest plan of a way, simulated; None where it is not executed."""
    plan = dataclasses.replace(case.plan(layout, memory), host_runs_ahead=True)
    problem = Problem(
        model=case.model,
        plan=plan,
        graphs=graphs_of(plan, case.model),
        features=case.task.features,
        machine=case.task.machine,
        listed=dataclasses.replace(OURS, overlap_param_gather=True),
    )
    assert case.task.features.overlap_param_gather
    prediction = Candidates(problem, LIMITS, 0.5).simplest(way).prediction
    return None if prediction is None else (prediction.predicted.step_seconds, prediction.fullest.needed_bytes)


@pytest.mark.parametrize("way", list(Way))
def test_no_plan_of_a_way_is_faster_than_the_closed_form(way: Way) -> None:
    """But for a tenth, as lists of tensor ranks hide more; and the form says more than that a step takes time."""
    costs, plain = HiddenCosts(SLOW.task, way), UniformCosts(SLOW.task)
    layouts = [layout for layout in sound(SLOW, way) if layout.context == 1 and layout.tensor <= 2]
    tight, held, saved = [], [], []
    for layout in layouts[:: max(1, len(layouts) // 12)]:
        evaluated = costs.evaluate(layout)
        simulated = simplest(SLOW, layout, way, MemoryChoice())
        if simulated is None:
            continue
        least = float(evaluated.seconds[0, 0])
        assert least <= 1.12 * simulated[0], layout
        saved.append(1.0 - least / float(plain.evaluate(layout).seconds[0, 0]))
        tight.append(least / simulated[0])
        held.append(float(evaluated.needed_bytes[0, 0]) / simulated[1])
    assert len(tight) >= 10 and sorted(saved)[len(saved) // 2] > 0.1
    # Of pairs it knows what runs alone while a pipeline fills and drains, and is close to the step.
    assert way is not Way.PAIRS or min(tight) > 0.92, tight
    # What two micro-batches hold is known before they are simulated.
    assert min(held) > 0.98 and max(held) < 1.01, held


def paced(host_seconds: float, graphs: bool = False) -> Case:
    """The case on a host that takes so long for a launch, with or without captured graphs."""
    machine, features = SLOW.task.machine, dataclasses.replace(SLOW.task.features, listed_graphs=graphs)
    constants = dataclasses.replace(machine.constants, host_seconds=host_seconds)
    task = dataclasses.replace(SLOW.task, machine=dataclasses.replace(machine, constants=constants), features=features)
    return dataclasses.replace(SLOW, task=task)


def test_what_partitions_launch_again_counts_as_far_as_they_are_worth_it() -> None:
    """A slow host makes partitions no way to hide: the least is then the layout as it is. Graphs are launched faster."""
    layouts = [layout for layout in sound(SLOW, Way.PARTITIONS) if layout.context == layout.tensor == 1]
    layouts = [layout for layout in layouts if goes_with(Way.PAIRS, layout, *batch_and_gpus())]
    assert len(layouts) >= 4
    for layout in layouts[:: (len(layouts) + 1) // 2]:

        def least(host_seconds: float, way: Way, graphs: bool = False, layout: UniformLayout = layout) -> float:
            costs = HiddenCosts(paced(host_seconds, graphs).task, way)
            return float(costs.evaluate(layout).seconds[0, 0])

        def plain(host_seconds: float, layout: UniformLayout = layout) -> float:
            return float(UniformCosts(paced(host_seconds).task).evaluate(layout).seconds[0, 0])

        batch, gpus = batch_and_gpus()
        count = batch * layout.pipeline // (gpus * layout.micro_batch)
        alone = lone_share(layout.pipeline, layout.virtual, count)
        assert 0.0 < alone < 1.0

        def in_pairs(host_seconds: float, way: Way, share: float = alone) -> float:
            """Of a pipeline's pairs fill and drain hide nothing; of partitions all passes hide as much."""
            return (1.0 - share) * least(host_seconds, way) + share * plain(host_seconds)

        # Without a host both ways hide as much where they hide; it launches one of them twice. Stages are not quite equal.
        assert least(0.0, Way.PAIRS) == pytest.approx(in_pairs(0.0, Way.PARTITIONS), rel=0.05)
        assert least(0.0, Way.PARTITIONS) < 0.97 * plain(0.0)
        slow = 3e-4
        assert in_pairs(slow, Way.PARTITIONS) > 1.02 * least(slow, Way.PAIRS)
        assert least(slow, Way.PARTITIONS, graphs=True) < 0.97 * least(slow, Way.PARTITIONS)
        assert least(1e-2, Way.PARTITIONS) == pytest.approx(plain(1e-2), rel=0.01)
        for graphs in (False, True):
            simulated = simplest(paced(slow, graphs), layout, Way.PARTITIONS, MemoryChoice())
            assert simulated is not None and least(slow, Way.PARTITIONS, graphs) <= 1.12 * simulated[0], layout


def batch_and_gpus() -> tuple[int, int]:
    return SLOW.template.global_batch_size, SLOW.template.world_size


def test_what_is_ranked_is_what_an_enumeration_has() -> None:
    plain = SLOW.search()
    bar, keep = 1.4 * plain.solution.objective, 6
    found = search_hidden(plain, SLOW.sound, SLOW.task, lambda layout: SLOW.bounds, keep, bar)
    for way in Way:
        costs, least = HiddenCosts(SLOW.task, way), {}
        for layout in sound(SLOW, way):
            evaluated = costs.evaluate(layout)
            capacity = SLOW.task.machine.usable_bytes
            fitting = evaluated.seconds[evaluated.needed_bytes <= capacity]
            seconds = float(fitting.min()) if fitting.size else math.inf
            shape = layout.ranks, layout.pipeline
            least[shape] = min(seconds, least.get(shape, math.inf))
        expected = sorted(seconds for seconds in least.values() if seconds < bar)[:keep]
        assert [each.ranked.seconds for each in found if each.way is way] == pytest.approx(expected, rel=1e-9)
        assert expected
    assert not search_hidden(plain, SLOW.sound, SLOW.task, lambda layout: SLOW.bounds, keep, 0.0)


def test_partitions_are_ranked_with_recomputation_that_they_may_have() -> None:
    """Norms are not recomputed in partitions: such layouts would take the seats of others, and be refused as flags."""
    slow = case_of("--global-batch-size", "64", gpus=4, domain_gb_per_s=20.0, node_gb_per_s=20.0)
    case = with_modules(least_memory(slow, 0.055))
    found = search_hidden(case.search(), case.sound, case.task, lambda layout: case.bounds, 8, math.inf)
    modules = {way: {each.ranked.memory.modules for each in found if each.way is way} for way in Way}
    assert modules[Way.PARTITIONS] == {()} and MODULE in modules[Way.PAIRS]
    several = dataclasses.replace(case.task, modules=(MODULE, ("layernorm", "moe_act"), ("moe_act",)))
    assert with_cuttable_modules(several).modules == (("moe_act",),)


def at_speed(gb_per_s: float) -> Cluster:
    return dataclasses.replace(
        H100,
        groups=(dataclasses.replace(H100.groups[0], domain_gb_per_s=gb_per_s, node_gb_per_s=gb_per_s),),
    )


def test_a_plan_that_is_fast_with_overlap_only_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three plans are faster without overlap, and stay slower than this one whatever they overlap."""
    words = "--num-layers 2 --num-experts 16 --moe-ffn-hidden-size 8191 --global-batch-size 64".split()
    words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    # Into how many partitions it is cut decides nothing here.
    settings = SearchSettings(solver_seconds=0.5, overlap_limits=dataclasses.replace(LIMITS, max_partitions=2))
    found = search_plan([*SMALL, *words], at_speed(150.0), settings, **OPTIONS)
    assert found.tuned is not None and found.tuned.chosen.name != PLAIN
    ranked = [found.chosen, *found.others]
    ranked.sort(key=lambda finalist: finalist.simulated_seconds)
    assert found.chosen.name not in [finalist.name for finalist in ranked[:DECIDED]]
    assert len({finalist.name for finalist in ranked}) == len(ranked)
    (screened,) = [layout for layout in found.screened if layout.name == found.chosen.name][:1]
    assert screened.seconds is not None and screened.least_seconds < screened.seconds
    assert found.prediction.predicted.step_seconds <= screened.seconds
    assert search_json(found)["overlap_screened"][0]["name"] == found.screened[0].name
    assert any(line.startswith("overlapped  ") for line in detail_lines(found))
    # What is written is predicted as it was found: its lists gather weights under their first passes, as the flags ask.
    assert not found.tuned.dropped
    assert all(stage.overlap.overlap_param_gather for stage in found.plan.stages)
    write_search(tmp_path, found)
    monkeypatch.chdir(tmp_path)
    again = predict(["@megatron_args.txt"], at_speed(150.0), **OPTIONS)
    assert again.predicted == found.prediction.predicted


class Decisions:
    """A twin of `tune` whose n-th answer is n tenths faster than the plan without overlap; `at` comes into the second."""

    def __init__(self, found: PlanSearch, at: Callable[[], None]) -> None:
        self.seconds, self.at = found.chosen.simulated_seconds, at
        self.asked: list[list[str]] = []

    def __call__(self, words: list[str], *args: object, **options: object) -> SimpleNamespace:
        self.asked.append(words)
        if len(self.asked) == 2:
            self.at()
        seconds = self.seconds * (1.0 - 0.1 * len(self.asked))
        return SimpleNamespace(chosen=SimpleNamespace(name="partitions", fits=True, seconds=seconds), graphs=None)


@pytest.mark.parametrize("ends", ["ctrl-c", "time limit", "whole"])
def test_what_was_decided_before_an_early_end_is_kept(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, clock = searched("moe-overlap"), SimpleNamespace(now=0.0)

    def passes() -> None:
        clock.now = 2.0

    def interrupts() -> None:
        raise KeyboardInterrupt

    decisions = Decisions(found, {"ctrl-c": interrupts, "time limit": passes}.get(ends, lambda: None))
    monkeypatch.setattr(overlapped_search, "choose_overlap", decisions)
    monkeypatch.setattr(overlapped_search.time, "monotonic", lambda: clock.now)
    ranked = [found.chosen, *found.others]
    finalists = [finalist for finalist in ranked if finalist.plan.stages[0].expert > 1][:DECIDED]
    assert len(finalists) == DECIDED
    search = OverlapSearch(
        read=lambda ranked: found.chosen, cluster=H100, limits=LIMITS, solver_seconds=0.5, deadline=1
    )
    best = decide_overlaps(finalists, lambda bar: (), search, **OPTIONS)
    kept = {"ctrl-c": 1, "time limit": 2, "whole": 3}[ends]
    assert best.chosen is finalists[kept - 1] and len(decisions.asked) == max(2, kept)
    assert best.seconds == pytest.approx(found.chosen.simulated_seconds * (1.0 - 0.1 * kept))
    assert (best.is_interrupted, best.is_late) == (ends == "ctrl-c", ends == "time limit")


@pytest.mark.parametrize("which", ["is_late", "is_interrupted"])
def test_an_overlap_that_was_not_decided_to_its_end_is_told(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(finalists: Sequence[Finalist], *args: object, **options: object) -> Overlapped:
        return dataclasses.replace(Overlapped(chosen=finalists[0], tuned=None), **{which: True})

    assert not searched("moe-overlap").ended_early
    monkeypatch.setattr(plan_search, "decide_overlaps", cut)
    found = search_plan(SMALL, H100, SearchSettings(has_baseline=False), **OPTIONS)
    assert found.ended_early and search_json(found)["search"]["ended_early"]
    assert any(EARLY in line for line in closing_lines(found, Path("tuned"), ()))


def way(name: str, seconds: float | None, verdict: str = "fits") -> SimpleNamespace:
    prediction = None if seconds is None else SimpleNamespace(memory_verdict=verdict)
    return SimpleNamespace(
        name=name, seconds=seconds, prediction=prediction, fits=verdict == "fits", refused=f"{name} is refused"
    )


@pytest.mark.parametrize(
    ("ways", "why"),
    [
        ((way("A", 1.2), way("B", 1.1)), "the best of 2 ways, B, takes 1.100 s (+10.0 %)"),
        ((way("A", 0.9, "does not fit"), way("B", 1.1)), "the best of 2 ways, B, takes 1.100 s (+10.0 %)"),
        (
            (way("A", 0.9, "may not fit"), way("B", None)),
            "the best of 2 ways, A, takes 0.900 s (-10.0 %) and may not fit",
        ),
        ((way("A", None),), "A: A is refused"),
        ((), ""),
    ],
)
def test_a_plan_that_overlaps_nothing_has_the_reason(
    ways: tuple[SimpleNamespace, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = searched("moe-overlap")
    ranked = [each for each in (found.chosen, *found.others) if each.plan.stages[0].expert > 1][:1]
    decision = SimpleNamespace(chosen=way(PLAIN, 1.0), others=ways, plain_seconds=1.0, graphs=None)
    monkeypatch.setattr(overlapped_search, "choose_overlap", lambda *words, **options: decision)
    search = OverlapSearch(read=lambda ranked: found.chosen, cluster=H100, limits=LIMITS, solver_seconds=0.5)
    assert decide_overlaps(ranked, lambda bar: (), search, **OPTIONS).why_plain == why


def test_a_search_has_the_reason_of_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken under the options of plans, whose own flags say the precision, and not under the user's."""
    received: dict[str, object] = {}

    def decided(finalists: Sequence[Finalist], *args: object, **options: object) -> Overlapped:
        received.update(options)
        return Overlapped(chosen=finalists[0], tuned=None, why_plain="because")

    monkeypatch.setattr(plan_search, "decide_overlaps", decided)
    options = {**OPTIONS, "precision": "bf16", "memory_margin": None}
    answer = search_plan(SMALL, H100, SearchSettings(has_baseline=False), **options)
    assert answer.why_plain == "because"
    assert received == {**options, "precision": None, "plan": None, "name": answer.chosen.problem.model.name}


@pytest.mark.parametrize("share", [0.04, 0.06])
def test_the_reason_is_told_where_all_to_alls_are_worth_a_look(share: float) -> None:
    found = searched("moe-overlap")
    prediction = found.chosen.prediction
    exposed = {"exposed_expert_seconds": share * prediction.predicted.step_seconds}
    prediction = dataclasses.replace(prediction, breakdown={**prediction.breakdown, **exposed})
    chosen = dataclasses.replace(found.chosen, prediction=prediction)
    found = dataclasses.replace(found, chosen=chosen, tuned=None, why_plain="because")
    told = [line for line in closing_lines(found, Path("tuned"), ()) if line.startswith("overlap ")]
    assert told == (["overlap     none helps: because"] if share > 0.05 else [])
    assert search_json(found)["why_no_overlap"] == "because"


def test_layouts_without_a_plan_stand_behind() -> None:
    def screened(seconds: float | None, least: float) -> Screened:
        return Screened(name="", way="", least_seconds=least, seconds=seconds)

    plans = [screened(None, 1.0), screened(3.0, 1.0), screened(2.0, 1.5)]
    assert sorted(plans, key=lambda each: each.order) == [plans[2], plans[1], plans[0]]


def test_refusals_are_told_once_for_each_flag() -> None:
    refused = [("PP2", "--a 1: no"), ("PP4", "--a 2: no"), ("PP8", "--b: no")]
    first, second = refused_lines(refused)
    assert first == "refused     PP2: --a 1: no (and 1 more plan for this flag: --json)"
    assert second == "refused     PP8: --b: no"


def test_every_offered_recomputation_is_accepted_as_flags() -> None:
    """Five layers on stages and chunks of unlike length: no one number says all of them, and none above the shortest is said."""
    words = [*SMALL, "--num-layers", "5"]
    case = case_of("--num-layers", "5", "--pipeline-model-parallel-size", "1")
    said = PlansAsFlags(case.task, without_layout(words, "megatron-lm")[0], "megatron-lm", 8)
    unlike = 0
    for layout in (each for each in case.sound if each.ranks == (1, 1, 1, 1) and each.micro_batch == 1):
        offered = UniformCosts(case.task).evaluate(layout).choices[0]
        longest = max(
            end - first for of_stage in chunks_of(5, layout.pipeline, layout.virtual) for first, end in of_stage
        )
        assert offered[-1].every_layer or offered[-1].layers == longest, layout
        unlike += offered[-1].every_layer
        for choice in offered:
            plan = case.plan(layout, choice)
            validate_plan(plan, case.model)
            said.read("", plan, case.model)
    assert unlike >= 3


def made_finalist(
    name: str,
    refusal: str | None = None,
    paired: bool = False,
    experts: int = 4,
    staged: bool = False,
    stored: bool = False,
) -> SimpleNamespace:
    problem = SimpleNamespace(features=SimpleNamespace(overlap_experts=paired))
    stages = [SimpleNamespace(expert=experts, expert_tensor=1)]
    plan = SimpleNamespace(stages=stages, transfers=(), has_stores=stored)
    return SimpleNamespace(
        name=name, simulated_seconds=4.4, refusal=refusal, problem=problem, plan=plan, is_staged=staged
    )


def test_only_what_this_runtime_executes_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that nothing runs, those of Megatron-LM's overlap and those of other ZeRO levels take no other's turn."""
    decided: list[str] = []
    monkeypatch.setattr(overlapped_search, "_faster", lambda best, finalist, *_: decided.append(finalist.name) or best)
    others = [made_finalist("offload", refusal="offload.optimizer 1.0"), made_finalist("pairs", paired=True)]
    others += [made_finalist("ZeRO-3", stored=True)]
    ours = [made_finalist(f"ours {number}") for number in range(DECIDED + 1)]
    found = decide_overlaps([*others, *ours], lambda bar: (), SimpleNamespace(is_late=False))  # type: ignore[list-item, arg-type]
    assert decided == [finalist.name for finalist in ours[:DECIDED]] and found.chosen is others[0]


def test_the_best_plan_with_equal_stages_is_decided_behind_those_with_unlike_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it nobody would know what unlike stages gain once all-to-alls are hidden."""
    decided: list[str] = []
    monkeypatch.setattr(overlapped_search, "_faster", lambda best, finalist, *_: decided.append(finalist.name) or best)
    unlike = [made_finalist(f"unlike {number}", staged=True) for number in range(DECIDED)]
    equal = [made_finalist(f"equal {number}") for number in range(2)]
    decide_overlaps([*unlike, *equal], lambda bar: (), SimpleNamespace(is_late=False))  # type: ignore[list-item, arg-type]
    assert decided == [*(finalist.name for finalist in unlike), "equal 0"]


@pytest.mark.parametrize(("pairs", "expected"), [(4.64, ["pairs", "cut"]), (4.9, ["cut"])])
def test_the_fastest_of_each_way_is_decided_where_a_decision_may_make_it_the_best(
    pairs: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simplest plan of a way defers nothing: slower than what was decided before, it may still win once it is decided."""
    seconds = {"cut": (Way.PARTITIONS, 4.37), "cut too": (Way.PARTITIONS, 4.38), "pairs": (Way.PAIRS, pairs)}

    def screened(layout: SimpleNamespace, _finalist: object, _search: object) -> tuple[Screened, SimpleNamespace]:
        way, simplest = seconds[layout.ranked.name]
        outcome = Screened(name=layout.ranked.name, way=str(way), least_seconds=4.0, seconds=simplest, refused="")
        return outcome, SimpleNamespace(name=layout.ranked.name)

    def faster(best: Overlapped, finalist: SimpleNamespace, *_: object) -> Overlapped:
        decided.append(finalist.name)
        return best

    decided: list[str] = []
    monkeypatch.setattr(overlapped_search, "_screened", screened)
    monkeypatch.setattr(overlapped_search, "_faster", faster)
    plain = made_finalist("plain", experts=1)
    layouts = [SimpleNamespace(ranked=SimpleNamespace(name=name)) for name in seconds]
    search = SimpleNamespace(is_late=False)
    decide_overlaps([plain], lambda bar: layouts, search)  # type: ignore[list-item, arg-type]
    assert sorted(decided) == sorted(expected)
