"""The dispatcher in a group of one: what the host is asked, what is refused, and megatron-core's layer on top."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_overlap.describe.errors import ConfigError
from moe_overlap.runtime.dispatch.capacity_chunks import capacity_chunks
from moe_overlap.runtime.dispatch.irregular import CountAllToAll, Handle, IrregularDispatcher, Known, Wires
from moe_overlap.runtime.dispatch.plug_in import IrregularTokenDispatcher, refuse_padding
from moe_overlap.runtime.dispatch.row_order import ExpertOrder, Reorder
from moe_overlap.runtime.dispatch.wire import AllToAll, AllToAllError, Pack
from moe_overlap.runtime.megatron_core.moe_layer import adapt_layer
from moe_overlap.runtime.spans import SpanRecorder
from tests.unit.runtime import one_process

READS_THE_DEVICE = {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "is_nonzero", "equal"}


@pytest.fixture(scope="module")
def groups():
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    world = dist.group.WORLD
    return SimpleNamespace(ep=world, expt_tp=world, tp_ep=world)


class HostReads(TorchDispatchMode):
    """Operators whose result the host must wait for on a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        if function.overloadpacket.__name__ in READS_THE_DEVICE:
            self.found.append(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


def one_pass(dispatcher, hidden, probs, chosen, most_rows=None):
    rows, handle = dispatcher.permute(hidden, probs, chosen, most_rows=most_rows)
    dispatcher.start_counts(handle)
    received = dispatcher.start_dispatch(rows, handle).wait().detach().requires_grad_()
    tokens, per_expert, weights = dispatcher.sort(received, handle)
    output = dispatcher.unsort(tokens * weights.unsqueeze(1), handle)
    merged = dispatcher.unpermute(dispatcher.start_combine(output, handle).wait(), handle)
    torch.autograd.backward(output, dispatcher.start_combine_backward(torch.ones_like(output), handle).wait())
    torch.autograd.backward(rows, dispatcher.start_dispatch_backward(received.grad, handle).wait())
    return merged, per_expert


@pytest.mark.parametrize("dropped", [False, True])
def test_one_copy_of_counts_and_no_other_wait(groups, monkeypatch, dropped):
    tokens, experts, k = 9, 4, 2
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(
        1, torch.rand(tokens, experts).topk(k).indices, True
    )
    if dropped:
        chosen[3:6] = False
    hidden, probs = torch.randn(tokens, 5, requires_grad=True), torch.rand(tokens, experts, requires_grad=True)
    lists = []
    stock = torch.Tensor.numpy
    monkeypatch.setattr(torch.Tensor, "numpy", lambda tensor: (lists.append(tensor.shape), stock(tensor))[1])
    dispatcher = IrregularDispatcher(Wires(groups), takes_bounds=True)
    with HostReads() as reads:
        merged, per_expert = one_pass(dispatcher, hidden, probs, chosen, tokens * k)
    assert reads.found == [] and len(lists) == 1 and dispatcher.wires.counts.host_copies == 1
    weights = (probs * chosen).sum(dim=1, keepdim=True)
    assert torch.allclose(merged, hidden * weights)
    assert per_expert.tolist() == chosen.sum(dim=0).tolist()
    expected = torch.autograd.grad((hidden * weights).sum(), (hidden, probs))
    assert torch.allclose(hidden.grad, expected[0], atol=1e-5) and torch.allclose(probs.grad, expected[1], atol=1e-5)


def test_counting_the_rows_asks_the_host(groups):
    """The control of the test above: without a bound, permute has to know the number of rows."""
    with HostReads() as reads:
        one_pass(
            IrregularDispatcher(Wires(groups)),
            torch.randn(3, 2, requires_grad=True),
            torch.rand(3, 2),
            torch.ones(3, 2) > 0,
        )
    assert reads.found == ["_local_scalar_dense"]


def test_more_rows_than_allowed_for_is_caught(groups):
    dispatcher = IrregularDispatcher(Wires(groups), takes_bounds=True)
    rows, handle = dispatcher.permute(torch.randn(3, 2), torch.rand(3, 2), torch.ones(3, 2) > 0, "L7.moe", 3)
    dispatcher.start_counts(handle)
    with pytest.raises(AssertionError, match=r"L7\.moe: 6 rows routed, 3 allowed for"):
        dispatcher.start_dispatch(rows, handle)


def test_counts_come_before_rows(groups):
    dispatcher = IrregularDispatcher(Wires(groups))
    rows, handle = dispatcher.permute(torch.randn(3, 2), torch.rand(3, 2), torch.ones(3, 2) > 0, "L7.moe")
    with pytest.raises(AssertionError, match=r"L7\.moe: start_counts comes first"):
        dispatcher.start_dispatch(rows, handle)


def counts_of(to_expert, from_source_PQL, tensor_rank=0):
    numbers = torch.tensor([*to_expert, *torch.tensor(from_source_PQL).flatten().tolist()])
    wire = SimpleNamespace(size=len(from_source_PQL) * len(from_source_PQL[0]))
    reader = CountAllToAll(wire, len(from_source_PQL), len(from_source_PQL[0]), tensor_rank)
    return reader.to_host(numbers, numbers, len(to_expert))


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_chunks_add_up(degree):
    counts = counts_of((5, 0, 9, 1), (((5, 0), (0, 0)), ((3, 2), (7, 11))), tensor_rank=1)
    chunks = [counts.chunk(index, degree) for index in range(degree)]
    assert sum(chunk.to_expert_E for chunk in chunks).tolist() == [5, 0, 9, 1]
    assert sum(chunk.from_source_QPL for chunk in chunks).tolist() == [[[5, 0], [3, 2]], [[0, 0], [7, 11]]]
    for part in (counts, *chunks):
        assert part.on_device[0].tolist() == part.to_expert_E.tolist()
        assert part.on_device[1].tolist() == part.from_source_QPL.tolist()
    assert counts.sent == [5, 10] and counts.received == [0, 18] and counts.gathered == [10, 18]
    assert counts.per_expert == [15, 13]


def test_the_allocator_learns_where_counts_are_read(monkeypatch):
    """They are made on the stream of the counts and read on another."""
    told = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "computing")
    on_device = tuple(SimpleNamespace(is_cuda=True, record_stream=told.append) for _ in range(2))
    assert dataclasses.replace(counts_of((1, 2), (((1, 2),),)), on_device=on_device).for_device() is on_device
    assert told == ["computing"] * 2


def test_memory_of_counts_is_pinned_before_the_first_step(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: pinned.append((shape, options["pin_memory"])))
    counts = CountAllToAll(SimpleNamespace(size=8), expert_ranks=4, tensor_ranks=2, tensor_rank=0)
    counts.prepare(torch.device("cpu"), experts=16, in_flight=3)
    assert pinned == []
    counts.prepare(torch.device("cuda"), experts=16, in_flight=3)
    assert pinned == [((16 + 2 * 16,), True)] * 3, "as many numbers as are sent and received"


@pytest.mark.parametrize("capacity", [None, 5])
def test_chunks_are_stretches_of_every_experts_rows(groups, capacity):
    counts = counts_of((5, 0, 9, 1) if capacity is None else (5, 5, 5, 5), (((5, 5),), ((5, 5),)))
    if capacity is not None:
        counts = dataclasses.replace(counts, on_device=None)
    sent = counts.to_expert_E.tolist()
    numbers = torch.arange(sum(sent))
    handle = Handle("moe", numbers, numbers, numbers + 100, numbers, torch.float32, 0, Known(counts))
    dispatcher = IrregularDispatcher(Wires(groups), static_capacity=capacity is not None)
    handle.order = ExpertOrder()
    for index, chunk in enumerate(capacity_chunks(dispatcher, handle, 3)):
        stretches = [(sum(sent[:e]) + index * n // 3, sum(sent[:e]) + (index + 1) * n // 3) for e, n in enumerate(sent)]
        rows = [row for first, last in stretches for row in range(first, last)]
        assert chunk.rows_N.tolist() == chunk.handle.row_tokens_N.tolist() == rows
        assert chunk.handle.row_sources_N.tolist() == [100 + row for row in rows]
        assert sum(chunk.handle.counts.sent) == len(rows) and chunk.handle.order is None


class HostWork(TorchDispatchMode):
    """Tensors that operators take and return, and calls of functions, which the host pays for whatever their size."""

    def __init__(self):
        super().__init__()
        self.tensors, self.calls = 0, 0

    def __torch_dispatch__(self, function, kinds, arguments=(), named=None):
        returned = function(*arguments, **(named or {}))
        self.tensors += sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((arguments, named, returned)))
        return returned

    def __enter__(self):
        sys.setprofile(self.count)
        return super().__enter__()

    def __exit__(self, *error):
        sys.setprofile(None)
        super().__exit__(*error)

    def count(self, frame, event, argument):
        self.calls += event in ("call", "c_call")


def work_of_a_pass(groups, ranks, experts, tensors=1, degree=1, capacity=None):
    """Sort and unsort, forward and backward, of a rank that has received one row, or `capacity`, from each rank and expert."""
    dispatcher = IrregularDispatcher(Wires(groups), static_capacity=capacity is not None)
    sizes = torch.full((ranks, tensors, experts), 1 if capacity is None else capacity).tolist()
    counts = counts_of([row for rows in sizes for row in rows[0]], sizes)
    rows = sum(counts.gathered)
    if capacity is not None:
        counts = dataclasses.replace(counts, on_device=None)
    nothing = torch.zeros(rows, dtype=torch.int64)
    handle = Handle("moe", nothing, nothing, nothing, nothing, torch.float32, 0, Known(counts))
    received = Pack.apply(torch.randn(rows, 4), torch.rand(rows)).requires_grad_()
    for _ in range(2):  # the first time modules are imported and caches filled
        part = dataclasses.replace(handle, arriving=Known(dataclasses.replace(counts)))
        with HostWork() as work:
            parts = [part] if degree == 1 else [chunk.handle for chunk in capacity_chunks(dispatcher, part, degree)]
            for chunk in parts:
                wanted = received[: sum(chunk.counts.gathered)]
                moved, _, probs = dispatcher.sort(wanted, chunk)
                output = dispatcher.unsort(moved, chunk)
                torch.autograd.backward([output, probs], [output.detach(), probs.detach()])
    return work.tensors, work.calls


@pytest.mark.parametrize("kind", [{}, {"degree": 2}, {"capacity": 2}, {"capacity": 2, "degree": 2}])
def test_the_host_does_not_pay_for_ranks_and_experts(groups, kind):
    few, many = work_of_a_pass(groups, 4, 2, **kind), work_of_a_pass(groups, 64, 256, **kind)
    assert 50 < few[0] == many[0] <= 300
    assert many[1] <= 1.02 * few[1]  # the first pass fills caches


def test_unpacked_rows_cost_the_host_no_more(groups):
    """by_expert, by_arrival: the way of megatron-core's interface."""

    def work(ranks, experts):
        sizes_SL = torch.ones(ranks, experts, dtype=torch.int64)
        rows = torch.randn(ranks * experts, 4, requires_grad=True)
        for _ in range(2):
            with HostWork() as work:
                order = ExpertOrder.of(sizes_SL, ranks * experts)
                Reorder.apply(Reorder.apply(rows, order), order.back).backward(rows.detach())
        return work.tensors, work.calls

    few, many = work(4, 2), work(64, 256)
    assert 20 < few[0] == many[0] <= 100 and many[1] <= 1.02 * few[1]


def test_tags_do_not_meet(groups):
    exchange = AllToAll(groups.ep)
    assert [exchange.take_tags(8) for _ in range(3)] == [0, 8, 16]


def test_error_names_operation_and_peers():
    error = AllToAllError("L3.moe.combine.backward", 0, [2, 1], RuntimeError("Timed out\nmore"))
    assert str(error) == ("L3.moe.combine.backward: rank 0 could not complete its all-to-all with rank 2, 1: Timed out")
    assert error.peers == (2, 1)


def test_refusals():
    accepted = dict.fromkeys(("moe_router_padding_for_quantization", "moe_shared_expert_overlap"), False)
    refuse_padding(SimpleNamespace(**accepted))
    for field in accepted:
        with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
            refuse_padding(SimpleNamespace(**{**accepted, field: True}))


def test_counts_have_a_span_of_their_own(groups):
    config = SimpleNamespace(
        moe_pad_expert_input_to_capacity=False,
        moe_router_padding_for_quantization=False,
        moe_shared_expert_overlap=False,
        moe_router_topk=1,
        deterministic_mode=False,
    )
    dispatcher = IrregularTokenDispatcher(2, [0, 1], config=config, pg_collection=groups)
    recorder = SpanRecorder()
    recorder.start_step()
    dispatcher.layer = SimpleNamespace(recorder=recorder, operator="L2.moe", sends_tokens=True)
    recorder.begin("L2.moe.gate")
    dispatcher.dispatch_preprocess(torch.randn(4, 1, 3), torch.eye(2).repeat(2, 1) > 0, torch.rand(4, 2))
    assert [(span.name, span.channel) for span in recorder.spans()] == [
        ("L2.moe.gate", "compute"),
        ("L2.moe.count", "ep"),
    ]


@pytest.mark.parametrize(
    "extra",
    ["", f"{one_process.SHARED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
)
def test_inside_megatron_core_models(groups, extra):
    made = one_process.small(f"{one_process.MOE} {extra}")
    recorder = SpanRecorder()
    plain = adapt_layer(recorder, made.groups.collection)

    def adapt(spec):
        spec = plain(spec)
        mlp = spec.submodules.mlp
        mlp = dataclasses.replace(mlp, params={**mlp.params, "make_dispatcher": IrregularTokenDispatcher})
        return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, mlp=mlp))

    stock, ours = made.stock(), made.adapted(recorder, adapt)
    assert type(ours.decoder.layers[0].mlp.token_dispatcher) is IrregularTokenDispatcher
    ours.load_state_dict(stock.state_dict())
    losses = []
    for model in (stock, ours):
        loss = one_process.loss_of(model)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    mine = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        if parameter.grad is not None:
            difference = (mine[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-12)
            assert difference < 1e-5, name
