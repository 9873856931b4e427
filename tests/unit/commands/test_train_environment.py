"""The launcher's variables: a number that is none is one line."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from megatron.training.cli.arguments import parse
from moe_overlap.commands.exits import end_with_launcher
from moe_overlap.commands.train import main, place_among_ranks, train
from moe_overlap.describe.errors import ConfigError


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "x"}, "RANK x: must be a whole number from 0;"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE -2: must be a whole number from 1;"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0: must be a whole number from 1;"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK: must be a whole number from 0;"),
        ({"RANK": "9" * 5000}, f"RANK {'9' * 19}…: must be"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE x: must be a whole number from 1;"),
        ({"RANK": "\x1b[2J"}, "RANK ?[2J: must be"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT x: is no port; start by torchrun,"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000: is no port;"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: is no port;"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2: WORLD_SIZE says 2 ranks, which count from 0;"),
    ],
)
def test_variables_that_no_launcher_sets(
    variables: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError) as caught:
        place_among_ranks(variables)
    assert str(caught.value).startswith(line)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_a_rank_asks_to_end_with_its_launcher_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def ask() -> None:
        raise AskedError

    monkeypatch.setattr("moe_overlap.commands.train.end_with_launcher", ask)
    with pytest.raises(AskedError):
        train(parse(["--num-layers", "2"]), [])


def test_only_ranks_of_torchrun_end_with_their_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    kernel = SimpleNamespace(prctl=lambda *words: asked.append(words))
    monkeypatch.setattr("moe_overlap.describe.process.ctypes.CDLL", lambda *_, **__: kernel)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    end_with_launcher()
    assert asked == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    end_with_launcher()
    assert asked == [(1, signal.SIGKILL)]  # PR_SET_PDEATHSIG


def test_a_place() -> None:
    assert place_among_ranks({}) == (0, 1)
    assert place_among_ranks({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == (3, 4)
