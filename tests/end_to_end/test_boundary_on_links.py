"""Tiles over a boundary of stages, on links of a rate: no slower than one leader, nor than tiles that nobody gathers."""

from __future__ import annotations

import statistics
import sys

import pytest

from tests.end_to_end.crossing import HIDDEN, RECEIVERS, SAMPLES, TOKENS
from tests.end_to_end.program import ROOT
from tests.link_hosts import namespaces_allowed
from tools.bench.bed import Bed, CpuGroup
from tools.bench.launch import LaunchedRanks

MBIT = 200.0
WAYS = ("tiles", "whole tiles", "leader")
TURNS = 5


def medians(senders: int) -> dict[str, float]:
    """Way -> the median of the seconds until its last rank is done, in turn behind one that opens connections."""
    ranks = senders + RECEIVERS
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    command = [sys.executable, "-m", "tests.end_to_end.crossing", str(senders)]
    with (
        Bed(ranks, MBIT) as bed,
        CpuGroup() as priority,
        LaunchedRanks(command, ranks, bed, priority, folder=ROOT) as all_ranks,
    ):
        for turn in range(TURNS + 1):
            for way in WAYS:
                answers = all_ranks.tell(way=way)
                assert all(whole for _, whole in answers), way
                if turn:
                    seconds[way].append(max(taken for taken, _ in answers))
    return {way: statistics.median(taken) for way, taken in seconds.items()}


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(not namespaces_allowed(), reason="needs network namespaces")
@pytest.mark.parametrize("senders", [1, 2])
def test_tiles_are_no_slower_than_a_leader_nor_than_whole_tensors(senders: int) -> None:
    taken = medians(senders)
    once = 4 * SAMPLES * TOKENS * HIDDEN / (MBIT * 1e6 / 8)
    # A share leaves every sender, and then every receiver.
    assert taken["tiles"] == pytest.approx((1 / senders + 1 / RECEIVERS) * once, rel=0.1), taken
    assert taken["tiles"] < 0.8 * taken["leader"], taken
    assert taken["tiles"] <= 1.05 * taken["whole tiles"], taken
