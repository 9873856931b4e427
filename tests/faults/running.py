"""Faults of running ranks: disks that fill up, ranks that fail, freeze or are killed, signals, and jobs beside each other.

Answers name every rank that says something: `rank 1: …`. What a rank's status is, where it says nothing, is part of the answer
when it is neither 0 nor a death that the fault itself brings.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.training.data.indexed import indexed_dataset
from tests.end_to_end.program import PROGRAM, ROOT, SMALL_ARGS, Ended, alone, environment, line_count
from tests.faults.fault import Fault
from tests.ranks import Ranks, Trouble

ONE = (SMALL_ARGS, "--expert-model-parallel-size", "1", "--lr-warmup-iters", "1", "--train-iters", "3")
TWO = (SMALL_ARGS, "--lr-warmup-iters", "1", "--train-iters", "3")
LONG = (SMALL_ARGS, "--lr-warmup-iters", "1", "--train-iters", "100000")
OVERLAPPED = """
    --attention-dropout 0 --hidden-dropout 0 --moe-gate topk --moe-token-dispatcher-type irregular --moe-overlap-partitions 2
    --defer-weight-gradients
""".split()
PLAIN_DISPATCHES, OVERLAPPED_DISPATCHES = 2, 8
"""Dispatches of layer 0 per step of a plain run; of both layers, in two parts, with overlap."""
SPACE = "free space, correct permissions, or choose another"


def told(ended: Sequence[Ended], expected: Sequence[int]) -> str:
    """The lines of the ranks on stderr, and the statuses that were not expected."""
    said = [
        " | ".join(
            [*(f"rank {rank}: {line}" for line in one.err.splitlines()), *unlike(rank, one.status, expected[rank])]
        )
        for rank, one in enumerate(ended)
    ]
    return " | ".join(text for text in said if text)


def unlike(rank: int, status: int, expected: int) -> list[str]:
    """A word on a status that was not expected."""
    return [] if status == expected else [f"rank {rank} ended with {status}"]


def _run(
    words: Sequence[str],
    more: str = "",
    ranks: int = 2,
    trouble: Trouble | None = None,
    status: int = 2,
    left: Callable[[Path], str] = lambda folder: "",
) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        (folder / "file").write_text("")
        job = Ranks([*words, *more.replace("F/", f"{folder}/").split()], folder / "ranks", ranks, trouble)
        # Rank 0 speaks for mistakes that all ranks see; the others only wait for their launcher to end them.
        ended = job.wait(only=0 if status == 2 else None)
        answer = told(ended[:1] if status == 2 else ended, [status] * ranks)
        return " | ".join(filter(None, (answer, left(folder))))

    return call


def steps_of(folder: Path) -> str:
    """The complete checkpoints of F/saved."""
    return "saved " + (" ".join(sorted(path.name for path in (folder / "saved").glob("step-*"))) or "nothing")


def disks() -> Iterator[Fault]:
    """Caches and disks that refuse a run, or fill up in it."""
    cache = "give --data-cache-path FOLDER with space and access"
    for flag, broken, ranks, rule in (
        ("F/file", "the cache is a file", 1, "File exists"),
        ("F/file/x", "the cache lies below a file", 2, "Not a directory"),
        ("/proc/x", "the cache is read-only", 2, "No such file or directory"),
    ):
        line = f"rank 0: error: --data-cache-path {flag}: cannot be written ({rule}); {cache}"
        words = ONE if ranks == 1 else TWO
        yield Fault(
            broken, f"`--data-cache-path {flag}`", _run(words, f"--data-cache-path {flag}", ranks), line, "slow"
        )
    full = Trouble(limit=("RLIMIT_FSIZE", 1 << 20))
    line = f"rank 0: error: --data-cache-path F/cache: cannot be written (File too large); {cache}"
    yield Fault(
        "the cache is full",
        "the disk of the cache fills up",
        _run(ONE, "--data-cache-path F/cache", 1, full),
        line,
        "slow",
    )
    for where, limit, rank in (("every rank", 2048, None), ("rank 1 alone", 2048, 1)):
        line = f"rank 0: error: --save F/saved: cannot be written: File too large; {SPACE} place | saved nothing"
        call = _run(TWO, "--save F/saved", trouble=Trouble(rank, ("RLIMIT_FSIZE", limit)), left=steps_of)
        yield Fault(
            f"no room to save on {where}", f"`--save` is on a disk that is full for {where}", call, line, "slow"
        )
    for how in ("", "--async-save"):
        line = f"rank 0: error: --save F/saved: cannot be written: File too large; {SPACE} folder | saved nothing"
        call = _run(TWO, f"--save F/saved {how}", trouble=Trouble(1, ("RLIMIT_FSIZE", 20_000)), left=steps_of)
        yield Fault(
            f"the disk fills up in a save {how}".strip(),
            "the disk of rank 1 fills up in the first save",
            call,
            line,
            "slow",
        )
    rule = "cannot be written: File too large; training goes on without it"
    # The console of these ranks is a file, too.
    line = f"rank 0: warning: --log-json F/log.jsonl: {rule} | rank 0: warning: stdout: {rule} | saved nothing"
    call = _run(
        ONE, "--train-iters 40 --log-json F/log.jsonl", 1, Trouble(limit=("RLIMIT_FSIZE", 5000)), 0, left=steps_of
    )
    yield Fault("the disk of the log fills up", "`--log-json` finds no room after some steps", call, line, "slow")
    for name, flags, place, limit, reason in (
        (
            "TensorBoard",
            "--train-iters 40 --tensorboard-dir F/board",
            "--tensorboard-dir F/board",
            6000,
            "File too large",
        ),
        ("the trace", "--trace F/trace.json", "--trace F/trace.json", 5000, "File too large"),
        (
            "the profile",
            "--tensorboard-dir F/board --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3",
            "--use-pytorch-profiler F/board/rank0.pt.trace.json",
            20_000,
            "torch wrote no whole profile; is the disk full?",
        ),
    ):
        call = _run(ONE, flags, 1, Trouble(limit=("RLIMIT_FSIZE", limit)), 0)
        line = f"rank 0: warning: {place}: cannot be written: {reason}; training goes on without it"
        yield Fault(
            f"the disk of {name} fills up", f"`{flags.split()[-2]}`: the disk fills up", call, f"{line}…", "slow"
        )
    for flag in ("--log-json", "--trace", "--log-expert-load"):
        line = f"rank 0: warning: {flag} /dev/full: cannot be written: No space left on device; training goes on without it"
        call = _run(ONE, f"{flag} /dev/full --save F/saved", 1, None, 0, left=steps_of)
        # Slow runs try all three at once (test_failing_outputs.py).
        name, broken = f"{flag} /dev/full", f"the disk behind `{flag}` is full"
        yield Fault(name, broken, call, f"{line} | saved step-000003", "hand")


def damaged() -> Iterator[Fault]:
    """Damaged checkpoints as two ranks load them: one line, from rank 0."""

    def call(folder: Path) -> str:
        saved = ["--save", str(folder / "saved"), "--load", str(folder / "saved")]
        (first, _) = Ranks([*TWO, *saved], folder / "first").wait()
        assert first.status == 0, first.err
        (data, *_) = sorted((folder / "saved/step-000003").glob("__1_*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        return told(Ranks([*TWO, *saved], folder / "again").wait(only=0)[:1], [2])

    line = "rank 0: error: --load F/saved/step-000003/__1_0.distcp: is corrupt: its content is not what was written; …"
    yield Fault("a damaged file of rank 1", "two ranks load; the file of rank 1 is flipped", call, line, "slow")


def _resumed(more: str) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        for name in ("a", "b"):
            with indexed_dataset(str(folder / name), 257) as writer:
                writer.add_document([(ord(name) + 7 * place * place) % 256 for place in range(400)])
        words = [
            *ONE,
            "--save",
            str(folder / "saved"),
            "--load",
            str(folder / "saved"),
            "--data-path",
            str(folder / "a"),
        ]
        words += ["--split", "1", "--lr-decay-style", "constant"]
        (first,) = Ranks(words, folder / "first", 1).wait()
        assert first.status == 0, first.err
        return told(Ranks([*words, *more.replace("F/", f"{folder}/").split()], folder / "again", 1).wait(), [2])

    return call


def resumes() -> Iterator[Fault]:
    """Another text, and the same one in another order, by the command line."""
    fix = "give the saved values, or add --resume-with-changes"
    for more, broken, change in (
        ("--data-path F/b", "the data are others", "other data; a digest of …, this run has …"),
        (
            "--train-iters 40",
            "the run is longer: four epochs in place of two",
            "other first samples (…); a digest of …",
        ),
    ):
        line = f"rank 0: error: --load F/saved: step 3 was saved with {change}; {fix}"
        yield Fault(f"a resume: {broken}", f"`{more}`: {broken}", _resumed(more), line, "slow")


def _lost(how: str, overlap: bool, minutes: int = 5) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        words = [*LONG, "--distributed-timeout-minutes", str(minutes), *(OVERLAPPED if overlap else [])]
        each = OVERLAPPED_DISPATCHES if overlap else PLAIN_DISPATCHES
        trouble = Trouble(1, dispatch=2 * each + 1, how=how if overlap else f"{how}-plain")
        job = Ranks(words, folder / "ranks", 2, trouble)
        ended = job.wait(60.0 * minutes + 60, only=0) if how == "SIGSTOP" else job.wait()
        number = -signal.SIGKILL if how.startswith("SIG") else 1
        answer = told(ended, [1, number])
        for kept in re.findall(r"traceback in (\S+)", answer):
            Path(kept).unlink()
        return answer

    return call


def troubles() -> Iterator[Fault]:
    """Rank 1 comes to grief at its third step's first dispatch; rank 0 must say which operation it could not complete."""
    own = {
        "raise": "rank 1: error: L0.moe.dispatch: KeyError: 'no such expert'; traceback in … (rank 1, step 3)",
        "memory": "rank 1: error: L0.moe.dispatch: out of memory: 2,048.0 MiB more were asked for; a smaller "
        "--micro-batch-size or recomputation needs less (rank 1, step 3)",
        "SIGKILL": "",
        "SIGSTOP": "",
    }
    broken = {
        "raise": "an operator of rank 1 raises",
        "memory": "rank 1 is at the limit of its memory",
        "SIGKILL": "rank 1 is killed",
        "SIGSTOP": "rank 1 is frozen",
    }
    for overlap in (False, True):
        kept = "rank 0: error: L0.moe.dispatch: lost a peer: … (rank 0, step 3)"
        if overlap:
            kept = "rank 0: error: L0.moe.count: rank 0 could not complete its all-to-all with rank 1… (rank 0, step 3)"
        for how, line in own.items():
            where = "with overlap" if overlap else "without overlap"
            call = _lost(how, overlap, 1 if how == "SIGSTOP" else 5)
            expected = " | ".join(filter(None, (kept, line)))
            # Slow runs try these in tests/end_to_end/test_lost_rank.py.
            yield Fault(f"{broken[how]}, {where}", f"{broken[how]} {where}", call, expected, "hand")


def _signalled(number: signal.Signals, more: str, status: int, rank: int | None = None) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        log = folder / "log.jsonl"
        words = [*LONG, "--save", str(folder / "saved"), "--log-json", str(log), *more.split()]
        job = Ranks(words, folder / "ranks")
        job.wait_until_lines(log, 2)
        job.signal(number, rank)
        answer, steps = told(job.wait(), [status, status]), line_count(log)
        saved = steps_of(folder).replace(f"step-{steps:06d}", "the last step")
        return " | ".join(filter(None, (answer, saved)))

    return call


def signals() -> Iterator[Fault]:
    """Signals to ranks that a scheduler started; those to our own launcher are tried in tests/end_to_end/test_launch.py."""
    handler = "--exit-signal-handler"
    yield Fault("SIGTERM", "SIGTERM to every rank", _signalled(signal.SIGTERM, "", -15), "saved nothing", "slow")
    yield Fault("SIGINT", "SIGINT to every rank", _signalled(signal.SIGINT, "", -2), "saved nothing", "slow")
    call = _signalled(signal.SIGTERM, handler, 0, rank=1)
    yield Fault("SIGTERM with a handler", f"SIGTERM to rank 1, `{handler}`", call, "saved the last step", "slow")
    call = _signalled(signal.SIGINT, f"{handler} --exit-signal 2", 0, rank=0)
    yield Fault(
        "SIGINT with a handler", f"SIGINT to rank 0, `{handler} --exit-signal 2`", call, "saved the last step", "slow"
    )


def _second_job(folder: Path) -> str:
    log, saved = folder / "log.jsonl", ["--save", str(folder / "saved")]
    first = Ranks([*LONG, *saved, "--log-json", str(log)], folder / "first")
    first.wait_until_lines(log, 1)
    second = told(Ranks([*TWO, *saved], folder / "second").wait(only=0)[:1], [2])
    process = first.processes[0].pid
    assert first.kill(), "the first job has ended"
    third = told(Ranks([*TWO, *saved], folder / "third").wait(), [0, 0])
    return " | ".join(filter(None, (second.replace(str(process), "PID"), third, steps_of(folder))))


def _launcher_killed(folder: Path) -> str:
    log = folder / "log.jsonl"
    command = [sys.executable, str(PROGRAM), *LONG, "--nproc-per-node", "2", "--log-json", str(log)]
    with (folder / "err").open("w") as err:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment({"TMPDIR": str(folder)}), stdout=subprocess.DEVNULL, stderr=err
        )
    while line_count(log) < 2 and launcher.poll() is None:
        time.sleep(0.05)
    ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{rank}/cmdline").exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    return (folder / "err").read_text().strip() or f"{len(left)} ranks are left"


def _restarted(folder: Path) -> str:
    """The first attempt fails in a step, the second one is killed before its first."""
    (folder / "sitecustomize.py").write_text(
        "import os, signal\n"
        "if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '1' and os.environ.get('RANK') == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    words = [*TWO, "--lr", "1e30", "--train-iters", "50", "--nproc-per-node", "2", "--max-restarts", "1"]
    ended = alone(words, {"PYTHONPATH": paths})
    first, *second = ended.err.splitlines()
    assert re.fullmatch(r"error: step \d+: not finite: .*", first), ended
    return " | ".join([*second, f"status {ended.status}"])


def _working_directory(folder: Path) -> str:
    """A prediction captures its model in a process of its own."""
    (folder / "torch.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\nraise SystemExit('executed')\n")
    (folder / "numpy.py").write_text("raise SystemExit('executed')\n")
    words = [*ONE, "--save", str(folder / "saved")]
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    executed = (folder / "executed").exists()
    return " | ".join([*ended.stderr.splitlines(), "executed" if executed else "not executed", steps_of(folder)])


def _no_such_host(folder: Path) -> str:
    rank = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "no.such.host.invalid",
        "MASTER_PORT": "29511",
    }
    return alone([*TWO, "--distributed-timeout-minutes", "1"], rank).err.strip().replace("\n", " | ")


def jobs() -> Iterator[Fault]:
    """Jobs beside and after each other."""
    line = (
        "rank 0: error: --save F/saved: belongs to another job (process PID on …, since …); choose another folder, or end that "
        "job; delete F/saved/.lock if there is none | saved step-000003"
    )
    broken = "a second job of two ranks saves there; the first one is killed, a third one starts"
    yield Fault("a second job of two ranks", broken, _second_job, line, "slow")
    yield Fault(
        "the launcher is killed", "SIGKILL to the launcher of two ranks", _launcher_killed, "0 ranks are left", "hand"
    )
    line = "error: rank 1 was ended by SIGKILL (start); the kernel does so where memory is out | status 137"
    yield Fault(
        "a restart that dies early", "`--max-restarts 1`; rank 1 is killed before it begins", _restarted, line, "hand"
    )
    line = "not executed | saved step-000003"
    yield Fault(
        "torch.py beside the user", "the working directory holds a `torch.py`", _working_directory, line, "hand"
    )
    line = "error: --distributed-timeout-minutes 1: the 2 processes did not meet (…); check that …"
    yield Fault("MASTER_ADDR of no host", "`MASTER_ADDR` is no host", _no_such_host, line, "hand")


def faults() -> Iterator[Fault]:
    """All of them."""
    for group in (disks, damaged, resumes, troubles, signals, jobs):
        yield from group()
