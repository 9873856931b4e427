"""Starts that must not happen: what the launcher's process refuses before a rank is there, and what a rank refuses first."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.training.checkpoint import folder as checkpoint_folder
from megatron.training.checkpoint.folder import Stored
from megatron.training.checkpoint.lock import LOCK, FolderLock, start_of, this_process
from megatron.training.cli.arguments import config_to_flags, parse
from megatron.training.cli.config import CheckpointConfig, Config, LoggingConfig, OverlapConfig
from megatron.training.cli.rules.checkpoint import model_fingerprint, require_same_fingerprint
from megatron.training.cli.rules.resume import require_same_run
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import check_indexed_dataset
from megatron.training.report.outputs import prove_places
from tests.end_to_end.program import SMALL
from tests.faults.damage import STEP, checkpoint, content_of, load
from tests.faults.fault import Fault, command, refusal, room_for

TWO = "--nproc-per-node 2"
ESCAPE = "\x1b[2J\x07"
SPACE = "free space, correct permissions, or choose another"


def _started(words: str, **variables: str) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        return command([*SMALL, *words.replace("F/", f"{folder}/").split()], variables)

    return call


def _port_taken(folder: Path) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        return command([*SMALL, *f"{TWO} --master-port {port}".split()]).replace(str(port), "PORT")


def environments() -> Iterator[Fault]:
    """Variables of a launcher that no launcher sets."""
    set_it = "start by torchrun, which sets it, or unset it"
    for name, value, rule in (
        ("RANK", "x", f"must be a whole number from 0; {set_it}"),
        ("RANK", "-1", f"must be a whole number from 0; {set_it}"),
        ("RANK", "2", "WORLD_SIZE says 1 ranks, which count from 0; start by torchrun, which sets both"),
        ("WORLD_SIZE", "-2", f"must be a whole number from 1; {set_it}"),
        ("WORLD_SIZE", "0", f"must be a whole number from 1; {set_it}"),
        ("WORLD_SIZE", "1e9", f"must be a whole number from 1; {set_it}"),
        ("LOCAL_RANK", "0x1", f"must be a whole number from 0; {set_it}"),
        ("MASTER_PORT", "x", "is no port; start by torchrun, which sets it, or use 1 to 65535"),
        ("MASTER_PORT", "70000", "is no port; start by torchrun, which sets it, or use 1 to 65535"),
    ):
        yield Fault(
            f"{name}={value}", f"`{name}={value}`", _started("", **{name: value}), f"error: {name} {value}: {rule}"
        )
    line = f"error: RANK ?[2J?: must be a whole number from 0; {set_it}"
    yield Fault("RANK of control characters", "`RANK` clears the screen", _started("", RANK=ESCAPE), line)


def command_lines() -> Iterator[Fault]:
    """Worlds that do not fit, launchers' flags, and words that are no words."""
    for words, line in (
        (
            f"{TWO} --expert-model-parallel-size 3",
            "--expert-model-parallel-size 3: 4 experts are not divisible by 3; use 1, 2 or 4",
        ),
        (
            "--nproc-per-node 3",
            "world size 3: not a multiple of ETP × EP × PP = 1 × 2 × 1; use a multiple of 2 ranks",
        ),
        (f"{TWO} --pipeline-model-parallel-size 3", "--pipeline-model-parallel-size 3: …; …"),
        (f"{TWO} --tensor-model-parallel-size 4", "…: …; …"),
        (f"{TWO} --context-parallel-size 3", "…: …; …"),
        (
            f"{TWO} --global-batch-size 7",
            "--global-batch-size 7: global batch 7 is not a multiple of micro-batch × data-parallel = 2 × 2; use a multiple of 4",
        ),
        ("--nproc-per-node 0", "--nproc-per-node 0: must be a whole number from 1; correct the value"),
        (
            f"{TWO} --nnodes 2",
            "--nnodes 2: the nodes must know where to meet; add --rdzv-endpoint HOST:PORT, the same on all",
        ),
        (f"{TWO} --max-restarts -1", "--max-restarts -1: must be a whole number from 0; correct the value"),
        (
            f"{TWO} --dry-run --world-size 4",
            "--world-size 4: --nproc-per-node says 2 processes in all; drop one of them",
        ),
    ):
        yield Fault(f"words {words}", f"`{words}`", _started(words), f"error: {line}")
    yield Fault(
        "port taken",
        "`--master-port` of another program",
        _port_taken,
        "error: port of 127.0.0.1:PORT: cannot be opened: Address already in use; …",
    )
    rank = _started(TWO, RANK="0", WORLD_SIZE="2")
    line = "error: --nproc-per-node 2: torchrun or Slurm has started this rank already; drop it"
    yield Fault("a rank that starts ranks", "`--nproc-per-node` under torchrun", rank, line)
    for words, line in (
        (f"--lr {ESCAPE}", "error: --lr ?[2J?: must be a number; correct the value"),
        (f"--{ESCAPE}", "error: --?[2J?: unknown flag; see --help"),
        (
            f"{TWO} --save /proc/{ESCAPE}",
            f"error: --save /proc/?[2J?: cannot be written: No such file or directory; {SPACE} place",
        ),
    ):
        yield Fault(
            f"control characters in {words.split()[0][:6].strip(chr(27))}",
            "a word clears the screen",
            _started(words),
            line,
        )


def _file(content: bytes, words: str) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        (folder / "x.args").write_bytes(content)
        return _started(words)(folder)

    return call


def _pipe(words: str) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        os.mkfifo(folder / "pipe")
        return _started(words)(folder)

    return call


def unreadable() -> Iterator[Fault]:
    """Files that are none, have no end, or hold what a command line cannot."""
    yield Fault(
        "argument file missing",
        "`@F/x.args` is not there",
        _started("@F/x.args"),
        "error: @F/x.args: cannot read F/x.args: No such file or directory; correct the path",
    )
    yield Fault(
        "argument file that names itself",
        "`@F/x.args` includes itself",
        _file(b"@x.args", "@F/x.args"),
        "error: @x.args: the file includes itself; remove that line",
    )
    yield Fault(
        "argument file with NUL",
        "`@F/x.args` holds a NUL",
        _file(b"--save a\0b", "@F/x.args"),
        "error: a?b: holds a NUL character; correct the file",
    )
    yield Fault(
        "argument file of bytes",
        "`@F/x.args` is no text",
        _file(b"\xff\xfe", "@F/x.args"),
        "error: @F/x.args: cannot read F/x.args: not UTF-8 text; correct the path",
    )
    for flag, end in (("@", "; …"), ("--plan ", ": …; …"), ("--model ", ": …; …"), ("--data-args-path ", "; …")):
        subject = "…" if flag.startswith("--") else "@F/pipe"
        name = flag.strip() or "@"
        yield Fault(
            f"{name} is a pipe",
            f"`{flag}F/pipe` that nobody writes to",
            _pipe(f"{TWO} {flag}F/pipe"),
            f"error: {subject}: …{end}" if flag == "@" else "error: …F/pipe: …; …",
        )
        yield Fault(
            f"{name} is endless", f"`{flag}/dev/zero`", _started(f"{TWO} {flag}/dev/zero"), "error: …/dev/zero: …; …"
        )


def _dataset(break_it: Callable[[Path], object]) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        with indexed_dataset(str(folder / "d"), 300) as writer:
            writer.add_document(list(range(100)))
        break_it(folder)
        return refusal(lambda: check_indexed_dataset(str(folder / "d")))

    return call


def datasets() -> Iterator[Fault]:
    """Indexed datasets that a run does not begin with."""
    again = "make it again with tools/preprocess_data.py"
    for name, broken, change, line in (
        ("no index", "`d.idx` is removed", lambda f: (f / "d.idx").unlink(), "F/d.idx does not exist; …"),
        (
            "tokens cut",
            "`d.bin` is cut",
            lambda f: os.truncate(f / "d.bin", 150),
            f"is corrupt: F/d.bin has 150 bytes, its index says 200; {again}",
        ),
        ("index emptied", "`d.idx` is emptied", lambda f: os.truncate(f / "d.idx", 0), f"is corrupt: …; {again}"),
        (
            "index as text",
            "`d.idx` is a text",
            lambda f: (f / "d.idx").write_text("text\n" * 99),
            f"is corrupt: …; {again}",
        ),
        ("index a folder", "`d.idx` is a folder", lambda f: ((f / "d.idx").unlink(), (f / "d.idx").mkdir()), "…; …"),
    ):
        yield Fault(f"dataset: {name}", broken, _dataset(change), f"error: --data-path F/d: {line}")


def _place(config: Callable[[Path], Config], room: int | None = None) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        (folder / "file").write_text("")
        if room is None:
            return refusal(lambda: prove_places(config(folder), 0))
        with room_for(room):
            return refusal(lambda: prove_places(config(folder), 0))

    return call


def outputs() -> Iterator[Fault]:
    """Places that cannot be written, asked for before the first step; full disks stand as files that may not grow."""

    def save(end: str) -> Callable[[Path], Config]:
        return lambda folder: Config(checkpoint=CheckpointConfig(save=str(folder / end) if end[0] != "/" else end))

    def log(flag: str, end: str) -> Callable[[Path], Config]:
        return lambda folder: Config(logging=LoggingConfig(**{flag: str(folder / end)}))

    def apart(folder: Path) -> Config:
        return Config(
            checkpoint=CheckpointConfig(
                save=str(folder), non_persistent_save_interval=1, non_persistent_global_ckpt_dir=str(folder / "file")
            )
        )

    fix = f"{SPACE} place"
    for flag, broken, call, rule in (
        ("--save F/file", "the folder is a file", _place(save("file")), "File exists"),
        ("--save F/file/x", "the folder lies below a file", _place(save("file/x")), "Not a directory"),
        ("--save /proc/x", "the file system takes no folders", _place(save("/proc/x")), "No such file or directory"),
        ("--save F/x", "the disk is full", _place(save("x"), 0), "File too large"),
        ("--save F/y", "the disk takes half a page", _place(save("y"), 2048), "File too large"),
        ("--non-persistent-global-ckpt-dir F/file", "the folder is a file", _place(apart), "File exists"),
        ("--log-json F", "the file is a folder", _place(log("log_json", "")), "Is a directory"),
        (
            "--log-expert-load F/file/x",
            "the file lies below a file",
            _place(log("log_expert_load", "file/x")),
            "File exists",
        ),
        ("--tensorboard-dir F/file", "the folder is a file", _place(log("tensorboard_dir", "file")), "File exists"),
        (
            "--trace /proc/x",
            "the file system takes no files",
            _place(lambda folder: Config(overlap=OverlapConfig(trace="/proc/x"))),
            "No such file or directory",
        ),
    ):
        yield Fault(f"{flag}: {broken}", broken, call, f"error: {flag}: cannot be written: {rule}; {fix}")


def _publish(room: int, folder_is_gone: bool = False) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        step = checkpoint(folder)
        content = {key: value for key, value in content_of(step).items() if key not in ("format", "order", "checksum")}
        temporary = checkpoint_folder.open_temporary(folder, 2)
        shutil.copy(step / "common.pt", temporary)
        if folder_is_gone:
            shutil.rmtree(temporary)
        with room_for(room):
            line = refusal(lambda: checkpoint_folder.publish(temporary, folder, 2, content))
        return f"{line} | {load(folder)}"

    return call


def saves() -> Iterator[Fault]:
    """Saves that fail: the checkpoint before is still the last one."""
    end = f"{SPACE} folder | step 2 loads"
    yield Fault(
        "no room for the mark",
        "the disk is full when the mark is written",
        _publish(100),
        f"error: --save F: cannot be written: File too large; {end}",
    )
    yield Fault(
        "the save is swept",
        "somebody deletes the temporary folder",
        _publish(1 << 30, True),
        f"error: --save F: cannot be written: No such file or directory; {end}",
    )


def _preprocess(prefix: str, room: int) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        from moe_overlap.commands import preprocess_data

        (folder / "in.txt").write_text("a\n" * 10_000)
        error, words = (
            io.StringIO(),
            ["--input", str(folder / "in.txt"), "--txt-documents", "line", "--log-interval", "1000000"],
        )
        words += ["--output-prefix", prefix.replace("F", str(folder))]
        with room_for(room), contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            preprocess_data.main(words)
        left = sorted(path.name for path in (folder / "out").iterdir()) if (folder / "out").is_dir() else []
        return " | ".join([*error.getvalue().splitlines(), *left])

    return call


def preprocessing() -> Iterator[Fault]:
    """`tools/preprocess_data.py` on a disk that fills up: one line, and no file is left."""
    for name, room in (("nothing", 0), ("some of the tokens", 1000), ("the tokens, not the index", 50_000)):
        yield Fault(
            f"preprocessing: room for {name}",
            f"the disk has room for {name}",
            _preprocess("F/out/d", room),
            "error: --output-prefix F/out/d: cannot be written (File too large); choose another folder",
        )
    yield Fault(
        "preprocessing below a file",
        "the folder is a file",
        _preprocess("F/in.txt/d", 1 << 30),
        "error: --output-prefix F/in.txt/d: cannot be written (File exists); choose another folder",
    )


def _locked(content: Callable[[], str]) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        (folder / LOCK).write_text(content())
        lock = FolderLock(folder, "--save")
        line = refusal(lock.acquire)
        lock.release()
        return line

    return call


def _by_a_live_job(folder: Path) -> str:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        owner = replace(this_process(), process=other.pid, started=start_of(other.pid) or 0, since="noon", host="here")
        line = _locked(lambda: json.dumps(asdict(owner)))(folder)
        other.communicate(b"\n")
    return line.replace(str(other.pid), "PID")


def _by_a_dead_job() -> str:
    return json.dumps(asdict(replace(this_process(), process=2**22 + 1, started=1)))


def _taken_away(folder: Path) -> str:
    lock = FolderLock(folder, "--save")
    lock.acquire()
    (folder / LOCK).write_text(
        json.dumps(asdict(replace(this_process(), process=1, started=1, since="noon", host="there")))
    )
    line = refusal(lock.require)
    lock.release()
    return line


def _lock_deleted(folder: Path) -> str:
    lock = FolderLock(folder, "--save")
    lock.acquire()
    (folder / LOCK).unlink()
    line = refusal(lock.require)
    lock.release()
    return line


def locks() -> Iterator[Fault]:
    """Folders of other jobs."""
    yield Fault(
        "a second job",
        "another job saves into the folder",
        _by_a_live_job,
        "error: --save F: belongs to another job (process PID on here, since noon); "
        "choose another folder, or end that job; delete F/.lock if there is none",
    )
    yield Fault("a lock left behind", "the job that has the lock is dead", _locked(_by_a_dead_job), "accepted")
    lost = "now: this job gave no sign of life, or its .lock was deleted; start one job for each folder"
    yield Fault(
        "a folder taken",
        "another job took the folder meanwhile",
        _taken_away,
        f"error: --save F: belongs to process 1 on there, since noon {lost}",
    )
    yield Fault(
        "a lock deleted",
        "somebody deleted the lock of a run",
        _lock_deleted,
        f"error: --save F: belongs to nobody {lost}",
    )


FACTS = {"samples_per_step": 8, "data": "d0", "order": "o0"}
MODEL = "--position-embedding-type rope --num-experts 4 --global-batch-size 8 --micro-batch-size 1 --lr 1e-3 --train-iters 5"
BASE = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 {MODEL}"


def _resumed(more: str, facts: dict[str, Any]) -> Callable[[Path], str]:
    def call(folder: Path) -> str:
        saved, now = parse(BASE.split()).config, parse(f"{BASE} {more}".split()).config
        mark = {"arguments": config_to_flags(saved), "run": FACTS, "fingerprint": model_fingerprint(saved, 257)}
        stored = Stored(Path("F") / STEP, 2, 1, mark)

        def check() -> None:
            require_same_fingerprint(stored, "F", model_fingerprint(now, 257))
            lines = require_same_run(stored, "F", now, {**FACTS, **facts}, weights_alone=False)
            assert bool(lines) == ("--resume-with-changes" in more), lines

        return refusal(check)

    return call


def resumes() -> Iterator[Fault]:
    """Runs that go on as another run; each is accepted with `--resume-with-changes`, but for another model."""
    fix = "give the saved values, or add --resume-with-changes"
    for more, facts, change in (
        ("--rotary-base 500000", {}, "--rotary-base 10000, this run has 500000"),
        ("--norm-epsilon 1e-6", {}, "--norm-epsilon 1e-05, this run has 1e-06"),
        ("--moe-router-pre-softmax", {}, "--moe-router-pre-softmax False, this run has True"),
        ("--moe-router-dtype fp32", {}, "--moe-router-dtype none, this run has fp32"),
        ("--seq-length 16", {}, "--seq-length 32, this run has 16"),
        ("--adam-beta1 0.8", {}, "--adam-beta1 0.9, this run has 0.8"),
        ("--seed 7", {}, "--seed 1234, this run has 7"),
        ("--split 9,1", {}, "--split none, this run has 9,1"),
        ("--lr-warmup-init 0.1", {}, "--lr-warmup-init 0.0, this run has 0.1"),
        ("", {"samples_per_step": 16}, "--global-batch-size 8, this run has 16"),
        ("", {"data": "d1"}, "other data; a digest of d0, this run has d1"),
        ("", {"order": "o1"}, "other first samples (…); a digest of o0, this run has o1"),
    ):
        what = more or next(iter(facts))
        line = f"error: --load F: step 2 was saved with {change}; {fix}"
        yield Fault(f"resume: {what}", f"the run resumes with another `{what}`", _resumed(more, facts), line)
        allowed = _resumed(f"{more} --resume-with-changes", facts)
        yield Fault(f"resume, allowed: {what}", "the same, with `--resume-with-changes`", allowed, "accepted")
    line = (
        "error: --load F: step 2 was saved with --num-layers 2, this run has 4 (…); give the flags of the saved model"
    )
    yield Fault("resume: --num-layers 4", "the run is of another model", _resumed("--num-layers 4", {}), line)


def faults() -> Iterator[Fault]:
    """All of them."""
    for group in (environments, command_lines, unreadable, datasets, outputs, saves, preprocessing, locks, resumes):
        yield from group()
