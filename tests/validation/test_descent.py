"""A descent ends where no move lowers the loss, and passes points at which moves of single coordinates are stuck."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_overlap.tuner.calibrate.fit import descent
from moe_overlap.tuner.calibrate.fit.descent import (
    LEAST_GAIN,
    Floats,
    Point,
    descend,
    errors_at,
    least_deviations,
    loss_of,
    neighbours,
    polished,
    slopes_of,
    stepped,
    walked,
)

STEP = 0.01


@dataclass
class Bent:
    """Errors that are linear in the coordinates, and bent: error = slopes · x + bend · (slopes · x)² - wanted."""

    slopes: Floats
    """[N, K]"""
    wanted: Floats
    bend: float = 0.0
    pull: float = 0.0
    asked: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def weights(self) -> Floats:
        return np.ones(len(self.wanted))

    @property
    def pulls(self) -> Floats:
        return np.full(self.slopes.shape[1], self.pull)

    @property
    def concerned(self) -> Sequence[NDArray[np.int64]]:
        return [np.flatnonzero(column) for column in self.slopes.T]

    def errors(self, moves: Sequence[tuple[Point, NDArray[np.int64] | None]]) -> list[Floats]:
        answers = []
        for point, runs in moves:
            self.asked.append(tuple(int(place) for place in point))
            linear = self.slopes @ point
            found = linear + self.bend * linear**2 - self.wanted
            answers.append(found if runs is None else found[runs])
        return answers


def valley(bend: float = 0.0) -> Bent:
    """Three runs see the sum of two coordinates and one run their difference, which wants both to move in opposite directions."""
    return Bent(STEP * np.array([[1.0, 1], [1, 1], [1, 1], [1, -1]]), np.array([0.0, 0, 0, 0.4]), bend)


def test_the_descent_passes_where_single_moves_are_stuck() -> None:
    surface, origin = valley(), np.zeros(2, dtype=np.int64)
    for stride in (32, 16, 8, 4, 2, 1):
        assert np.array_equal(walked(surface, origin, stride), origin)
    assert np.array_equal(stepped(surface, origin, neighbours(surface, origin, 1)), origin)
    assert descend(surface, origin).tolist() == [20, -20]


def test_a_point_at_the_end_stays_and_no_move_lowers_its_loss() -> None:
    rng = np.random.default_rng(1)
    slopes = STEP * rng.normal(size=(9, 4)) * (rng.random((9, 4)) < 0.7)
    surface = Bent(slopes, rng.normal(size=9) / 3, bend=0.3, pull=1e-3)
    lines: list[str] = []
    end = descend(surface, np.zeros(4, dtype=np.int64), lines.append)
    assert "single steps: 0 moved" in lines[-1]
    assert np.array_equal(descend(surface, end, coarse=()), end)
    for axis, offset in itertools.product(range(4), (-1, 1)):
        move = end.copy()
        move[axis] += offset
        assert loss_of(surface, move) >= loss_of(surface, end) - LEAST_GAIN
    # From elsewhere the descent ends as low, to a hundredth of one run.
    other = descend(surface, np.array([40, -30, 20, -10]))
    assert loss_of(surface, other) == pytest.approx(loss_of(surface, end), abs=0.01)


def test_a_box_has_the_least_deviations_and_the_pulls_of_its_inside() -> None:
    rng = np.random.default_rng(2)
    surface = Bent(STEP * rng.normal(size=(7, 2)), rng.normal(size=7) / 10, pull=1.5e-2)
    point, width = np.array([3, -2]), 5
    errors = errors_at(surface, point)
    slopes = slopes_of(neighbours(surface, point, 1), 1)
    found = least_deviations(surface, point, errors, slopes, width)
    assert np.abs(found - point).max() <= width + 1e-9

    def linearised(place: Floats) -> float:
        deviations = np.abs(errors + slopes @ (place - point)).sum()
        return float(deviations + surface.pull * np.abs(place).sum())

    fine = np.linspace(-width, width, 81)
    best = min(linearised(point + np.array(offset)) for offset in itertools.product(fine, fine))
    assert linearised(found) <= best + 1e-9
    assert linearised(found) >= best - 0.01


def test_a_solver_that_gives_up_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    surface, point = Bent(STEP * rng.normal(size=(7, 2)), rng.normal(size=7) / 10, pull=1.5e-2), np.array([3, -2])
    errors, slopes = errors_at(surface, point), slopes_of(neighbours(surface, point, 1), 1)
    usual = least_deviations(surface, point, errors, slopes, 4)
    stock, asked = descent.least_deviations_by, []

    def gives_up(name: str, *arguments: Any) -> Floats | None:
        asked.append(name)
        return None if name == "GLOP" else stock(name, *arguments)

    monkeypatch.setattr(descent, "least_deviations_by", gives_up)
    found = least_deviations(surface, point, errors, slopes, 4)
    assert asked == ["GLOP", "CLP"]

    def loss(at: Floats) -> float:
        return float(surface.weights @ np.abs(errors + slopes @ (at - point)) + surface.pulls @ np.abs(at))

    assert loss(found) == pytest.approx(loss(usual), rel=1e-9)
    monkeypatch.setattr(descent, "least_deviations_by", lambda *_: None)
    with pytest.raises(RuntimeError, match="none of GLOP, CLP finds it"):
        least_deviations(surface, point, errors, slopes, 4)


def test_polishing_moves_pairs_as_well() -> None:
    surface, start = valley(), np.array([15, -15])
    found = polished(surface, start, errors_at(surface, start), surface.slopes)
    assert found.tolist() == [20, -20]
    # It asked for no price.
    assert len(surface.asked) == 1


def test_single_steps_are_repeated_twice_as_far_while_the_loss_falls() -> None:
    """From 0 to 0.4 by steps of 0.01: 1, 2, 4, 8, 16 and 32 steps are taken, and 64 would be further away on the other side."""
    surface, origin = Bent(np.array([[STEP, 0.0]]), np.array([0.4])), np.zeros(2, dtype=np.int64)
    assert stepped(surface, origin, neighbours(surface, origin, 1)).tolist() == [32, 0]


def test_slopes_are_those_of_both_sides() -> None:
    surface, point = valley(bend=0.5), np.array([4, 2])
    linear = surface.slopes @ point
    exact = surface.slopes * (1.0 + 2.0 * surface.bend * linear[:, None])
    # Differences on both sides of a parabola are its slope in the middle, whatever their span.
    for span in (1, 4):
        assert slopes_of(neighbours(surface, point, span), span) == pytest.approx(exact)


def test_a_descent_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "MOST_ROUNDS", 1)
    with pytest.raises(RuntimeError, match="still move after 1 rounds"):
        descend(valley(bend=0.3), np.zeros(2, dtype=np.int64))
