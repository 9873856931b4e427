"""Descent of a sum of absolute errors on a grid: moves of one coordinate, and of all of them by a linear program.

The loss of a point is the weighted sum of absolute logarithmic errors plus a pull for every step away from zero. Moves of single
coordinates stop too early: if two coordinates explain the same errors, raising one and lowering the other may lower the loss,
while each move by itself raises it. A round therefore

1. takes the slopes of all errors by central differences, which price the neighbours of the point;
2. solves the linearised problem, least absolute deviations with pulls, inside a box around the point, as a linear program;
3. rounds the solution to the grid, and moves single coordinates and pairs while the linearised loss falls;
4. prices the result, and accepts it only if the true loss is lower. Boxes shrink until none lowers the loss.

Then every coordinate is moved by one step. The descent ends when neither boxes nor single steps lower the loss. Every acceptance
compares true losses at points of the grid, so the same errors lead to the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

Floats = NDArray[np.float64]
Point = NDArray[np.int64]
"""[K] steps of every coordinate."""

COARSE = (32, 16, 8)
"""Strides of the first rounds, in steps; they approach the minimum."""
WIDEST = 32
"""Largest half width of a box."""
SOLVERS = ("GLOP", "CLP")
"""Solvers of linear programs, tried in this order: the first sometimes stops without an answer, for lack of precision."""
FAR_SPAN = 4
"""Half the distance of the points for slopes, in steps; 1 once a round moves nothing."""
MOST_ROUNDS = 60
LEAST_GAIN = 1e-3
"""A move must lower the loss by a tenth of a per cent of one run. Repeated runs differ by more, and smaller gains would cost many
rounds."""


class Surface(Protocol):
    """Errors over a grid of K coordinates and N runs."""

    @property
    def weights(self) -> Floats:
        """[N]"""

    @property
    def pulls(self) -> Floats:
        """[K] loss per step away from zero."""

    @property
    def concerned(self) -> Sequence[NDArray[np.int64]]:
        """[K] indices of the runs that a coordinate acts on."""

    def errors(self, moves: Sequence[tuple[Point, NDArray[np.int64] | None]]) -> list[Floats]:
        """Logarithmic errors at points, of some runs each or of all."""


def errors_at(surface: Surface, point: Point) -> Floats:
    """[N] logarithmic errors of all runs at a point."""
    (errors,) = surface.errors([(point, None)])
    return errors


def loss_of(surface: Surface, point: Point, errors: Floats | None = None) -> float:
    """The loss of a point."""
    errors = errors_at(surface, point) if errors is None else errors
    return float((surface.weights * np.abs(errors)).sum() + (surface.pulls * np.abs(point)).sum())


def descend(
    surface: Surface, start: Point, report: Callable[[str], None] = lambda line: None, coarse: Sequence[int] = COARSE
) -> Point:
    """The point where no move lowers the loss.

    Args:
        coarse: strides of the first rounds; empty if the start is close to the minimum.
    Raises:
        RuntimeError: coordinates still move after the last round.
    """
    point = start.copy()
    for stride in coarse:
        point = walked(surface, point, stride)
        report(f"strides of {stride}: loss {loss_of(surface, point):.3f}")
    span = FAR_SPAN if coarse else 1
    for number in range(MOST_ROUNDS):
        around = neighbours(surface, point, span)
        next_point, method = followed(surface, point, slopes_of(around, span)), f"slopes over {span}"
        if span == 1 and np.array_equal(next_point, point):
            next_point, method = stepped(surface, point, around), "single steps"
        moved = int((next_point != point).sum())
        report(f"round {number + 1}, {method}: {moved} moved, loss {loss_of(surface, next_point):.3f}")
        if not moved and span == 1:
            return point
        span = span if moved else 1
        point = next_point
    raise RuntimeError(f"constants still move after {MOST_ROUNDS} rounds")


def is_settled(surface: Surface, point: Point) -> bool:
    """True if neither a linear program nor a single step lowers the loss of a point, which ends a descent."""
    around = neighbours(surface, point, 1)
    ends = (followed(surface, point, slopes_of(around, 1)), stepped(surface, point, around))
    return all(np.array_equal(end, point) for end in ends)


def walked(surface: Surface, start: Point, stride: int) -> Point:
    """The point after one stride of every coordinate in turn, down or up, if it lowers the loss."""
    point, errors = start.copy(), errors_at(surface, start)
    for axis, runs in enumerate(surface.concerned):
        weights, pull = surface.weights[runs], float(surface.pulls[axis])
        moves = [_shifted(point, axis, offset) for offset in (-stride, stride)]
        moved_errors = surface.errors([(move, runs) for move in moves])
        before = float((weights * np.abs(errors[runs])).sum()) + pull * abs(int(point[axis]))
        after = [
            float((weights * np.abs(after_move)).sum()) + pull * abs(int(move[axis]))
            for after_move, move in zip(moved_errors, moves, strict=True)
        ]
        best = min(range(2), key=lambda i: after[i])
        if after[best] < before - LEAST_GAIN:
            point = moves[best]
            errors[runs] = moved_errors[best]
    return point


def neighbours(surface: Surface, point: Point, span: int) -> Floats:
    """[2, N, K] errors with each coordinate `span` steps down and up."""
    center = errors_at(surface, point)
    around = np.broadcast_to(center[None, :, None], (2, len(surface.weights), len(point))).copy()
    places = [(side, runs, axis) for axis, runs in enumerate(surface.concerned) for side in range(2)]
    moves = [(_shifted(point, axis, (-span, span)[side]), runs) for side, runs, axis in places]
    for place, errors in zip(places, surface.errors(moves), strict=True):
        around[place] = errors
    return around


def slopes_of(around: Floats, span: int) -> Floats:
    """[N, K] change of every error per step, from the errors of neighbours on both sides."""
    return (around[1] - around[0]) / (2 * span)


def stepped(surface: Surface, start: Point, around: Floats) -> Point:
    """The point after single steps of coordinates, the best first, and after multiples of their sum.

    Each step must lower the loss after the steps before it. At a kink of the errors the slopes of both sides mislead the linear
    program; then the change of all single steps together is repeated, twice as far each time, until the loss rises.

    Args:
        around: errors of the neighbours one step away.
    """
    before = loss_of(surface, start)
    moves = [_shifted(start, axis, offset) for offset in (-1, 1) for axis in range(len(start))]
    after = [
        loss_of(surface, move, errors)
        for move, errors in zip(moves, np.vstack([around[0].T, around[1].T]), strict=True)
    ]
    point, best = start, before
    for place in sorted(range(len(moves)), key=lambda place: (after[place], place)):
        if after[place] >= before - LEAST_GAIN:
            break
        move = point + moves[place] - start
        loss = loss_of(surface, move)
        if loss < best - LEAST_GAIN:
            point, best = move, loss
    direction = point - start
    while direction.any():
        loss = loss_of(surface, point + direction)
        if loss >= best - LEAST_GAIN:
            break
        point, best, direction = point + direction, loss, 2 * direction
    return point


def followed(surface: Surface, start: Point, slopes: Floats) -> Point:
    """The point after moves by the linearised problem, in boxes that shrink if the true loss does not fall."""
    point, errors = start, errors_at(surface, start)
    best, width = loss_of(surface, start, errors), WIDEST
    while width >= 1:
        move = linear_move(surface, point, errors, slopes, width)
        move_errors = errors_at(surface, move)
        loss = loss_of(surface, move, move_errors)
        if loss < best - LEAST_GAIN:
            point, errors, best = move, move_errors, loss
        else:
            width //= 2
    return point


def linear_move(surface: Surface, point: Point, errors: Floats, slopes: Floats, width: int) -> Point:
    """The solution of the linearised problem as a point of the grid, at most `width` steps away, except for rounding."""
    solution = least_deviations(surface, point, errors, slopes, width)
    rounded = np.rint(solution).astype(np.int64)
    return polished(surface, rounded, errors + slopes @ (rounded - point), slopes)


def least_deviations(surface: Surface, point: Point, errors: Floats, slopes: Floats, width: int) -> Floats:
    """[K] the minimum of the linearised loss inside a box."""
    for name in SOLVERS:
        solution = least_deviations_by(name, surface, point, errors, slopes, width)
        if solution is not None:
            return solution
    raise RuntimeError(f"a box has a minimum, and none of {', '.join(SOLVERS)} finds it")


def least_deviations_by(
    name: str, surface: Surface, point: Point, errors: Floats, slopes: Floats, width: int
) -> Floats | None:
    """The answer of `least_deviations` by one solver; None if it stops without one.

    The absolute value of an error is a variable that is at least the error and at least its negative; so is that of a step.
    """
    solver = pywraplp.Solver.CreateSolver(name)
    infinity, objective = solver.infinity(), solver.Objective()
    places = [solver.NumVar(float(at - width), float(at + width), "") for at in point]
    for place, pull in zip(places, surface.pulls, strict=True):
        size = solver.NumVar(0.0, infinity, "")
        solver.Add(size >= place)
        solver.Add(size >= -place)
        objective.SetCoefficient(size, float(pull))
    # error(x) = errors + slopes · (x - point); size - slopes · x >= offset, and size + slopes · x >= -offset
    offsets = errors - slopes @ point
    for run, weight in enumerate(surface.weights):
        size = solver.NumVar(0.0, infinity, "")
        objective.SetCoefficient(size, float(weight))
        for sign in (1.0, -1.0):
            row = solver.Constraint(sign * float(offsets[run]), infinity)
            row.SetCoefficient(size, 1.0)
            for axis in np.flatnonzero(slopes[run]):
                row.SetCoefficient(places[axis], -sign * float(slopes[run, axis]))
    objective.SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return np.array([place.solution_value() for place in places])


def polished(surface: Surface, start: Point, errors: Floats, slopes: Floats) -> Point:
    """The rounded point after single steps and pairs of them, the best first, while the linearised loss falls.

    Args:
        errors: linearised errors of the start.
    """
    point, errors = start.copy(), errors.copy()
    axes = np.concatenate([np.arange(len(point))] * 2)
    signs = np.repeat([1, -1], len(point))
    changes = (slopes[:, axes] * signs).T  # [2K, N]
    same = axes[:, None] == axes[None, :]
    while True:
        size = float((surface.weights * np.abs(errors)).sum())
        pulled = surface.pulls[axes] * (np.abs(point[axes] + signs) - np.abs(point[axes]))
        singles = (np.abs(errors + changes) * surface.weights).sum(axis=1) - size + pulled
        # Pairs by rows, so that they need no more memory than [2K, N].
        pairs = np.array(
            [
                (np.abs(errors + change + changes) * surface.weights).sum(axis=1) - size + pull + pulled
                for change, pull in zip(changes, pulled, strict=True)
            ]
        )
        pairs[same] = np.inf
        first, second = np.unravel_index(int(pairs.argmin()), pairs.shape)
        single = int(singles.argmin())
        chosen = [single] if singles[single] <= pairs[first, second] else [int(first), int(second)]
        if min(float(singles[single]), float(pairs[first, second])) > -LEAST_GAIN:
            return point
        for move in chosen:
            point[axes[move]] += signs[move]
            errors = errors + changes[move]


def _shifted(point: Point, axis: int, offset: int) -> Point:
    moved = point.copy()
    moved[axis] += offset
    return moved
