"""The file of expert loads: what is written is read, a resumed run's second lines count, a wrong line is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad, read_expert_loads, shares_by_layer


def load(first: int, last: int, layer: int = 0, counts: tuple[int, ...] = (3, 1, 0, 0)) -> ExpertLoad:
    return ExpertLoad(first, last, layer, 4, counts, (2, 0, 0, 0), 1.25)


def write(path: Path, rows: list[ExpertLoad]) -> Path:
    path.write_text("".join(row.to_line() + "\n" for row in rows))
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = [load(1, 10), load(1, 10, layer=3), load(11, 20), load(11, 20, layer=3)]
    assert read_expert_loads(write(tmp_path / "f", rows)) == tuple(rows)


def test_steps_that_were_run_again_count_once(tmp_path: Path) -> None:
    """A run that was killed after step 30 goes on from a checkpoint of step 15."""
    rows = [load(1, 10), load(1, 10, 1), load(11, 20), load(11, 20, 1), load(21, 30), load(21, 30, 1)]
    again = [load(16, 25, counts=(0, 0, 0, 4)), load(16, 25, 1, counts=(0, 0, 0, 4))]
    assert read_expert_loads(write(tmp_path / "f", rows + again)) == (rows[0], rows[1], *again)


def test_figures_of_a_line() -> None:
    assert load(1, 1).imbalance == 3.0
    assert load(1, 1).dropped_share == pytest.approx(2 / 6)
    empty = ExpertLoad(1, 1, 0, 0, (0, 0), (0, 0), 0.0)
    assert (empty.imbalance, empty.dropped_share) == (0.0, 0.0)


def test_shares_count_what_the_tokens_chose() -> None:
    shares = shares_by_layer([load(1, 10), load(11, 20), load(1, 10, 2, (1, 1, 1, 1))])
    assert shares[0] == pytest.approx((10 / 12, 2 / 12, 0, 0))
    assert shares[2] == pytest.approx((3 / 6, 1 / 6, 1 / 6, 1 / 6))
    assert all(math.isclose(sum(layer), 1.0) for layer in shares.values())
    with pytest.raises(ConfigError, match="layer 0 has 4 experts in one line and 2 in another"):
        shares_by_layer([load(1, 10), ExpertLoad(11, 20, 0, 4, (1, 1), (0, 0), 1.0)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f:2: is no record of expert loads"),
        ("[1]", "expected the fields"),
        (load(1, 1).to_line().replace('"tokens"', '"token"'), "expected the fields"),
        (load(1, 1).to_line().replace("[3,", "[3.5,"), "must be whole numbers"),
        (load(1, 1).to_line().replace("[3,", "[-3,"), "must be whole numbers"),
        (load(1, 1).to_line().replace("[3,", "["), "must name the same experts"),
        (load(1, 1).to_line().replace("[3, 1, 0, 0]", "3"), "is no record"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "f").write_text(load(1, 1).to_line() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_expert_loads(tmp_path / "f")
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        read_expert_loads(tmp_path / "nowhere")
