"""Weight gradients that are computed early because the bound on held bytes is reached; bytes that partitions copy.

The rule is that of runtime/weight_grad/queue.py. Held bytes never exceed the bound. A gradient that does not fit is
computed at once, inside the backward operator that made it, behind those of its name that still wait, so that sums keep
their order. A gradient whose computation communicates is judged by the bytes of its own kind alone, which all ranks
know; for it the oldest others give way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from moe_overlap.plan.instructions import COMPUTE, BufferId, BufferRole, Home, Instruction, parse_buffer
from moe_overlap.plan.operators import ATTENTION, HEAD_LOSS, MLP, SHARED, WEIGHTS, OperatorId, parse_operator
from moe_overlap.plan.plan import StagePlan

# Bytes copied where a micro-batch is cut into partitions and joined again, by the instruction that copies them.
#
# What the runtime does (runtime/executor/buffers.py, bindings.py): partitions of hidden states are joined by whoever
# reads several of them; a partition of whole hidden states is a view and costs nothing. A gate that leaves its rows in
# partitions copies the hidden states of each, and joins their gradients. Where rows travel in capacity chunks, an
# all-to-all picks its rows, and who needs all of them puts them into their places. Partitions that go to another stage
# are joined behind the computation that made the last of them.

HIDDEN = (
    *(BufferRole.HIDDEN, BufferRole.ATTENDED, BufferRole.SHARED),
    *(BufferRole.D_HIDDEN, BufferRole.D_ATTENDED, BufferRole.D_SHARED),
)
"""Buffers of hidden states and their gradients."""
ROWS = (BufferRole.ROWS, BufferRole.RETURNED, BufferRole.D_ROWS, BufferRole.D_RETURNED)
"""Buffers of routed rows where their tokens are."""
Place = tuple[str, int | None, tuple[int, ...]]


def place_in_list(i: Instruction) -> Place:
    """Name, micro-batch and partition: what tells an instruction of a pass, on every rank of a stage."""
    return i.name, i.micro_batch, i.partition


def copied_bytes(made: Sequence[Instruction], hidden_bytes: float, rows_bytes: float) -> dict[Place, float]:
    """Bytes that are copied beside the operators of a list, by the instruction that copies them.

    Args:
        hidden_bytes: of the hidden states of a micro-batch.
        rows_bytes: of all rows that a micro-batch sends.
    """
    pieces = Counter((i.name, i.micro_batch) for i in made)
    makers = {name: i for i in made if i.channel == COMPUTE for name in i.writes}
    left_in_parts = {
        _rows_of(name) for i in made if _is_whole_gate(i) for name in i.writes if _parts(i.writes)[BufferRole.ROWS] > 1
    }
    copied: dict[Place, float] = defaultdict(float)
    for i in made:
        read = _parts(name for name in i.reads if name not in i.writes)
        size = hidden_bytes * sum(read[word] > 1 for word in HIDDEN)
        if i.channel == COMPUTE:
            of_parts = any(_rows_of(name) in left_in_parts for name in (*i.reads, *i.writes))
            size += hidden_bytes * (_is_whole_gate(i) and _parts(i.writes)[BufferRole.ROWS] > 1)
            size += (hidden_bytes if of_parts else rows_bytes) * sum(read[word] > 1 for word in ROWS)
        elif i.partition and any(_is_whole_rows(parse_buffer(name)) for name in i.reads):
            size += rows_bytes / pieces[i.name, i.micro_batch]
        if size:
            copied[place_in_list(makers[i.reads[-1]] if i.kind == "point-to-point" else i)] += size
    return copied


def _is_whole_gate(i: Instruction) -> bool:
    return (
        not i.partition
        and i.channel == COMPUTE
        and any(parse_buffer(name).role is BufferRole.ROWS for name in i.writes)
    )


def _is_whole_rows(buffer: BufferId) -> bool:
    return buffer.role in ROWS and buffer.partition is None


def _parts(names: Iterable[str]) -> Counter[BufferRole]:
    """Role -> buffers of it."""
    return Counter(parse_buffer(name).role for name in names if parse_buffer(name).home is Home.DEVICE)


def _rows_of(name: str) -> BufferId:
    """`drows.L3.m0.p1` -> `rows.L3.m0`: the whole buffer that this is a part of, or a part of the gradient of."""
    buffer = parse_buffer(name)
    return replace(buffer, role=buffer.role.differentiated, partition=None)


GATHERED = {ATTENTION: ("qkv", "q", "q_up", "kv_up"), MLP: ("fc1",), SHARED: ("fc1",), HEAD_LOSS: ("output",)}
"""Products of a part of the sequence that is gathered again for the weight gradient, where tensor ranks share it."""


@dataclass(slots=True)
class Room:
    """Gradients that wait, the oldest first: name, bytes, and whether they communicate.

    Args:
        max_bytes: most bytes that may be held; None is no bound.
    """

    max_bytes: int | None
    _waiting: list[tuple[str, float, bool]] = field(default_factory=list)

    def put(self, name: str, size: float, communicates: bool = False) -> list[str]:
        """Names of what is computed now, in order."""
        entry = (name, size, communicates)
        bound = float("inf") if self.max_bytes is None else self.max_bytes
        # A gradient that communicates must be computed at the same place on all ranks of its group, or their
        # collectives do not meet. Its decision may not depend on bytes that differ by rank, such as routed rows.
        if self._held(communicates_only=communicates) + size > bound:
            # In the order in which they came: sums of floats in another order would not be bitwise equal.
            early = [other for other in self._waiting if other[0] == name]
            self._waiting = [other for other in self._waiting if other[0] != name]
            return [other[0] for other in (*early, entry)]
        self._waiting.append(entry)
        early = []
        while self._held(communicates_only=False) > bound:
            # There is one: those that communicate were found to fit by themselves.
            oldest = next(other for other in self._waiting if not other[2])
            self._waiting.remove(oldest)
            early.append(oldest)
        return [other[0] for other in early]

    def run(self, name: str) -> int:
        """How many of a name still waited, and are computed now."""
        before = len(self._waiting)
        self._waiting = [other for other in self._waiting if other[0] != name]
        return before - len(self._waiting)

    def _held(self, communicates_only: bool) -> float:
        return sum(size for _, size, communicates in self._waiting if communicates or not communicates_only)


@dataclass(frozen=True, slots=True)
class Computed:
    """Weight gradients that the instructions of a list compute.

    Attributes:
        early: backward instruction -> gradients beside its own work; of an operator in parts once for each part.
        late: weight-gradient instruction -> how many it still finds.
    """

    early: dict[Place, tuple[str, ...]]
    late: dict[Place, int]

    @property
    def early_names(self) -> Counter[str]:
        """How often each gradient of the list is computed early."""
        return Counter(name for names in self.early.values() for name in names)


def computed_gradients(
    made: Sequence[Instruction],
    size_of: Callable[[str], float],
    communicates: Callable[[str], bool],
    max_bytes: int | None,
) -> Computed:
    """Follow the deferred weight gradients of a list.

    Args:
        size_of: bytes that one of the gradients of a name holds.
    """
    room = Room(max_bytes)
    early: dict[Place, list[str]] = defaultdict(list)
    late: dict[Place, int] = {}
    for i in made:
        saved = [str(buffer.gradient) for buffer in map(parse_buffer, i.writes) if buffer.role is BufferRole.SAVED]
        # A backward operator runs through its products in reverse; the order of arrival decides which are the oldest.
        for name in sorted(saved, key=_place_in_forward, reverse=True):
            early[place_in_list(i)] += room.put(name, size_of(name), communicates(name))
        if i.kind == "weight-gradient":
            late[place_in_list(i)] = room.run(i.name)
    return Computed({place: tuple(names) for place, names in early.items() if names}, late)


def is_gathered(gradient: OperatorId, stage: StagePlan) -> bool:
    """Whether computing a weight gradient communicates."""
    return stage.tensor > 1 and gradient.weight in GATHERED.get(gradient.kind, ())


def _place_in_forward(gradient: str) -> int:
    operator = parse_operator(gradient)
    return WEIGHTS[operator.kind].index(operator.weight)
