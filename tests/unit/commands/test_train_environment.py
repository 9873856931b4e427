"""The launcher's variables: a number that is none is one line."""

from __future__ import annotations

import pytest

from moe_overlap.commands.train import main, place_among_ranks
from moe_overlap.describe.errors import ConfigError


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"RANK": "x"}, "RANK x: must be a whole number from 0;"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE -2: must be a whole number from 1;"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0: must be a whole number from 1;"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK: must be a whole number from 0;"),
        ({"RANK": "9" * 5000}, f"RANK {'9' * 19}…: must be"),
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


def test_a_place() -> None:
    assert place_among_ranks({}) == (0, 1)
    assert place_among_ranks({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == (3, 4)
