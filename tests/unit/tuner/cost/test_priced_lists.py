"""Tests that the priced list is the executed one: predictions lower what training lowers on the cluster's devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import moe_overlap.api as api
from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model, known_vocab_size
from megatron.training.plan_flags import plan_of_run
from moe_overlap.commands.train import on_device
from moe_overlap.describe.cluster import Cluster, Measured, shipped_cluster
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.serialize import save_plan
from moe_overlap.plan_search.request import _described
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.search.test_overlap_tuning import JOB

WORDS = [*JOB, *"--moe-overlap-partitions 2 --moe-gate topk --moe-token-dispatcher-type irregular".split()]


def cluster_of(device: str) -> Cluster:
    """16 H100s, taken from a table, or 16 measured devices."""
    measured = Measured(database="", device=device, latency_seconds=0.0, constants={})
    cluster = shipped_cluster("H100", 16)
    return cluster if device == "table" else dataclasses.replace(cluster, measured=measured)


@pytest.mark.parametrize("device", ["table", "cuda", "cpu"])
def test_the_priced_list_is_the_one_that_runs(device: str) -> None:
    job = api._job_on(WORDS, cluster_of(device), {})
    config = parse(WORDS).config
    model = describe_model(config, known_vocab_size(config) or 0, "job")
    runs = on_device(plan_of_run(config, model, 16), config, torch.device("cpu" if device == "cpu" else "cuda"))
    assert runs.host_runs_ahead == (device != "cpu")
    for rank in (0, 8):
        assert lower(job.plan, job.model, rank) == lower(runs, model, rank)
    other = dataclasses.replace(runs, host_runs_ahead=not runs.host_runs_ahead)
    assert lower(other, model, 0) != lower(runs, model, 0), "the job tells the orders apart"


def test_what_is_simulated_on_gpus_is_what_they_run() -> None:
    step = api.simulated(WORDS, cluster_of("table"), graphs=by_hand, constants=CONSTANTS)
    plan = api._job_on(WORDS, cluster_of("table"), {}).plan
    config = parse(WORDS).config
    model = describe_model(config, known_vocab_size(config) or 0, "job")
    ran = {event.instruction.id: event.instruction for event in step.ran(0)}
    assert plan.host_runs_ahead and [ran[number] for number in sorted(ran)] == list(lower(plan, model, 0))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_plan_of_a_file_is_priced_and_executed_as_it_stands(ahead: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    save_plan(api.read_job(WORDS, 16, host_runs_ahead=ahead).plan, path)
    named = [*WORDS, "--plan", path]
    for device in ("table", "cpu"):
        assert api._job_on(named, cluster_of(device), {}).plan.host_runs_ahead == ahead
        assert api._job_on(WORDS, cluster_of(device), {"plan": path}).plan.host_runs_ahead == ahead
    config = parse(named).config
    plan = api.read_job(named, 16).plan
    assert on_device(plan, config, torch.device("cuda")) == on_device(plan, config, torch.device("cpu")) == plan


@pytest.mark.parametrize("device", ["table", "cpu"])
def test_a_search_makes_plans_for_the_devices_of_its_cluster(device: str) -> None:
    assert _described(WORDS, WORDS, cluster_of(device), {}).plan.host_runs_ahead == (device != "cpu")
