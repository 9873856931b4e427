"""The span recorder: names, nesting, background work, marks of the backward pass; communication seconds of hand-made spans."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_overlap.plan.instructions import Span, communication_seconds
from moe_overlap.runtime.spans import HostClock, SpanRecorder


class Ticks(HostClock):
    """A clock that counts how often it is read."""

    def __init__(self) -> None:
        self.now = -1.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now


def recorder() -> SpanRecorder:
    made = SpanRecorder(Ticks())
    made.start_step()  # tick 0
    return made


def names(made: SpanRecorder) -> list[str]:
    return [span.name for span in made.spans()]


def span(channel: str, start: float, end: float) -> Span:
    return Span("x", channel, 0, 0, start, end)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], (0, 0)),
        ([span("compute", 0, 9)], (0, 0)),
        ([span("ep", 1, 3)], (2, 2)),
        ([span("ep", 1, 3), span("compute", 3, 5)], (2, 2)),  # neighbours do not overlap
        ([span("compute", 0, 5), span("ep", 1, 3)], (2, 0)),  # inside
        ([span("ep", 0, 10), span("compute", 2, 5), span("compute", 6, 7)], (10, 6)),  # around
        ([span("compute", 0, 2), span("ep", 1, 5), span("compute", 4, 9)], (4, 2)),  # both ends covered
        ([span("ep", 0, 4), span("dp", 2, 6)], (6, 6)),  # two channels at once count once
        ([span("ep", 0, 4), span("dp", 1, 2)], (4, 4)),  # one within the other
        ([span("ep", 0, 4), span("pp", 2, 6), span("compute", 3, 5)], (6, 4)),
        ([span("compute", 0, 3), span("compute", 1, 4), span("ep", 2, 6)], (4, 2)),  # compute counts once
        ([span("compute", n, n + 1) for n in range(0, 40, 2)] + [span("ep", 5, 25)], (20, 10)),
        ([span("ep", 3, 3)], (0, 0)),
    ],
)
def test_communication_seconds(spans: list[Span], expected: tuple[float, float]) -> None:
    assert communication_seconds(spans) == expected
    assert communication_seconds(spans[::-1]) == expected


def test_communication_seconds_equals_counting_cells() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        rows = torch.randint(0, 30, (12, 3), generator=generator).tolist()
        spans = [span(("compute", "ep", "dp")[kind % 3], min(a, b), max(a, b)) for kind, a, b in rows]

        def busy(cell: int, compute: bool, made: list[Span] = spans) -> bool:
            return any((s.channel == "compute") == compute and s.start <= cell < s.end for s in made)

        communicating = [cell for cell in range(30) if busy(cell, False)]
        exposed = [cell for cell in communicating if not busy(cell, True)]
        assert communication_seconds(spans) == (len(communicating), len(exposed))


def test_blocking_work_is_one_line() -> None:
    made = recorder()
    made.forward(chunk=1, micro_batch=2)
    made.begin("L0.attention")  # 1
    made.begin("L0.moe.dispatch", "ep")  # 2
    made.begin("L0.moe.dispatch", "ep")  # the same: nothing
    made.begin("L0.moe.experts")  # 3
    made.end()  # 4
    made.end()
    with made.span("optimizer.norm", "dp"):  # 5, 6
        pass
    assert made.spans() == [
        Span("L0.attention", "compute", 1, 2, 1, 2),
        Span("L0.moe.dispatch", "ep", 1, 2, 2, 3),
        Span("L0.moe.experts", "compute", 1, 2, 3, 4),
        Span("optimizer.norm", "dp", 1, 2, 5, 6),
    ]
    made.start_step()
    assert made.spans() == []


def test_a_failed_span_ends() -> None:
    made = recorder()
    with pytest.raises(ValueError), made.span("gradients", "dp"):
        raise ValueError
    made.begin("L0.mlp")
    assert names(made) == ["gradients", "L0.mlp"]


def test_the_same_operator_of_the_next_micro_batch_is_a_new_span() -> None:
    made = recorder()
    for micro_batch in range(2):
        made.forward(0, micro_batch)
        made.begin("embedding")
    assert [(s.micro_batch, s.start, s.end) for s in made.spans()] == [(0, 1, 2), (1, 2, 3)]


def test_background_work_runs_beside() -> None:
    made = recorder()
    waited = made.background("receive.S0>S1", "pp")  # 1
    made.begin("L0.mlp")  # 2
    never = made.background("send.S0>S1", "pp")  # 3
    made.finish_background(waited)  # 4
    made.finish_background(waited)  # a second wait changes nothing
    assert made.spans() == [  # the open one ends at 5, what nobody waited for at 6
        Span("receive.S0>S1", "pp", 0, 0, 1, 4),
        Span("L0.mlp", "compute", 0, 0, 2, 5),
        Span("send.S0>S1", "pp", 0, 0, 3, 6),
    ]
    made.start_step()
    made.finish_background(never)  # of the step before: forgotten
    assert made.spans() == []


def two_operators(made: SpanRecorder, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made.begin("L0.attention")
    h = made.on_backward("L0.attention.backward", x * weight)
    made.begin("L0.moe.dispatch", "ep")
    h = made.on_backward("L0.moe.dispatch.backward", h + 1)
    made.begin("head.loss")
    return made.on_backward("head.loss.backward", (h * h).sum())


def test_backward_and_recomputation_carry_their_names() -> None:
    made, weight = recorder(), torch.ones(3, requires_grad=True)
    losses = []
    for micro_batch in range(2):
        made.forward(0, micro_batch)
        losses.append(two_operators(made, torch.ones(3), weight))
    losses[0].backward()
    made.begin("L1.attention")  # forward work met in a backward pass
    made.begin("L1.moe.dispatch", "ep")
    made.begin("gradients", "dp")  # no operator of a layer
    losses[1].backward()
    made.forward(1, 0)
    made.begin("L1.attention")
    forward = [
        (name, "ep" if "dispatch" in name else "compute") for name in ("L0.attention", "L0.moe.dispatch", "head.loss")
    ]
    backward = [(f"{name}.backward", channel) for name, channel in forward[::-1]]
    expected = [(*one, 0, micro_batch) for micro_batch in range(2) for one in forward] + [
        (*one, 0, 0) for one in backward
    ]
    expected += [("L1.attention.recompute", "compute", 0, 0), ("L1.moe.dispatch.recompute", "ep", 0, 0)]
    expected += [("gradients", "dp", 0, 0), *((*one, 0, 1) for one in backward), ("L1.attention", "compute", 1, 0)]
    assert [(s.name, s.channel, s.chunk, s.micro_batch) for s in made.spans()] == expected


def test_marks_change_no_number_and_make_no_view() -> None:
    made = recorder()
    x, y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    def gradients(mark: bool) -> list[torch.Tensor]:
        a, b = torch.sin(x * y), (x + y).exp()
        if mark:
            a, b = made.on_backward("L0.moe.dispatch.backward", a, b)
            assert a._base is None and b._base is None and a.is_contiguous()
        return list(torch.autograd.grad((a * b).sum(), (x, y)))

    for marked, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(marked, plain)
    single = made.on_backward("L0.mlp.backward", x * 2)
    assert isinstance(single, torch.Tensor) and single._base is None and single.requires_grad


def test_a_mark_whose_second_output_is_not_used() -> None:
    made, x = recorder(), torch.ones(3, requires_grad=True)
    first, _ = made.on_backward("L0.moe.gate.backward", x * 2, x * 3)
    first.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and names(made) == ["L0.moe.gate.backward"]


def test_integers_and_constants_pass_a_mark() -> None:
    made, x = recorder(), torch.ones(3, requires_grad=True)
    counts, constant = torch.tensor([1, 2]), torch.ones(2)
    scaled, same, fixed = made.on_backward("L0.moe.dispatch.backward", x * 2, counts, constant)
    scaled.sum().backward()
    assert torch.equal(same, counts) and not same.requires_grad and torch.equal(fixed, constant)


def test_marks_disappear_without_gradients() -> None:
    made, x = recorder(), torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert made.on_backward("L0.mlp.backward", x) is x
    constant = torch.ones(2)
    assert made.on_backward("L0.mlp.backward", constant) is constant
    assert made.on_backward("L0.mlp.backward", constant, counts := torch.ones(1))[1] is counts


def test_a_span_reads_the_clock_once_or_twice() -> None:
    """The cost of a span on a CPU: one reading where the next begins it, two where it stands alone."""
    made, clock = SpanRecorder(counting := Ticks()), 0.0
    made.start_step()
    clock = counting.now
    for number in range(10):
        made.begin(f"L{number}.mlp")
    assert counting.now - clock == 10
    made.end()
    clock = counting.now
    for _ in range(10):
        with made.span("optimizer.L0", "compute"):
            pass
    assert counting.now - clock == 20


def test_seconds_of_the_host_clock() -> None:
    made = SpanRecorder(HostClock())
    made.start_step()
    made.begin("L0.mlp")
    made.begin("head.norm")
    first, second = made.spans()
    assert 0 <= first.start <= first.end == second.start <= second.end < 60


def test_the_graph_of_a_mark_is_freed() -> None:
    """A pipeline drops a micro-batch's output: the mark keeps neither it nor its gradient."""
    made, x = recorder(), torch.ones(3, requires_grad=True)
    marked: Any = made.on_backward("L0.mlp.backward", x * 2)
    assert marked.grad_fn.saved_tensors == ()
