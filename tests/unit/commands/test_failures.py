"""The one line of a failing rank: which kind of failure it is, and what of a library's message is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.training.report.reports import start_command
from moe_overlap.commands.exits import LaunchFolder
from moe_overlap.commands.failures import Place, failure_line, kind_of_failure
from moe_overlap.runtime.step import CommunicationFailed, naming

GLOO = (
    "[/__w/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711. "
    "This is typically caused by a remote worker crashing. GLHF!\nframe #0: raise"
)
ALLOCATION = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1048576 bytes. Error code 12 (Cannot allocate memory)"
)


def named(cause: str) -> Exception:
    """What `naming` makes of an error of torch inside of a communication."""
    try:
        with naming("L1.y"):
            raise RuntimeError(cause)
    except CommunicationFailed as error:
        return error


LESS = "a smaller --micro-batch-size or recomputation needs less"
LINES = [
    (RuntimeError(GLOO), "L0.x: lost a peer: Connection closed by peer [127.0.0.1]:4711"),
    (
        RuntimeError("[pair.cc:1] Timed out waiting 60000ms for recv"),
        "L0.x: lost a peer: [pair.cc:1] Timed out waiting ",
    ),
    (dist.DistNetworkError("store is gone"), "L0.x: lost a peer: store is gone"),
    (CommunicationFailed(f"L1.y: rank 0 could not: {GLOO}"), "L1.y: rank 0 could not: Connection closed by peer "),
    (named(GLOO), "L1.y: Connection closed by peer [127.0.0.1]:4711"),
    (named("sizes 5 and 4 must match"), "L1.y: sizes 5 and 4 must match; traceback in "),
    (MemoryError(), f"L0.x: out of memory; {LESS}"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), f"L0.x: out of memory: CUDA out of memory. Tried; {LESS}"),
    (RuntimeError(ALLOCATION), f"L0.x: out of memory: 1.0 MiB more were asked for; {LESS}"),
    (CommunicationFailed(f"L0.x: {ALLOCATION}"), f"L0.x: out of memory: 1.0 MiB more were asked for; {LESS}"),
    (RuntimeError("shape mismatch\nframe #0"), "L0.x: RuntimeError: shape mismatch; traceback in "),
    (ValueError(), "L0.x: ValueError; traceback in "),
    (TimeoutError("disk"), "L0.x: TimeoutError: disk; traceback in "),
]


@pytest.mark.parametrize(("error", "expected"), LINES, ids=lambda value: str(value)[:30])
def test_a_failure_is_one_line_with_operation_rank_and_step(
    error: Exception, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    line = failure_line(error, kind_of_failure(error), Place(1, "step 3", "L0.x"))
    assert line.startswith(f"error: {expected}") and line.endswith(" (rank 1, step 3)") and "\n" not in line
    assert len(list(tmp_path.iterdir())) == ("traceback in" in expected)


def test_the_first_rank_of_an_attempt_speaks(tmp_path: Path) -> None:
    first, again = LaunchFolder(tmp_path), LaunchFolder(tmp_path, "1")
    first.begin()
    assert [first.claim(), first.claim(), first.has_spoken()] == [True, False, True]
    again.begin()
    assert [again.has_spoken(), again.claim(), again.has_spoken()] == [False, True, True]
    assert first.activity(3) == "start"
    first.note(3, "step 7")
    assert first.activity(3) == "step 7"


@pytest.mark.parametrize(
    ("environment", "program", "ranks", "expected"),
    [
        ({}, "/a/pretrain_moe.py", 1, "python pretrain_moe.py @x"),
        ({}, "/a/pretrain_moe.py", 4, "python pretrain_moe.py --nproc-per-node 4 @x"),
        ({"LOCAL_WORLD_SIZE": "4"}, "/bin/moe-train", 4, "moe-train --nproc-per-node 4 @x"),
        (
            {"LOCAL_WORLD_SIZE": "4"},
            "pretrain_moe.py",
            8,
            "python pretrain_moe.py --nproc-per-node 4 --nnodes 2 --rdzv-endpoint HOST:PORT @x",
        ),
    ],
)
def test_the_command_that_goes_on(environment: dict[str, str], program: str, ranks: int, expected: str) -> None:
    assert start_command(environment, program, ranks, ["@x"]) == expected
