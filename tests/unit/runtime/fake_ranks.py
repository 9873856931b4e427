"""One rank of a run of two in one process: a peer that behaves as this rank does, and a device whose waits are counted.

The default group is torch's fake one, whose collectives return at once. All-to-alls of tokens are answered by a peer that has
sent what this rank has sent, as far as the numbers of rows agree, and zeros otherwise: shapes and counts are those of a run of
two, the numbers mean nothing. The tensors lie in host memory; `DeviceMode` pretends that they lie on a device, and notes each
operator that would make the host wait for it.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime import step
from moe_overlap.runtime.dispatch.irregular import CountAllToAll
from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.runtime.executor import execute
from moe_overlap.runtime.executor.graphs import GraphLibrary, SegmentGraphs

LAYERS = 2
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --moe-token-dispatcher-type irregular --moe-gate topk --mock-data --micro-batch-size 4
    --global-batch-size 16 --expert-model-parallel-size 2 --train-iters 2 --lr 1e-3 --eval-iters 0 --num-workers 0
    --log-interval 1000000 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
"""
WAITS_FOR_THE_DEVICE = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "unique_dim", "is_nonzero", "equal"}
)
"""Operators whose result, or whose shape, the host must read from the device."""


ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
RELABELS = frozenset({"_reshape_alias", "_unsafe_view", "lift_fresh"})
"""Views in all but their schema."""


STARTED, COMPUTED, READ = "started", "computed", "read"


class DeviceMode(TorchDispatchMode):
    """Pretends that the tensors of a step lie on a device.

    Attributes:
        waits: operators that the host would wait for, by the instruction that was current.
        operators: operators that were launched, by the instruction that was current; views and allocations count, too.
        kernels: those of them that a device would run something for.
        issued: what the host did, in order: COMPUTED an instruction, STARTED or READ counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.instruction: Instruction | None = None
        self.waits: list[tuple[Instruction | None, str]] = []
        self.operators: Counter[Instruction | None] = Counter()
        self.kernels: Counter[Instruction | None] = Counter()
        self.issued: list[str] = []

    def note(self, operator: str) -> None:
        """The host waits for the device now."""
        self.waits.append((self.instruction, operator))

    def launched(self) -> None:
        """One kernel runs that no operator of torch stands for here."""
        self.operators[self.instruction] += 1
        self.kernels[self.instruction] += 1

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.operators[self.instruction] += 1
        name, named = function.overloadpacket.__name__, named or {}
        self.kernels[self.instruction] += not (function.is_view or name in ALLOCATES or name in RELABELS)
        repeats = name == "repeat_interleave" and named.get("output_size") is None
        if name in WAITS_FOR_THE_DEVICE or repeats or _finds_places(name, arguments):
            self.note(name)
        return function(*arguments, **named)

    def bare_reads(self) -> list[int]:
        """Which reads of counts, in their order, had no computation queued since their all-to-all was started."""
        started = [place for place, event in enumerate(self.issued) if event == STARTED]
        reads = [place for place, event in enumerate(self.issued) if event == READ]
        # Counts have a channel of their own, which runs in order: the n-th that is started is the n-th that is read.
        pairs = enumerate(zip(started, reads, strict=True))
        return [number for number, (start, read) in pairs if COMPUTED not in self.issued[start:read]]

    def waits_of(self, i: Instruction) -> list[str]:
        """The operators in one instruction that the host waited for."""
        return [operator for instruction, operator in self.waits if instruction == i]


def _finds_places(name: str, arguments: Sequence[Any]) -> bool:
    """Whether an operator must count the true elements of a mask. Filling by a mask needs no number of them."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    fills = name != "index" and len(arguments[1]) == 1 and arguments[2].numel() == 1
    return not fills and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])


class HostCopies(TorchFunctionMode):
    """Notes copies between host and device that the host waits for: to a device or back, unless they are asked not to block."""

    def __init__(self, device: DeviceMode) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        moved = function is torch.Tensor.to and (
            "device" in named or any(isinstance(argument, (torch.device, str)) for argument in arguments[1:])
        )
        if (moved or function in (torch.Tensor.cpu, torch.Tensor.cuda)) and not named.get("non_blocking"):
            self._device.note("copy")
        if function is torch.nn.functional.rms_norm:
            return _DeviceNorm.apply(self._device, *arguments, named["weight"], named["eps"])
        return function(*arguments, **named)


class _DeviceNorm(torch.autograd.Function):
    """An RMSNorm that is one kernel each way, as torch's for CUDA; torch's for a CPU is composed of many."""

    @staticmethod
    def forward(ctx: Any, device: DeviceMode, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        ctx.device = device
        device.launched()
        with torch.enable_grad(), _unseen():
            ctx.leaves = [part.detach().requires_grad_() for part in (x, weight)]
            ctx.output = torch.nn.functional.rms_norm(ctx.leaves[0], shape, ctx.leaves[1], eps)
            output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.device.launched()
        with _unseen():
            dx, dweight = torch.autograd.grad(ctx.output, ctx.leaves, gradients)
        return None, dx, None, dweight, None


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    """The default group of rank 0 of two, and a peer that answers its all-to-alls."""
    with first_rank_of(2):
        yield


@contextlib.contextmanager
def first_rank_of(ranks: int) -> Iterator[None]:
    """The default group of rank 0, and peers that answer its all-to-alls."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        for module in (execute, step):
            patch.setattr(module, "computes_later", lambda device: True)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        patch.setattr(AllToAll, "_start_on_host", _answered)
        yield
        dist.destroy_process_group()


class _Arrived:
    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        return self._received


def _answered(
    wire: AllToAll, rows: Tensor, received: Tensor, sent: Sequence[int], expected: Sequence[int], tag: int, name: str
) -> _Arrived:
    """The rows from a peer that sends what this rank has sent: no more than one copy, and no operator of the executor's own."""
    with torch.no_grad(), _unseen():
        answer(rows, received, sent, expected, wire.rank)
    return _Arrived(received)


def answer(rows: Tensor, received: Tensor, sent: Sequence[int], expected: Sequence[int], rank: int) -> None:
    """Fill what a rank receives: of each peer what the rank sends it, where the numbers of rows agree, and zeros otherwise."""
    received.zero_()
    for peer, (own, part) in enumerate(zip(rows.split(list(sent)), received.split(list(expected)), strict=True)):
        if own.shape == part.shape or peer == rank:
            part.copy_(own)
        elif rows.dtype == torch.int64:
            part.copy_(rows.split(list(sent))[rank])


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """The peer's own operators are not the executor's."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def executor_of(flags: str) -> tuple[Any, tuple[Instruction, ...], Any]:
    """The executor of a run of MODEL with these flags, its instruction list and its micro-batches."""
    return parts_of(job_of(flags))


def job_of(flags: str) -> Any:
    """The training job of a run of MODEL with these flags."""
    return assembled(f"{MODEL} {flags}".split())


def parts_of(job: Any) -> tuple[Any, tuple[Instruction, ...], Any]:
    """The executor of a training job, its instruction list and its micro-batches."""
    return job.machinery.runner, tuple(job.schedule.instructions), job.batches("train", 0)


def assembled(words: Sequence[str]) -> Any:
    """The training job of this command line."""
    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands.train import assemble

    parsed = parse(words)
    validate(parsed.config, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):
        return assemble(parsed, dist.get_rank()).job


def run_step(
    flags: str, graphs: Callable[[DeviceMode], GraphLibrary] | None = None
) -> tuple[DeviceMode, tuple[Instruction, ...]]:
    """One step of the executor on the pretended device; its list.

    Args:
        graphs: makes the library that captures its segments: the step is the third then, which replays them.
    """
    runner, instructions, feed = executor_of(flags)
    device = DeviceMode()
    if graphs is not None:
        queue, is_static = runner.context.weight_gradients, runner.dispatcher.static_capacity
        captured = SegmentGraphs(graphs(device), queue, is_static, warm_up_steps=1)
        runner = execute.PlanExecutor(runner.context, graphs=captured)
        for number in range(2):
            runner.run(instructions, feed, number)
        device.kernels.clear()
        device.operators.clear()
    with pytest.MonkeyPatch.context() as patch:
        place_at, to_host, start = runner.recorder.place_at, CountAllToAll.to_host, CountAllToAll.start

        def placed(instruction: Instruction) -> None:
            device.instruction = instruction
            if instruction.kind == "compute":
                device.issued.append(COMPUTED)
            place_at(instruction)

        def started(counts: CountAllToAll, *arguments: Any, **named: Any) -> Any:
            device.issued.append(STARTED)
            return start(counts, *arguments, **named)

        def copied(counts: CountAllToAll, *arguments: Any) -> Any:
            device.note("counts")
            device.issued.append(READ)
            return to_host(counts, *arguments)

        patch.setattr(runner.recorder, "place_at", placed)
        patch.setattr(CountAllToAll, "to_host", copied)
        patch.setattr(CountAllToAll, "start", started)
        with HostCopies(device), device:
            runner.run(instructions, feed, 0)
    return device, instructions
