"""CUDA graphs of autograd segments: an operator's forward and its backward pass, each captured once and then one launch.

The list says which instructions are captured, and in which slot of memory (plan/lowering/captured.py). Contract:

1. Warm-up. The first steps run without graphs: libraries load kernels and allocate workspaces then, not inside a capture.
2. An operator is captured when the list first reaches it in its slot, and replayed at once, since a capture executes nothing. A
   capture never waits for the device, so it holds up no other rank.
3. Memory. A graph's inputs, outputs, gradients and tensors saved by autograd stay referenced here, so that no later capture gets
   their memory. A graph captured earlier may still have used that memory for temporaries, and its replay overwrites it. Graphs
   therefore share a pool only if they are replayed in the order of their captures, and if no result of one round is needed when
   the first graph of the next round runs. The list guarantees both for the graphs of one slot. Weight gradients leave no results
   in their pool: all of them share one and run in any order.
4. Inputs. The output of another graph of the slot is read in place. Any other input is copied to the address that the capture
   read.
5. Gradients of inputs come from `torch.autograd.grad`, which a capture can hold; those of parameters are added to DDP's sums
   inside the graph, where DDP's hook would add them. The sums must not move: `begin` checks it.
6. Every replay puts its deferred weight gradients into the queue again, each as a graph of its own. They read the slot's memory,
   which the list reuses only after them; a weight gradient or a backward pass that comes after its slot was overwritten is an
   error.
7. Other results of an operator (a gate's handles) are those of its capture, with the same tensors.

Not captured: communication, embedding and head, evaluations. Work that a graph would freeze (random draws, 8-bit scales,
collectives inside operators, recomputation) is refused by flag (megatron/training/cli/rules/graphs.py). Not yet run on hardware:
the stand-in of the tests records operators, runs them again in the same memory, and overwrites free memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.captured import CapturedList, Slot, captured_list
from moe_overlap.runtime.context import RunContext
from moe_overlap.runtime.executor.segments import Segment
from moe_overlap.runtime.routing.gate import Gate
from moe_overlap.runtime.weight_grad.delayed_linear import can_delay
from moe_overlap.runtime.weight_grad.queue import DeferralError, Put, WeightGradQueue

WARM_UP_STEPS = 3
"""Steps before the first capture, as upstream's --cuda-graph-warmup-steps."""

T = TypeVar("T")


class GraphLibrary(Protocol):
    """A library that captures and replays."""

    def prepare(self) -> None:
        """Free what memory can be freed; between steps, before the first capture."""

    def new_pool(self) -> Any:
        """A memory pool for captures; it hands out memory again that nobody refers to."""

    def capture(self, run: Callable[[], T], pool: Any) -> tuple[Callable[[], None], T]:
        """Capture what `run` launches. Returns the function that replays it on the current stream, and what `run` returned."""


class CudaGraphs:
    """torch's CUDA graphs. Not yet run on hardware.

    Args:
        stream: the stream of all captures, on which DDP was built. Autograd runs a backward operator on the stream of its
            forward operator and adds gradients on the stream of DDP; a capture that met another stream would fail.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def prepare(self) -> None:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], T], pool: Any) -> tuple[Callable[[], None], T]:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        # Not torch.cuda.graph, which synchronizes the device: the peers of transfers in flight may be waiting for this rank.
        # A garbage collection could free another graph, which a capture forbids.
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads (NCCL's watchdog) may call the driver meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay, result


def refuse_uncapturable(context: RunContext) -> None:
    """Refuse modules that work on the host in every pass, which a replay does not repeat.

    Raises:
        ConfigError: a router is megatron-core's own, or Transformer Engine's split of weight gradients is on.
    """
    modules = [module for chunk in context.chunks for module in chunk.modules()]
    if any(isinstance(module, TopKRouter) and not isinstance(module, Gate) for module in modules):
        rule = "megatron-core's router logs its losses where a graph must not keep them"
        raise ConfigError("--moe-overlap-cuda-graphs", "", rule, "add --moe-gate topk, or write a gate into the plan")
    if any(can_delay(module) for module in modules):
        rule = "Transformer Engine puts weight gradients aside itself, which a replay does not repeat"
        raise ConfigError("--defer-weight-gradients", "", rule, "drop it or --moe-overlap-cuda-graphs")


def leave_generators_alone(modules: Iterable[torch.nn.Module]) -> None:
    """Keep attention without dropout from reading the state of a random generator, which a capture forbids.

    Up to release 2.18 Transformer Engine's attention reads it in every pass if it has megatron-core's tracker, even without
    dropout. Graphs are refused with dropout.
    """
    for module in modules:
        if hasattr(module, "attention_dropout_ctx"):
            module.attention_dropout_ctx = contextlib.nullcontext


class SegmentGraphs:
    """The graphs of one rank.

    Args:
        queue: takes the weight gradients that captured backward passes defer.
        has_static_rows: True if every expert's input is padded to its capacity.
        warm_up_steps: number of steps without graphs, at least 1.
    """

    def __init__(
        self,
        library: GraphLibrary,
        queue: WeightGradQueue,
        has_static_rows: bool,
        warm_up_steps: int = WARM_UP_STEPS,
    ) -> None:
        assert warm_up_steps >= 1, "kernels are loaded, and buffers allocated, in a step without graphs"
        self.library, self.queue = library, queue
        self._has_static_rows, self._warm_up_steps = has_static_rows, warm_up_steps
        self._lists: dict[int, tuple[Sequence[Instruction], CapturedList]] = {}  # by identity: a run has few lists
        self._listed = CapturedList({}, {})
        self._slots: dict[Slot, CapturedSlot] = {}
        self._gradient_pool: Any = None
        self._sums: dict[int, tuple[torch.nn.Parameter, int, int]] = {}

    def begin(self, instructions: Sequence[Instruction]) -> None:
        """Begin a training step.

        Raises:
            RuntimeError: a parameter or its sum of gradients has moved since it was captured.
        """
        for parameter, at, sum_at in self._sums.values():
            if (parameter.data_ptr(), _sum_of(parameter).data_ptr()) != (at, sum_at):
                raise RuntimeError("captured graphs: a parameter or its sum of gradients was moved in memory")
        self._listed = CapturedList({}, {})
        if self._warm_up_steps:
            self._warm_up_steps -= 1
            return
        if self._gradient_pool is None:
            self.library.prepare()
            self._gradient_pool = self.library.new_pool()
        if id(instructions) not in self._lists:
            self._lists[id(instructions)] = (instructions, captured_list(instructions, self._has_static_rows))
        self._listed = self._lists[id(instructions)][1]

    def sent(self, i: Instruction) -> tuple[str, ...]:
        """Buffers in the slot's memory that an instruction has written for another stage: they must be copied out."""
        return self._listed.sent.get(i.id, ())

    def segment(
        self, i: Instruction, run: Callable[..., Any], inputs: Sequence[Tensor | None], aside: dict[Any, Any]
    ) -> Segment | ReplayedSegment:
        """Run a forward operator with gradients, as a graph if the list captures it.

        Args:
            run, inputs: function and inputs of a `Segment`.
            aside: results of `run` in addition to its outputs; a graph keeps those of its capture.
        """
        slot = self._listed.slots.get(i.id)
        if slot is None:
            return Segment(run, inputs, aside)
        if slot not in self._slots:
            self._slots[slot] = CapturedSlot(self.library.new_pool())
        operators, key = self._slots[slot].operators, (i.name, i.partition)
        if key not in operators:
            operators[key] = CapturedOperator(self, self._slots[slot], i.name, run, inputs, aside)
        return operators[key].forward(inputs)

    def capture_gradient(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture a deferred weight gradient; returns its replay."""
        return self.library.capture(compute, self._gradient_pool)[0]

    def add_to_sums(self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Inside a capture: add gradients where DDP's hook adds them."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            total = _sum_of(parameter)
            self._sums[id(parameter)] = (parameter, parameter.data_ptr(), total.data_ptr())
            # A linear layer that has added its own gradient says so, and returns a dummy.
            added: bool = parameter.grad_added_to_main_grad  # type: ignore[attr-defined]
            if gradient is not None and (not added or getattr(parameter, "zero_out_wgrad", False)):
                total.add_(gradient)


@dataclass(slots=True)
class CapturedSlot:
    """The graphs of one slot, by operator and partition.

    Attributes:
        pool: memory pool of its graphs.
        owned: addresses of the slot's storages.
    """

    pool: Any
    owned: set[int] = field(default_factory=set)
    operators: dict[tuple[str, tuple[int, ...]], CapturedOperator] = field(default_factory=dict)


class CapturedOperator:
    """An operator in one slot: its forward graph, and from its first backward pass on its backward graph.

    Attributes:
        generation: number of replays of the forward graph so far; identifies the pass that may run backward.
    """

    def __init__(
        self,
        graphs: SegmentGraphs,
        slot: CapturedSlot,
        name: str,
        run: Callable[..., Any],
        inputs: Sequence[Tensor | None],
        aside: dict[Any, Any],
    ) -> None:
        self._graphs, self._slot, self.name, self.aside = graphs, slot, name, aside
        self.generation = 0
        self._inputs = [None if x is None else StaticTensor(x, slot.owned) for x in inputs]
        self._leaves = [
            None if place is None else place.inside.requires_grad_(place.tensor.is_floating_point())
            for place in self._inputs
        ]
        self._replay, returned = graphs.library.capture(lambda: run(*self._leaves), slot.pool)
        self._outputs: tuple[Any, ...] = returned if isinstance(returned, tuple) else (returned,)
        self._add_owned(self._outputs)
        self._backward: CapturedBackward | None = None

    def forward(self, inputs: Sequence[Tensor | None]) -> ReplayedSegment:
        """Replay the forward graph on these inputs."""
        _fill(self._inputs, inputs, self.name)
        self._replay()
        self.generation += 1
        return ReplayedSegment(self, self.generation, self._outputs, self.aside)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Replay the backward graph on these gradients of the outputs, None for an output that nothing uses."""
        needed = [isinstance(x, Tensor) and x.requires_grad for x in self._outputs]
        output_gradients = [g if is_needed else None for g, is_needed in zip(gradients, needed, strict=True)]
        if self._backward is None:
            self._backward = self._capture_backward(output_gradients)
        captured = self._backward
        _fill(captured.inputs, output_gradients, self.name)
        captured.replay()
        generation = self.generation
        for put in captured.puts:
            self._graphs.queue.put(put.name, self._late(put, generation), put.held, announce=put.announce)
        return captured.results

    def _capture_backward(self, output_gradients: Sequence[Tensor | None]) -> CapturedBackward:
        places = [None if g is None else StaticTensor(g, self._slot.owned) for g in output_gradients]
        pairs = [(x, p.inside) for x, p in zip(self._outputs, places, strict=True) if p is not None]
        outputs, filled = [x for x, _ in pairs], [gradient for _, gradient in pairs]
        leaves = [x for x in self._leaves if x is not None and x.requires_grad]
        parameters = list(_parameters_of(outputs))

        def run() -> list[Tensor | None]:
            # retain_graph: a replay reads the saved tensors, which autograd would otherwise return to the pool.
            gradients = torch.autograd.grad(
                outputs, [*leaves, *parameters], filled, retain_graph=True, allow_unused=True
            )
            self._graphs.add_to_sums(parameters, gradients[len(leaves) :])
            return list(gradients[: len(leaves)])

        with self._graphs.queue.set_aside() as puts:
            replay, input_gradients = self._graphs.library.capture(run, self._slot.pool)
        self._add_owned(input_gradients)
        rest = iter(input_gradients)
        results = tuple(next(rest) if x is not None and x.requires_grad else None for x in self._leaves)
        return CapturedBackward(places, replay, results, [CapturedGradient(put) for put in puts])

    def _late(self, put: CapturedGradient, generation: int) -> Callable[[], None]:
        def compute() -> None:
            if generation != self.generation:
                raise DeferralError(f"{put.name}: its operands were overwritten by a later micro-batch")
            put.compute(self._graphs)

        return compute

    def _add_owned(self, tensors: Sequence[Any]) -> None:
        self._slot.owned.update(x.untyped_storage().data_ptr() for x in tensors if isinstance(x, Tensor))


class ReplayedSegment:
    """One pass through a captured operator, in the place of a `Segment`.

    Attributes:
        aside: results of the operator in addition to its outputs.
    """

    def __init__(
        self, operator: CapturedOperator, generation: int, outputs: tuple[Any, ...], aside: dict[Any, Any]
    ) -> None:
        self._operator, self._generation, self.aside = operator, generation, aside
        self._outputs = outputs

    def take(self) -> tuple[Any, ...]:
        """The outputs, in the slot's memory, detached from autograd."""
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in self._outputs)

    def backward(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Replay the backward graph, as `Segment.backward` runs its operators."""
        operator = self._operator
        assert self._generation == operator.generation, f"{operator.name}: a later micro-batch has taken its slot"
        return operator.backward(gradients)


@dataclass(slots=True)
class CapturedBackward:
    """A backward graph: the memory of its incoming gradients, the gradients of its inputs, and its deferred weight gradients."""

    inputs: Sequence[StaticTensor | None]
    replay: Callable[[], None]
    results: tuple[Tensor | None, ...]
    puts: Sequence[CapturedGradient]


@dataclass(slots=True)
class CapturedGradient:
    """A deferred weight gradient; its computation is captured when it is first due."""

    put: Put
    _replay: Callable[[], None] | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """Name of its operator."""
        return self.put.name

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The operands of its computation."""
        return self.put.held

    @property
    def announce(self) -> Callable[[], None]:
        """Tells DDP that the gradient is complete."""
        return self.put.announce

    def compute(self, graphs: SegmentGraphs) -> None:
        """Add the gradient to DDP's sum."""
        if self._replay is None:
            self._replay = graphs.capture_gradient(self.put.compute)
        self._replay()


class StaticTensor:
    """The memory in which a graph reads one of its inputs.

    Args:
        like: the first input: a tensor in the slot's storages is read in place, any other is copied.
        owned: addresses of the slot's storages.
    Attributes:
        inside: an alias of the memory for the graph, so that autograd does not count the next input as an in-place change.
    """

    def __init__(self, like: Tensor, owned: set[int]) -> None:
        self._is_borrowed = like.untyped_storage().data_ptr() in owned
        self.tensor = like.detach() if self._is_borrowed else torch.empty_like(like.detach())
        self.inside = self.tensor.data
        owned.add(self.tensor.untyped_storage().data_ptr())

    def fill(self, x: Tensor, name: str) -> None:
        """Copy the input of a replay here, or check that it lies here."""
        assert x.shape == self.tensor.shape and x.dtype == self.tensor.dtype, (
            f"{name}: captured for {list(self.tensor.shape)}, called with {list(x.shape)}"
        )
        if not self._is_borrowed:
            self.tensor.copy_(x.detach())
        else:
            assert x.data_ptr() == self.tensor.data_ptr(), f"{name}: its input does not lie where it was captured"


def _fill(places: Sequence[StaticTensor | None], values: Sequence[Tensor | None], name: str) -> None:
    for place, x in zip(places, values, strict=True):
        assert (place is None) == (x is None), f"{name}: other inputs than those that were captured"
        if place is not None and x is not None:
            place.fill(x, name)


def _parameters_of(outputs: Sequence[Tensor]) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters that outputs depend on, each once."""
    waiting, seen = [x.grad_fn for x in outputs], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.nn.Parameter):
            yield variable
        waiting += [following for following, _ in node.next_functions]


def _sum_of(parameter: torch.nn.Parameter) -> Tensor:
    total: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return total
