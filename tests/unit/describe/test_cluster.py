"""Clusters: the shipped ones, files, and every mistake in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.cluster import GIB, cluster_of, known_gpus, load_cluster, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from tools.write_examples import CLUSTERS, cluster_files


def test_every_gpu_of_the_table_makes_a_cluster_under_each_of_its_names() -> None:
    for name, row in known_gpus().items():
        cluster = shipped_cluster(name, 2 * row["gpus_per_node"])
        assert cluster.gpus == 2 * row["gpus_per_node"]
        assert cluster.group_of(0).gpu.name == row["name"]


def test_a_part_of_one_node_is_a_cluster() -> None:
    assert [shipped_cluster("H100", gpus).gpus for gpus in (3, 6)] == [3, 6]


def test_names_for_one_type_are_one_type() -> None:
    assert shipped_cluster("B200-SXM", 64).groups == shipped_cluster("B200", 64).groups


def test_files_are_those_the_tool_writes_and_can_be_read() -> None:
    files = cluster_files()
    assert {path.name: path.read_text(encoding="utf-8") for path in CLUSTERS.glob("*.json")} == files
    assert all(load_cluster(CLUSTERS / name).gpus >= 32 for name in files)


def test_ranks_go_through_the_groups_of_nodes_in_order() -> None:
    content = json.loads((CLUSTERS / "h100.json").read_text(encoding="utf-8"))
    other = {**content["groups"][0], "gpu": "A100", "nodes": 1}
    cluster = cluster_of({"name": "mixed", "groups": [content["groups"][0], other]}, "mixed")
    assert [cluster.group_of(rank).gpu.name for rank in (0, 63, 64, 71)] == ["H100", "H100", "A100", "A100"]
    with pytest.raises(ValueError, match="no GPU 72"):
        cluster.group_of(72)


def group(**changes: Any) -> dict[str, Any]:
    content = json.loads((CLUSTERS / "h100.json").read_text(encoding="utf-8"))
    return {"name": "mine", "groups": [{**content["groups"][0], **changes}]}


OWN_GPU = {
    "name": "mine",
    "architecture": "Hopper",
    "bf16_tflops": 900.0,
    "fp8_tflops": 1800.0,
    "fp4_tflops": 3600.0,
    "memory_gib": 80.0,
    "memory_gb_per_s": 3000.0,
    "multiprocessors": 132,
}


def own(**changes: float) -> dict[str, Any]:
    return group(gpu=OWN_GPU | changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "f []: must be an object"),
        ({"name": "x"}, "f.groups: is missing"),
        ({"name": "x", "groups": []}, "a cluster has nodes"),
        ({"name": "x", "groups": [], "gpus": 3}, "f.gpus: unknown field"),
        (group(gpu="H1000"), "f groups[0].gpu H1000: unknown GPU; did you mean H100"),
        (group(nodes=0), "f groups[0].nodes 0: must be a positive whole number"),
        (group(nodes=True), "f groups[0].nodes true: must be a positive whole number"),
        (group(nodes=8.5), "f groups[0].nodes 8.5: must be a positive whole number"),
        (
            group(domain_gb_per_s=41e-300),
            "f groups[0].domain_gb_per_s 4.1e-299: is less than 1e-06 GB/s, which no device",
        ),
        (group(network_gb_per_s="fast"), 'f groups[0].network_gb_per_s "fast": must be a positive number'),
        (group(domain_gb_per_s=None), "8 GPUs share a domain"),
        (group(domain_gpus=3), "domains of 3 neither divide nodes of 8 GPUs"),
        (group(domain_gpus=12), "domains of 12 neither divide nodes of 8 GPUs"),
        (group(gpus_per_node=-8), "f groups[0].gpus_per_node -8: must be a positive whole number"),
        (group(host_gb_per_s=float("inf")), "f groups[0].host_gb_per_s Infinity: must be a positive number"),
        (group(gpu={"name": "mine"}), "f groups[0].gpu.architecture: is missing"),
        (
            group(network_gb_per_s=50e9),
            "f groups[0].network_gb_per_s 5e+10: is more than 100,000 GB/s, which no device has",
        ),
        (group(domain_gb_per_s=450_000), "f groups[0].domain_gb_per_s 450000: is more than 100,000 GB/s"),
        (
            own(bf16_tflops=989e12),
            "f groups[0].gpu.bf16_tflops 9.89e+14: is more than 100,000 TFLOP/s, which no device has",
        ),
        (own(fp8_tflops=1979e12), "f groups[0].gpu.fp8_tflops 1.979e+15: is more than 100,000 TFLOP/s"),
        (own(memory_gib=80 * GIB), "f groups[0].gpu.memory_gib 8.58993e+10: is more than 50,000 GiB"),
    ],
)
def test_mistakes_in_a_file_are_one_line(content: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster_of(content, "f")
    assert message in str(caught.value)


MEASURED = {
    "database": "db",
    "device": "cuda",
    "latency_seconds": 1e-5,
    "constants": {"gemm": 0.7},
    "latencies": {"all_reduce": 2e-5},
}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of all numbers of a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))
    elif isinstance(value, int | float):
        yield path


def test_every_number_of_a_file_must_be_finite_and_not_negative(tmp_path: Path) -> None:
    """JSON readers take NaN and Infinity, and every comparison with NaN is false."""
    content = {**group(gpu=OWN_GPU), "measured": MEASURED}
    cluster_of(content, "f")
    found = list(places(content))
    assert len(found) == 7 + 6 + 3
    for path in found:
        for wrong in ("NaN", "Infinity", "-Infinity", "-1"):
            broken = json.loads(json.dumps(content))
            inside = broken
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = json.loads(wrong)
            (tmp_path / "broken.json").write_text(json.dumps(broken))
            with pytest.raises(ConfigError) as caught:
                load_cluster(tmp_path / "broken.json")
            assert str(path[-1]) in caught.value.subject and "number" in caught.value.rule


def test_mistakes_on_the_command_line_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--list-gpus prints the known ones"):
        shipped_cluster("RTX", 8)
    with pytest.raises(ConfigError, match="nodes of GB200 have 4 GPUs"):
        shipped_cluster("GB200", 6)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_cluster(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        load_cluster(tmp_path / "broken.json")
