"""The probes of one GPU: what a record refutes, and on a CPU a rehearsal of all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.cli.validation import validate
from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher
from tests.gpu.cases import BY_NAME, Case
from tests.gpu.one_rank import LISTED, command_line, measure
from tests.gpu.probes import LAYERS_OF_QWEN3, MOST_LAUNCHES, PROBES, ROOT, TINY_LAYERS, failures
from tests.spawn import HANGS_SECONDS
from tests.unit.runtime import test_launch_cost

GOOD = {"waits": [], "is_deterministic": True, "equals_one_stream": True}


@pytest.mark.parametrize(
    ("probe", "figures", "expected"),
    [
        ("lists", {"pairs": GOOD}, []),
        ("lists", {"pairs": {"error": "RuntimeError: lost"}}, ["lists, pairs: RuntimeError: lost"]),
        ("lists", {"pairs": GOOD | {"waits": ["L1.moe: item"]}}, ["lists, pairs: the host waits: L1.moe: item"]),
        ("races", {"pairs": GOOD | {"is_deterministic": False}}, ["races, pairs: two runs differ"]),
        (
            "races",
            {"pairs": GOOD | {"equals_one_stream": False}},
            ["races, pairs: channel streams differ from one stream"],
        ),
        ("launched", {"of_a_partition": 127}, []),
        ("launched", {"of_a_partition": 128}, ["launched: 128 kernels for a partition, not 1 to 127"]),
        ("launched", {"of_a_partition": 0}, ["launched: 0 kernels for a partition, not 1 to 127"]),
        ("grouped", {"4": {"largest_gradient_without_rows": 0.0}}, []),
        ("grouped", {"4": {"largest_gradient_without_rows": None}}, []),
        ("grouped", {"4": {"largest_gradient_without_rows": 2.0}}, ["grouped, 4: a gradient without rows is 2.0"]),
    ],
)
def test_what_a_record_refutes(probe: str, figures: dict[str, Any], expected: list[str]) -> None:
    assert failures({"probes": {probe: {"figures": figures}}}) == expected


def test_a_probe_that_did_not_end_is_a_failure() -> None:
    assert failures({"probes": {"memory": {"error": "no end within 300 s"}}}) == ["memory: no end within 300 s"]


def test_the_bound_of_kernels_is_the_documented_one() -> None:
    assert MOST_LAUNCHES == test_launch_cost.MOST_KERNELS + 1


@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_a_list_at_real_sizes_is_a_run(case: Case) -> None:
    config = parse([*command_line(case, "cuda", is_tiny=False), "--deterministic-mode"]).config
    validate(config, case.ranks)
    assert config.model.hidden_size == 2048 and (config.optimizer.bf16 or config.precision.fp16)


@pytest.mark.parametrize("sizes", [LAYERS_OF_QWEN3, TINY_LAYERS])
def test_the_whole_step_is_a_run(sizes: str) -> None:
    config = parse([*sizes.split(), "--train-iters", "30"]).config
    validate(config, 1)
    assert config.moe.num_experts and config.model.num_layers <= 4


@pytest.mark.slow
def test_a_wait_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    unpermute = IrregularDispatcher.unpermute

    def reading(dispatcher: IrregularDispatcher, returned: torch.Tensor, handle: Any) -> torch.Tensor:
        returned.sum().item()
        return unpermute(dispatcher, returned, handle)

    monkeypatch.setattr(IrregularDispatcher, "unpermute", reading)
    figures = measure(BY_NAME["partitions, deferred"], "cpu", is_tiny=True, steps=1)
    assert figures["waits"] and all(wait.endswith(": _local_scalar_dense") for wait in figures["waits"])
    assert failures({"probes": {"lists": {"figures": {"case": figures}}}})


@pytest.mark.slow
def test_every_probe_is_rehearsed(tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    command = [sys.executable, "-m", "tests.gpu.probes", "--device", "cpu", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads(output.read_text())
    assert list(record["probes"]) == list(PROBES) and all("figures" in of for of in record["probes"].values())
    assert list(record["probes"]["lists"]["figures"]) == [case.name for case in LISTED]
    counted = {name: of["count_reads"] for name, of in record["probes"]["lists"]["figures"].items()}
    assert counted["partitions, deferred"] == 2 * counted["deferred weight gradients"] > 0
    assert counted["static capacity"] == 0
    for probe in ("memory", "whole_step"):
        figures = record["probes"][probe]["figures"]
        assert figures["predicted"]["needed_bytes"] > 0 and figures["step_seconds"] > 0
