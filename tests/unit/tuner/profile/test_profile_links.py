"""Lines through measured collectives, and cluster descriptions made of a database."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_overlap.describe.cluster import cluster_of, load_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.cost.hardware import measured_constants
from moe_overlap.tuner.cost.links import Group, collective_seconds, point_to_point_seconds
from moe_overlap.tuner.profile.cluster_file import (
    LEAST_LATENCY_SECONDS,
    fit_latency,
    fit_line,
    fit_links,
    measured_cluster,
    moved_bytes,
)
from moe_overlap.tuner.profile.database import Database, Device, LinkKey
from moe_overlap.tuner.profile.measure import links

LATENCY, RATE = 2e-4, 1.5e9
SIZES = [1 << power for power in range(12, 25, 2)]
RATES = {
    "product_flops": 5e10,
    "grouped_product_flops": 4e10,
    "attention_forward_flops": 2e10,
    "attention_backward_flops": 1e10,
    "copy_bytes_per_second": 2e10,
    "kernel_seconds": 1e-6,
    "memory_bytes": float(32 << 30),
    "overlap_slowdown": 0.5,
}


def test_a_line_is_found_again() -> None:
    fitted = fit_line(SIZES, [LATENCY + size / RATE for size in SIZES])
    assert fitted.latency_seconds == pytest.approx(LATENCY) and fitted.bytes_per_second == pytest.approx(RATE)
    assert fitted.error < 1e-9


def test_disturbed_measurements_do_not_bend_it() -> None:
    seconds = [LATENCY + size / RATE for size in SIZES] * 3
    for index, factor in ((2, 10), (11, 5), (6, 4), (13, 3)):
        seconds[index] *= factor
    fitted = fit_line(SIZES * 3, seconds)
    assert fitted.latency_seconds == pytest.approx(LATENCY, rel=0.02)
    assert fitted.bytes_per_second == pytest.approx(RATE, rel=0.02)


def test_burst_credits_do_not_make_a_link_fast() -> None:
    """A token bucket let three of seven sizes pass at once: the line is that of the link, within a quarter for what it paces."""
    held = [1 << power for power in (12, 14, 16, 18, 20, 21, 22)]
    seconds = [9.0e-4, 4.5e-4, 5.2e-4, 1.55e-2, 6.32e-2, 0.147, 0.314]  # all-to-alls of four ranks, 100 Mbit/s, tbf
    fitted = fit_line([0.75 * size for size in held], seconds)
    assert fitted.bytes_per_second == pytest.approx(12.5e6, rel=0.2)
    for size, taken in list(zip(held, seconds, strict=True))[3:]:
        assert fitted.latency_seconds + 0.75 * size / fitted.bytes_per_second == pytest.approx(taken, rel=0.25)


def test_a_line_never_goes_below_nothing() -> None:
    """Seconds that fall with the size: a latency or a pace below zero would be fitted."""
    for seconds in ([5e-4, 4e-4, 1e-4], [1e-6, 1e-4, 9e-3], [1e-4] * 3):
        fitted = fit_line([1e3, 1e5, 1e6], seconds)
        assert fitted.latency_seconds > 0 and fitted.bytes_per_second > 0
        assert np.isfinite(fitted.error)


def test_collectives_move_what_their_algorithm_moves() -> None:
    assert moved_bytes(LinkKey("all_reduce", "node", 4, 4000)) == 6000
    assert moved_bytes(LinkKey("all_gather", "node", 4, 4000)) == 3000
    assert moved_bytes(LinkKey("point_to_point", "node", 4, 4000)) == 4000
    assert fit_links({LinkKey("all_gather", "node", 4, 4000): 1.0}, ("all_gather",), "node") is None


LATENCIES = {
    "all_gather": 1.2e-3,
    "all_reduce": 3e-3,
    "reduce_scatter": 2e-3,
    "all_to_all": 6e-4,
    "point_to_point": 3e-4,
}


def measured_content(path: Path) -> dict[str, Any]:
    database = Database.open(path, Device("cpu", "a processor", 1, "2.13.0"))
    for name, value in RATES.items():
        database.add_rate(name, value)
    rates = {"all_gather": RATE, "reduce_scatter": RATE / 2, "all_to_all": 2 * RATE, "point_to_point": 3 * RATE}
    for kind, rate in rates.items():
        for size in SIZES:
            key = LinkKey(kind, "node", 2, size)
            database.add_link(key, LATENCY + moved_bytes(key) / rate)
    return measured_cluster(database, "here", nodes=1, ranks_per_node=2)


def test_a_measured_cluster_predicts_what_was_measured(tmp_path: Path) -> None:
    """From the database over the file to the cost model's seconds of a collective."""
    (tmp_path / "here.json").write_text(json.dumps(measured_content(tmp_path / "here.measured.jsonl")))
    cluster = load_cluster(tmp_path / "here.json")
    assert cluster.measured is not None and cluster.gpus == 2
    assert Database.load(Path(cluster.measured.database)).rates == RATES
    links = cluster.group_of(0)
    constants, extrapolating = measured_constants(cluster.measured, links.gpu.name).of_gpu(links.gpu)
    assert not extrapolating and links.gpu.memory_gib == 16
    group = Group(size=2, per_domain=1, per_node=2, links=links)
    for kind, rate in (("all_gather", RATE), ("reduce_scatter", RATE / 2), ("all_to_all", 2 * RATE)):
        seconds = collective_seconds(kind, 1 << 20, group, constants.link_rates)
        assert float(seconds) == pytest.approx(LATENCY + (1 << 19) / rate, rel=1e-3)
    assert links.network_gb_per_s == pytest.approx(3 * RATE / 1e9, rel=1e-3)


@pytest.mark.parametrize(("tier", "nodes"), [("node", 1), ("network", 4)])
def test_every_kind_has_its_own_latency(tmp_path: Path, tier: str, nodes: int) -> None:
    """Small collectives cost what they were measured to: with gloo an all-reduce takes ten times as long as a transfer."""
    database = Database.open(tmp_path / "here.measured.jsonl", Device("cpu", "a processor", 1, "2.13.0"))
    database.rates.update(RATES)
    for (kind, latency), size in itertools.product(LATENCIES.items(), SIZES):
        key = LinkKey(kind, tier, 4, size)
        database.add_link(key, latency + moved_bytes(key) / RATE)
    cluster = cluster_of(measured_cluster(database, "here", nodes, 4 // nodes), "here")
    assert cluster.measured is not None and cluster.measured.latencies.keys() == LATENCIES.keys()
    links = cluster.group_of(0)
    constants, _ = measured_constants(cluster.measured, links.gpu.name).of_gpu(links.gpu)
    rates, group = constants.link_rates, Group(size=4, per_domain=1, per_node=4 // nodes, links=links)
    for kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        key = LinkKey(kind, tier, 4, 1 << 12)
        assert float(collective_seconds(kind, 1 << 12, group, rates)) == pytest.approx(database.links[key], rel=1e-2)
    pair = Group(size=2, per_domain=1, per_node=2 if nodes == 1 else 1, links=links)
    taken = database.links[LinkKey("point_to_point", tier, 4, 1 << 12)]
    assert float(point_to_point_seconds(1 << 12, pair, rates)) == pytest.approx(taken, rel=1e-2)
    assert rates.latency("broadcast") == rates.latency_seconds


def test_a_disturbed_measurement_does_not_bend_a_latency() -> None:
    links = {LinkKey("all_gather", "node", 2, size): 1e-3 + size / 2 / RATE for size in SIZES}
    links[LinkKey("all_gather", "node", 2, SIZES[1])] *= 20
    assert fit_latency(links, "all_gather", "node", RATE) == pytest.approx(1e-3)
    assert fit_latency(links, "all_gather", "node", RATE / 1e6) == LEAST_LATENCY_SECONDS
    assert fit_latency(links, "all_reduce", "node", RATE) is None


def test_a_file_of_an_older_release_prices_all_kinds_with_one_latency(tmp_path: Path) -> None:
    content = measured_content(tmp_path / "here.jsonl")
    del content["measured"]["latencies"]
    cluster = cluster_of(content, "here")
    assert cluster.measured is not None
    constants, _ = measured_constants(cluster.measured, "a processor").of_gpu(cluster.group_of(0).gpu)
    assert constants.link_rates.latency("all_reduce") == pytest.approx(LATENCY)


def test_a_file_of_an_older_release_prices_a_reduce_scatter_as_an_all_gather(tmp_path: Path) -> None:
    content = measured_content(tmp_path / "here.jsonl")
    del content["measured"]["constants"]["reduce_scatter"]
    cluster = cluster_of(content, "here")
    assert cluster.measured is not None
    constants, _ = measured_constants(cluster.measured, "a processor").of_gpu(cluster.group_of(0).gpu)
    assert constants.link_rates.reduce_scatter == 1.0


def test_nodes_of_one_rank_have_the_latency_of_the_network(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "bed.measured.jsonl", Device("cpu", "a processor", 1, "2.13.0"))
    for name, value in RATES.items():
        database.add_rate(name, value)
    for kind, size in itertools.product(("all_gather", "all_to_all"), SIZES):
        key = LinkKey(kind, "network", 2, size)
        database.add_link(key, LATENCY + moved_bytes(key) / RATE)
    (tmp_path / "bed.json").write_text(json.dumps(measured_cluster(database, "bed", nodes=2, ranks_per_node=1)))
    cluster = load_cluster(tmp_path / "bed.json")
    assert cluster.measured is not None
    links = cluster.group_of(0)
    constants, _ = measured_constants(cluster.measured, links.gpu.name).of_gpu(links.gpu)
    group = Group(size=2, per_domain=1, per_node=1, links=links)
    for size in (1 << 12, 1 << 20):
        seconds = collective_seconds("all_to_all", size, group, constants.link_rates)
        assert float(seconds) == pytest.approx(LATENCY + size / 2 / RATE, rel=1e-3)


def test_one_rank_has_no_links_and_is_a_cluster(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "one.jsonl", Device("cpu", "a processor", 1, "2.13.0"))
    database.rates.update(RATES)
    assert cluster_of(measured_cluster(database, "one", 1, 1), "one").gpus == 1


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("constants", {"gemm": -1}, "measured.constants.gemm -1: must be a number from 0"),
        ("latency_seconds", "fast", 'measured.latency_seconds "fast": must be a positive number'),
        ("database", 3, "measured.database 3: is of the wrong kind"),
        ("extra", 3, "measured.extra: unknown field"),
        ("latencies", {"all_gather": -1}, "measured.latencies.all_gather -1: must be a number from 0"),
        ("latencies", {"gather": 1e-3}, "measured.latencies.gather: unknown kind of collective"),
        ("latencies", 1e-3, "measured.latencies 0.001: is of the wrong kind"),
    ],
)
def test_mistakes_in_the_measured_part(tmp_path: Path, field: str, value: object, message: str) -> None:
    content = measured_content(tmp_path / "here.jsonl")
    content["measured"][field] = value
    with pytest.raises(ConfigError) as caught:
        cluster_of(content, "c.json")
    assert message in str(caught.value)


def test_every_constant_is_asked_for(tmp_path: Path) -> None:
    content = measured_content(tmp_path / "here.jsonl")
    del content["measured"]["constants"]["memory"]
    measured = cluster_of(content, "c.json").measured
    assert measured is not None
    with pytest.raises(ConfigError, match=r"measured.constants.memory: is missing"):
        measured_constants(measured, "a processor")


@pytest.mark.parametrize("name", ["gemm", "memory", "domain", "all_to_all_network", "reduce_scatter"])
def test_no_share_of_a_rate_is_0(tmp_path: Path, name: str) -> None:
    content = measured_content(tmp_path / "here.jsonl")
    content["measured"]["constants"] |= {name: 0, "host_seconds": 0}
    measured = cluster_of(content, "c.json").measured
    assert measured is not None
    with pytest.raises(ConfigError, match=rf"measured.constants.{name} 0: is a share of a rate, greater than 0"):
        measured_constants(measured, "a processor")


def test_an_all_to_all_beside_products_has_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks share no power of two, and both backends refuse unequal parts."""
    sizes = set()
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(links.dist, "all_to_all_single", lambda received, sent, **_: (sizes.add(sent.numel()), done)[1])
    monkeypatch.setattr(links, "_agreed", lambda seconds, *_: seconds)
    group: Any = SimpleNamespace(size=lambda: 3)
    assert 0 <= links.slowdown_of_both(group, "cpu", 1 << 10, 8) <= 1
    assert sizes == {1023}
