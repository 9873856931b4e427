"""Slowdowns that are read off when jobs ran."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from moe_overlap.tuner.cost.decoupled import PASSING, _Passes, _Run
from moe_overlap.tuner.cost.interference import slowed_down
from moe_overlap.tuner.cost.overlaps import slowdowns_of
from moe_overlap.tuner.cost.stage import UseBytes, UseSeconds
from moe_overlap.tuner.cost.stage_channels import StageChannels
from moe_overlap.tuner.cost.use_slowdowns import ListKind, Part, SlowdownTable, UseSlowdowns

TABLE = slowed_down(0.5).table
"""Beside one other stream everything takes 1.5 times as long, beside two twice as long."""
NONE = np.zeros((8, 1))


def at(begin: float, end: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([begin]), np.array([end])


def test_a_job_is_slowed_down_for_as_long_as_others_run_beside_it() -> None:
    ran = {("compute", 3): at(0, 4), ("weights", 4): at(1, 5), ("compute", 4): at(5, 7), ("left", 0): at(2, 4)}
    slowed = slowdowns_of(ran, NONE, NONE, TABLE)
    assert slowed["compute", 4] == pytest.approx(1)
    # It is beside the weights for all of its time, and beside the use: two others.
    assert slowed["left", 0] == pytest.approx(2, rel=1e-5)
    # Of four seconds three are beside weights and two beside what leaves, independently of each other.
    rate = 0.25 * 0.5 + (0.75 * 0.5 + 0.25 * 0.5) / 1.5 + 0.75 * 0.5 / 2
    assert slowed["compute", 3] == pytest.approx(1 / rate, rel=1e-5)


def test_tokens_and_collectives_share_links() -> None:
    sent, shared = np.full((8, 1), 0.5), np.full((8, 1), 0.4)
    ran = {("compute", 3): at(0, 4), ("scatter", 2): at(0, 4)}
    slowed = slowdowns_of(ran, sent, shared, TABLE)
    # Half of the use computes beside the collective, and in the other half both crowd the links.
    assert slowed["compute", 3] == pytest.approx(0.5 * 1.5 + 0.5 * 1.4, rel=1e-5)
    assert slowed["scatter", 2] == pytest.approx(1 / (0.5 / 1.5 + 0.5 / 1.4), rel=1e-5)


def test_collectives_far_behind_their_uses_are_found() -> None:
    ran = {("compute", place): at(place, place + 1) for place in range(8)}
    ran |= {("scatter", 0): at(1, 2), ("scatter", 1): at(6, 7)}
    slowed = slowdowns_of(ran, NONE, NONE, TABLE)
    assert [float(slowed["compute", place][0]) for place in range(8)] == pytest.approx([1, 1.5, 1, 1, 1, 1, 1.5, 1])


def test_what_comes_long_behind_a_use_without_a_job_is_found() -> None:
    """The only scatter is that of the first use, long after it: those between have none, nor has the second strategy."""
    none = np.zeros((8, 2))
    ran = {("compute", place): (np.full(2, 1.0 * place), np.full(2, place + 1.0)) for place in (0, 1, 6)}
    ran["scatter", 0], ran["scatter", 1] = (np.array([6.0, 0.5]), np.array([7.0, 0.5])), (np.full(2, 1.2),) * 2
    slowed = slowdowns_of(ran, none, none, TABLE)
    assert slowed["compute", 6].tolist() == pytest.approx([1.5, 1]) and slowed["compute", 1].tolist() == [1, 1]


def test_strategies_that_differ_in_their_updates_alone_are_one_without_them() -> None:
    """The second differs in its optimizer step, the third in the bytes of its gradients, whatever its copies take."""
    seconds = {field.name: np.ones((2, 3)) for field in fields(UseSeconds)}
    sizes = {field.name: np.ones((2, 3)) for field in fields(UseBytes)}
    for values in (seconds["sweep"], sizes["states"]):
        values[:, 1] = 2.0
    sizes["gradients"][:, 2] = 2.0
    kind = ListKind(offloads_weights=False)
    still, places = SlowdownTable(UseSeconds(**seconds), UseBytes(**sizes), kind, slowed_down(0.5)).still
    assert places[0] == places[1] != places[2]
    assert still.sizes.gradients[0, places].tolist() == [1, 1, 2] and not still.seconds.sweep.any()


def test_a_run_that_has_been_forked_goes_on_as_one_that_has_not() -> None:
    """The second strategy offloads nothing, the third no gradients; copies take longer than uses, so that uses wait for them."""
    rng = np.random.default_rng(3)
    seconds = {field.name: rng.uniform(1.0, 2.0, (2, 3)) for field in fields(UseSeconds)}
    sizes = {field.name: rng.uniform(1.0, 2.0, (2, 3)) for field in fields(UseBytes)}
    for share in ("sent_forward", "sent_backward", "shared", "transfer_shared"):
        seconds[share] *= 0.2
    for name in ("gradients", "activations"):
        seconds[name][:, 1], seconds[name] = 0.0, 4.0 * seconds[name]
    seconds["gradients"][:, 2] = 0.0
    kind, parts = ListKind(offloads_weights=False), [Part(0), Part(1)]
    passes = _Passes(parts, ahead=1, waits=False, transfers_wait=True)
    table = SlowdownTable(UseSeconds(**seconds), UseBytes(**sizes), kind, slowed_down(0.5)).still[0]
    whole, first = (_Run(StageChannels(UseSlowdowns([parts], passes.uses, table)), passes, [PASSING]) for _ in range(2))
    whole.play(forward_waits=False)
    first.play(forward_waits=False, until=passes.drained)
    other = first.fork()
    other.play(forward_waits=False, drains=whole.taken)
    first.play(forward_waits=False)
    np.testing.assert_array_equal([*first.ends.values()], [*whole.ends.values()])
    np.testing.assert_array_equal([*first.taken.values()], [*whole.taken.values()])
    np.testing.assert_array_equal(first.later, whole.later)
    assert (other.ends[passes.order[-1]] > whole.ends[passes.order[-1]]).any()


def test_peaks_are_those_of_the_times_at_which_a_strategys_own_buffers_come() -> None:
    """The second strategy lacks the buffer that comes last. Room is free for what waits for it, whatever rounding says."""
    seconds = {field.name: np.ones((1, 2)) for field in fields(UseSeconds)}
    sizes = {field.name: np.ones((1, 2)) for field in fields(UseBytes)}
    kind, parts = ListKind(offloads_weights=False), [Part(0)]
    passes = _Passes(parts, ahead=1, waits=False, transfers_wait=True)
    table = SlowdownTable(UseSeconds(**seconds), UseBytes(**sizes), kind, slowed_down(0.5))
    channels = StageChannels(UseSlowdowns([parts], passes.uses, table))
    begin, end = np.array([0.3, 0.3]), np.ones(2)

    def hold(start: float, until: float, size: list[float]) -> None:
        channels._sizes = {("states", 0): np.array(size)}
        channels._hold("states", 0, np.full(2, start), np.full(2, until))

    hold(0.0, 0.1 + 0.2, [16.0, 16.0])
    hold(0.0, 0.5, [8.0, 8.0])
    hold(0.4, 1.0, [4.0, 4.0])
    hold(0.7, 1.0, [2.0, 0.0])
    assert 0.1 + 0.2 > 0.3
    assert channels.peak_bytes(0, begin, end).tolist() == [8.0, 12.0]


def test_last_backward_passes_of_chunks_come_as_far_apart_as_the_stage_behind_makes_them() -> None:
    ones = np.ones((1, 1))
    seconds = {field.name: 0.0 * ones for field in fields(UseSeconds)} | {"forward": ones, "backward": 2.0 * ones}
    sizes = {field.name: 0.0 * ones for field in fields(UseBytes)}
    parts = [Part(0), Part(0, chunk=1)]
    passes = _Passes(parts, ahead=1, waits=False, transfers_wait=True)
    kind = ListKind(offloads_weights=False)
    table = SlowdownTable(UseSeconds(**seconds), UseBytes(**sizes), kind, slowed_down(0.5)).still[0]
    run = _Run(StageChannels(UseSlowdowns([parts], passes.uses, table)), passes, [])
    run.play(forward_waits=False, drains=dict.fromkeys(passes.order, np.array([5.0])))
    *_, second_last, last = passes.emptying
    assert (passes.awaited, passes.spaced) == (passes.emptying[:2], passes.emptying[2:])
    assert run.ends[last] - run.ends[second_last] == pytest.approx(5.0) and run.taken[last] == pytest.approx(2.0)
