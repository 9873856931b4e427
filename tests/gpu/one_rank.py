"""One rank of several on one device: every list of cases.py is executed there, and no peer exists.

The default group is torch's fake one, whose collectives return at once. An all-to-all is answered by copies of the rank's own
rows on the current stream, which is its channel's; a transfer from another stage brings a constant. Streams, events, counts,
pinned copies, launches and memory are those of a run; losses mean nothing. With `device="cpu"` the same code runs in host memory,
where `DeviceMode` counts waits and launches: that shows that the program works.
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime.dispatch.irregular import CountAllToAll
from moe_overlap.runtime.executor import execute
from moe_overlap.runtime.executor.streams import HostOrder
from tests.gpu.cases import CASES, Case
from tests.unit.runtime.fake_ranks import DeviceMode, HostCopies, answer, assembled, first_rank_of, parts_of

LISTED = tuple(case for case in CASES if "--moe-overlap" in case.flags or "--defer" in case.flags)
"""The cases that instruction lists execute."""
REAL = """
    --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --moe-ffn-hidden-size 2048
    --ffn-hidden-size 4096
"""
"""Sizes of layers that keep a GPU busy: 16,384 rows in a micro-batch of 8,192 tokens."""
TINY = "--hidden-size 32 --seq-length 16 --max-position-embeddings 16 --moe-ffn-hidden-size 32 --ffn-hidden-size 64"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
ARRIVES = 1e-3
"""Every element of a tensor from another stage."""


@contextlib.contextmanager
def lone_rank(ranks: int) -> Iterator[None]:
    """The default group of rank 0, with answers on whatever device the tensors lie."""

    def all_to_all(output: Tensor, rows: Tensor, expected: Any, sent: Any, group: Any, async_op: bool) -> Any:
        with torch.no_grad():
            answer(rows, output, sent, expected, group.rank())
        return _Ended()

    def receive(tensor: Tensor, src: int, group: Any) -> Any:
        with torch.no_grad():
            tensor.fill_(ARRIVES)
        return _Ended()

    with first_rank_of(ranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", all_to_all)
        patch.setattr(dist, "irecv", receive)
        yield


class _Ended:
    def wait(self) -> None:
        """The stream that is current has the result."""


def command_line(case: Case, device: str, is_tiny: bool) -> list[str]:
    """The flags of a case at the sizes of a rehearsal or at real ones, in 16 bits unless the case says otherwise."""
    words = [*case.words(device), "--train-iters", "100"]
    if is_tiny:
        return [*words, *TINY.split()]
    return [*words, *REAL.split(), *(() if {"--bf16", "--fp16"} & set(words) else ("--bf16",))]


def in_layers(instruction: Instruction | None) -> bool:
    """Whether the host must not wait in an instruction."""
    return instruction is not None and instruction.operator.layer is not None and not instruction.operator.is_update


def host_waits(runner: Any, instructions: Sequence[Instruction], feed: Any, device: str) -> list[str]:
    """Where the host waits for the device in the layers of a step, but for its reads of counts: `instruction: operator`."""
    current: list[Instruction | None] = [None]
    waits: list[str] = []
    pretended = DeviceMode()

    def placed(instruction: Instruction, place_at: Any = runner.recorder.place_at) -> None:
        current[0] = pretended.instruction = instruction
        place_at(instruction)

    def noted(message: Any, *rest: Any) -> None:
        if "synchroniz" in str(message) and in_layers(current[0]):
            waits.append(f"{current[0].name}: {str(message).splitlines()[0]}")  # type: ignore[union-attr]

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), contextlib.ExitStack() as modes:
        patch.setattr(runner.recorder, "place_at", placed)
        if device == "cuda":
            warnings.simplefilter("always")
            patch.setattr(warnings, "showwarning", noted)
            torch.cuda.set_sync_debug_mode("warn")
            modes.callback(torch.cuda.set_sync_debug_mode, "default")
        else:
            modes.enter_context(HostCopies(pretended))
            modes.enter_context(pretended)
        runner.run(instructions, feed, 0)
    return waits + [f"{i.name}: {operator}" for i, operator in pretended.waits if i is not None and in_layers(i)]


def launches(runner: Any, instructions: Sequence[Instruction], feed: Any, device: str) -> int:
    """Kernels and graphs that the host launches in a step."""
    if device == "cpu":
        pretended = DeviceMode()
        with HostCopies(pretended), pretended:
            runner.run(instructions, feed, 0)
        return sum(pretended.kernels.values())
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        runner.run(instructions, feed, 0)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key in LAUNCHES)


def bits(runner: Any, instructions: Sequence[Instruction], feed: Any, steps: int) -> list[tuple[float, float]]:
    """Loss and norm of every step, and the sum of all weights after the last one."""
    results = [runner.run(instructions, feed, number) for number in range(steps)]
    weights = sum(
        parameter.detach().double().sum().item() for chunk in runner.context.chunks for parameter in chunk.parameters()
    )
    return [*((result.loss, result.grad_norm) for result in results), (weights, 0.0)]


def measure(case: Case, device: str, is_tiny: bool, steps: int = 6) -> dict[str, Any]:
    """What one list does on the device.

    Returns:
        waits: of the host, in layers; count_reads: of a step, over its layers; is_deterministic: whether two runs on channel
        streams have the same bits; equals_one_stream: whether they have those of one stream; step_seconds: of the last step;
        peak_bytes, reserved_bytes: of the allocator, None on a CPU.
    """
    words = [*command_line(case, device, is_tiny), "--deterministic-mode"]
    figures: dict[str, Any] = {}
    with lone_rank(case.ranks):
        # Twice on channel streams, which tells chance from a race; a CPU has no streams.
        first, *repeats = [_follow(words, device, steps, figures) for _ in range(1 if device == "cpu" else 2)]
        # Graphs are captured on streams of their own: one stream runs the operators themselves.
        one_stream = _follow([word for word in words if word not in case.on_gpu.split()], device, steps, None)
    return {
        **figures,
        "is_deterministic": all(repeat == first for repeat in repeats),
        "equals_one_stream": first == one_stream,
    }


def _follow(words: Sequence[str], device: str, steps: int, figures: dict[str, Any] | None) -> list[tuple[float, float]]:
    """The bits of the steps of one run; with `figures`, which it completes, on channel streams, else on one stream."""
    runner, instructions, feed = parts_of(assembled(words))
    if figures is None:
        runner = execute.PlanExecutor(runner.context, streams=HostOrder())
    found = bits(runner, instructions, feed, steps)
    if figures is not None and not figures:
        figures |= _memory_and_time(runner, instructions, feed, device)
        figures["count_reads"] = _count_reads(runner, instructions, feed)
        figures["waits"] = host_waits(runner, instructions, feed, device)
    del runner, instructions, feed
    gc.collect()
    return found


def _count_reads(runner: Any, instructions: Sequence[Instruction], feed: Any) -> int:
    reads: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        to_host = CountAllToAll.to_host
        patch.setattr(CountAllToAll, "to_host", lambda *arguments: (reads.append(1), to_host(*arguments))[1])
        runner.run(instructions, feed, 0)
    return len(reads)


def _memory_and_time(runner: Any, instructions: Sequence[Instruction], feed: Any, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    runner.run(instructions, feed, 0)
    if device == "cpu":
        return {"step_seconds": time.perf_counter() - begin, "peak_bytes": None, "reserved_bytes": None}
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"step_seconds": seconds, "peak_bytes": peak, "reserved_bytes": reserved}
