"""The best choice of layers, devices and frontier point for every stage: Mist's mixed-integer program, solved exactly.

Contract: problem and objective are stage_options.py's. The answer is feasible, its objective is its `step_of_choice`, and no
choice is better than the bound. The solver's objective of the answer agrees to AGREE, or an assertion fails. Each number of
stages and of micro-batches is a separate problem; per_stage.py loops over them.

Steps of `choose_stages`.
1. The additive bound, by branch and bound over the longest chain at a stage. The objective prices each choice on the way; the
   best of them and of the caller's `start` is the incumbent.
2. If the bound equals the incumbent, the incumbent is optimal and no solver runs.
3. The incumbent is improved stage by stage. A candidate is pruned if the bound of the choices through it is not below the
   incumbent. The labels of chain_labels.py search the other candidates, if pipelines have one chunk per stage and equal links,
   as those of one layout do.
4. Otherwise, or with too many labels, HiGHS solves the integer program.

The program has a variable for every term of the objective, and one row per stage for each maximum; all terms are linear in the
choice z, so nothing is approximated. It differs from Mist's in three points: first and last micro-batches are priced separately,
transfers and updates are priced, and one program divides both layers and devices.

Source: Mist, section 5.3, equations (1) to (3).
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.math_opt.python import mathopt

from moe_overlap.tuner.cost.pipeline import transfer_waits, warm_up
from moe_overlap.tuner.search.pipeline.chain_labels import applies, choose_by_labels
from moe_overlap.tuner.search.pipeline.stage_options import (
    AdditiveBound,
    BoundedChoice,
    Choice,
    Floats,
    PipelineProblem,
    improved,
    is_feasible,
    step_of_choice,
)
from moe_overlap.tuner.search.pipeline.thresholds import ROUNDING, search_thresholds
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.solver_output import output_among_errors

AGREE = 1e-5
"""Largest relative error of the solver's objective; its rows hold to a millionth."""
CLOSED = 1e-6
"""Relative gap that counts as closed."""

Rows = list[NDArray[np.intp]]
"""[S] rows of the unpruned candidates."""
Terms = list[mathopt.LinearTypes]
"""[S] times in the program's units."""
_Answering = Callable[["_Best", float, Status], Solution[Choice]]
"""(incumbent, bound, status) -> the answer."""


def choose_stages(
    problem: PipelineProblem,
    start: Choice | None = None,
    time_limit: float = math.inf,
    gap: float = 0.0,
    beat: float = math.inf,
) -> Solution[Choice]:
    """Steps 1 to 4.

    Args:
        start: a feasible choice to begin with, such as the best uniform plan.
        time_limit: seconds; after them the incumbent is the answer.
        gap: relative gap at which the integer program may stop.
        beat: incumbent seconds of the caller; an answer without a value says that no choice is faster than the smaller of `beat`
            and the bound.
    """
    started = time.perf_counter()
    deadline = started + time_limit
    assert start is None or is_feasible(problem, start), start

    def answer(best: _Best, bound: float, status: Status) -> Solution[Choice]:
        bound, seconds = min(bound, best.seconds), time.perf_counter() - started
        return Solution(value=best.choice, objective=best.seconds, bound=bound, status=status, seconds=seconds)

    # Step 1.
    best = _Best(problem, start)
    relaxed = max((AdditiveBound(problem, halves) for halves in (False, True)), key=AdditiveBound.at_once)
    lowest = relaxed.lowest()
    least = relaxed.shortest(math.inf)
    if least is None:
        return answer(best, math.inf, Status.INFEASIBLE)
    bound = least.total + lowest + relaxed.fixed
    if bound >= beat:
        return answer(_Best(problem, None), bound, Status.INFEASIBLE)
    bound, in_time = _bound(relaxed, best, lowest, least.total, deadline)
    # Step 2.
    if best.seconds <= bound * (1.0 + max(gap, ROUNDING)):
        status = Status.OPTIMAL if best.seconds <= bound * (1.0 + CLOSED) else Status.FEASIBLE
        return answer(best, best.seconds if status == Status.OPTIMAL else bound, status)
    if not in_time:
        return answer(best, bound, Status.TIME_LIMIT)
    # Step 3.
    if best.choice is not None:
        best.offer(improved(problem, best.choice))
    limit = min(best.seconds, beat)
    rows = _open_candidates(relaxed, best, lowest, least.total, limit)
    if applies(problem):
        labelled = choose_by_labels(problem, rows, limit, deadline)
        if labelled.choice is not None:
            best.offer(improved(problem, labelled.choice))
        if labelled.is_complete:
            return _answer(problem, best, min(max(bound, labelled.bound), limit), beat, True, answer)
        limit = min(best.seconds, beat)
        rows = _open_candidates(relaxed, best, lowest, least.total, limit)
    # Step 4.
    program = _Program(problem, rows, lowest)
    result = program.solve(best.choice, deadline - time.perf_counter(), gap)
    if result.choice is not None:
        seconds = best.offer(result.choice)
        assert abs(seconds - result.objective) <= AGREE * seconds, (seconds, result.objective)
    # Pruned candidates are in no choice below the limit.
    bound = min(max(bound, result.bound), limit)
    return _answer(problem, best, bound, beat, result.is_complete, answer)


def _answer(
    problem: PipelineProblem, best: _Best, bound: float, beat: float, is_complete: bool, answer: _Answering
) -> Solution[Choice]:
    """The answer of step 3 or 4, with its status."""
    if best.seconds > beat:
        best = _Best(problem, None)
    if best.seconds <= bound * (1.0 + CLOSED):
        return answer(best, bound, Status.OPTIMAL)
    if best.choice is None and is_complete:
        return answer(best, bound, Status.INFEASIBLE)
    return answer(best, bound, Status.FEASIBLE if is_complete else Status.TIME_LIMIT)


class _Best:
    """The incumbent: the fastest choice so far, by the objective."""

    def __init__(self, problem: PipelineProblem, start: Choice | None) -> None:
        self._problem = problem
        self.choice: Choice | None = None
        self.seconds = math.inf
        if start is not None:
            self.offer(start)

    def offer(self, choice: Choice) -> float:
        """Make a choice the incumbent if it is faster; returns its seconds."""
        seconds = float(step_of_choice(self._problem, choice))
        if seconds < self.seconds:
            self.choice, self.seconds = choice, seconds
        return seconds


def _bound(relaxed: AdditiveBound, best: _Best, lowest: float, least: float, deadline: float) -> tuple[float, bool]:
    """Step 1: the smallest value of the bound, and False if the deadline came first."""
    levels = relaxed.levels[relaxed.levels >= lowest]

    def shortest(threshold: float, most: float) -> BoundedChoice | None:
        relaxed_choice = relaxed.shortest(threshold, most)
        if relaxed_choice is not None:
            best.offer(relaxed_choice.choice)
        return relaxed_choice

    end = search_thresholds(levels, 1.0, least, shortest, math.inf, deadline)
    return end.bound + relaxed.fixed, end.is_complete


def _open_candidates(relaxed: AdditiveBound, best: _Best, lowest: float, least: float, limit: float) -> Rows:
    """Step 3: the candidates that may be in a choice below the limit, and those of the incumbent."""
    rows = []
    for place, (sums, chains) in enumerate(
        zip(relaxed.through(limit - relaxed.fixed - least), relaxed.chains, strict=True)
    ):
        is_open = np.isfinite(sums)
        is_open[is_open] = sums[is_open] + np.maximum(chains[is_open], lowest) + relaxed.fixed < limit
        if best.choice is not None:
            is_open[best.choice[place]] = True
        rows.append(np.flatnonzero(is_open))
    return rows


@dataclass(frozen=True, slots=True)
class _Result:
    """The solver's answer."""

    choice: Choice | None
    objective: float
    bound: float
    is_complete: bool


class _Program:
    """The integer program over the unpruned candidates.

    z[i][c]: 1 if stage i takes its candidate c. All other variables are times. Rows hold to an absolute millionth, so their unit
    is about the time of the slowest stage. Minimization pushes each of them down to the largest of its rows.
    """

    def __init__(self, problem: PipelineProblem, rows: Rows, lowest: float) -> None:
        self._problem, self._rows = problem, rows
        self._unit = lowest / problem.micro_batches or 1.0
        self.model = mathopt.Model()
        self.z = [[self.model.add_binary_variable() for _ in of_stage] for of_stage in rows]
        self._divide()
        waits, filling = self._transfers()
        count, virtual = len(problem.stages), problem.rules.virtual
        self._forward = [(self._chosen(i, "forward") + wait / 2) / virtual for i, wait in enumerate(waits)]
        self._backward = [(self._chosen(i, "backward") + wait / 2) / virtual for i, wait in enumerate(waits)]
        entered = self._entered()
        after_last, gone = self._ends()
        step = self.model.add_variable()
        forward_rest: mathopt.LinearTypes = 0.0
        backward_rest: mathopt.LinearTypes = 0.0
        for i in range(count - 1, -1, -1):
            self._chain(i, step, (entered[i], entered[-1] + backward_rest), (after_last[i], gone[-1], forward_rest))
            forward_rest = forward_rest + self._forward[i]
            backward_rest = backward_rest + self._backward[i]
        update = self._largest([self._time(i, stage.optimizer) for i, stage in enumerate(problem.stages)])
        self.model.minimize(step + filling + update)

    def _entered(self) -> Terms:
        """Per stage, as in pipeline.py: end of the first forward pass of its last chunk."""
        problem, virtual = self._problem, self._problem.rules.virtual
        rounds, _, _ = warm_up(len(problem.stages), 0, problem.micro_batches, virtual)
        around = (virtual - 1) * mathopt.fast_sum(self._forward)
        passed: mathopt.LinearTypes = 0.0
        delay: mathopt.LinearTypes = self._chosen(0, "first")
        ends: Terms = []
        for i, forward in enumerate(self._forward):
            first = self._chosen(i, "first")
            if i:
                delay = self._largest([delay, first - passed])
            passed = passed + forward
            ended, busy = passed + delay, forward + first
            if rounds:
                busy = busy + rounds * forward
                # The first stage never waits for another.
                waits = [ended + rounds * forward, ends[-1] + forward] if i else []
                ended = self._largest([ended + around, *waits])
            ends.append(self._largest([ended, busy]))
        return ends

    def _ends(self) -> tuple[Terms, Terms]:
        """Per stage, as in pipeline.py: time after its last backward pass, without and with that pass."""
        after_last: Terms = []
        gone: Terms = []
        for i, backward in enumerate(self._backward):
            tail = self._chosen(i, "tail")
            after_last.append(self._largest([tail, gone[-1]]) if i else tail)
            gone.append(backward + after_last[-1])
        return after_last, gone

    def _chain(
        self,
        i: int,
        step: mathopt.Variable,
        begins: tuple[mathopt.LinearTypes, mathopt.LinearTypes],
        ends: tuple[mathopt.LinearTypes, mathopt.LinearTypes, mathopt.LinearTypes],
    ) -> None:
        """Rows: the step is no shorter than the chains that are busy at stage i; names as in pipeline.py."""
        problem, model, virtual = self._problem, self.model, self._problem.rules.virtual
        stages = problem.stages
        rounds, warm, steady = warm_up(len(stages), i, problem.micro_batches, virtual)
        f, b = self._forward[i], self._backward[i]
        (entered, first), (after_last, all_gone, forward_rest) = begins, ends
        cycles: mathopt.LinearTypes = 0.0
        if rounds:
            cycles = self._largest([rounds * b, (virtual - 1) * mathopt.fast_sum(self._backward)])
        warmed, last = entered + warm * f, forward_rest + all_gone
        drain = b + warm * b + after_last if i < len(stages) - 1 else all_gone
        steady_begin = self._largest([warmed, first])
        if steady:
            model.add_linear_constraint(step >= cycles + steady_begin + steady * (f + b) + self._largest([drain, last]))
        else:
            model.add_linear_constraint(step >= cycles + steady_begin + drain)
            model.add_linear_constraint(step >= cycles + warmed + last)

    def _largest(self, terms: Sequence[mathopt.LinearTypes]) -> mathopt.Variable:
        """A variable that minimization pushes down to the largest of some terms."""
        largest = self.model.add_variable(lb=-math.inf)
        for term in terms:
            self.model.add_linear_constraint(largest >= term)
        return largest

    def _divide(self) -> None:
        """Rows: one candidate per stage; every layer and every device exactly once."""
        problem, model = self._problem, self.model
        for of_stage in self.z:
            model.add_linear_constraint(mathopt.fast_sum(of_stage) == 1.0)
        for kind, count in enumerate(problem.devices):
            devices = [self._sum(i, stage.devices[:, kind]) for i, stage in enumerate(problem.stages)]
            model.add_linear_constraint(mathopt.fast_sum(devices) == float(count))
        end: mathopt.LinearTypes = 0.0
        for i, stage in enumerate(problem.stages):
            # If layers differ, a stage begins at the end of the stage before it.
            if stage.first_layer is not None:
                model.add_linear_constraint(self._sum(i, stage.first_layer) == end)
            end = end + self._sum(i, stage.layers)
        model.add_linear_constraint(end == float(problem.layers))

    def _transfers(self) -> tuple[list[mathopt.LinearTypes], mathopt.LinearTypes]:
        """Times that transfers add to every stage, and to filling and draining, by pipeline.py's rules, which are linear."""
        problem, model = self._problem, self.model
        count, rules = len(problem.stages), problem.rules
        if count == 1:
            return [0.0], 0.0
        links = 1 if rules.virtual > 1 else count - 1
        # One way over each link; all links of an interleaved pipeline wait for the slowest.
        one_way = [model.add_variable(lb=0.0) for _ in range(links)]
        for i, stage in enumerate(problem.stages):
            ends = {0} if links < count - 1 else {max(0, i - 1), min(count - 2, i)}
            for link in ends:
                model.add_linear_constraint(one_way[link] >= self._time(i, stage.sent))
        if rules.virtual > 1:
            shares, filling = transfer_waits([1.0] * (count - 1), rules.virtual, rules.transfer_slowdown)
            return [float(share) * one_way[0] for share in shares], float(filling) * one_way[0]
        units = [
            transfer_waits([float(a == b) for b in range(links)], 1, rules.transfer_slowdown)[0] for a in range(links)
        ]
        waits = [
            mathopt.fast_sum(float(unit[i]) * way for unit, way in zip(units, one_way, strict=True))
            for i in range(count)
        ]
        return [*waits], 0.0

    def _chosen(self, i: int, name: str) -> mathopt.LinearTypes:
        """One time of a stage at its chosen candidate, as a variable that many rows share."""
        values = self._problem.stages[i].column(name)[self._rows[i]]
        if (values == values[0]).all():
            return float(values[0]) / self._unit
        variable = self.model.add_variable(lb=-math.inf)
        self.model.add_linear_constraint(variable == self._time(i, self._problem.stages[i].column(name)))
        return variable

    def _time(self, i: int, seconds: Floats) -> mathopt.LinearSum:
        """A column of seconds of stage i at its chosen candidate, in units."""
        return self._sum(i, seconds / self._unit)

    def _sum(self, i: int, values: Floats | NDArray[np.intp]) -> mathopt.LinearSum:
        """A column of stage i at its chosen candidate."""
        coefficients = values[self._rows[i]].tolist()
        return mathopt.fast_sum(value * z for value, z in zip(coefficients, self.z[i], strict=True) if value)

    def solve(self, start: Choice | None, seconds: float, gap: float) -> _Result:
        """Run HiGHS from a choice."""
        hints = []
        if start is not None:
            values = {
                z: float(row == start[i])
                for i, of_stage in enumerate(self.z)
                for row, z in zip(self._rows[i].tolist(), of_stage, strict=True)
            }
            hints.append(mathopt.SolutionHint(variable_values=values))
        limit = None if math.isinf(seconds) else datetime.timedelta(seconds=max(0.0, seconds))
        parameters = mathopt.SolveParameters(time_limit=limit, relative_gap_tolerance=gap, absolute_gap_tolerance=0.0)
        with output_among_errors():
            result = mathopt.solve(
                self.model,
                mathopt.SolverType.HIGHS,
                params=parameters,
                model_params=mathopt.ModelSolveParameters(solution_hints=hints),
            )
        reason = result.termination.reason
        if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
            return _Result(None, math.inf, math.inf, True)
        is_complete = reason == mathopt.TerminationReason.OPTIMAL
        fixed = self._problem.rules.fixed
        bound = result.best_objective_bound() * self._unit + fixed
        if not result.has_primal_feasible_solution():
            return _Result(None, math.inf, bound, is_complete)
        solved_values = result.variable_values()
        choice = tuple(
            int(of_stage[int(np.argmax([solved_values[z] for z in variables]))])
            for of_stage, variables in zip(self._rows, self.z, strict=True)
        )
        return _Result(choice, result.objective_value() * self._unit + fixed, bound, is_complete)
