"""The interference model against its obvious twin, what it promises, and its fit on made-up hosts."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.calibrate.interference import (
    InterferenceSamples,
    alone_seconds,
    fit_factors,
    fit_host,
    mean_error,
    read_samples,
    report,
    used_samples,
)
from moe_overlap.tuner.cost.interference import (
    BLOCK,
    NO_INTERFERENCE,
    SETS,
    Factors,
    Floats,
    Interference,
    measured_hosts,
    serial_share,
)

RANDOM = np.random.default_rng(0)


def twin(row: list[float], factors: Factors) -> float:
    """Mist's algorithm 1 as printed: set after set, the largest first."""
    left, total = list(row), 0.0
    for word in sorted(SETS, key=lambda word: -word.count("1")):
        busy = [stream for stream in range(4) if word[stream] == "1"]
        if [stream for stream in range(4) if left[stream] > 0] != busy:
            continue
        slowed = [left[stream] * factor for stream, factor in zip(busy, factors[word], strict=True)]
        together = min(slowed)
        total += together
        for stream, seconds, factor in zip(busy, slowed, factors[word], strict=True):
            left[stream] = (seconds - together) / factor
    return total + sum(left)


def draw_factors() -> dict[str, tuple[float, ...]]:
    """Factors anywhere inside the contract."""
    drawn = {}
    for word in SETS:
        values = 1 + RANDOM.exponential(1.0, word.count("1"))
        while serial_share(values) < 1:
            values = 1 + 0.9 * (values - 1)
        drawn[word] = tuple(values.tolist())
    return drawn


def draw_rows(count: int) -> Floats:
    """Alone seconds with idle streams and ties."""
    rows = RANDOM.exponential(1.0, (4, count)) * (RANDOM.random((4, count)) < 0.7)
    rows[:, : count // 4] = rows[:, : count // 4].round()
    return rows


def test_it_equals_the_twin() -> None:
    for _ in range(20):
        factors, rows = draw_factors(), draw_rows(200)
        expected = [twin(row, factors) for row in rows.T.tolist()]
        np.testing.assert_allclose(Interference(factors).seconds(*rows), expected, rtol=1e-12)


@pytest.mark.parametrize("used", [(), (2,), (0, 1), (1, 3), (0, 2, 3), (1, 2, 3)])
def test_it_equals_the_twin_where_streams_are_idle_in_every_row(used: tuple[int, ...]) -> None:
    factors, rows = draw_factors(), draw_rows(200)
    rows[[stream for stream in range(4) if stream not in used]] = 0.0
    expected = [twin(row, factors) for row in rows.T.tolist()]
    np.testing.assert_allclose(Interference(factors).seconds(*rows), expected, rtol=1e-12)


def test_limits() -> None:
    """Between the longest and the sum; one stream alone as it is; twice the work, twice the time."""
    for _ in range(20):
        model, rows = Interference(draw_factors()), draw_rows(BLOCK + 7)
        seconds = model.seconds(*rows)
        assert (seconds >= rows.max(axis=0) * (1 - 1e-12)).all() and (seconds <= rows.sum(axis=0) * (1 + 1e-12)).all()
        alone = (rows > 0).sum(axis=0) == 1
        np.testing.assert_array_equal(seconds[alone], rows.sum(axis=0)[alone])
        np.testing.assert_allclose(model.seconds(*(2 * rows)), 2 * seconds)
    np.testing.assert_allclose(NO_INTERFERENCE.seconds(*rows), rows.max(axis=0), rtol=1e-15)
    assert model.seconds(*np.zeros((4, 3, 2))).tolist() == np.zeros((3, 2)).tolist()


def test_by_hand() -> None:
    """Half speed together: after 4 s the copy of 2 s has ended and 3 of 5 s of computation are left."""
    model = Interference({**NO_INTERFERENCE.factors, "1010": (2.0, 2.0)})
    assert model.seconds(*np.array([5.0, 0.0, 2.0, 0.0])) == 7.0
    assert (model.factor(0, {0, 2}), model.factor(0, {0, 1}), model.factor(2, {2})) == (2.0, 1.0, 1.0)


@pytest.mark.parametrize("word", ["1010", "1101", "1111"])
def test_other_factors_of_one_set_are_those_of_a_model_of_its_own(word: str) -> None:
    before, after, rows = draw_factors(), draw_factors(), draw_rows(200)
    model = Interference(before)
    seconds = model.seconds(*rows)  # What is looked up once belongs to these factors alone.
    changed, expected = model.with_set(word, after[word]), Interference({**before, word: after[word]})
    assert changed.factors == expected.factors and (changed.table == expected.table).all()
    assert changed.factor_of(0, int(word, 2)) == expected.factor_of(0, int(word, 2)) == after[word][0]
    for idle in ((), (1,), (2,)):
        rows[list(idle)] = 0.0
        np.testing.assert_array_equal(changed.seconds(*rows), expected.seconds(*rows))
        np.testing.assert_array_equal(model.seconds(*rows), Interference(before).seconds(*rows))
    assert seconds.shape == (200,) and model.factors == Interference(before).factors


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"0011": (0.9, 1.0)}, "here 0011 0.9 1.0: work beside other work is not faster; use factors from 1"),
        ({"0011": (2.5, 2.5)}, "here 0011 2.5 2.5: slower than one after the other: the inverses add up to 0.8000;"),
        ({"0111": (2.0, 2.0)}, "here 0111 2.0 2.0: the set has 3 busy streams; give a factor for each"),
        ({"0001": (1.0,)}, "here 0001: no set of busy streams; use 1111, 1110"),
        ({"0011": (float("nan"), 1.0)}, "here 0011 nan 1.0: work beside other work is not faster"),
    ],
)
def test_factors_outside_the_contract_are_refused(changed: Factors, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Interference({**NO_INTERFERENCE.factors, **changed}, "here")
    assert str(caught.value).startswith(message)


TRUE_FACTORS = {**NO_INTERFERENCE.factors, "1100": (1.5, 1.25), "0011": (1.75, 2.0), "1111": (2.0, 3.0, 2.5, 4.0)}


def made_up(noise: float = 0.0) -> InterferenceSamples:
    """A host with one group: every mix of three sizes, latencies of 1 ms; every third mixed sample is a test."""
    sizes = np.array([mix for mix in product((0.0, 10.0, 20.0, 50.0), repeat=4) if any(mix)]).T
    alone = np.where(sizes > 0, 1e-3 + sizes * np.array([[1e-3], [2e-3], [1.5e-3], [1e-3]]), 0.0)
    seconds = Interference(TRUE_FACTORS).seconds(*alone) * (1 + noise * RANDOM.standard_normal(sizes.shape[1]))
    count = len(seconds)
    is_test = ((sizes > 0).sum(axis=0) > 1) & (np.arange(count) % 3 == 0)
    return InterferenceSamples("made-up", np.full(count, "1x2"), sizes, seconds, np.full(count, 0.01), is_test)


def test_alone_seconds_come_from_samples_of_one_stream() -> None:
    samples = made_up()
    alone = alone_seconds(samples)
    expected = 1e-3 + samples.sizes_SN[1] * 2e-3
    busy = samples.sizes_SN[1] > 0
    np.testing.assert_allclose(alone[1, busy], expected[busy])
    assert not alone[1, ~busy].any()
    with pytest.raises(ConfigError, match="no calibration sample of device_to_host alone in group 1x2"):
        alone_seconds(samples.at((samples.busy_N > 1) | (samples.sizes_SN[3] == 0)))


def test_the_fit_finds_the_factors() -> None:
    samples = made_up()
    alone, test = alone_seconds(samples), samples.is_test_N
    fitted = fit_factors(alone[:, ~test], samples.seconds_N[~test], NO_INTERFERENCE.factors)
    assert mean_error(Interference(fitted), alone[:, test], samples.seconds_N[test]) < 0.003
    np.testing.assert_allclose(fitted["1100"], TRUE_FACTORS["1100"], atol=0.02)
    np.testing.assert_allclose(fitted["1111"], TRUE_FACTORS["1111"], atol=0.1)


def test_sets_without_samples_keep_what_they_had() -> None:
    samples = made_up()
    pairs = (samples.sizes_SN[2:] == 0).all(axis=0) & (samples.busy_N == 2)
    alone = alone_seconds(samples)[:, pairs]
    fitted = fit_factors(alone, samples.seconds_N[pairs], TRUE_FACTORS)
    assert {word: tuple(fitted[word]) for word in SETS if word != "1100"} == {
        word: TRUE_FACTORS[word] for word in SETS if word != "1100"
    }


def test_a_host_is_fitted_whole_and_by_group() -> None:
    samples = made_up(noise=0.005)
    samples = samples.at((samples.sizes_SN[2] == 0) | (samples.busy_N == 1))
    samples.spread_N[-1] = 0.2
    samples.seconds_N[-2] = 10.0
    host = fit_host("somewhere", samples)
    assert (host.noisy, host.slower_than_serial, host.places) == (1, 1, {})
    assert host.all_groups.test_error_percent < 1 and host.groups["1x2"].test_error_percent < 1
    assert host.all_groups.calibration_rows + host.all_groups.test_rows == (samples.busy_N > 1).sum() - 2
    used = used_samples(samples, alone_seconds(samples)).mixed_N
    assert not used[-2:].any()
    model, name = host.interference(1, 2)
    assert (name, host.interference(1, 8)[1]) == ("1x2", "host")
    assert model.factors == host.groups["1x2"].factors
    assert list(report(host, samples))[-1].split()[:2] == ["all", str(host.all_groups.test_rows)]


def test_measured_hosts_say_what_they_were_measured_on() -> None:
    a100 = next(host for host in measured_hosts() if host.gpu.startswith("a100"))
    assert [a100.interference(*group)[1] for group in ((1, 8), (1, 3), (8, 8))] == [
        "1x8", "inside_node", "across_nodes",
    ]  # fmt: skip


def test_samples_are_read_from_a_file(tmp_path: Path) -> None:
    setting = {"N": 4, "g2g_allgather_MB": 0, "h2d_MB": 2, "d2h_MB": 0, "intra": 8, "inter": 2, "std_over_mean": "0.5"}
    row = {"source_path": "a.json", "gpu": "l4", "stage_config_json": json.dumps(setting), "value": "0.25"}
    path = tmp_path / "samples.csv.gz"

    def write(**changes: str) -> None:
        with gzip.open(path, "wt") as file:
            writer = csv.DictWriter(file, [*row, "split"])
            writer.writeheader()
            writer.writerow({**row, "split": "test", **changes})

    write()
    (samples,) = read_samples(path).values()
    assert samples.groups_N.tolist() == ["2x8"] and samples.sizes_SN[:, 0].tolist() == [4, 0, 2, 0]
    assert (samples.seconds_N[0], samples.spread_N[0], samples.is_test_N[0], samples.gpu) == (0.25, 0.5, True, "l4")
    write(value="soon")
    with pytest.raises(ConfigError, match="line 2 is no sample: ValueError"):
        read_samples(path)
    with pytest.raises(ConfigError, match="no file in gzip's format; name one"):
        read_samples(tmp_path / "nothing.csv.gz")
