"""The queue of weight gradients: order, bytes, bound, and what is left over."""

from __future__ import annotations

import random
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_overlap.runtime.weight_grad.queue import DeferralError, WeightGradQueue, drain_after_backward


def filled(queue: WeightGradQueue, names: str, size: int = 4, communicating: str = "") -> list[str]:
    """Put one closure per letter, each with a tensor of `size` bytes; the answer is what ran, in order."""
    ran: list[str] = []
    for number, name in enumerate(names):
        held = [torch.zeros(size, dtype=torch.uint8)]
        queue.put(name, partial(ran.append, f"{name}{number}"), held, communicates=name in communicating)
    return ran


def test_one_name_runs_in_its_order_and_the_rest_waits():
    queue = WeightGradQueue()
    ran = filled(queue, "abab")
    assert queue.run("b") == 2 and ran == ["b1", "b3"] and len(queue) == 2
    assert queue.run("b") == 0 and queue.run("never put") == 0
    queue.run_all()
    assert ran == ["b1", "b3", "a0", "a2"]
    queue.assert_empty()


def test_what_is_left_is_named():
    queue = WeightGradQueue()
    filled(queue, "aab")
    queue.run("b")
    with pytest.raises(DeferralError, match=r"not computed: a \(2\)$"):
        queue.assert_empty()
    many = WeightGradQueue()
    filled(many, "abcdefghij")
    with pytest.raises(DeferralError, match=r"h \(1\), 2 more$"):
        many.assert_empty()


def test_a_lost_closure_is_noticed_though_nothing_waits():
    queue = WeightGradQueue()
    filled(queue, "ab")
    del queue._entries[0]
    queue.run_all()
    assert len(queue) == 0
    with pytest.raises(DeferralError, match=r"a \(1\)"):
        queue.assert_empty()


def test_each_storage_is_counted_once_and_whole():
    queue = WeightGradQueue()
    rows = torch.zeros(10, 100)
    queue.put("a", lambda: None, (rows[:2], rows[2:3]))
    queue.put("b", lambda: None, (rows, torch.zeros(5)))
    assert queue.peak_bytes == rows.nbytes + 20
    queue.run("a")
    queue.put("c", lambda: None, (torch.zeros(1),))
    assert queue.peak_bytes == rows.nbytes + 24
    queue.run_all()
    queue.put("d", lambda: None, (torch.zeros(2),))
    assert queue.peak_bytes == rows.nbytes + 24


def test_beyond_the_bound_closures_run_at_once_behind_older_ones_of_their_name():
    queue = WeightGradQueue(max_bytes=10)
    ran = filled(queue, "abaca")
    assert ran == ["a0", "a2", "a4"] and len(queue) == 5
    assert (queue.inline.count, queue.inline.bytes, queue.peak_bytes) == (3, 12, 8)
    queue.run_all()
    assert ran[3:] == ["b1", "c3"]
    queue.assert_empty()


def test_a_bound_of_nothing_defers_nothing():
    queue = WeightGradQueue(max_bytes=0)
    assert filled(queue, "aba", communicating="b") == ["a0", "b1", "a2"]
    assert queue.inline.count == 3 and queue.peak_bytes == 0
    assert queue.figures() == {"deferred_peak_bytes": 0, "deferred_early": 3}


def test_what_was_computed_early_is_announced_in_its_turn_and_holds_nothing():
    queue, log = WeightGradQueue(max_bytes=0), []
    tensor = torch.zeros(100)
    gone = weakref.ref(tensor)

    def compute(held=tensor):
        log.append("compute")

    queue.put("a", compute, (tensor,), announce=lambda: log.append("announce"))
    del tensor, compute
    assert log == ["compute"] and gone() is None
    assert queue.run("a") == 1 and log == ["compute", "announce"]
    queue.assert_empty()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_with_unequal_routed_bytes_start_collectives_in_the_same_order(seed):
    """Two ranks run one program; only the bytes of what does not communicate differ."""
    generator = random.Random(seed)
    program = [(generator.choice("abcxyz"), generator.random() < 0.1) for _ in range(60)]
    orders = []
    for rank in range(2):
        queue, own = WeightGradQueue(max_bytes=64), random.Random(1000 * seed + rank)
        ran: list[str] = []
        announced: list[int] = []
        for number, (name, runs) in enumerate(program):
            if runs:
                queue.run(name)
            size = 10 if name in "abc" else own.randrange(50)
            held = [torch.zeros(size, dtype=torch.uint8)]
            announce = partial(announced.append, number)
            ready = partial(ran.append, f"{name}{number}")
            queue.put(name, ready, held, announce=announce, communicates=name in "abc")
            assert queue._held.bytes <= 64
        queue.run_all()
        queue.assert_empty()
        assert sorted(ran) == sorted(f"{name}{number}" for number, (name, _) in enumerate(program))
        for name in "abcxyz":
            mine = [int(entry[1:]) for entry in ran if entry[0] == name]
            assert mine == sorted(mine)
        orders.append(([entry for entry in ran if entry[0] in "abc"], announced))
    assert orders[0] == orders[1]


class _Puts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, log, queue):
        ctx.log, ctx.queue = log, queue
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append("backward")
        ctx.queue.put(
            "w", lambda: ctx.log.append("closure" if not torch.is_grad_enabled() else "closure with gradients")
        )
        return gradient * 2, None, None


def test_the_queue_runs_empty_when_the_whole_backward_pass_is_over():
    queue, log = WeightGradQueue(), []

    class Chunk(torch.nn.Module):
        def forward(self, x):
            for _ in range(2):
                x = checkpoint(lambda y: _Puts.apply(y, log, queue), x, use_reentrant=True)
            return x

    chunk = Chunk()
    drain_after_backward(chunk, queue)
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        log.clear()
        chunk(x).sum().backward()
        assert log == ["backward", "backward", "closure", "closure"]
        queue.assert_empty()
    with torch.no_grad():
        chunk(x)
