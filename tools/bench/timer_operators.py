"""Timer compute: the executor with every operator replaced by a sleep of its profiled time; communication stays real.

Ranks then need no processor, so there may be more of them than cores, and the figures vary by a few per cent at most. Routing is
balanced: token t goes to experts t·k, …, t·k + k - 1 (mod E). What is sent has the real sizes and no meaning.

T tokens of a micro-batch on this rank, E experts, k experts per token, H hidden.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_overlap.plan.instructions import BufferRole, Instruction
from moe_overlap.plan.operators import BACKWARD, COUNT, DISPATCH, GATE, OperatorKind, state_operator
from moe_overlap.plan.step import StepResult
from moe_overlap.runtime.dispatch.irregular import Handle, IrregularDispatcher
from moe_overlap.runtime.dispatch.wire import AllToAll, Columns, Pending
from moe_overlap.runtime.executor.buffers import Buffers
from moe_overlap.runtime.executor.execute import PlanExecutor, StageTransfers, is_update
from moe_overlap.runtime.executor.state import StepState, handle_of, travelling
from moe_overlap.runtime.spans import HostClock, SpanRecorder
from moe_overlap.runtime.step import Batch
from tools.bench.profile import LATE_SECONDS, GivenSeconds, ListSeconds, apply_profile


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that decide how large a message is."""

    tokens: int
    experts: int
    experts_per_token: int
    hidden: int
    dtype: torch.dtype


class ProcessorClock(HostClock):
    """A clock for the span recorder: processor seconds of this thread, which other processes do not lengthen."""

    def mark(self) -> float:
        """Read the clock."""
        return time.thread_time()


class TimerOperators:
    """Stands in for `ChunkOperators`: it sleeps, and its all-to-alls carry rows of zeros."""

    def __init__(self, dispatcher: IrregularDispatcher, recorder: SpanRecorder, sizes: Sizes) -> None:
        self._dispatcher, self._recorder, self._sizes = dispatcher, recorder, sizes
        self.seconds: ListSeconds | GivenSeconds = ListSeconds({}, {})
        self.scale = 1.0
        self.partitions: Mapping[str, int] = {}
        self._openings: dict[int, Handle] = {}
        self._zeros: dict[tuple[int, int], Tensor] = {}

    def compute(self, instruction: Instruction, state: StepState) -> None:
        """Sleep for the time of a compute or weight-gradient instruction; a gate also decides the routing."""
        begun = time.perf_counter()
        self._recorder.computing(instruction)
        operator = instruction.operator
        if operator.kind == GATE and not operator.phase:
            assert operator.layer is not None
            places = travelling(instruction, operator.layer, instruction.writes, BufferRole.ROWS)
            partitions = max(self.partitions.get(instruction.name, 1), len(places))
            state.handles |= {place: self._open(operator.layer, partitions) for place in places}
        remaining = begun + self.seconds.of(instruction) * self.scale - LATE_SECONDS - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)

    def start_all_to_all(self, instruction: Instruction, state: StepState) -> Callable[[], None]:
        """Start an all-to-all; the returned function waits for it."""
        operator = instruction.operator
        handle, dispatcher = handle_of(instruction, operator, state, self._dispatcher), self._dispatcher
        if operator.kind == COUNT:
            span = self._recorder.started(instruction)
            counting = dispatcher.start_counts(handle)
            return self._recorder.ending(span, lambda: _drop(counting.wait()))
        routed, arrived = sum(handle.counts.sent), sum(handle.counts.received)
        packed = self._sizes.hidden + Columns.of(self._sizes.dtype, handle.probs_dtype).appended
        back = operator.phase == BACKWARD
        start: Callable[[Tensor, Handle], Pending[Tensor]]
        if operator.kind == DISPATCH:
            start = dispatcher.start_dispatch_backward if back else dispatcher.start_dispatch
            rows = self._rows(arrived if back else routed, packed)
        else:
            start = dispatcher.start_combine_backward if back else dispatcher.start_combine
            rows = self._rows(routed if back else arrived, self._sizes.hidden)
        span = self._recorder.started(instruction)
        pending = start(rows, handle)
        return self._recorder.ending(span, lambda: _drop(pending.wait()))

    def _open(self, layer: int, partitions: int) -> Handle:
        tokens = self._sizes.tokens // partitions
        if tokens not in self._openings:
            experts, k = self._sizes.experts, self._sizes.experts_per_token
            chosen_TK = (torch.arange(tokens)[:, None] * k + torch.arange(k)[None, :]) % experts
            map_TE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen_TK, True)
            self._openings[tokens] = self._dispatcher.open(map_TE, torch.float32, "moe")
        name, tag = f"L{layer}.moe", self._dispatcher.take_tags()
        return dataclasses.replace(self._openings[tokens], name=name, tag=tag, arriving=None)

    def _rows(self, rows: int, columns: int) -> Tensor:
        if (rows, columns) not in self._zeros:
            self._zeros[rows, columns] = torch.zeros(rows, columns, dtype=self._sizes.dtype)
        return self._zeros[rows, columns]


class ZeroPieces:
    """Replaces `GradientBuckets`: it sends zeros of the sizes in the list."""

    def __init__(self, replicas: AllToAll) -> None:
        self.replicas = replicas
        self._sent_bytes: dict[tuple[str, int], int] = {}

    def take_sizes(self, instructions: Sequence[Instruction]) -> None:
        """Read the buckets of the next step."""
        pieces = [i for i in instructions if i.operator.is_bucket]
        self._sent_bytes = {(i.name, i.partition[0]): i.bytes for i in pieces}

    def start(self, parameter_group: str, bucket: int, buckets: int) -> Callable[[], None]:
        """Start one bucket; the returned function waits for it."""
        name, size = state_operator(OperatorKind.GRADIENTS, parameter_group), self.replicas.size
        rows = torch.zeros(size, self._sent_bytes[name, bucket] // (size - 1), dtype=torch.uint8)
        pending = self.replicas.start(rows, [1] * size, [1] * size, tag=self.replicas.take_tags(1), name=name)
        return lambda: _drop(pending.wait())

    def finish(self) -> None:
        """Nothing was summed, so nothing is scaled."""


class ZeroTransfers(StageTransfers):
    """Replaces `StageTransfers`: it sends zeros of the same sizes, and discards received tensors."""

    @classmethod
    def like(cls, transfers: StageTransfers) -> ZeroTransfers:
        """Zero transfers with the sizes and the group of given transfers."""
        zeros = cls.__new__(cls)
        zeros.__dict__.update(transfers.__dict__)
        return zeros

    def start(self, i: Instruction, buffers: Buffers) -> Callable[[], None]:
        """Start one transfer; the returned function waits for it."""
        empty = Buffers(lambda _: 1)
        hidden = dataclasses.replace(i, reads=("h.m0",), writes=("h.m0",))
        empty.write(hidden, "h", torch.zeros(self._shape, dtype=self._dtype))
        return super().start(hidden, empty)


class TimedExecutor(PlanExecutor):
    """The executor over `TimerOperators`: forward and backward of a list, without the update.

    Attributes:
        profile: operator -> seconds of an uncut micro-batch (profile.py).
        list_seconds: seconds of the next list, in place of the profile; None: by the profile.
        scale: factor of all of them; 0 leaves the communication alone.
    """

    profile: Mapping[str, float]
    list_seconds: GivenSeconds | None = None
    scale: float = 1.0

    @classmethod
    def over(cls, executor: PlanExecutor, sizes: Sizes, replicas: AllToAll, waits: bool) -> TimedExecutor:
        """An executor that shares everything but the operators with another one.

        Args:
            replicas: the wire over which gradients are reduced.
            waits: wait for every all-to-all where it is started.
        """
        timed = cls.__new__(cls)
        timed.__dict__.update(executor.__dict__)
        timed._operators = [TimerOperators(executor.dispatcher, executor.recorder, sizes) for _ in executor._operators]  # type: ignore[misc]
        timed._buckets = ZeroPieces(replicas)
        timed._waits = waits
        timed._transfers = ZeroTransfers.like(executor._transfers)
        timed.profile = {}
        return timed

    @torch.no_grad()
    def run(self, instructions: Sequence[Instruction], batches: Iterator[Batch], step: int) -> StepResult:
        """Forward and backward. Loss and norm are not numbers, and no weight moves."""
        listed = [_as_compute(i) for i in instructions if not is_update(i)]
        seconds = self.list_seconds or apply_profile(self.profile, listed)
        for operators in self._operators:
            assert isinstance(operators, TimerOperators)
            operators.seconds, operators.partitions, operators.scale = seconds, _partitions(listed), self.scale
        assert isinstance(self._buckets, ZeroPieces)
        self._buckets.take_sizes(listed)
        self._recorder.start_step()
        self._follow(listed, self._state(listed, batches, step))
        return StepResult(math.nan, 0, math.nan, False, None, tuple(self._recorder.spans()))


def _as_compute(i: Instruction) -> Instruction:
    """A sleep is a sleep: weight gradients need no queue."""
    return dataclasses.replace(i, kind="compute") if i.kind == "weight-gradient" else i


def _partitions(instructions: Sequence[Instruction]) -> dict[str, int]:
    partitions: dict[str, int] = {}
    for i in instructions:
        partitions[i.name] = max([partitions.get(i.name, 1), *(number + 1 for number in i.partition)])
    return partitions


def _drop(arrived: object) -> None:
    """Drop what arrives: it has no meaning."""
