"""Training in fp16: near fp32, and when gradients overflow every rank skips the step, in every layout and after a resume."""

from __future__ import annotations

import pytest

from tests.multiprocess.fp16_runs import SAVED_STEP, Rows, fast_runs, slow_runs
from tests.spawn import run

NEAR = 5e-3
"""Relative difference of losses that ten bits of mantissa make in a few steps."""
Ranks = list[dict[str, Rows]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(2, fast_runs, str(tmp_path_factory.mktemp("fp16")))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    return run(2, slow_runs, str(tmp_path_factory.mktemp("fp16-layouts")))[0]


def near(rows: Rows, others: Rows) -> None:
    """The same run in another precision: losses and norms of unscaled gradients."""
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=NEAR)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * NEAR)


def skips_until_it_fits(rows: Rows) -> None:
    """From 2⁴⁰ on: the first overflow is forgiven, every other one halves the scale, and nothing moves."""
    assert [row["loss_scale"] for row in rows] == [2.0**40, *(2.0 ** (40 - halved) for halved in range(1, len(rows)))]
    assert [row["skipped_iterations"] for row in rows] == [row["step"] for row in rows]
    assert all(row["grad_norm"] is None for row in rows)
    assert len({row["learning_rate"] for row in rows}) == 1  # the schedule waits
    assert [row["consumed_samples"] for row in rows] == [4 * row["step"] for row in rows]  # the data do not


def resumes_bitwise(whole: Rows, again: Rows) -> None:
    names = ("step", "loss", "grad_norm", "loss_scale", "skipped_iterations", "learning_rate", "consumed_samples")
    for row, other in zip(whole[SAVED_STEP:], again, strict=True):
        assert {name: row[name] for name in names} == {name: other[name] for name in names}


def test_losses_and_norms_are_near_those_of_fp32(ranks: Ranks) -> None:
    near(ranks[0]["fp16"], ranks[0]["fp32"])
    assert [row["loss"] for row in ranks[0]["fp16"]] != [row["loss"] for row in ranks[0]["fp32"]]
    assert {(row["loss_scale"], row["skipped_iterations"]) for row in ranks[0]["fp16"]} == {(65536, 0)}
    assert not any("loss_scale" in row for row in ranks[0]["fp32"])


def test_overflow_halves_the_scale_and_skips_on_every_rank(ranks: Ranks) -> None:
    for rank in ranks:
        skips_until_it_fits(rank["overflows"])


def test_a_run_resumes_in_the_middle_of_a_window(ranks: Ranks) -> None:
    whole, again = ranks[0]["whole"], ranks[0]["again"]
    resumes_bitwise(whole, again)
    scales = [row["loss_scale"] for row in whole]
    assert whole[SAVED_STEP - 1]["skipped_iterations"] > 0, "nothing to restore"
    # Without the saved count of good steps the scale would double at another step.
    assert any(later > earlier for earlier, later in zip(scales[SAVED_STEP - 1 :], scales[SAVED_STEP:], strict=False))


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks) -> None:
    for rank in ranks:
        assert [row["still"] for row in rank["hurt"]] == [False, True, False, False]
        assert [row["scale"] for row in rank["hurt"]] == [65536, 32768, 32768, 32768]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "ep2"])
def test_layouts(layouts: dict[str, Rows], layout: str) -> None:
    near(layouts[layout], layouts[f"{layout}, fp32"])
    skips_until_it_fits(layouts[f"{layout}, overflows"])
    resumes_bitwise(layouts[f"{layout}, whole"], layouts[f"{layout}, again"])
    assert layouts[f"{layout}, whole"][SAVED_STEP - 1]["skipped_iterations"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["executor", "in gaps"])
def test_overlap(layouts: dict[str, Rows], name: str) -> None:
    near(layouts[name], layouts["listed"])
    skips_until_it_fits(layouts[f"{name}, overflows"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "pp2"])
def test_prediction_layers(layouts: dict[str, Rows], layout: str) -> None:
    """Their losses reach the gradient at the scale of the loss: twice of it here."""
    rows, others = layouts[f"predicting, {layout}"], layouts[f"predicting, {layout}, fp32"]
    near(rows, others)
    for row, other in zip(rows, others, strict=True):
        assert [row[f"mtp_{n}_loss"] for n in (1, 2)] == pytest.approx(
            [other[f"mtp_{n}_loss"] for n in (1, 2)], rel=NEAR
        )


@pytest.mark.slow
def test_a_constant_scale_stays_and_stops_at_an_overflow(layouts: dict[str, Rows]) -> None:
    near(layouts["constant"], layouts["ep2, fp32"])
    assert {row["loss_scale"] for row in layouts["constant"]} == {256}
    (failure,) = layouts["constant, too large"]
    assert failure["error"].startswith("step 1: not finite: loss ") and failure["error"].endswith("gradient norm nan")
