"""The choice of layers, devices and frontier points of all stages against every choice, and against the cuts."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from moe_overlap.tuner.cost.evaluate import StageCosts
from moe_overlap.tuner.cost.pipeline import PipelineRules, StageTimes
from moe_overlap.tuner.search.pipeline import mist_milp
from moe_overlap.tuner.search.pipeline.mist_milp import choose_stages
from moe_overlap.tuner.search.pipeline.stage_cuts import CutProblem, cut_stages
from moe_overlap.tuner.search.pipeline.stage_options import (
    AdditiveBound,
    PipelineProblem,
    StageOptions,
    improved,
    is_feasible,
    options_of,
    step_of_choice,
    undominated,
)
from moe_overlap.tuner.search.solution import Status

INSTANCES = 100


def random_options(draw: np.random.Generator, count: int, edges: float, unlike: bool, types: int) -> StageOptions:
    """Points that trade stable seconds for seconds of the first and last micro-batch; some do not fit."""
    layers = draw.integers(1, 4, count)
    work = layers * draw.uniform(0.5, 1.5, count)
    extras = {name: edges * draw.uniform(0, 4, count) * draw.integers(0, 2, count) for name in ("first", "tail")}
    return StageOptions(
        layers=layers,
        devices=np.where(draw.integers(0, types, count)[:, None] == range(types), draw.integers(1, 3, (count, 1)), 0),
        times=StageTimes(forward=work, backward=work * draw.uniform(1, 2, count), **extras),
        optimizer=edges * draw.uniform(0, 2, count),
        fits=draw.random(count) < 0.85,
        sent=draw.uniform(0, 0.3, count) * draw.integers(0, 2),
        first_layer=draw.integers(0, 5, count) if unlike else None,
    )


def random_problem(draw: np.random.Generator) -> PipelineProblem:
    stages = int(draw.integers(1, 5))
    edges, unlike = float(draw.choice([0.0, 1.0, 4.0])), bool(draw.random() < 0.25)
    types = 2 if draw.random() < 0.3 else 1
    options = [random_options(draw, int(draw.integers(2, 8)), edges, unlike, types) for _ in range(stages)]
    if unlike:
        # The first stage begins with the first layer, and so on: half of the candidates continue an earlier one.
        end = 0
        for stage in options:
            assert stage.first_layer is not None
            stage.first_layer[::2] = end
            end += int(stage.layers[0])
    return PipelineProblem(
        stages=tuple(options),
        # Sometimes a layer more than the first candidates hold, which may fit no choice.
        layers=sum(int(stage.layers[0]) for stage in options) + int(draw.integers(0, 6) == 0),
        devices=tuple(sum(stage.devices[0] for stage in options).tolist()),
        micro_batches=int(draw.choice([1, 2, 8, 64])),
        rules=PipelineRules(
            virtual=int(draw.choice([1, 1, 2])), transfer_slowdown=draw.choice([None, 0.15]), fixed=0.02
        ),
    )


def of_all(problem: PipelineProblem) -> tuple[float, tuple[int, ...]]:
    """The best of every choice; infinite, and no choice, where none is feasible."""
    every = np.array([*product(*[range(len(stage)) for stage in problem.stages])])
    layers, devices = np.zeros(len(every), dtype=int), np.zeros((len(every), len(problem.devices)), dtype=int)
    feasible = np.ones(len(every), dtype=bool)
    for stage, row in zip(problem.stages, every.T, strict=True):
        feasible &= stage.fits[row]
        if stage.first_layer is not None:
            feasible &= stage.first_layer[row] == layers
        layers, devices = layers + stage.layers[row], devices + stage.devices[row]
    feasible &= (layers == problem.layers) & (devices == problem.devices).all(axis=1)
    if not feasible.any():
        return math.inf, ()
    seconds = step_of_choice(problem, every[feasible].T)
    return float(seconds.min()), tuple(every[feasible][seconds.argmin()].tolist())


@pytest.mark.parametrize("closed_by_bound", [True, False])
def test_choice_is_the_best_of_all(closed_by_bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the steps in front of the solver, and where neither the bound nor labels are of any use."""
    if not closed_by_bound:
        monkeypatch.setattr(mist_milp, "applies", lambda problem: False)
        monkeypatch.setattr(mist_milp, "_bound", lambda relaxed, best, lowest, least, deadline: (0.0, True))
        monkeypatch.setattr(
            mist_milp, "_open_candidates", lambda relaxed, *_: [np.flatnonzero(np.isfinite(s)) for s in relaxed.chains]
        )
    draw = np.random.default_rng(53)
    infeasible = 0
    for _ in range(INSTANCES):
        problem = random_problem(draw)
        best, _ = of_all(problem)
        solution = choose_stages(problem)
        assert solution.objective == pytest.approx(best, rel=2e-6)
        if solution.value is None:
            infeasible += 1
            assert solution.status == Status.INFEASIBLE
            continue
        assert solution.status == Status.OPTIMAL and solution.gap < 2e-6 and solution.bound <= best
        assert is_feasible(problem, solution.value)
        assert solution.objective == float(step_of_choice(problem, solution.value))
    assert 5 < infeasible < INSTANCES / 2


@pytest.mark.parametrize("halves", [False, True])
def test_bound_is_below_every_choice_and_meets_those_without_edges(halves: bool) -> None:
    draw = np.random.default_rng(54)
    met = 0
    for _ in range(INSTANCES // 2):
        problem = random_problem(draw)
        best, choice = of_all(problem)
        if math.isinf(best):
            continue
        relaxed = AdditiveBound(problem, halves)
        bounds = [
            found.total + found.slowest + relaxed.fixed
            for found in (relaxed.shortest(float(level)) for level in relaxed.levels)
            if found is not None
        ]
        assert min(bounds) <= best * (1 + 1e-12)
        if not any(stage.sent.any() or stage.optimizer.any() for stage in problem.stages):
            # Where the last stage is the slowest.
            met += min(bounds) == pytest.approx(best, rel=1e-12)
            assert problem.micro_batches < 8 or min(bounds) > 0.8 * best
        # No candidate of the best choice looks worse than that choice is.
        for sums, chains, row in zip(relaxed.through(math.inf), relaxed.chains, choice, strict=True):
            assert sums[row] + chains[row] + relaxed.fixed <= best * (1 + 1e-12)
    assert met >= 2


def test_no_single_stage_does_better_in_an_improved_choice() -> None:
    draw = np.random.default_rng(61)
    better = 0
    for _ in range(30):
        problem = random_problem(draw)
        solution = choose_stages(problem, gap=0.5)
        if solution.value is None:
            continue
        choice = improved(problem, solution.value)
        assert is_feasible(problem, choice)
        seconds = float(step_of_choice(problem, choice))
        better += seconds < solution.objective
        for place, stage in enumerate(problem.stages):
            for row in range(len(stage)):
                other = (*choice[:place], row, *choice[place + 1 :])
                assert not is_feasible(problem, other) or float(step_of_choice(problem, other)) >= seconds
    assert better > 0


def test_a_start_is_never_lost_and_seconds_of_no_interest_are_not_searched() -> None:
    draw = np.random.default_rng(55)
    for _ in range(15):
        problem = random_problem(draw)
        solution = choose_stages(problem)
        if solution.value is None:
            continue
        stopped = choose_stages(problem, start=solution.value, time_limit=0.0)
        assert (
            stopped.value is not None
            and stopped.objective <= solution.objective
            and stopped.bound <= solution.objective
        )
        cut_off = choose_stages(problem, beat=0.9 * solution.objective)
        assert cut_off.value is None and cut_off.status == Status.INFEASIBLE
        assert cut_off.bound >= 0.9 * solution.objective * (1 - 1e-6)
        assert choose_stages(problem, beat=1.1 * solution.objective).objective == pytest.approx(
            solution.objective, rel=2e-6
        )
        rough = choose_stages(problem, gap=0.1)
        assert rough.objective <= solution.objective * 1.12 and rough.gap <= 0.1 + 1e-6


def test_a_search_for_less_proves_no_more_than_that_there_is_none() -> None:
    """The candidates left out may be in a choice between the limit and the bound of the others."""
    problem = random_problem(np.random.default_rng(52))
    best = choose_stages(problem).objective
    cut_off = choose_stages(problem, beat=0.9 * best)
    assert cut_off.value is None and 0.9 * best * (1 - 1e-6) <= cut_off.bound <= best * (1 + 1e-6)


def test_candidates_that_a_pipeline_may_need_hold_a_best_choice() -> None:
    """Few values, so that candidates dominate one another in all columns."""
    draw = np.random.default_rng(58)
    left = total = 0
    for _ in range(60):
        problem = random_problem(draw)
        rough = [
            replace(
                stage,
                times=StageTimes(**{f.name: np.ceil(stage.column(f.name)) for f in fields(StageTimes)}),
                optimizer=np.ceil(stage.optimizer),
                sent=np.ceil(5 * stage.sent) / 5,
            )
            for stage in problem.stages
        ]
        rows = [undominated(stage, place, len(rough), problem.rules.virtual) for place, stage in enumerate(rough)]
        best, _ = of_all(replace(problem, stages=tuple(rough)))
        # What is left out counts as what does not fit.
        kept = [
            replace(stage, fits=stage.fits & np.isin(np.arange(len(stage)), of_stage))
            for stage, of_stage in zip(rough, rows, strict=True)
        ]
        reduced, _ = of_all(replace(problem, stages=tuple(kept)))
        assert reduced == pytest.approx(best, rel=1e-12)
        left, total = left + sum(map(len, rows)), total + sum(int(stage.fits.sum()) for stage in rough)
    assert left < total


def test_candidates_of_costs_are_strategy_by_strategy() -> None:
    draw = np.random.default_rng(59)
    arrays = {f.name: draw.random((3, 4)) for f in fields(StageCosts) if f.name != "peaks"}
    costs = StageCosts(**arrays, peaks={})
    fits = draw.random((3, 4)) < 0.5
    options = options_of(costs, np.array([1, 2, 3, 4]), (8,), 0.1, fits)
    for row, (strategy, shape) in enumerate(product(range(3), range(4))):
        times = options.at(np.array(row))
        for field in fields(StageTimes):
            stable = field.name in ("forward", "backward", "tail")
            column = arrays[f"{field.name}_seconds" if stable else f"{field.name}_extra_seconds"]
            assert getattr(times, field.name) == column[strategy, shape]
        assert (options.layers[row], options.fits[row]) == (shape + 1, fits[strategy, shape])
        assert options.optimizer[row] == costs.optimizer_seconds[strategy, shape]
        assert options.devices[row].tolist() == [8] and options.sent[row] == 0.1


def test_choice_and_cuts_agree_where_both_apply() -> None:
    """Stable seconds alone, the same meshes and cuts, the best number of stages."""
    draw = np.random.default_rng(56)
    for _ in range(12):
        layers, devices = int(draw.integers(2, 6)), int(draw.choice([2, 4]))
        sizes = [size for size in (1, 2, 4) if size <= devices]
        seconds = draw.uniform(1, 5, (layers, layers, layers, len(sizes)))
        cuts = CutProblem(
            seconds=seconds,
            devices_of=np.array(sizes)[:, None],
            devices=(devices,),
            micro_batches=int(draw.choice([1, 4, 32])),
            transfer_seconds=np.zeros((layers - 1, 1)),
        )
        first, last, option = (
            axis.ravel() for axis in np.meshgrid(range(layers), range(layers), range(len(sizes)), indexing="ij")
        )
        kept = first <= last
        first, last, option = first[kept], last[kept], option[kept]
        best = math.inf
        for count in range(1, layers + 1):
            stages = [
                StageOptions(
                    layers=last - first + 1,
                    devices=np.array(sizes)[option, None],
                    times=StageTimes(forward=0.0 * first, backward=seconds[count - 1 - place, first, last, option]),
                    optimizer=np.zeros(len(first)),
                    fits=np.ones(len(first), dtype=bool),
                    sent=np.zeros(len(first)),
                    first_layer=first,
                )
                for place in range(count)
            ]
            problem = PipelineProblem(
                stages=tuple(stages),
                layers=layers,
                devices=(devices,),
                micro_batches=cuts.micro_batches,
                rules=PipelineRules(virtual=1, transfer_slowdown=None),
            )
            best = min(best, choose_stages(problem).objective)
        assert best == pytest.approx(cut_stages(cuts).objective, rel=1e-6)
