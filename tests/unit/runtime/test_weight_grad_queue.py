"""The queue of weight gradients: order, bytes, bound, and what is left over."""

from __future__ import annotations

import random
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_overlap.runtime.weight_grad.queue import DeferralError, DeferredBytesExceeded, WeightGradQueue
from tests.drained import drain_after_backward


def filled(queue: WeightGradQueue, names: str, size: int = 4) -> list[str]:
    """Put one closure per letter, each with a tensor of `size` bytes; the answer is what ran, in order."""
    ran: list[str] = []
    for number, name in enumerate(names):
        held = [torch.zeros(size, dtype=torch.uint8)]
        queue.put(name, partial(ran.append, f"{name}{number}"), held)
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
    queue.begin_operator()
    assert queue.peak_bytes == rows.nbytes + 20
    queue.run("a")
    queue.put("c", lambda: None, (torch.zeros(1),))
    queue.begin_operator()
    assert queue.peak_bytes == rows.nbytes + 24
    queue.run_all()
    queue.put("d", lambda: None, (torch.zeros(2),))
    queue.begin_operator()
    assert queue.peak_bytes == rows.nbytes + 24


def test_bytes_beyond_the_bound_are_refused_and_nothing_is_computed_for_them():
    queue = WeightGradQueue(max_bytes=8)
    ran = filled(queue, "ab")
    queue.begin_operator()
    queue.put("c", lambda: None, (torch.zeros(1, dtype=torch.uint8),))
    # What a list computes early is held between two instructions; only what waits longer counts.
    assert queue.run("c", 1, is_early=True) == 1
    queue.begin_operator()
    assert queue.figures() == {"deferred_peak_bytes": 8, "deferred_early": 1}
    filled(queue, "d", size=1)
    message = (
        "--max-deferred-bytes 8: weight gradients that wait hold 9 bytes on this rank; .* 2 times .*; give 18 or more$"
    )
    with pytest.raises(DeferredBytesExceeded, match=message):
        queue.begin_operator()
    assert ran == []


def test_a_list_computes_partitions_apart_and_announces_them_together():
    queue, log = WeightGradQueue(), []
    tensor = torch.zeros(100)
    gone = weakref.ref(tensor)

    def compute(number, held):
        log.append(f"compute {number}")

    for number in range(3):
        held = tensor if number == 0 else torch.zeros(1)
        queue.begin_operator()
        queue.put("a", partial(compute, number, held), (held,), announce=partial(log.append, f"announce {number}"))
    del tensor, held
    assert queue.run("a", 1, announce=False) == 1 and log == ["compute 0"]
    # An announcement that waits keeps nothing alive.
    assert gone() is None
    with pytest.raises(DeferralError, match="not computed: a"):
        queue.assert_empty()
    log.clear()
    assert queue.run("a", 2) == 2
    assert log == ["compute 1", "compute 2", "announce 0", "announce 1", "announce 2"]
    queue.assert_empty()


def test_a_list_that_computes_what_was_not_put_is_noticed():
    queue = WeightGradQueue()
    filled(queue, "a")
    with pytest.raises(DeferralError, match="a: the list computes what 2 operators left, and 1 did"):
        queue.run("a", 2)


def test_an_operator_may_put_several_gradients_of_a_name():
    """Experts that are products of their own do so: a partition of them is computed as one."""
    queue = WeightGradQueue()
    ran = filled(queue, "aa")
    queue.begin_operator()
    ran_later = filled(queue, "aa")
    assert queue.run("a", 1) == 2 and ran == ["a0", "a1"] and ran_later == []
    assert queue.run("a", 1) == 2 and ran_later == ["a0", "a1"]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_with_unequal_routed_bytes_start_collectives_in_the_same_order(seed):
    """Two ranks run one program; only the bytes they hold differ, and bytes decide nothing."""
    generator = random.Random(seed)
    program = [(generator.choice("abcxyz"), generator.random() < 0.1) for _ in range(60)]
    orders = []
    for rank in range(2):
        queue, own = WeightGradQueue(), random.Random(1000 * seed + rank)
        ran: list[str] = []
        announced: list[int] = []
        for number, (name, runs) in enumerate(program):
            if runs:
                queue.run(name)
            held = [torch.zeros(own.randrange(50), dtype=torch.uint8)]
            announce = partial(announced.append, number)
            queue.put(name, partial(ran.append, f"{name}{number}"), held, announce=announce)
        queue.run_all()
        queue.assert_empty()
        assert sorted(ran) == sorted(f"{name}{number}" for number, (name, _) in enumerate(program))
        for name in "abcxyz":
            of_name = [int(entry[1:]) for entry in ran if entry[0] == name]
            assert of_name == sorted(of_name)
        orders.append((ran, announced))
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
