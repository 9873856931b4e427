"""The span recorder: names, nesting, background work, marks of the backward pass; communication seconds of hand-made spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from torch.distributed import ProcessGroup

from moe_overlap.plan.instructions import Span, communication_seconds, operator_spans
from moe_overlap.runtime.layer_collectives import LayerCollectives, channels_inside
from moe_overlap.runtime.spans import HostClock, SpanRecorder, phase_seconds


class Ticks(HostClock):
    """A clock that counts how often it is read."""

    def __init__(self) -> None:
        self.now = -1.0

    def mark(self) -> float:
        self.now += 1.0
        return self.now


def recorder() -> SpanRecorder:
    made = SpanRecorder(Ticks(), inside=("tp", "cp"))
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


def test_a_collective_inside_an_operator_splits_it() -> None:
    made = recorder()
    made.place(1, 2, (0,))
    made.begin("L0.attention")  # 1
    opened = made.start_inside("tp", blocks=True)  # 2
    assert made.operation == "L0.attention"
    assert made.wait_inside(opened, lambda: "done") == "done"  # 3
    made.begin("L0.attention")  # goes on
    made.begin("L0.mlp")  # 4
    place = (1, 2)
    spans = made.spans()
    assert spans == [
        Span("L0.attention", "compute", *place, 1, 2, (0,)),
        Span("L0.attention", "tp", *place, 2, 3, (0,)),
        Span("L0.attention", "compute", *place, 3, 4, (0,)),
        Span("L0.mlp", "compute", *place, 4, 5, (0,)),
    ]
    assert communication_seconds(spans) == (1, 1)
    assert operator_spans(spans) == [
        Span("L0.attention", "compute", *place, 1, 4, (0,)),
        Span("L0.mlp", "compute", *place, 4, 5, (0,)),
    ]


def test_a_collective_beside_computation_is_exposed_from_its_wait_on() -> None:
    made = recorder()
    made.begin("L0.attention.backward")  # 1
    opened = made.start_inside("tp", blocks=False)  # 2
    made.begin("L0.attention.qkv.dW")  # 3
    made.wait_inside(opened, lambda: None)  # 4, 5
    made.wait_inside(opened, lambda: None)  # a second wait changes nothing
    made.end()  # 6
    spans = made.spans()
    assert [(s.name, s.channel, s.start, s.end) for s in spans] == [
        ("L0.attention.backward", "compute", 1, 3),
        ("L0.attention.backward", "tp", 2, 5),
        ("L0.attention.qkv.dW", "compute", 3, 4),
        ("L0.attention.qkv.dW", "compute", 5, 6),
    ]
    assert communication_seconds(spans) == (3, 1)
    assert [(s.start, s.end) for s in operator_spans(spans)] == [(1, 3), (3, 6)]


def test_a_collective_inside_a_communication_belongs_to_it() -> None:
    made = recorder()
    assert made.start_inside("tp", blocks=True) is None  # nothing runs
    made.begin("gradients", "dp")
    assert made.start_inside("tp", blocks=True) is None
    assert [s.channel for s in made.spans()] == ["dp"]


def test_timers_count_collectives_inside_operators_as_computation() -> None:
    parts = [("compute", 0, 2), ("tp", 1, 5), ("compute", 5, 9)]
    split = [Span("L0.attention", channel, 0, 0, start, end) for channel, start, end in parts]
    assert phase_seconds(split, 2) == phase_seconds([Span("L0.attention", "compute", 0, 0, 0, 9)], 2)


def test_spans_without_collectives_inside_stay_as_they_are() -> None:
    apart = [Span("L0.attention", "compute", 0, 0, 0, 2), Span("L0.attention", "compute", 0, 0, 2, 5)]
    assert operator_spans(apart) == apart


class Group:
    """A process group with so many ranks."""

    def __init__(self, size: int) -> None:
        self.ranks = size

    def size(self) -> int:
        return self.ranks


def test_groups_of_one_rank_are_not_watched() -> None:
    tensor, context, both = Group(2), Group(1), Group(2)
    groups: Any = SimpleNamespace(tp=tensor, cp=context, tp_cp=both, expt_tp=Group(1))
    assert channels_inside(groups) == {tensor: "tp", both: "tp"}
    before = dict(vars(ProcessGroup))
    with LayerCollectives(recorder(), {}).recorded():
        assert dict(vars(ProcessGroup)) == before


def test_methods_of_process_groups_are_put_back_behind_an_error() -> None:
    before = dict(vars(ProcessGroup))
    with pytest.raises(ValueError), LayerCollectives(recorder(), {Group(2): "tp"}).recorded():  # type: ignore[dict-item]
        assert vars(ProcessGroup)["allreduce"] is not before["allreduce"]
        raise ValueError
    assert dict(vars(ProcessGroup)) == before


def test_collectives_of_watched_groups_have_spans() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watched, other = dist.new_group([0]), dist.new_group([0])
    made, x, y = recorder(), torch.ones(2), torch.empty(2)
    with LayerCollectives(made, {watched: "cp"}).recorded():
        made.begin("L0.attention")
        dist.all_reduce(x, group=watched)
        mappings.dist_all_gather_func(y, x, group=watched)  # the name under which megatron-core keeps it
        mappings.dist_reduce_scatter_func(y, x, group=watched)
        dist.all_to_all_single(y, x, group=watched)
        dist.all_reduce(x, group=other)
        pending = dist.all_reduce(x, group=watched, async_op=True)
        made.begin("L0.mlp")
        pending.wait()
        assert pending.is_completed()
    dist.all_reduce(x, group=watched)
    spans = made.spans()
    assert [s.name for s in spans if s.channel == "cp"] == ["L0.attention"] * 5
    assert [s.name for s in operator_spans(spans)] == ["L0.attention", "L0.mlp"]


def test_collectives_of_a_backend_that_hands_out_no_work_have_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL from torch 2.8 on: None for what is not asynchronous; gloo always has a work."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watched, made, x = dist.new_group([0]), recorder(), torch.ones(2)
    allreduce = ProcessGroup.allreduce

    def as_nccl(group: ProcessGroup, *arguments: Any) -> Any:
        work = allreduce(group, *arguments)
        work.wait()
        return work if arguments[-1].asyncOp else None

    monkeypatch.setattr(ProcessGroup, "allreduce", as_nccl)
    with LayerCollectives(made, {watched: "tp"}).recorded():
        made.begin("L0.attention")
        assert dist.all_reduce(x, group=watched) is None
        pending = dist.all_reduce(x, group=watched, async_op=True)
        pending.wait()
        made.begin("L0.mlp")
    spans = made.spans()
    assert [s.name for s in spans if s.channel == "tp"] == ["L0.attention"] * 2
    assert [s.name for s in operator_spans(spans)] == ["L0.attention", "L0.mlp"]


def test_a_recorder_that_covers_no_collectives_inside_operators_leaves_them_whole() -> None:
    recorder = SpanRecorder(Ticks(), inside=("tp",))
    recorder.covered = ("ep",)
    recorder.start_step()
    recorder.begin("L0.attention")
    assert recorder.start_inside("tp", blocks=True) is None
    recorder.end()
    assert [span.name for span in recorder.spans()] == ["L0.attention"]
