"""Readers against inputs made from valid ones: `python -m tests.fuzz --minutes 60`, or `--inputs 1000000`.

Every target gets its share of inputs; a failing input is counted by its kind (`guard.py`), written to
`tests/fuzz/corpus/TARGET-HASH`, where `test_fuzz.py` tries it in every run, and the next one is tried.
The n-th input of a target depends on `--seed` alone. `--record FILE` writes the table of what was tried.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.guard import KINDS, SLOW_SECONDS, bounded_memory, failure
from tests.fuzz.targets import Target, targets

CORPUS = Path(__file__).with_name("corpus")
IN_MEMORY = Path("/dev/shm")
"""The folder of Linux whose files never reach a disk: a million are written."""
ROUND = 200
"""Inputs of a target of weight 1 before the next target has its turn."""
MOST_KEPT = 5
"""Failing inputs of one target and kind that are written: hundreds of others show the same."""


@dataclass(slots=True)
class Tally:
    """The counts of a target's inputs, failures and reasons."""

    inputs: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Count another process's inputs, too."""
        self.inputs, self.seconds = self.inputs + other.inputs, self.seconds + other.seconds
        self.failures += other.failures
        self.reasons += other.reasons


def fuzz(names: Sequence[str], seed: str, minutes: float, inputs: int | None, slow_seconds: float) -> dict[str, Tally]:
    """Try inputs until so many were tried, or the time is over."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        chosen = [target for target in targets(Path(folder)) if not names or target.name in names]
        draws = {target.name: random.Random(f"{seed} {target.name}") for target in chosen}
        tallies = {target.name: Tally() for target in chosen}
        for target in chosen:
            for valid in target.seeds:
                failure(target, valid)  # What is imported on first use is not the first input's.
        share = None if inputs is None else inputs / sum(target.weight for target in chosen)
        wanted = {t.name: None if share is None else -(-share * t.weight // 1) for t in chosen}
        deadline, open_targets = time.monotonic() + 60 * minutes, list(chosen)
        while open_targets and time.monotonic() < deadline:
            for target in list(open_targets):
                tally, most = tallies[target.name], wanted[target.name]
                left = ROUND * target.weight if most is None else min(ROUND * target.weight, most - tally.inputs)
                _turn(target, draws[target.name], tally, max(1, round(left)), deadline, slow_seconds)
                if most is not None and tally.inputs >= most:
                    open_targets.remove(target)
    return tallies


def _turn(target: Target, draw: random.Random, tally: Tally, count: int, deadline: float, slow_seconds: float) -> None:
    for _ in range(count):
        if time.monotonic() >= deadline:
            return
        content = target.change(draw.choice(target.seeds), draw)
        begin = time.process_time()
        with bounded_memory():  # Of what this process has by now: readers keep some answers.
            wrong = failure(target, content, slow_seconds)
        tally.inputs, tally.seconds = tally.inputs + 1, tally.seconds + time.process_time() - begin
        if wrong is not None:
            tally.failures[wrong.kind] += 1
            tally.reasons[f"{target.name}: {wrong}"[:200]] += 1
            if tally.failures[wrong.kind] <= MOST_KEPT:
                CORPUS.mkdir(exist_ok=True)
                (CORPUS / f"{target.name}-{hashlib.sha256(content).hexdigest()[:12]}").write_bytes(content)


def table(tallies: dict[str, Tally]) -> str:
    """Inputs, rate and failures of every target, in Markdown."""
    lines = [f"| target | inputs | inputs per CPU second | {' | '.join(KINDS)} |", "|---" * (3 + len(KINDS)) + "|"]
    total = Tally()
    for name, tally in sorted(tallies.items()):
        total.add(tally)
        lines.append(_row(name, tally))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, tally: Tally) -> str:
    counts = " | ".join(str(tally.failures[kind]) for kind in KINDS)
    return f"| {name} | {tally.inputs:,} | {tally.inputs / max(tally.seconds, 1e-9):,.0f} | {counts} |"


def main() -> int:
    """Try inputs; the status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="most minutes; default 2, or no end with --inputs")
    parser.add_argument("--inputs", type=int, help="inputs in all, dealt to the targets by weight")
    parser.add_argument("--target", action="append", default=[], help="a target; default all; may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a share of the inputs")
    parser.add_argument("--seconds", type=float, default=SLOW_SECONDS, help="of the processor that an input may take")
    parser.add_argument("--record", type=Path, help="file for the table")
    words = parser.parse_args()
    minutes = words.minutes or (2.0 if words.inputs is None else 1e6)
    share = None if words.inputs is None else -(-words.inputs // words.jobs)
    asked = [(words.target, f"{words.seed}.{job}", minutes, share, words.seconds) for job in range(words.jobs)]
    begin = time.monotonic()
    if words.jobs == 1:
        answers = [fuzz(*asked[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(words.jobs) as pool:
            answers = pool.starmap(fuzz, asked)
    tallies = answers[0]
    for answer in answers[1:]:
        for name, tally in answer.items():
            tallies[name].add(tally)
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10
    text = (
        f"{table(tallies)}\n\n{(time.monotonic() - begin) / 60:.1f} minutes, at most {peak} MiB resident in a process."
    )
    print(text)
    for tally in tallies.values():
        for reason, count in tally.reasons.most_common(20):
            print(f"{count} × {reason}")
    if words.record is not None:
        words.record.write_text(text + "\n", encoding="utf-8")
    return 1 if any(tally.failures for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
