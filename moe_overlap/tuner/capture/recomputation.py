"""The graph of a part with recomputation, rewritten from its graph without. Standard library only.

megatron-core 0.16.1 recomputes a stretch of a layer's forward pass in one of two ways (`tensor_parallel/random.py`):

- `checkpoint` (class CheckpointFunction) runs the stretch without gradients and keeps its inputs. When the gradients of its
  outputs arrive, it runs the stretch again, now with gradients, and then the stretch's backward pass.
- `CheckpointWithoutOutput` does the same, and empties the stretch's outputs once the operators after it have read them. A hook
  on the gradient of a later tensor runs the stretch again and copies its results into the emptied storages, which those operators
  hold for their own backward passes.

`recomputed` implements this as a rewrite: which operators run again, when, on which storages, and how long each storage lives.
The marks of the part (`without_gradients.py`) give the operators that a pass without gradients omits, and the storages that the
model's code holds without autograd. `library.py` compares the rewritten graph of one layout with a capture before it answers
with others: this verifies a variant's collectives, but not every class of a block, which slow tests compare
(`test_capture_layouts.py`). Other variants raise `NotRewrittenError`, and are captured.

Recomputation changes the attribution of operators, too: a hook runs outside of the methods that name operators, so an operator
in a module of its own has no operator name there, and every other one has the place of the operator whose gradient fired the
hook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_overlap.tuner.capture.dependencies import finished
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedPart, Op, Storage
from moe_overlap.tuner.capture.stretches import NotRewrittenError, Place, Stretch, forward_count, place_of, stretches

FIRST, AGAIN, REFILLED, SCRATCH, SCRATCH_TOO = range(5)
"""Copies of a storage: of the forward pass, of the stretch that runs again, the emptied one that is refilled, and two without
any bytes that torch creates to copy one storage into another."""
Copy = tuple[int, int]
"""A storage of the part without recomputation, and the index of its copy."""


def recomputed(part: CapturedPart, variant: str) -> CapturedPart:
    """The part as it would be captured with a variant of recomputation.

    Args:
        part: captured without recomputation, with the marks of its pass without gradients.
        variant: see `Request.variant`.
    Raises:
        NotRewrittenError: it must be captured.
    """
    return _Rewrite(part, stretches(part, variant)).result(variant)


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator of the rewritten part.

    Attributes:
        op: the operator, with its place in the rewritten part.
        run: FIRST, or AGAIN if it runs again in the backward pass.
    """

    op: Op
    run: int
    is_backward: bool
    reads: tuple[Copy, ...]
    writes: tuple[Copy, ...]


class _Storages:
    """The storages of a part, from the point of view of one stretch.

    Attributes:
        late: the sum of a gradient that leaves the stretch and one from outside. Without a checkpoint it runs among the backward
            operators; with one it runs after them, since autograd sees the checkpoint's results when it ends.
        own_storages: storages made by the stretch, including constants of its code: each run makes its own.
        outputs: those of `own_storages` that operators after the stretch read.
        inputs: storages that a checkpoint keeps.
        met: gradients from outside that the stretch's backward pass reads.
        leaving: gradients that it passes to operators after it.
        held: inputs, met and leaving: a checkpoint holds them until its backward pass has ended.
        never_freed: those of `held` that stay because the model's code keeps a result until the layer runs again (the
            probabilities, in a token dispatcher), and with it the graph of autograd, which ends in the checkpoint's inputs and
            their gradients.
    """

    def __init__(self, part: CapturedPart, stretch: Stretch) -> None:
        count, storages = forward_count(part), part.storages
        inside, back = (
            part.ops[stretch.forward.start : stretch.forward.stop],
            part.ops[stretch.backward.start : stretch.backward.stop],
        )
        used_before = _used(part.ops[: stretch.forward.start])
        self.own_storages = {index for index in _used(inside) - used_before if _is_own(storages[index])}
        read_later = _read(part.ops[stretch.forward.stop : count]).union(part.outputs)
        self.outputs = sorted(self.own_storages & read_later)
        self.inputs = {
            index for index in _read(inside) - self.own_storages if storages[index].role in ("activation", "input")
        }
        self.late = _late_sum(back)
        written = _written(op for op in back if op is not self.late)
        before = _written(part.ops[count : stretch.backward.start]).union(part.gradient_inputs)
        self.met = (_read(back) & before) - self.inputs
        after = _read([*part.ops[stretch.backward.stop :], *([self.late] if self.late is not None else [])])
        self.leaving = (
            {index for index in written & after if storages[index].role == "activation"} - self.inputs - self.met
        )
        self.held = self.inputs | self.met | self.leaving
        self.never_freed = _never_freed(part, inside, self.inputs, self.leaving)


def _never_freed(part: CapturedPart, inside: Sequence[Op], inputs: set[int], leaving: set[int]) -> set[int]:
    replaced = {
        index
        for op in inside
        for index in op.writes
        if part.storages[index].replaced_after is not None and "float" in op.dtype
    }
    for op in reversed(inside):
        if not replaced.isdisjoint(op.writes):
            replaced.update(op.reads)
    held = inputs & replaced
    return held | leaving if held else held


def _read(ops: Iterable[Op]) -> set[int]:
    return {index for op in ops for index in op.reads}


def _written(ops: Iterable[Op]) -> set[int]:
    return {index for op in ops for index in op.writes}


def _used(ops: Sequence[Op]) -> set[int]:
    return _read(ops) | _written(ops)


def _is_own(storage: Storage) -> bool:
    """Whether each run makes its own copy of a storage: tables that all runs read are never freed."""
    is_number = storage.role == "constant" and not storage.name and storage.freed_after is not None
    return storage.role == "activation" or is_number


def _late_sum(backward: Sequence[Op]) -> Op | None:
    written, read = _written(backward), _read(backward)
    for op in backward:
        from_outside = [index for index in op.reads if index not in written]
        if op.name == "add" and len(op.reads) == 2 and len(from_outside) == 1 and read.isdisjoint(op.writes):
            return op
    return None


class _Rewrite:
    """The rewrite of one part.

    Args:
        stretches: the stretches that run again; they must not overlap.
    """

    def __init__(self, part: CapturedPart, stretches: Sequence[Stretch]) -> None:
        self._part, self._stretches = part, stretches
        self._count = forward_count(part)
        if any(
            earlier.forward.stop > later.forward.start for earlier, later in zip(stretches, stretches[1:], strict=False)
        ):
            raise NotRewrittenError(f"{part.kind}: recomputed stretches inside of each other")
        self._of = {stretch: _Storages(part, stretch) for stretch in stretches}
        self._maker = {index: stretch for stretch in stretches for index in self._of[stretch].own_storages}
        """Storage -> the stretch that makes it."""
        self._around = {place: stretch for stretch in stretches for place in (*stretch.forward, *stretch.backward)}
        """Operator -> the stretch of it, or of its forward operator."""
        self._is_marked = any(storage.released_after is not None for storage in part.storages)
        self._steps: list[_Step] = []
        self._at: dict[tuple[int, int], int] = {}
        """Operator of the part, and FIRST or AGAIN -> its index in `_steps`, or that of the last one before it."""
        self._ends: dict[Stretch, int] = {}
        """Stretch -> the last step of its backward pass."""
        self._last_use: dict[Copy, int] = {}
        """Copy -> the last step that reads or writes it."""

    def result(self, variant: str) -> CapturedPart:
        """The rewritten part."""
        part = self._part
        self._run()
        for place, step in enumerate(self._steps):
            self._last_use.update(dict.fromkeys((*step.reads, *step.writes), place))
        order = self._storage_order()
        number = {copy: index for index, copy in enumerate(order)}
        storages = tuple(self._storage(copy, index) for index, copy in enumerate(order))
        ops = [
            dataclasses.replace(
                step.op,
                id=index,
                phase="backward" if step.is_backward else "forward",
                reads=tuple(number[copy] for copy in step.reads),
                writes=tuple(number[copy] for copy in step.writes),
                is_recomputed=step.run == AGAIN,
                needs_gradients=False,
            )
            for index, step in enumerate(self._steps)
        ]

        def numbers(ids: Sequence[int]) -> tuple[int, ...]:
            return tuple(number[index, FIRST] for index in ids)

        return dataclasses.replace(
            part,
            variant=variant,
            ops=finished(ops, [storage.role for storage in storages]),
            storages=storages,
            saved=self._saved(order, storages),
            inputs=numbers(part.inputs),
            outputs=numbers(part.outputs),
            gradient_inputs=numbers(part.gradient_inputs),
            gradient_outputs=numbers(part.gradient_outputs),
        )

    def _run(self) -> None:
        """Put the operators into the order in which they run."""
        for op in self._part.ops[: self._count]:
            stretch = self._around.get(op.id)
            if stretch is None or not op.needs_gradients:
                self._add(op, FIRST, stretch)
            self._at[op.id, FIRST] = len(self._steps) - 1
        for op in self._part.ops[self._count :]:
            # A hook on a result of a checkpoint fires before the checkpoint's own backward pass.
            for stretch in sorted(
                [candidate for candidate in self._stretches if candidate.starts == op.id],
                key=lambda candidate: candidate.hook is None,
            ):
                self._run_again(stretch)
            stretch = self._around.get(op.id)
            if stretch is None or op is not self._of[stretch].late:
                self._add(op, FIRST, stretch)
            self._at[op.id, AGAIN] = len(self._steps) - 1
            if stretch is not None and op.id == stretch.backward[-1]:
                self._end(stretch)

    def _end(self, stretch: Stretch) -> None:
        self._ends[stretch] = len(self._steps) - 1
        late = self._of[stretch].late
        if late is None:
            return
        # Autograd adds gradients from outside when the stretch returns its gradient.
        operator, module = stretch.function_place or place_of(self._steps[-1].op)
        self._add(dataclasses.replace(late, operator=operator, module=module), FIRST, None)
        self._at[late.id, AGAIN] = len(self._steps) - 1

    def _run_again(self, stretch: Stretch) -> None:
        for place in stretch.forward:
            self._add(self._part.ops[place], AGAIN, stretch)
            self._at[place, AGAIN] = len(self._steps) - 1
        if stretch.hook is None:
            return
        at = self._hook_place(stretch)
        for index in self._of[stretch].outputs:
            # torch copies one storage into another through two empty tensors that it points at them.
            for which in (SCRATCH, SCRATCH_TOO):
                self._steps.append(_hook_step("empty", at, (), ((index, which),), Expression()))
            copied = ((index, AGAIN),), ((index, REFILLED),)
            self._steps.append(_hook_step("copy_", at, *copied, self._part.storages[index].bytes))

    def _add(self, op: Op, run: int, stretch: Stretch | None) -> None:
        is_backward = run == AGAIN or op.id >= self._count
        reads, writes = (
            tuple([self._copy(index, stretch, is_backward) for index in ids]) for ids in (op.reads, op.writes)
        )
        if is_backward and stretch is not None:
            again = stretch.place(op)
            if again is None:
                again = self._hook_place(stretch) if run == AGAIN else place_of(self._steps[-1].op)
            operator, module = again
            op = dataclasses.replace(op, operator=operator, module=module)
        self._steps.append(_Step(op, run, is_backward, reads, writes))

    def _hook_place(self, stretch: Stretch) -> Place:
        """The place of the autograd function whose gradient fires a stretch's hook: an operator's, or another checkpoint's."""
        assert stretch.hook is not None
        hooked = stretch.hook[0]
        around = self._around.get(hooked.id)
        if around is None or around.hook is not None:
            return place_of(hooked)
        return around.function_place or place_of(self._steps[-1].op)

    def _copy(self, index: int, stretch: Stretch | None, is_backward: bool) -> Copy:
        """The copy of a storage that an operator uses, inside a stretch or outside of all."""
        maker = self._maker.get(index)
        if maker is None or not is_backward:
            return index, FIRST
        if maker is stretch:
            return index, AGAIN
        return index, REFILLED if maker.hook is not None else FIRST

    def _storage_order(self) -> list[Copy]:
        """The storages in the order in which a recorder would number them."""
        part = self._part
        order: dict[Copy, None] = dict.fromkeys((index, FIRST) for index in range(max(part.inputs) + 1))
        emptied = sorted(
            index for stretch, storages in self._of.items() if stretch.hook is not None for index in storages.outputs
        )
        between = [*((index, REFILLED) for index in emptied), *((index, FIRST) for index in part.gradient_inputs)]
        was_backward = False
        for step in self._steps:
            if step.is_backward and not was_backward:
                order.update(dict.fromkeys(between))
                was_backward = True
            order.update(dict.fromkeys((*step.reads, *step.writes)))
        seen = {index for index, _ in order}
        order.update(dict.fromkeys((storage.id, FIRST) for storage in part.storages if storage.id not in seen))
        return list(order)

    def _storage(self, copy: Copy, number: int) -> Storage:
        storage = self._part.storages[copy[0]]
        is_scratch = copy[1] in (SCRATCH, SCRATCH_TOO)
        return Storage(
            id=number,
            bytes=Expression() if is_scratch else storage.bytes,
            role=storage.role,
            name=storage.name,
            replicas=storage.replicas,
            freed_after=self._last_use[copy] if is_scratch else self._freed(storage, copy[1]),
        )

    def _freed(self, storage: Storage, which: int) -> int | None:
        """The step after which a copy of a storage is freed."""
        stretch = self._maker.get(storage.id)
        if stretch is None:
            return self._freed_outside(storage)
        is_output = storage.id in self._of[stretch].outputs
        if which == REFILLED or (is_output and which == AGAIN and stretch.hook is not None):
            # Autograd's node holds the checkpoint's tensors, and they hold the node.
            return None
        if which == AGAIN:
            return self._ends[stretch] if is_output else self._after(storage.freed_after, AGAIN)
        if not is_output:
            return self._freed_without_gradients(storage)
        if stretch.hook is None and (storage.freed_after is None or storage.freed_after not in stretch.backward):
            return self._after(storage.freed_after, FIRST)
        # An emptied storage is freed by its last reader; the stretch's own backward operators hold the other copy.
        return self._last_use[storage.id, FIRST]

    def _freed_without_gradients(self, storage: Storage) -> int | None:
        if storage.released_after is not None:
            return self._at[storage.released_after, FIRST]
        if storage.replaced_after is not None:
            return self._at[storage.replaced_after, AGAIN]
        if not self._is_marked:
            raise NotRewrittenError(
                f"{self._part.kind}: nothing tells how long a pass without gradients holds a storage"
            )
        return None

    def _freed_outside(self, storage: Storage) -> int | None:
        """The step after which a storage from outside all stretches is freed: a checkpoint holds its inputs and the gradients
        of its outputs until its backward pass has ended, and returns the gradients of its inputs then."""
        freed = self._after(storage.freed_after, FIRST)
        for stretch, storages in self._of.items():
            if storage.id in storages.never_freed:
                return None
            if freed is not None and storage.id in storages.held:
                freed = max(freed, self._ends[stretch])
        return freed

    def _after(self, op: int | None, run: int) -> int | None:
        """The step of an operator; for a forward one, that of a run."""
        return None if op is None else self._at[op, AGAIN if op >= self._count else run]

    def _saved(self, order: Sequence[Copy], storages: Sequence[Storage]) -> tuple[int, ...]:
        """`CapturedPart.saved`: storages that the forward pass writes and keeps, and inputs kept by autograd or a checkpoint."""
        part = self._part
        forward = [step for step in self._steps if not step.is_backward]
        written = {copy for step in forward for copy in step.writes}
        kept_inputs = set(part.saved).union(*(storages_of.inputs for storages_of in self._of.values())) & set(
            part.inputs
        )
        saved = []
        for number, copy in enumerate(order):
            freed = storages[number].freed_after
            is_alive = freed is None or freed >= len(forward)
            is_made = copy in written and storages[number].role == "activation" and copy[0] not in part.outputs
            if copy[0] in kept_inputs or (is_made and is_alive):
                saved.append(number)
        return tuple(saved)


def _hook_step(name: str, at: Place, reads: tuple[Copy, ...], writes: tuple[Copy, ...], size: Expression) -> _Step:
    """The step of an operator that only a hook of recomputation has: it moves bytes from storage to storage."""
    op = Op(
        id=-1,
        name=name,
        phase="backward",
        operator=at[0],
        module=at[1],
        cost_class="memory" if reads else "free",
        shape=(size,),
        dtype="uint8",
        flops=Expression(),
        bytes=size * 2,
        reads=(),
        writes=(),
        after=(),
    )
    return _Step(op, FIRST, True, reads, writes)
