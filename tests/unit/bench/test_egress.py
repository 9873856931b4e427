"""The virtual clock of an emulated link."""

from __future__ import annotations

import pytest

from tools.bench.emulator import HANDED_OVER_BYTES, EgressClock, sleep_until


def test_messages_leave_one_after_another() -> None:
    moments = iter([10.0, 10.5, 20.0])
    clock = EgressClock(1000.0, now=lambda: next(moments))
    assert clock.send(2000) == 12.0
    assert clock.send(500) == 12.5, "the second waits for the first"
    assert clock.send(1000) == 21.0, "an idle link gives nothing back"
    assert (clock.sent_bytes, clock.busy_seconds) == (3500, 3.5)


def test_a_small_message_overtakes_what_is_held_back() -> None:
    moments = iter([10.0, 10.0, 19.9])
    rate = HANDED_OVER_BYTES / 2.0
    clock = EgressClock(rate, now=lambda: next(moments))
    assert clock.send(5 * HANDED_OVER_BYTES) == 20.0
    assert clock.overtake(HANDED_OVER_BYTES // 2) == 13.0, "two seconds for what was handed over, one for itself"
    assert clock.overtake(0) == pytest.approx(20.0), "nothing is held back any more"
    assert clock.busy_seconds == 10.0 and EgressClock(None, now=lambda: 7.0).overtake(9) == 7.0


def test_a_free_link_takes_no_time() -> None:
    clock = EgressClock(None, now=lambda: 7.0)
    assert clock.send(1 << 30) == 7.0 and clock.busy_seconds == 0.0
    clock.bytes_per_second = 1.0
    assert clock.send(3) == 10.0


def test_sleep_ends_at_the_moment() -> None:
    moments = iter([1.0, 1.5, 2.0])
    sleep_until(1.5001, now=lambda: next(moments))
    assert next(moments, None) is None, "sleeps again when it woke too early"
