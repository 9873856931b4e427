"""Bytes over a simulated step, and the bytes that overlap adds to a stage.

Live memory of one rank (`live_bytes`). A buffer is live from the start of the instruction that first writes it to the end of the
one that reads it last; if it is written again later, it is live again. Parameters, gradient sums and states stay on the device
during the complete step; buffers in host memory never count. `activations.L3.m0` stands for the activations that the forward pass
of a micro-batch through a layer saves for its backward pass. No instruction names them: they are live from the first computation
of the forward pass to the last of the backward pass. An offloaded share (`moved.activations.…`) is a buffer of the list.

Overlap (`listed_bytes`) adds the operands of deferred weight gradients, and rows of several partitions or micro-batches at once.
1. The passes of `compress.sample_blocks` are simulated with and without overlap.
2. The *surplus* of a list is the peak of its live bytes minus the activations of the micro-batches in flight. The closed form
   already counts all activations of a micro-batch until its backward pass has ended.
3. The extra bytes are the surplus with overlap minus the surplus without.
4. A host that runs ahead of its device allocates the rows of LAYERS_AHEAD passes through a layer before the device frees those of
   earlier ones (plan/lowering/lifetimes.py): `ahead_bytes`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import BufferRole, Home, Instruction, parse_buffer, whole_buffer
from moe_overlap.plan.lowering.dependencies import last_uses
from moe_overlap.plan.lowering.lifetimes import LAYERS_AHEAD, layer_passes
from moe_overlap.plan.lowering.optimizer_state import part_of
from moe_overlap.tuner.cost.instruction_seconds import StagePrices, place_of
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.layer import weight_of
from moe_overlap.tuner.cost.simulate.compress import run_alone
from moe_overlap.tuner.cost.simulate.engine import Ran, Simulation, pass_of

STAYING = (BufferRole.PARAMETERS, BufferRole.GRADIENT, BufferRole.STATE)
"""Roles of buffers that outlive a step, unless they are an offloaded share."""
Interval = tuple[str, float, float]
"""A buffer, with start and end of a time in which it is live."""


def live_bytes(ran: Sequence[Ran], bytes_of: Callable[[str], float]) -> list[tuple[float, float]]:
    """(seconds, bytes): when live bytes change, and the live bytes from then on, sorted by time from 0.

    Args:
        ran: the events of one rank in a Simulation.
        bytes_of: bytes of a buffer, also of `activations.…`.
    """
    changes: dict[float, float] = {0.0: 0.0}
    for name, start, end in intervals(ran):
        size = bytes_of(name)
        changes[start] = changes.get(start, 0.0) + size
        changes[end] = changes.get(end, 0.0) - size
    total = 0.0
    curve: list[tuple[float, float]] = []
    for time in sorted(changes):
        total += changes[time]
        if not curve or changes[time] != 0:
            curve.append((time, total))
    return curve


def intervals(ran: Sequence[Ran]) -> Iterator[Interval]:
    """The times in which each buffer is live."""
    in_list = sorted(ran, key=lambda event: event.instruction.id)
    step = max((event.end for event in ran), default=0.0)
    ends = last_uses([event.instruction for event in in_list])
    live: dict[str, tuple[float, float]] = {}
    for event in in_list:
        i = event.instruction
        for name in dict.fromkeys((*i.reads, *i.writes)):
            buffer = parse_buffer(name)
            if buffer.home is Home.HOST:
                continue
            # A buffer that is read before it is written exists since the start of the step.
            is_initial = name in i.reads and name not in live
            start, end = live.get(name, (0.0 if is_initial else event.start, event.end))
            live[name] = (start, max(end, event.end))
            # Live during the complete step, however often it is written, because it is never freed.
            if buffer.word in STAYING:
                live[name] = (0.0, step)
            elif name in ends[i.id]:
                yield (name, *live.pop(name))
    yield from ((name, start, end) for name, (start, end) in live.items())
    yield from _activations(in_list)


def _activations(in_list: Sequence[Ran]) -> Iterator[Interval]:
    spans: dict[str, tuple[float, float]] = {}
    for event in in_list:
        i = event.instruction
        if i.micro_batch is not None and (part := part_of(i)):
            name = f"activations.{part}.m{i.micro_batch}"
            start, end = spans.get(name, (event.start, event.end))
            spans[name] = (min(start, event.start), max(end, event.end))
    yield from ((name, start, end) for name, (start, end) in spans.items())


Size = Callable[[str], float]
ROWS_OF_EXPERTS = (BufferRole.COMPUTED, BufferRole.D_RECEIVED, BufferRole.D_COMPUTED)
ROWS = (*ROWS_OF_EXPERTS, BufferRole.ROWS, BufferRole.RETURNED, BufferRole.D_ROWS, BufferRole.D_RETURNED)
"""Routed rows; received rows are left out, since they are among the activations that a micro-batch saves."""


@dataclass(frozen=True, slots=True)
class ListedBytes:
    """Bytes that overlap adds to one stage.

    Attributes:
        deferred: largest bytes that deferred weight gradients would hold without a limit.
        extra: peak bytes with overlap, within the plan's limit, minus those without.
    """

    deferred: float
    extra: float


def listed_bytes(
    prices: StagePrices,
    model: ModelDescription,
    simulation: Simulation,
    without: Sequence[Instruction],
    slowed: Interference,
) -> ListedBytes:
    """Compute the bytes that overlap adds.

    Args:
        prices: prices of the stage, with the list with overlap read in.
        simulation: the simulation of that list.
        without: the list of the same passes without overlap.
    """
    # Without overlap the order alone decides which buffers are live together, so every instruction takes one second.
    baseline = run_alone(without, prices.stage.devices.ranks[0], lambda _: 1.0, slowed).ran
    rows, saved = RowBytes(prices, model, prices.instructions), SavedBytes(prices, prices.instructions)
    before = surplus(intervals(baseline), flights(baseline), prices, RowBytes(prices, model, without).of)
    if prices.stage.overlap.micro_batches_in_flight > 1:
        # The closed form counts one more layer for a pair (`stage_sizes`).
        before += max((float(prices.saved_bytes(f"L{layer}")) for layer in prices.stage.layers), default=0.0)
    live, flying = list(intervals(simulation.ran)), list(flights(simulation.ran))
    undeferred = surplus(live, flying, prices, rows.of) - before
    unlimited = surplus(live, flying, prices, lambda name: rows.of(name) + saved.of(name)) - before
    deferred = highest((name, start, end, saved.of(name)) for name, start, end in live)
    # Held operands never exceed the limit, so they raise the peak by at most the limit, wherever the peak is.
    extra = max(0.0, min(unlimited, undeferred + prices.stage.overlap.max_deferred_bytes))
    # Counts, which travel otherwise or are read at the gate, keep the host from being ahead of a layer.
    if prices.plan.host_runs_ahead and prices.plan.static_capacity_factor is not None:
        extra += ahead_bytes(prices.instructions, rows.of)
    return ListedBytes(deferred, extra)


def ahead_bytes(instructions: Sequence[Instruction], size_of: Size) -> float:
    """Bytes of the rows of LAYERS_AHEAD passes through a layer, of those with most."""
    touched = ({n for i in of_pass for n in (*i.reads, *i.writes)} for of_pass in layer_passes(instructions).values())
    return LAYERS_AHEAD * max(sum(map(size_of, names)) for names in touched)


def surplus(live: Iterable[Interval], flying: Iterable[Interval], prices: StagePrices, size_of: Size) -> float:
    """Peak of live bytes minus the activations of the micro-batches in flight.

    Args:
        live: result of `intervals`.
        flying: result of `flights`.
    """

    def saved(name: str) -> float:
        buffer = parse_buffer(name)
        return float(prices.saved_bytes(buffer.subject)) if buffer.word == BufferRole.ACTIVATIONS else 0.0

    # The closed form already counts the activations of every micro-batch in flight. Subtracting them during their flight avoids
    # counting them twice; activations that live longer than the flight remain.
    sized = [(name, start, end, size_of(name) + saved(name)) for name, start, end in live]
    return highest([*sized, *((name, start, end, -saved(name)) for name, start, end in flying)])


def highest(sized: Sequence[tuple[str, float, float, float]] | Iterator[tuple[str, float, float, float]]) -> float:
    """The largest sum of sizes at any time, for (name, start, end, size)."""
    changes: dict[float, float] = defaultdict(float)
    for _, start, end, size in sized:
        changes[start] += size
        # Summed by time before they are accumulated, so that bytes freed and allocated at the same time cancel.
        changes[end] -= size
    most = total = 0.0
    for time in sorted(changes):
        total += changes[time]
        most = max(most, total)
    return most


def flights(ran: Sequence[Ran]) -> Iterator[Interval]:
    """`activations.L3.m0` from the start of the forward pass through its chunk to the end of the backward pass.

    A forward pass that is paired with a backward pass, of any chunk, uses the memory that the latter frees: its flight starts at
    the end of the backward pass.
    """
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    backward: dict[tuple[int, int], tuple[float, float]] = {}
    parts: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for event in ran:
        i = event.instruction
        if i.micro_batch is None or i.channel != "compute":
            continue
        step = pass_of(i)
        key = step.chunk, step.micro_batch
        start, end = spans.get(key, (event.start, event.end))
        spans[key] = (min(start, event.start), max(end, event.end))
        if step.direction == "backward" and i.kind != "weight-gradient":
            begun, ended = backward.get(key, (event.start, event.end))
            backward[key] = (min(begun, event.start), max(ended, event.end))
        if part := part_of(i):
            parts[key][part] = None
    # Backward passes do not overlap each other, so the last one that starts before a forward pass is its partner.
    begins, ends = zip(*sorted(backward.values()), strict=True) if backward else ((), ())
    for key, (start, end) in spans.items():
        last = bisect_left(begins, start)
        start = max(start, ends[last - 1]) if last else start
        yield from ((f"activations.{part}.m{key[1]}", start, end) for part in parts[key])


class RowBytes:
    """Bytes of buffers of routed rows.

    A rank sends `sent_rows` (sizes.py). Its experts receive that times the ranks that share an expert, times the rows of the
    busiest rank over the mean; with a static capacity every rank receives the same number of rows.
    """

    def __init__(self, prices: StagePrices, model: ModelDescription, instructions: Sequence[Instruction]) -> None:
        stage, plan = prices.stage, prices.plan
        width = (model.moe_latent_size or model.hidden_size) * payload.ACTIVATION_BYTES[plan.precision]
        load = prices.priced.setting.load if plan.static_capacity_factor is None else 1.0
        self._sent = float(payload.sent_rows(plan, stage, model) * width)
        self._received = self._sent * stage.expert_tensor * load
        self._partitions = _partitions(instructions)

    def of(self, name: str) -> float:
        """Bytes of a buffer such as `rows.L3.m0.p1`; 0 for buffers without routed rows."""
        buffer = parse_buffer(name)
        if buffer.word not in ROWS:
            return 0.0
        size = self._received if buffer.role in ROWS_OF_EXPERTS else self._sent
        return size / self._partitions[whole_buffer(name)]


class SavedBytes:
    """Bytes that a backward pass keeps for a deferred weight gradient: the operands of its product."""

    def __init__(self, prices: StagePrices, instructions: Sequence[Instruction]) -> None:
        self._prices = prices
        self._partitions = _partitions(instructions)
        written = {parse_buffer(name) for i in instructions for name in i.writes}
        gradients = {buffer.gradient for buffer in written if buffer.role is BufferRole.SAVED}
        self._named = Counter((place_of(gradient), gradient.kind) for gradient in gradients)
        self._read: dict[str, dict[tuple[str, str], float]] = {}

    def of(self, name: str) -> float:
        """Bytes of a buffer such as `saved.L3.attention.qkv.m0.p1`; 0 for other buffers."""
        buffer = parse_buffer(name)
        if buffer.role is not BufferRole.SAVED:
            return 0.0
        operator = buffer.gradient
        place = place_of(operator)
        if place not in self._read:
            self._read[place] = self._operands(place)
        read = self._read[place]
        size = read.get((operator.kind, operator.weight))
        # If the capture does not tell the weights of an operator apart, they get equal shares.
        if size is None:
            size = sum(bytes_ for (kind, _), bytes_ in read.items() if kind == operator.kind)
            size /= self._named[place, operator.kind]
        return size / self._partitions[whole_buffer(name)]

    def _operands(self, place: str) -> dict[tuple[str, str], float]:
        """(operator, weight) -> operand bytes: a product [n, tokens] · [tokens, k] reads tokens · (n + k) elements."""
        table = self._prices.priced.family.tables[self._prices.row(place)]
        width = payload.ACTIVATION_BYTES[self._prices.plan.precision]
        operands: dict[tuple[str, str], float] = defaultdict(float)
        for op, shape in zip(table.ops, table.shapes, strict=True):
            if op.is_weight_gradient and op.cost_class == "gemm":
                operands[op.operator, weight_of(table.part, op)] += shape[2] * (shape[0] + shape[1]) * width
            elif op.is_weight_gradient and op.cost_class == "grouped_gemm":
                operands[op.operator, weight_of(table.part, op)] += shape[1] * (shape[2] + shape[3]) * width
        return operands


def _partitions(instructions: Sequence[Instruction]) -> Counter[str]:
    """Buffer -> the number of partitions in which the instructions write or read it."""
    return Counter(whole_buffer(name) for name in {name for i in instructions for name in (*i.reads, *i.writes)})
