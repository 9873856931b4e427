"""Faults and kills by hand.

    python -m tests.faults --kills 50 [--seed N] [--folder DIR]     kill a job that saves after every step
    python -m tests.faults --flips     flip every bit of a completion mark
    python -m tests.faults --table [--price fast slow hand] [--only WORD]     try the faults; a row of Markdown for each

The status is 1 where a resume was not the same run, or a fault had another answer than the expected one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.kills import killed_job


def main() -> int:
    """Execute what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, help="kill a job so often")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="keeps what the killed job wrote; default a temporary one")
    parser.add_argument("--table", action="store_true", help="try the faults")
    parser.add_argument("--price", nargs="+", choices=("fast", "slow", "hand"), default=["fast", "slow", "hand"])
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--flips", action="store_true", help="flip every bit of a completion mark")
    words = parser.parse_args()
    if not (words.table or words.flips) and words.kills is None:
        parser.error("name --table, --flips or --kills N")
    if words.flips:
        flipped()
    failed = words.table and tried(words.price, words.only) > 0
    if words.kills is not None:
        with tempfile.TemporaryDirectory() as temporary:
            failed |= not killed(words.kills, words.seed, words.folder or Path(temporary))
    return int(failed)


def tried(prices: list[str], only: str) -> int:
    """Try faults and print a row for each; returns how many had another answer than the expected one."""
    from tests.faults.table import FAULTS

    chosen = [fault for fault in FAULTS if fault.price in prices and only in fault.name]
    wrong = 0
    print("| fault | what is broken | answer | as expected | seconds |\n|---|---|---|---|---:|", flush=True)
    for fault in chosen:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            answer = fault.answer(Path(folder))
        agrees = fault.agrees(answer)
        wrong += not agrees
        cells = (fault.name, fault.broken, answer[:400], "yes" if agrees else f"NO: {fault.line}")
        shown = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
        print(f"| {shown} | {time.monotonic() - begin:.2f} |", flush=True)
    print(f"\n{len(chosen)} faults, {len(chosen) - wrong} answered as expected, {wrong} not")
    return wrong


def flipped() -> None:
    """Flip every bit of a completion mark, and print what came of it."""
    from tests.faults.test_flips import answers

    with tempfile.TemporaryDirectory() as folder:
        seen = answers(Path(folder), lambda size: range(8 * size), loads=False)
    print(f"{sum(seen.values())} bits of a mark: {', '.join(f'{count} {answer}' for answer, count in seen.items())}")


def killed(kills: int, seed: int, folder: Path) -> bool:
    """Kill a job as often as asked for, and print what came of it; returns whether all was well."""
    outcome = killed_job(kills, seed, folder, lambda line: print(line, flush=True))
    print(
        f"{outcome.kills} kills, {outcome.resumes} resumes, {outcome.repeated} steps executed again, "
        f"{outcome.steps} steps in all, {len(outcome.problems)} problems"
    )
    for problem in outcome.problems:
        print(problem)
    return not outcome.problems and outcome.kills == kills


if __name__ == "__main__":
    sys.exit(main())
