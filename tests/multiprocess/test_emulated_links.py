"""Emulated links between two processes: times follow bytes and rate exactly, data are untouched."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess import link_runs
from tests.multiprocess.link_runs import LATENCY, NOW, RATE, ROWS, WIDTH
from tests.spawn import run


def both() -> tuple[Any, Any]:
    return link_runs.exchanges(), link_runs.whole_exchange()


@pytest.fixture(scope="module")
def ran() -> list[Any]:
    return run(2, both)


@pytest.mark.parametrize("me", [0, 1])
def test_times_follow_bytes_and_rate(ran: list[Any], me: int) -> None:
    seen, other = ran[me][0], 1 - me
    leaving = 4 * WIDTH * ROWS[me][other]
    arriving = 4 * WIDTH * ROWS[other][me]
    assert seen["sent_bytes"] == 2 * leaving
    assert seen["busy_seconds"] == pytest.approx(2 * leaving / RATE)
    # The second follows the first on the sender's link; the first is waited for after it.
    assert seen["moments"] == pytest.approx([NOW + n * arriving / RATE + LATENCY for n in (2, 1)])
    rows = [float(source) for source, counts in enumerate(ROWS) for _ in range(counts[me])]
    assert seen["arrived"] == [[row + 10 for row in rows], rows]


def test_replaced_exchanges_move_the_same_rows(ran: list[Any]) -> None:
    assert ran[0][1] == ran[1][1] == [True] * 8
