"""The papers' comparisons: the jobs that are predicted, and how candidates become figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.validation import validate
from tools.bench.paper_rows import Row, table
from tools.benchmark_papers import SITES, V100, fastest, lancet_arguments


@pytest.mark.parametrize("gate", ["switch", "batch_prioritized"])
@pytest.mark.parametrize("model", ["s", "l"])
def test_two_experts_and_a_fixed_batch_for_each_gpu(model: str, gate: str) -> None:
    for site in SITES:
        words = lancet_arguments(model, 16, site.batch[model], gate)
        config = parse(words).config
        validate(config, 16)
        assert config.moe.num_experts == 32 and config.training.global_batch_size == 16 * site.batch[model]


def test_gpus_share_the_cards_of_their_node() -> None:
    p4de, p3dn = (site.cluster(2).group_of(0) for site in SITES)
    assert (p4de.network_gb_per_s, p3dn.network_gb_per_s) == (6.25, 1.5625), "400 and 100 Gb/s for eight GPUs"
    assert p3dn.gpu.name == V100 and p3dn.gpu.memory_gib == 32 and p4de.gpu.memory_gib == 80


def candidate(seconds: float, mechanism: str, defers: bool = False, predicted: bool = True) -> SimpleNamespace:
    overlap = SimpleNamespace(layers=[SimpleNamespace(mechanism=mechanism)])
    plan = SimpleNamespace(stages=[SimpleNamespace(overlap=overlap)])
    schedule, prediction = object() if defers else None, object() if predicted else None
    return SimpleNamespace(seconds=seconds, decided=plan, schedule=schedule, prediction=prediction)


def test_the_fastest_candidate_of_a_kind() -> None:
    others = (candidate(3.0, "tutel"), candidate(2.0, "tutel"), candidate(0.5, "partitioned", predicted=False))
    tuned = SimpleNamespace(chosen=candidate(1.0, "partitioned", defers=True), others=others)
    assert fastest(tuned, False, "tutel") == 2.0  # type: ignore[arg-type]
    assert fastest(tuned, True) == 1.0 and fastest(tuned, False) == 2.0  # type: ignore[arg-type]
    assert fastest(tuned, False, "partitioned") is None  # type: ignore[arg-type]


def test_a_missing_figure_is_an_empty_cell() -> None:
    rows = [
        Row(figure="1", case="a", figures={"gain": 1.25, "other": None}, paper="1.3", notes=("said once",)),
        Row(figure="1", case="b", figures={"gain": 1.0}, paper="", notes=("said once",)),
    ]
    lines = table(rows)
    assert lines[2:4] == ["| a | 1.250 |  | 1.3 |", "| b | 1.000 |  |  |"]
    assert lines[4:] == ["", "- said once"]
