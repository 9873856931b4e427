"""`--help` alone names the topics and what most runs need, `--help TOPIC` the flags of one, `--help all` every flag."""

from __future__ import annotations

import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.flags.help import NEEDED, help_about
from megatron.training.cli.flags.table import config_flags, help_text
from moe_overlap.commands import autotune, predict
from moe_overlap.describe.errors import ConfigError

FLAG = re.compile(r"^ +(?:-h [^,]*, )?(--[a-z][a-z-]*)", re.MULTILINE)
TOOLS = {"predict": predict.main, "autotune": autotune.main}


def helped(main: Callable[[list[str]], object], words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    said = capsys.readouterr()
    assert not end.value.code and said.err == ""
    return said.out


def test_training_has_a_topic_for_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    groups = {"launch": "start of the ranks", **{n: str(g.__doc__) for n, g in typing.get_type_hints(Config).items()}}
    alone = helped(parse, ["--help"], capsys)
    assert len(alone.splitlines()) < 80 and all(f"    {name} " in alone or f"    {name}\n" in alone for name in NEEDED)
    by_topic = {}
    for name, about in groups.items():
        assert re.search(rf"^  {name} +{about}", alone, re.MULTILINE)
        text = helped(parse, ["--num-layers", "2", "--help", name], capsys)
        assert text.startswith(about)
        by_topic[name] = set(FLAG.findall(text))
    every = set(FLAG.findall(helped(parse, ["-h", "all"], capsys)))
    assert set().union(*by_topic.values()) == every - {"--help", "--dry-run", "--model", "--world-size"}
    assert sum(map(len, by_topic.values())) == len(set().union(*by_topic.values()))
    assert help_about("all") == help_text() and set(NEEDED) <= {name for flag in config_flags() for name in flag.names}


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_has_every_flag_in_one_topic(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = helped(TOOLS[name], ["--help"], capsys)
    topics = re.findall(r"^  (\w+) {2,}\w", alone.partition("topics of")[2], re.MULTILINE)
    assert {"job", "machines", "prices", "answer"} <= set(topics)
    flags = [flag for topic in topics for flag in FLAG.findall(helped(TOOLS[name], ["--help", topic], capsys))]
    every = FLAG.findall(helped(TOOLS[name], ["--help", "all"], capsys).partition("options:")[2])
    assert len(flags) > 12 and sorted(flags) == sorted(set(every) - {"--help", "--version", "--print-completion"})
    assert "--megatron-args" in FLAG.findall(alone) and len(FLAG.findall(alone)) < len(flags)


def test_an_unknown_topic_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--help moes: is no topic; use launch, model, attention, moe, .* or all"):
        parse(["--help", "moes"])
    for main in TOOLS.values():
        with pytest.raises(SystemExit) as end:
            main(["--help", "moes"])
        said = capsys.readouterr()
        assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1
        assert said.err.startswith("error: --help moes: is no topic; use job, machines, ")


@pytest.mark.parametrize("tool", TOOLS)
def test_help_loads_no_solver(tool: str) -> None:
    """The version, help and mistakes in a tool's own flags are answered before the cost model and its libraries are loaded."""
    heavy = {"numpy", "ortools", "pandas", "scipy", "torch"}
    code = (
        f"import sys\nfrom moe_overlap.commands.{tool} import main\n"
        "try:\n    main(['--help'])\n"
        f"finally:\n    print(sorted({heavy} & sys.modules.keys()), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "[]\n") and "--megatron-args" in ended.stdout


def test_a_shell_completes_flags_of_the_tool_and_of_the_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With shtab, an optional package; a stand-in shows what it is given."""
    parsers = []
    stand_in = types.ModuleType("shtab")
    stand_in.SUPPORTED_SHELLS = ["bash", "zsh"]  # type: ignore[attr-defined]
    stand_in.complete = lambda parser, shell: parsers.append(parser) or f"script of {shell}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shtab", stand_in)
    for arguments, status, out, err in (
        (["--print-completion", "zsh"], 0, "script of zsh", ""),
        (["--print-completion", "cmd"], 2, "", "--print-completion cmd: is no shell that shtab knows; use bash or zsh"),
    ):
        with pytest.raises(SystemExit) as ended:
            predict.main(arguments)
        printed = capsys.readouterr()
        assert ended.value.code == status and printed.out == out and err in printed.err
    assert {"--gpu", "--tensor-model-parallel-size"} <= parsers[0]._option_string_actions.keys()
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit):
        predict.main(["--print-completion", "bash"])
    assert "needs the package shtab; pip install shtab" in capsys.readouterr().err
