"""Readers against mutated files: `python -m tests.fuzz --minutes 60 [--target NAME] [--seed N]`.

An input counts as a failure when its reader raises anything but the errors that are printed as one line, takes longer than
SLOW_SECONDS, or gets an error of several lines. Failing inputs are written to `tests/fuzz/corpus/TARGET-HASH`, where
`tests/fuzz/test_fuzz.py` tries them in every run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.targets import EXPECTED, Target, targets

CORPUS = Path(__file__).with_name("corpus")
SLOW_SECONDS = 5.0
TOKENS = (
    b"9" * 5000,
    b"-1",
    b"NaN",
    b"1e999",
    b"null",
    b"[" * 500,
    b'{"a":' * 300,
    b"\x00",
    b"\xff",
    b"$A",
    b"${A}",
    b"'",
)


def mutated(seed: bytes, draw: random.Random) -> bytes:
    """An input with some bytes flipped, cut, repeated or replaced."""
    content = bytearray(seed)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        at = draw.randrange(len(content) + 1)
        end = min(len(content), at + draw.choice((1, 1, 4, 16, 200)))
        kind = draw.randrange(6)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at:end]
        elif kind == 2:
            content[at:at] = content[at:end] * draw.choice((1, 2, 30))
        elif kind == 3:
            content[at:end] = draw.choice(TOKENS)
        elif kind == 4 and at < len(content):
            content[at] = draw.randrange(256)
        else:
            other = draw.randrange(len(content) + 1)
            content[at:end] = content[other : other + end - at]
    return bytes(content)


def failure(target: Target, content: bytes) -> str | None:
    """What a reader does wrong with an input; None where it reads it or says in one line why not."""
    begin = time.process_time()  # What else the machine does is no fault of the reader.
    try:
        target.read(content)
    except EXPECTED as error:
        if "\n" in str(error) or not str(error):
            return f"an error of several lines: {error!r}"
    except Exception as error:  # whatever else a reader raises is what is looked for
        return f"{type(error).__name__}: {error}"
    seconds = time.process_time() - begin
    return f"{seconds:.1f} s" if seconds > SLOW_SECONDS else None


def main() -> int:
    """Try inputs for the time asked for; the status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--target")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    draw = random.Random(words.seed)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [target for target in targets(Path(folder)) if words.target in (None, target.name)]
        deadline = time.monotonic() + 60 * words.minutes
        while time.monotonic() < deadline:
            target = draw.choice(chosen)
            content = mutated(draw.choice(target.seeds), draw)
            tried[target.name] += 1
            reason = failure(target, content)
            if reason is not None:
                failed[f"{target.name}: {reason[:100]}"] += 1
                CORPUS.mkdir(exist_ok=True)
                (CORPUS / f"{target.name}-{hashlib.sha256(content).hexdigest()[:12]}").write_bytes(content)
    print(f"{tried.total()} inputs:", ", ".join(f"{name} {count}" for name, count in sorted(tried.items())))
    for reason, count in failed.most_common():
        print(f"{count} × {reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
