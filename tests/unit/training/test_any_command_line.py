"""Whatever is written on the command line, a dry run answers by its page or by one line: never by another exception."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from megatron.training.cli.arguments import ALIASES, parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.flags.table import config_flags
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.upstream_flags import UpstreamFlag, load_upstream_flags

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8"
)
NUMBERS = "0 1 2 3 4 8 -1 0.5 1e-3 1e400 nan -inf 7.5 1000003 99999999999999999999 1_0 ٣ 0x10 1e".split()
WORDS = [
    "",
    " ",
    "none",
    "None",
    "x",
    "a b",
    "[1]*4",
    "([0]*1+[1]*3)",
    "[",
    "1,0",
    "-1,0",
    "E|tt|ttL",
    "Ettt*9",
    "9:",
    "0:8",
]
PATHS = ["/nowhere/at/all", ".", "pyproject.toml", "${DATA}", "é"]
LAYOUTS = ("--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2", "--bf16", "--fp16")


def answer(words: list[str]) -> str:
    """The page of a dry run, or the error's line."""
    page = io.StringIO()
    try:
        parsed = parse([*words, "--dry-run"])
        dry_run(parsed, parsed.world_size, page)
    except ConfigError as error:
        line = str(error)
        assert line and "\n" not in line
        return line
    return page.getvalue()


def upstream_values(flag: UpstreamFlag) -> list[list[str]]:
    """Values that upstream's parser reads."""
    if flag.nargs == "0":
        return [[]]
    if flag.choices:
        return [[choice] for choice in flag.choices]
    number = {"int": "2", "float": "0.5"}.get(flag.type or "", "word")
    return [[number] * (int(flag.nargs) if (flag.nargs or "").isdigit() else 1)]


@pytest.mark.parametrize("letter", sorted({name[2] for name in load_upstream_flags() if name.startswith("--")}))
def test_every_flag_of_upstream_is_answered_by_name(letter: str) -> None:
    """It counts, is listed as idle or as not executed, or is refused with its name; none is unknown, none vanishes."""
    plain = answer(SMALL.split())
    for name, flag in load_upstream_flags().items():
        if name[:3] != f"--{letter}" or name == "--help":
            continue
        for values in upstream_values(flag):
            said = answer([*SMALL.split(), name, *values])
            assert "unknown flag" not in said, name
            noted = name in said or name in ALIASES or said != plain
            assert noted or flag.is_default(tuple(values)) or values in ([flag.default], []), (name, values)


def drawn_values(draw: random.Random, name: str) -> list[str]:
    """Values of one flag: mostly of its type, else anything."""
    flag = next((flag for flag in config_flags() if name in flag.names), None)
    if draw.random() < 0.2:
        return [draw.choice(draw.choice((NUMBERS, WORDS, PATHS))) for _ in range(draw.choice((0, 1, 1, 2)))]
    if flag is None:
        return [] if name not in load_upstream_flags() else draw.choice(upstream_values(load_upstream_flags()[name]))
    if flag.kind == "switch":
        return []
    if flag.choices is not None:
        return [draw.choice(flag.choices)]
    texts = {"int": "0 1 2 3 4 8 16", "float": "0 0.1 0.5 1 8", "layers": "1 2 [0,1,1,1]", "pair": "8,0 -1,0"}
    return [draw.choice(texts.get(flag.kind, "E|tt|ttL x 9,1").split())]


@pytest.mark.parametrize("seed", range(10))
def test_no_command_line_raises_anything_else(seed: int) -> None:
    draw = random.Random(seed)
    own = [name for flag in config_flags() for name in (*flag.names, flag.off) if name is not None]
    others = [*load_upstream_flags(), *ALIASES, "--world-size", "--model", "--nonsense"]
    others.remove("--help")
    for _ in range(100):
        words = [*SMALL.split(), *draw.choice(("", *LAYOUTS)).split()]
        for name in draw.sample(own, draw.randint(1, 4)) + draw.sample(others, draw.choice((0, 0, 1))):
            words += [name, *drawn_values(draw, name)]
        answer(words)
