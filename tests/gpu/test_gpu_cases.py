"""The runs of tests/gpu are runs that this program accepts: every command line is read and checked, without a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.cli.validation import validate
from megatron.training.plan_flags import plan_of_run
from tests.gpu import row_sums
from tests.gpu.benchmark import MODEL, RUNS, SIZES
from tests.gpu.cases import CASES, Case
from tests.gpu.one_rank import LISTED
from tests.gpu.test_gpu_losses import STEPS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_is_a_run(case: Case) -> None:
    config = parse([*case.words(), "--train-iters", str(STEPS)]).config
    validate(config, case.ranks)
    assert config.parallel.tensor_model_parallel_size == case.tensor, "the vocabulary is padded to 512 in every layout"


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_is_a_run(name: str) -> None:
    words = [*SIZES.split(), *MODEL.split(), *RUNS[name].split(), "--max-position-embeddings", "4096"]
    words += ["--global-batch-size", "16", "--train-iters", "30", "--expert-model-parallel-size", "2"]
    config = parse(words).config
    validate(config, 2)
    assert (config.overlap.moe_gate is None) == (name == "plain"), "plain is megatron-core's own gate and schedule"


def test_sums_of_rows_are_those_of_index_add(capsys: pytest.CaptureFixture[str]) -> None:
    """What is measured computes the same, and the program works."""
    rows, tokens = row_sums.routed(8, 4, 16, "cpu")
    expected = row_sums.added(rows, tokens, 8)
    for way in row_sums.WAYS.values():
        torch.testing.assert_close(way(rows, tokens, 8), expected)
    assert row_sums.main(["--repeats", "1"], [(8, 4, 16)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3 + 2 * len(row_sums.WAYS)


def test_lists_of_one_rank_are_those_that_are_lowered() -> None:
    """Without building anything: a case is a list where its plan runs one."""
    for case in CASES:
        config = parse([*case.words(), "--train-iters", str(STEPS)]).config
        plan = plan_of_run(config, describe_model(config, 500, case.name), case.ranks)
        assert plan.runs_lists == (case in LISTED), case.name


def test_names_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES), "losses stand under the number of a case"
