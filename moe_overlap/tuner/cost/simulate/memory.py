"""Bytes that overlap adds to a stage: what deferred weight gradients hold, and rows of several parts or micro-batches at once.

The passes of `folded.sample_blocks` are looked at with and without overlap. At any time a stage holds what its micro-batches in
flight save for their backward passes; the closed form counts that whole, until a backward pass has ended. What is there beyond
that, at most, is the surplus of a list; the surplus with overlap less that without is the extra.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan import sizes as payload
from moe_overlap.plan.instructions import BufferRole, Home, Instruction, parse_buffer, whole_buffer
from moe_overlap.plan.lowering.dependencies import Draft, last_uses
from moe_overlap.plan.lowering.optimizer_state import part_of
from moe_overlap.tuner.cost.instruction_seconds import StagePrices, place_of
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.layer import weight_of
from moe_overlap.tuner.cost.simulate.compress import run_alone
from moe_overlap.tuner.cost.simulate.engine import Ran, Simulation, pass_of

# Live memory of one rank over a simulated step.
#
# A buffer is there from the start of what writes it first to the end of what reads it last; written anew later, it is there
# again. Parameters, gradient sums and states stay on the device all the time, what begins with `host.` never is there.
# `activations.L3.m0` stands for what the forward pass of a micro-batch through a part saves for its backward pass, which no
# instruction names: from the first computation of the one to the last of the other. Of an offloaded share
# (`moved.activations.…`) the list says itself when it is there.

STAYING = (BufferRole.PARAMETERS, BufferRole.GRADIENT, BufferRole.STATE)
"""Buffers that outlive a step, where they are not the share that moves."""
Interval = tuple[str, float, float]
"""Buffer, and from when to when it is there."""


def live_bytes(ran: Sequence[Ran], bytes_of: Callable[[str], float]) -> list[tuple[float, float]]:
    """When memory changes, and the bytes from then on.

    Args:
        ran: one rank's part of a Simulation.
        bytes_of: bytes of a buffer, of `activations.…` as well.
    Returns:
        In order of time, from 0; the largest bytes are the peak.
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
    """When each buffer is there."""
    in_list = sorted(ran, key=lambda one: one.instruction.id)
    step = max((one.end for one in ran), default=0.0)
    ends = last_uses([one.instruction for one in in_list])
    there: dict[str, tuple[float, float]] = {}
    for one in in_list:
        i = one.instruction
        for name in dict.fromkeys((*i.reads, *i.writes)):
            buffer = parse_buffer(name)
            if buffer.home is Home.HOST:
                continue
            given = name in i.reads and name not in there
            start, end = there.get(name, (0.0 if given else one.start, one.end))
            there[name] = (start, max(end, one.end))
            if buffer.word in STAYING:
                there[name] = (0.0, step)
            elif name in ends[i.id]:
                yield (name, *there.pop(name))
    yield from ((name, start, end) for name, (start, end) in there.items())
    yield from _activations(in_list)


def _activations(in_list: Sequence[Ran]) -> Iterator[Interval]:
    spans: dict[str, tuple[float, float]] = {}
    for one in in_list:
        i: Instruction = one.instruction
        if i.micro_batch is not None and (part := part_of(Draft.of(i))):
            name = f"activations.{part}.m{i.micro_batch}"
            start, end = spans.get(name, (one.start, one.end))
            spans[name] = (min(start, one.start), max(end, one.end))
    yield from ((name, start, end) for name, (start, end) in spans.items())


Size = Callable[[str], float]
ROWS_OF_EXPERTS = (BufferRole.COMPUTED, BufferRole.D_RECEIVED, BufferRole.D_COMPUTED)
ROWS = (*ROWS_OF_EXPERTS, BufferRole.ROWS, BufferRole.RETURNED, BufferRole.D_ROWS, BufferRole.D_RETURNED)
"""Routed rows; what the experts received is among what a micro-batch saves."""


@dataclass(frozen=True, slots=True)
class ListedBytes:
    """Of one stage.

    Attributes:
        deferred: most that waiting weight gradients hold if nothing bounds them.
        extra: peak bytes beyond those without overlap, the plan's bound kept.
    """

    deferred: float
    extra: float


def listed_bytes(
    prices: StagePrices,
    model: ModelDescription,
    alone: Simulation,
    without: Sequence[Instruction],
    slowed: Interference,
) -> ListedBytes:
    """Bytes that overlap adds.

    Args:
        prices: of the stage, which have read the list with overlap.
        alone: how that ran.
        without: the list of such passes without overlap; in it only the order counts.
    """
    plain = run_alone(without, prices.stage.devices.ranks[0], lambda _: 1.0, slowed).ran
    rows, saved = RowBytes(prices, model, prices.made), SavedBytes(prices, prices.made)
    before = surplus(plain, prices, RowBytes(prices, model, without).of)
    undeferred = surplus(alone.ran, prices, rows.of) - before
    whole = surplus(alone.ran, prices, lambda name: rows.of(name) + saved.of(name)) - before
    deferred = highest((name, start, end, saved.of(name)) for name, start, end in intervals(alone.ran))
    return ListedBytes(deferred, max(0.0, min(whole, undeferred + prices.stage.overlap.max_deferred_bytes)))


def surplus(ran: Sequence[Ran], prices: StagePrices, size_of: Size) -> float:
    """Most bytes beyond what the micro-batches in flight save."""

    def saved(name: str) -> float:
        buffer = parse_buffer(name)
        return float(prices.saved_bytes(buffer.subject)) if buffer.word == BufferRole.ACTIVATIONS else 0.0

    there = [(name, start, end, size_of(name) + saved(name)) for name, start, end in intervals(ran)]
    flying = [(name, start, end, -saved(name)) for name, start, end in _flights(ran)]
    return highest([*there, *flying])


def highest(there: Sequence[tuple[str, float, float, float]] | Iterator[tuple[str, float, float, float]]) -> float:
    """The largest sum of sizes at a time, of buffers with start, end and size."""
    changes: dict[float, float] = defaultdict(float)
    for _, start, end, size in there:
        changes[start] += size
        changes[end] -= size
    most = total = 0.0
    for time in sorted(changes):
        total += changes[time]
        most = max(most, total)
    return most


def _flights(ran: Sequence[Ran]) -> Iterator[Interval]:
    """`activations.L3.m0` from the beginning of a forward pass of its chunk to the end of the backward pass."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    parts: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for one in ran:
        i = one.instruction
        if i.micro_batch is None or i.channel != "compute":
            continue
        step = pass_of(i)
        key = step.chunk, step.micro_batch
        start, end = spans.get(key, (one.start, one.end))
        spans[key] = (min(start, one.start), max(end, one.end))
        if part := part_of(Draft.of(i)):
            parts[key][part] = None
    for key, (start, end) in spans.items():
        yield from ((f"activations.{part}.m{key[1]}", start, end) for part in parts[key])


class RowBytes:
    """Bytes of routed rows on their way between ranks.

    A rank sends B · S / (C · T) · k rows; of its experts' they are as many times more as ranks share an expert, and as the load
    of the busiest rank is above the mean.
    """

    def __init__(self, prices: StagePrices, model: ModelDescription, made: Sequence[Instruction]) -> None:
        stage, plan = prices.stage, prices.plan
        setting = prices.priced.setting
        width = (model.moe_latent_size or model.hidden_size) * payload.ACTIVATION_BYTES[plan.precision]
        self._sent = float(payload.tokens_of_rank(plan, stage) * setting.topk * width)
        self._taken = self._sent * stage.expert_tensor * setting.load
        self._pieces = _pieces(made)

    def of(self, name: str) -> float:
        """Of `rows.L3.m0.p1`; 0 for other buffers."""
        buffer = parse_buffer(name)
        if buffer.word not in ROWS:
            return 0.0
        whole = self._taken if buffer.role in ROWS_OF_EXPERTS else self._sent
        return whole / self._pieces[whole_buffer(name)]


class SavedBytes:
    """Bytes of what a backward pass leaves for a deferred weight gradient: the product's operands."""

    def __init__(self, prices: StagePrices, made: Sequence[Instruction]) -> None:
        self._prices = prices
        self._pieces = _pieces(made)
        written = {parse_buffer(name) for i in made for name in i.writes}
        gradients = {buffer.gradient for buffer in written if buffer.role is BufferRole.SAVED}
        self._named = Counter((place_of(gradient), gradient.kind) for gradient in gradients)
        self._read: dict[str, dict[tuple[str, str], float]] = {}

    def of(self, name: str) -> float:
        """Of `saved.L3.attention.qkv.m0.p1`; 0 for other buffers."""
        buffer = parse_buffer(name)
        if buffer.role is not BufferRole.SAVED:
            return 0.0
        operator = buffer.gradient
        place = place_of(operator)
        if place not in self._read:
            self._read[place] = self._operands(place)
        read = self._read[place]
        whole = sum(size for (part, _), size in read.items() if part == operator.kind)
        named = read.get((operator.kind, operator.weight))
        return (whole / self._named[place, operator.kind] if named is None else named) / self._pieces[
            whole_buffer(name)
        ]

    def _operands(self, place: str) -> dict[tuple[str, str], float]:
        """Of the products [n, tokens] · [tokens, k] of a part: tokens · (n + k) elements."""
        table = self._prices.priced.family.tables[self._prices.row(place)]
        width = payload.ACTIVATION_BYTES[self._prices.plan.precision]
        found: dict[tuple[str, str], float] = defaultdict(float)
        for op, shape in zip(table.ops, table.shapes, strict=True):
            if op.is_weight_gradient and op.cost_class == "gemm":
                found[op.operator, weight_of(table.part, op)] += shape[2] * (shape[0] + shape[1]) * width
            elif op.is_weight_gradient and op.cost_class == "grouped_gemm":
                found[op.operator, weight_of(table.part, op)] += shape[1] * (shape[2] + shape[3]) * width
        return found


def _pieces(made: Sequence[Instruction]) -> Counter[str]:
    """How many parts a buffer stands in."""
    return Counter(whole_buffer(name) for name in {name for i in made for name in (*i.reads, *i.writes)})
