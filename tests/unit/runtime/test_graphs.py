"""Captured segments on a stand-in for CUDA graphs: the same losses, norms and weights, in one launch each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron.training import optimizer
from megatron.training.model import build
from megatron.training.model.layers.local_modules import GroupedExperts
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.captured import CapturedList, Slot, captured_list
from moe_overlap.plan.operators import FORWARD, MERGE
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.runtime.build import make_runner
from moe_overlap.runtime.executor import execute, graphs
from moe_overlap.runtime.executor.buffers import Buffers
from moe_overlap.runtime.executor.execute import PlanExecutor
from moe_overlap.runtime.executor.graphs import SegmentGraphs
from moe_overlap.runtime.executor.segments import Segment
from moe_overlap.runtime.routing.gates import SwitchGate
from moe_overlap.runtime.routing.meter import RouterMeter
from moe_overlap.runtime.weight_grad.queue import DeferralError, WeightGradQueue
from tests.stand_ins.cuda_graphs import RecordedGraphs
from tests.unit.runtime.fake_ranks import executor_of, two_ranks
from tests.unit.runtime.test_streams import Library

__all__ = ["two_ranks"]
pytestmark = pytest.mark.usefixtures("two_ranks")
STATIC = "--moe-expert-capacity-factor 0.75 --moe-pad-expert-input-to-capacity"
DEFER, PAIRS, TWO = "--defer-weight-gradients", "--moe-overlap-micro-batches 2", "--moe-overlap-partitions 2"
SHARED, NO_LOSS = "--moe-shared-expert-intermediate-size 32", "--moe-aux-loss-coeff 0"
SIGMOID = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
RUNS = {
    "two micro-batches, deferred": f"{STATIC} {PAIRS} {DEFER} --moe-z-loss-coeff 1e-3",
    "chunks of capacity": f"{STATIC} --moe-overlap-capacity-chunks 2 --moe-router-load-balancing-type aux_loss",
    "counted partitions": f"{TWO} --moe-overlap-range around {DEFER} {SHARED}",
    "counted partitions behind a whole gate": f"{TWO} --moe-overlap-range after --moe-layer-freq [0,1] "
    "--moe-gate batch_prioritized --moe-expert-capacity-factor 0.75",
    "bias, sums in order": f"{STATIC} {DEFER} --deterministic-mode {SIGMOID} {NO_LOSS} {SHARED}",
    "experts choose": f"{STATIC} {PAIRS} --moe-gate expert_choice --moe-router-load-balancing-type none {NO_LOSS} "
    "--moe-expert-capacity-factor 1.5 --bf16",
}
STEPS = 5


def graphed(flags: str, library: RecordedGraphs) -> tuple[Any, Any, Any]:
    runner, instructions, feed = executor_of(flags)
    queue = runner.context.weight_gradients
    made = SegmentGraphs(library, queue, runner.dispatcher.static_capacity, warm_up_steps=1)
    return PlanExecutor(runner.context, graphs=made), instructions, feed


def curve(runner: Any, instructions: Any, feed: Any) -> list[tuple[float, float]]:
    results = [runner.run(instructions, feed, number) for number in range(STEPS)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts as one grouped product, as on a GPU."""
    plain = build.layer_spec

    def layer_spec(tc: Any, is_moe: bool, *rest: Any) -> Any:
        spec = plain(tc, is_moe, *rest)
        if is_moe:
            spec.submodules.mlp.submodules.experts.module = GroupedExperts
        return spec

    monkeypatch.setattr(build, "layer_spec", layer_spec)


@pytest.mark.usefixtures("grouped")
def test_grouped_products() -> None:
    flags = f"{STATIC} --moe-overlap-micro-batches 2 --defer-weight-gradients --bf16"
    library = RecordedGraphs()
    runner, *rest = graphed(flags, library)
    assert any(isinstance(module, GroupedExperts) for module in runner.context.models[0].modules())
    assert curve(runner, *rest) == curve(*executor_of(flags))


@pytest.mark.parametrize("name", RUNS)
def test_graphs_compute_what_segments_do(name: str) -> None:
    library = RecordedGraphs()
    assert curve(*graphed(RUNS[name], library)) == curve(*executor_of(RUNS[name]))
    assert library.captures and library.replays > library.captures


# One operator by hand, several micro-batches under way


def listed(passes: str) -> tuple[Instruction, ...]:
    """`F0 F1 B0 W0`: passes of one operator and its weight gradients, by micro-batch; `G`, `C`, `X` are those of another."""
    names = {"F": "L0.attention", "B": "L0.attention.backward", "W": "L0.attention.qkv.dW"}
    names |= {"G": "L1.attention", "C": "L1.attention.backward", "X": "L1.attention.qkv.dW"}
    kinds: dict[str, Any] = {letter: "weight-gradient" if letter in "WX" else "compute" for letter in names}
    return tuple(
        Instruction(id=n, kind=kinds[word[0]], name=names[word[0]], stage=0, chunk=0, micro_batch=int(word[1:]))
        for n, word in enumerate(passes.split())
    )


class Run:
    """The passes of a list, by segments or by graphs: gradients of the inputs, then the sums of the weights' gradients."""

    def __init__(self, made: SegmentGraphs | None, queue: WeightGradQueue) -> None:
        torch.manual_seed(1)
        self.weights: list[Any] = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
        for weight in self.weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(8, 8), False
        self.weights[0].register_post_accumulate_grad_hook(_added)  # as DDP's
        self.graphs, self.queue = made, queue

    def function(self, layer: int, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.weights[0]).sin().masked_fill(mask, 0)
        return PutOff.apply(hidden, self.weights[1], self.queue, f"L{layer}.attention.qkv.dW").cos().exp()

    def step(self, passes: str) -> list[torch.Tensor]:
        instructions, left, found, unread = listed(passes), {}, [], []
        torch.manual_seed(2)
        if self.graphs is not None:
            self.graphs.begin(instructions)
        for i in instructions:
            if i.kind == "weight-gradient":
                self.queue.run(i.name, 1)
                found += [gradient.clone() for gradient in unread]
                unread = []
            elif i.in_backward_pass:
                self.queue.begin_operator()
                (gradient, none) = left.pop((i.operator.layer, i.micro_batch)).backward(torch.randn(8, 8))
                assert none is None
                unread.append(gradient)
            else:
                inputs = (torch.randn(8, 8), torch.randn(8, 8) > 0)
                make = Segment if self.graphs is None else partial(self.graphs.segment, i)
                segment = make(partial(self.function, i.operator.layer), inputs, {})
                left[i.operator.layer, i.micro_batch] = segment
                found.append(segment.take()[0].detach().clone())
        self.queue.assert_empty()
        return [*found, *(weight.main_grad.clone() for weight in self.weights)]


class PutOff(torch.autograd.Function):
    """A product whose weight gradient goes to the queue."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, queue: WeightGradQueue, name: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue, ctx.name = queue, name
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        ctx.queue.put(ctx.name, lambda: weight.main_grad.add_(x.t() @ gradient), (x, gradient))
        return gradient @ weight.t(), None, None, None


def by_hand() -> tuple[Run, Run, SegmentGraphs]:
    queue = WeightGradQueue()
    made = SegmentGraphs(RecordedGraphs(), queue, has_static_rows=False, warm_up_steps=1)
    return Run(made, queue), Run(None, WeightGradQueue()), made


LISTS = {
    "one after the other": ["F0 B0 W0 F1 B1 W1"] * 4,
    "1F1B": ["F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4"] * 4,
    "late gradients": ["F0 F1 B0 B1 W0 F2 W1 B2 W2"] * 4,
    "gradients in another order": ["F0 G0 C0 X0 B0 W0 F1 G1 C1 B1 X1 W1 F2 G2 C2 B2 W2 X2"] * 3,
    "passes in another order": ["F0 G0 C0 B0 W0 X0 G1 F1 C1 B1 X1 W1 F2 G2 B2 C2 W2 X2"] * 3,
    "a longer step later": ["F0 B0 W0"] * 3 + ["F0 F1 B0 W0 F2 B1 W1 B2 W2"] * 3 + ["F0 B0 W0"] * 2,
}


def test_passes_in_another_order_have_another_slot() -> None:
    made = listed("F0 G0 C0 B0 G1 F1 C1 B1 F2 G2 C2 B2")
    slots = [captured_list(made, False).slots[number] for number in range(12)]
    assert len(set(slots[:4])) == len(set(slots[4:8])) == 1
    assert slots[0] == slots[8] != slots[4] and slots[4].number == 0


def assert_equal_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("name", LISTS)
def test_passes_under_way_together_do_not_disturb_each_other(name: str) -> None:
    ours, theirs, _ = by_hand()
    for passes in LISTS[name]:
        assert_equal_bits(ours.step(passes), theirs.step(passes))


def test_a_gradient_that_comes_behind_the_next_micro_batch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = by_hand()
    ours.step("F0 B0 W0")
    crowded = partial(_one_slot, captured_list)
    monkeypatch.setattr(graphs, "captured_list", crowded)
    with pytest.raises(DeferralError, match="overwritten by a later micro-batch"):
        ours.step("F0 B0 F1 W0 B1 W1")
    with pytest.raises(AssertionError, match="a later micro-batch has taken its slot"):
        ours.step("F0 F1 B0 B1 W0 W1")


def _one_slot(plain: Any, instructions: Any, has_static_rows: bool) -> CapturedList:
    found = plain(instructions, has_static_rows)
    return CapturedList(dict.fromkeys(found.slots, Slot(0, (), 0)), found.sent)


def test_sums_that_move_are_an_error() -> None:
    ours, _, _ = by_hand()
    for _ in range(2):
        ours.step("F0 B0 W0")
    ours.weights[0].main_grad = ours.weights[0].main_grad.clone()
    with pytest.raises(RuntimeError, match="moved in memory"):
        ours.step("F0 B0 W0")


def test_a_product_that_adds_its_own_gradient_is_not_added_twice() -> None:
    _, _, made = by_hand()
    for added, zeroed, expected in ((False, False, 1), (True, False, 0), (True, True, 1)):
        weight: Any = torch.nn.Parameter(torch.zeros(2))
        weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.zeros(2), added, zeroed
        made.add_to_sums([weight], [torch.ones(2)])
        assert weight.main_grad.tolist() == [expected] * 2


def test_what_a_transfer_sends_does_not_lie_in_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, instructions, feed = graphed(RUNS["two micro-batches, deferred"], RecordedGraphs())
    merges = [i for i in instructions if i.operator.kind is MERGE and i.operator.phase is FORWARD]
    sent = {i.id: i.writes for i in merges}

    def found(listed: Any, has_static_rows: bool) -> CapturedList:
        return CapturedList(captured_list(listed, has_static_rows).slots, sent)

    monkeypatch.setattr(graphs, "captured_list", found)
    written: list[bool] = []
    put = Buffers.replace

    def replaced(buffers: Buffers, name: str, by: Any) -> None:
        (before,) = buffers.named([name])
        put(buffers, name, by)
        (after,) = buffers.named([name])
        written.append(torch.equal(before, after) and before.data_ptr() != after.data_ptr())

    monkeypatch.setattr(Buffers, "replace", replaced)
    runner.run(instructions, feed, 0)
    assert not written
    runner.run(instructions, feed, 1)
    assert written == [True] * len(merges)


def test_ddp_is_built_on_the_stream_of_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd adds gradients up on the stream on which DDP was built: a capture on another one would fail."""
    device, built = Library(), []
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    present, wrap = device.current, optimizer.wrap_chunks

    def wrapped(*arguments: Any, **named: Any) -> Any:
        built.append(device.current)
        return wrap(*arguments, **named)

    monkeypatch.setattr(optimizer, "wrap_chunks", wrapped)
    runner, _, _ = executor_of(f"{RUNS['two micro-batches, deferred']} --moe-overlap-cuda-graphs")
    assert built == [runner.context.graph_stream] == [runner._graphs.library._stream] != [present]
    assert device.whole_waits == [(built[0], present), (present, built[0])] and device.current is present


def test_what_the_model_brings_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = executor_of(f"{TWO} {DEFER}")
    graphs.refuse_uncapturable(runner.context)
    monkeypatch.setattr(graphs, "can_delay", lambda module: True)
    with pytest.raises(ConfigError, match="^--defer-weight-gradients: Transformer Engine puts weight gradients aside"):
        graphs.refuse_uncapturable(runner.context)
    monkeypatch.setattr(graphs, "Gate", SwitchGate)
    with pytest.raises(ConfigError, match="^--moe-overlap-cuda-graphs: megatron-core's router logs its losses"):
        graphs.refuse_uncapturable(runner.context)


def test_every_module_of_a_graphed_run_leaves_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Library()
    for name in ("Stream", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    told: list[torch.nn.Module] = []
    monkeypatch.setattr(execute, "leave_generators_alone", told.extend)
    runner, _, _ = executor_of(f"{RUNS['two micro-batches, deferred']} --moe-overlap-cuda-graphs")
    assert told == [module for chunk in runner.context.chunks for module in chunk.modules()] != []


def test_attention_without_dropout_takes_no_generators_state() -> None:
    """Transformer Engine's up to release 2.18 forks the tracker in every pass; a capture allows no reading of its state."""

    def fork() -> None:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Identity()))
    attention = model[1][0]
    attention.attention_dropout_ctx = fork
    graphs.leave_generators_alone(model.modules())
    with attention.attention_dropout_ctx():
        pass
    assert not hasattr(model[0], "attention_dropout_ctx")


def test_a_run_without_a_list_is_refused() -> None:
    runner, _, _ = executor_of(f"{TWO} {DEFER}")
    bare = replace(runner.context.stage, overlap=StageOverlap())
    context = replace(runner.context, plan=replace(runner.context.plan, stages=(bare,)), graph_stream=object())
    with pytest.raises(ConfigError, match="^--moe-overlap-cuda-graphs: .* this run follows none"):
        make_runner(context)


def test_a_handle_that_is_opened_again_has_tags_of_its_own() -> None:
    runner, _, _ = executor_of(f"{TWO} {DEFER}")
    chosen = torch.ones(3, 4, dtype=torch.bool)
    first = runner.dispatcher.open(chosen, torch.float32, "L0.moe", most_rows=12)
    runner.dispatcher.start_counts(first)
    again = runner.dispatcher.opened_again(first)
    assert again.tag != first.tag and again.arriving is None and again.map_TE is first.map_TE


def test_counters_of_loads_stay_where_graphs_add_to_them() -> None:
    meter = RouterMeter(4, "softmax", torch.device("cpu"))
    at = meter._sums.data_ptr()
    meter.add(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool))
    assert meter.take().sum() > 0 and meter._sums.data_ptr() == at and not meter._sums.any()


def _added(weight: Any) -> None:
    weight.main_grad.add_(weight.grad)
    weight.grad = None
