"""A recorder of operators: their kernels, storages and modules. Works on real and on fake tensors.

The recorder is a dispatch mode. It writes a `Part` whose expressions are constants, those of the batch that ran. It watches
memory by storage, so that lifetimes are those of the references that the model's code and autograd really hold.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import Collective, CollectiveKind, Op, Phase, Role, Storage
from moe_overlap.tuner.capture.kernels import FORWARD_ONLY, GATHERS, KERNELS, UnregisteredKernelError, flops

COLLECTIVES: dict[str, CollectiveKind] = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}
"""Operators of torch.distributed's process groups."""
_ONE_BUFFER = ("allreduce_", "broadcast_")
_KNOWN_LIBRARIES = ("aten", "prim", "prims", "c10d")


@dataclass(slots=True)
class _Watched:
    """A storage during a recording."""

    bytes: int
    role: Role
    name: str = ""
    replicas: Any = ""
    freed_after: int | None = None


@dataclass(slots=True)
class Recording:
    """The record of a run: operators, storages, and the storages that autograd and the model keep between the passes.

    Attributes:
        alive: storages alive at the end of the forward pass.
        packed: storages saved by autograd's nodes.
    """

    ops: list[Op] = field(default_factory=list)
    storages: list[_Watched] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)
    packed: set[int] = field(default_factory=set)

    def frozen_storages(self) -> tuple[Storage, ...]:
        """The storages in the form of the graph."""
        return tuple(
            Storage(
                id=index,
                bytes=Expression.of(watched.bytes),
                role=watched.role,
                name=watched.name,
                replicas=watched.replicas,
                freed_after=watched.freed_after,
            )
            for index, watched in enumerate(self.storages)
        )


class Recorder(TorchDispatchMode):
    """Records the operators that run inside `with recorder:`.

    Args:
        axis_of: name of a process group -> axis (`ep`), for the groups of the model.

    Attributes:
        rows_of_map: number of tokens that a routing map (experts, tokens) selects: the size of a `masked_select` by one, which
            would depend on data.
    """

    def __init__(self, axis_of: Mapping[str, str]) -> None:
        super().__init__()
        self._axis_of = axis_of
        self.rows_of_map: Callable[[int, int], int] | None = None
        self._watches: list[weakref.finalize[..., torch.UntypedStorage]] = []
        self.begin()

    def begin(self) -> None:
        """Start a new recording; later reports of hooks and wrappers belong to it.

        Storages of the previous one are no longer watched. Some outlive their model, and each would hold a whole recording:
        after ten captures in a process every further one took twice as long, as the garbage collector walked through all of
        them.
        """
        for watch in self._watches:
            watch.detach()
        self._watches = []
        self.recording = Recording()
        self.phase: Phase = "forward"
        self._ids: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._modules: list[str] = []
        self._operators: list[str] = []
        self._place_of_node: dict[int, tuple[str, str]] = {}
        self._inside: list[Any] | None = None
        self._recomputing = 0

    # -- reports of the caller ----------------------------------------------------------------------------------------------

    def hold(self, tensor: torch.Tensor, role: Role, name: str = "", replicas: str = "") -> int:
        """Register a tensor that exists before the recording starts, or that is held by something besides the model.

        Returns:
            The id of its storage.
        """
        index = self._watch(tensor, role, name, replicas)
        watched = self.recording.storages[index]
        watched.role, watched.name, watched.replicas = role, name, replicas
        return index

    def id_of(self, tensor: torch.Tensor) -> int:
        """The id of a tensor's storage."""
        return self._ids[tensor.untyped_storage()._cdata]

    @contextlib.contextmanager
    def at(self, operator: str) -> Iterator[None]:
        """Attribute operators inside the block to an operator of the plan's vocabulary."""
        self._operators.append(operator)
        try:
            yield
        finally:
            self._operators.pop()

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark operators inside the block, in the backward pass, as recomputation."""
        self._recomputing += self.phase == "backward"
        # A checkpoint runs its function in the forward pass, too, which is no recomputation.
        counted = self.phase == "backward"
        try:
            yield
        finally:
            self._recomputing -= counted

    def watch_modules(self, root: torch.nn.Module, prefix: str = "") -> None:
        """Attribute operators to the modules below `root`."""

        def leave(*_: Any) -> None:
            self._modules.pop()

        for name, module in root.named_modules(prefix=prefix):
            module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name))
            # Also after an exception: a name that stays would be given to all later operators.
            module.register_forward_hook(leave, always_call=True)

    def end_forward(self) -> None:
        """Note that the forward pass has ended and its frames are gone."""
        refilled = self._split_discarded()
        self.recording.alive = set(self._ids.values()) - refilled
        self.phase = "backward"

    def _split_discarded(self) -> set[int]:
        """Give every discarded storage a second id, under which the backward pass refills it.

        megatron-core's checkpoints without output empty the storage of the recomputed tensors and keep the tensors: they are
        alive, but hold no data between the passes.
        holds nothing between the passes.

        Returns:
            The second ids.
        """
        storages, second = self.recording.storages, set()
        for key, reference in self._references.items():
            storage = reference()
            if storage is None or storage.nbytes() or not storages[self._ids[key]].bytes:
                continue
            first = self._ids[key]
            users = [op.id for op in self.recording.ops if first in op.reads or first in op.writes]
            storages[first].freed_after = max(users)
            self._ids[key] = len(storages)
            second.add(len(storages))
            storages.append(_Watched(storages[first].bytes, "activation"))
        return second

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd saves; for saved_tensors_hooks."""
        if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) in self._ids:
            self.recording.packed.add(self._ids[key])
        return tensor

    def kernel(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        written: Sequence[torch.Tensor] = (),
        shape: tuple[int, ...] | None = None,
        compiled: bool = False,
        sent: tuple[Any, int] | None = None,
    ) -> Any:
        """Run a function that is one kernel on a GPU: its inner operators are not recorded, only their remaining results.

        Args:
            written: tensors that it writes in place.
            shape: shape of its `Op`; default: the table computes it from the arguments.
            compiled: whether torch compiles it, fusing operators that move memory; other kernels are looked up in the table.
            sent: for an all-to-all: the process group, and all bytes that a rank sends, including those to itself.
        Raises:
            UnregisteredKernelError: it is neither compiled nor in the table.
        """
        if not compiled and name not in KERNELS:
            raise UnregisteredKernelError(name, self._place()[0])
        if self._inside is not None:
            return function(*args)
        self._inside = []
        try:
            result = function(*args)
        finally:
            inner, self._inside = self._inside, None
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs += self._left_inside(inner, outputs)
        # A returned argument is no result; a kernel without results and writes moves no bytes, such
        # as a view.
        results = [leaf for leaf in outputs if leaf.untyped_storage()._cdata not in self._ids]
        if results or written:
            self._emit(name, [*tensors, *written], results, [*results, *written], shape, self._exchange(sent))
        return result

    def _left_inside(
        self, inner: Sequence[weakref.ref[torch.UntypedStorage]], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Tensors inside a kernel that autograd keeps, such as a mask: the kernel writes them, too."""
        seen = {leaf.untyped_storage()._cdata for leaf in outputs}
        tensors: list[torch.Tensor] = []
        # These views are no operators of the model.
        self._inside = []
        for storage in filter(None, (reference() for reference in inner)):
            if storage._cdata not in self._ids and storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                tensors.append(torch.empty(0, dtype=torch.uint8).set_(storage))
        self._inside = None
        return tensors

    def _exchange(self, sent: tuple[Any, int] | None) -> Collective | None:
        if sent is None:
            return None
        group, payload = sent
        axis = self._axis_of[group.group_name]
        return Collective(kind="all_to_all", axis=axis, size=group.size(), payload_bytes=Expression.of(payload))

    # -- reports of torch ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:
            # Called on every tensor without data, many times per operator: answered as FakeTensor itself does.
            return args[0].fake_device
        kwargs = kwargs or {}
        self._note_node()
        library, _, name = function._schema.name.partition("::")
        if name == "masked_select" and self.rows_of_map is not None:
            result = args[0].new_zeros(self.rows_of_map(*args[1].shape))
        else:
            result = function(*args, **kwargs)
        if self._inside is not None:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            # Weak: a strong reference would keep the storage alive and change the recorded lifetimes.
            self._inside += [weakref.ref(leaf.untyped_storage()) for leaf in leaves]
            return result
        if library not in _KNOWN_LIBRARIES and name not in KERNELS:
            raise UnregisteredKernelError(f"{library}::{name}", self._place()[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if library == "c10d":
            self._emit_collective(name, args, tensors)
            return result
        if name in ("lift_fresh", "set_"):
            # A number in the code becomes a constant, recorded where it is read; `set_` moves no bytes.
            return result
        aliases = {tensor.untyped_storage()._cdata for tensor in tensors}
        # A result on the storage of an argument is a view: it moves no bytes.
        output = [leaf for leaf in outputs if leaf.untyped_storage()._cdata not in aliases]
        written = output + _mutated(function, args, kwargs)
        if written:
            self._emit(name, tensors, output, written)
        return result

    def _emit(
        self,
        name: str,
        tensors: Sequence[Any],
        produced: Sequence[Any],
        written: Sequence[Any],
        shape: tuple[int, ...] | None = None,
        collective: Collective | None = None,
    ) -> None:
        """Record one kernel."""
        if name == "copy_":
            # A copy overwrites its first argument and does not read it.
            tensors = tensors[1:]
        reads = [self._watch(tensor, "constant") for tensor in tensors]
        writes = [self._watch(tensor, "activation") for tensor in written]
        entry, elements = KERNELS.get(name), dict[int, int]()
        if collective is not None:
            shape = ()
        elif shape is not None:
            pass
        elif entry is not None and entry.shape is not None:
            shape = tuple(int(size) for size in entry.shape(tensors, produced or written))
        else:
            elements = _by_storage(writes, [tensor.numel() for tensor in written])
            shape = (sum(elements.values()),)
        read_bytes, written_bytes = (list(map(_touched_bytes, side)) for side in (tensors, written))
        if name.removesuffix("_") in GATHERS:
            # A gather reads only the rows that it returns, not the whole table.
            read_bytes[0] = sum(written_bytes)
        of_reads, of_writes = _by_storage(reads, read_bytes), _by_storage(writes, written_bytes)
        if name in FORWARD_ONLY:
            of_reads, of_writes = {}, dict.fromkeys(of_writes, 0)
        expressions = tuple(map(Expression.of, shape))
        self._append(
            name=name,
            cost_class="free" if name in FORWARD_ONLY else entry.cost_class if entry else "memory",
            shape=expressions,
            dtype=str((written or tensors)[0].dtype).removeprefix("torch."),
            flops=flops(name, expressions),
            collective=collective,
            elements=tuple(map(Expression.of, elements.values())),
            **_memory(of_reads, of_writes),
        )

    def _emit_collective(self, name: str, args: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Record one collective; c10d's schemas do not mark the written argument: it is the first."""
        if name not in COLLECTIVES:
            if name in ("barrier", "monitored_barrier_"):
                return
            raise UnregisteredKernelError(f"c10d::{name}", self._place()[0])
        group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        outputs = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
        inputs = outputs if name in _ONE_BUFFER else [t for t in tensors if all(t is not o for o in outputs)]
        sent_bytes, received_bytes = (list(map(_touched_bytes, side)) for side in (inputs, outputs))
        sent, received = sum(sent_bytes), sum(received_bytes)
        kind = COLLECTIVES[name]
        # The whole tensor, as in `links.collective_seconds`, not the shard of a rank.
        payload = sent if kind in ("all_to_all", "reduce_scatter") else max(sent, received)
        reads = [self._watch(tensor, "constant") for tensor in inputs]
        writes = [self._watch(tensor, "activation") for tensor in outputs]
        self._append(
            name=name.strip("_"),
            cost_class="collective",
            shape=(),
            dtype=str(outputs[0].dtype).removeprefix("torch."),
            flops=Expression(),
            **_memory(_by_storage(reads, sent_bytes), _by_storage(writes, received_bytes)),
            collective=Collective(
                kind=kind,
                axis=self._axis_of[group.group_name],
                size=group.size(),
                payload_bytes=Expression.of(payload),
            ),
        )

    def _append(self, **fields: Any) -> None:
        module, operator = self._place()
        self.recording.ops.append(
            Op(
                id=len(self.recording.ops),
                phase=self.phase,
                operator=operator,
                module=module,
                after=(),
                is_recomputed=self._recomputing > 0,
                **fields,
            )
        )

    def _place(self) -> tuple[str, str]:
        """Module and operator that run now; in the backward pass, those of the forward operator."""
        node = torch._C._current_autograd_node()
        if self._modules or self._operators or node is None:
            return (self._modules[-1] if self._modules else "", self._operators[-1] if self._operators else "")
        place = self._place_of_node.get(node._sequence_nr())
        if place is None:
            # Autograd creates nodes without forward operator, such as sums of gradients: they get the place of the previous
            # operator.
            last = self.recording.ops[-1] if self.recording.ops else None
            place = (last.module, last.operator) if last is not None else ("", "")
        return place

    def _note_node(self) -> None:
        """Remember where autograd's newest node was created: it takes the next sequence number before its operators run."""
        if self._modules or self._operators:
            self._place_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, self._place())

    def _watch(self, tensor: torch.Tensor, role: Role, name: str = "", replicas: str = "") -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._ids:
            self._ids[key] = len(self.recording.storages)
            self._references[key] = weakref.ref(storage)
            self.recording.storages.append(_Watched(storage.nbytes(), role, name, replicas))
            # The key is an address, which the next storage may reuse: it is dropped when this one is freed.
            self._watches.append(weakref.finalize(storage, _free, self._ids, self._references, key, self.recording))
        return self._ids[key]


def _free(ids: dict[int, int], references: dict[int, Any], key: int, recording: Recording) -> None:
    """Tell the recording that watches a storage that it is gone."""
    index = ids.pop(key, None)
    references.pop(key, None)
    if index is not None:
        recording.storages[index].freed_after = len(recording.ops) - 1


def _mutated(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    mutated = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            mutated += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return mutated


def _by_storage(ids: Sequence[int], sizes: Sequence[int]) -> dict[int, int]:
    """Storage -> bytes of all its tensors in a list."""
    total: dict[int, int] = {}
    for index, size in zip(ids, sizes, strict=True):
        total[index] = total.get(index, 0) + size
    return total


def _memory(of_reads: Mapping[int, int], of_writes: Mapping[int, int]) -> dict[str, Any]:
    """The fields of an operator that describe the bytes it moves.

    Args:
        of_reads, of_writes: storage -> bytes.
    """
    sizes = (*of_reads.values(), *of_writes.values())
    return {
        "bytes": Expression.of(sum(sizes)),
        "reads": tuple(of_reads),
        "writes": tuple(of_writes),
        "touched": tuple(map(Expression.of, sizes)),
    }


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the different elements of a view: broadcast axes count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()
