"""`--target megatron-lm --search-space zero` and `offload`: plans of Megatron-FSDP, and activations on the host."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from megatron.training.cli.arguments import expand_files
from moe_overlap.api import predict, problem_of
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.plan import Offload
from moe_overlap.plan_search.request import SearchSettings, read_request
from moe_overlap.plan_search.results import PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import closing_lines, write_search
from moe_overlap.tuner.cost.prediction import estimate_plan, moves_states
from moe_overlap.tuner.search.space import SEARCH_SPACES
from moe_overlap.tuner.write.upstream_rules import upstream_errors
from moe_overlap.tuner.write.upstream_values import parser_errors, values_of
from tests.unit.plan_search.test_plan_search import H100, JOB, OPTIONS, SMALL

pytestmark = pytest.mark.usefixtures("whole_memory")

WORDS = [*SMALL, "--num-layers", "6", "--overlap-grad-reduce", "--overlap-param-gather", "--moe-shared-expert-overlap"]
"""The model has no shared expert: the flag keeps Megatron-LM's other overlap, which is faster here, out of the search."""
DEEP = [*JOB, *"--num-layers 6 --ffn-hidden-size 8192 --global-batch-size 16".split()]
WHOLE = "--recompute-granularity full --recompute-method block --recompute-num-layers"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy"


GIBS = 3.5
"""A capacity in which sharded weights and gradients leave room for larger passes."""


def with_memory(gib: float, host_gb_per_s: float | None = None) -> Cluster:
    (group,) = H100.groups
    group = dataclasses.replace(group, gpu=dataclasses.replace(group.gpu, memory_gib=gib))
    return dataclasses.replace(
        H100, groups=(dataclasses.replace(group, host_gb_per_s=host_gb_per_s or group.host_gb_per_s),)
    )


@cache
def searched(space: str, jobs: int = 1, host_gb_per_s: float | None = None) -> PlanSearch:
    settings = SearchSettings(target="megatron-lm", space=space, jobs=jobs)
    return search_plan(WORDS, with_memory(GIBS, host_gb_per_s), settings, **OPTIONS)


def test_fsdp_is_found_where_it_is_the_fastest_that_fits() -> None:
    """No plan of a grid of Megatron-FSDP's is faster."""
    narrow, found = searched("recompute"), searched("zero")
    assert found.plan.stages[0].zero_level in (2, 3) and len(found.plan.stages) == 1
    assert found.prediction.predicted.step_seconds < 0.99 * narrow.prediction.predicted.step_seconds
    for finalist in (found.chosen, *found.others):
        ranked = next(plan for plan in found.uniform.ranked if plan.name == finalist.name)
        assert finalist.seconds == pytest.approx(ranked.seconds, rel=0.05 if moves_states(finalist.plan) else 1e-9)
    steps = []
    for tensor, expert, samples, strategy, layers in itertools.product(
        (1, 2), (1, 2, 4), (1, 2), ("optim_grads", "optim_grads_params"), (0, 3, 6)
    ):
        words = f"{FSDP} {strategy} --pipeline-model-parallel-size 1 --tensor-model-parallel-size {tensor}"
        words += f" --expert-model-parallel-size {expert} --micro-batch-size {samples}"
        words += " --sequence-parallel --expert-tensor-parallel-size 1" if tensor > 1 else ""
        words += f" {WHOLE} {layers}" if layers else ""
        problem = problem_of([*WORDS, *words.split()], with_memory(GIBS), {**OPTIONS})
        prediction = estimate_plan(problem.plan, problem)
        steps += [prediction.predicted.step_seconds] if prediction.fits else []
    assert len(steps) > 5 and found.uniform.solution.objective <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize(("space", "host_gb_per_s"), [("zero", None), ("offload", 5000.0)])
def test_flags_are_those_of_megatron_lm(space: str, host_gb_per_s: float | None, tmp_path: Path) -> None:
    """Its parser and its rules accept them, they are predicted as they were found, and kernels of several streams may run."""
    found = searched(space, host_gb_per_s=host_gb_per_s)
    write_search(tmp_path, found)
    words = [f"@{tmp_path / 'megatron_args.txt'}"]
    flags = grouped(tuple(expand_files(words)))
    assert {"--use-megatron-fsdp", "--overlap-grad-reduce", "--overlap-param-gather"} <= flags.keys()
    assert ("--cpu-offloading-num-layers" in flags) == (space == "offload")
    assert not parser_errors(flags) and not upstream_errors(values_of(flags), 8)
    again = predict(words, with_memory(GIBS, host_gb_per_s), **OPTIONS)
    assert again.predicted == found.prediction.predicted
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32" in (tmp_path / "launch.sbatch").read_text()


def test_processes_that_share_the_search_answer_as_one() -> None:
    alone, shared = searched("zero"), searched("zero", 2)
    assert [each.name for each in (shared.chosen, *shared.others)] == [
        each.name for each in (alone.chosen, *alone.others)
    ]
    assert shared.uniform.solution.objective == alone.uniform.solution.objective


def test_activations_wait_on_the_host_where_that_is_faster() -> None:
    """Weights and gradients stay, as no flag moves them; so does the optimizer, whose step on the CPU is not priced."""
    found = searched("offload", host_gb_per_s=5000.0)
    assert found.plan.stages[0].offload.activations == 0.5
    assert found.chosen.seconds < searched("zero", host_gb_per_s=5000.0).chosen.seconds
    for finalist in (found.chosen, *found.others):
        offload = finalist.plan.stages[0].offload
        assert (offload.weights, offload.gradients, offload.optimizer) == (0.0, 0.0, 0.0)
        assert not offload.activations or len(finalist.plan.stages) == 1


def test_this_fork_finds_and_writes_plans_of_all_zero_levels(tmp_path: Path) -> None:
    """No flag says them: the file beside the flags does, and the flags with it are the plan that was found."""
    machines = with_memory(10.0)
    narrow, wide = (
        search_plan(DEEP, machines, SearchSettings(space=space), **OPTIONS) for space in ("recompute", "zero")
    )
    levels = {stage.zero_level for stage in wide.plan.stages}
    assert levels & {2, 3} and wide.plan.is_decoupled and wide.refusal is None
    assert wide.prediction.predicted.step_seconds < narrow.prediction.predicted.step_seconds
    require_written(wide, DEEP, machines, tmp_path)


def test_this_fork_offloads_where_nothing_else_fits(tmp_path: Path) -> None:
    """The norm of the step reads the gradients, so these stay."""
    wide = SEARCH_SPACES["full"].moe_overlap
    assert "gradients" not in wide.offloads
    space = dataclasses.replace(wide, all_layers=True, zero_levels=(0, 1), frees_stages=False, meshes=())
    found = search_plan(DEEP, with_memory(5.0), SearchSettings(space=space), **OPTIONS)
    assert found.plan.stages[0].offload == Offload(optimizer=0.5)
    require_written(found, DEEP, with_memory(5.0), tmp_path)


def test_the_default_space_is_what_this_fork_executes() -> None:
    for flags, target, name in (
        ([], "moe-overlap", "full"),
        (["--grad-reduce-in-bf16"], "moe-overlap", "stages"),
        ([], "megatron-lm", "stages"),
        ([], "any", "stages"),
    ):
        request = read_request([*SMALL, *flags], H100, SearchSettings(target=target), math.inf, **OPTIONS)  # type: ignore[arg-type]
        assert request.space.name == name


def require_written(wide: PlanSearch, job: Sequence[str], machines: Cluster, tmp_path: Path) -> None:
    """Assert that a plan is read again from what is written."""
    write_search(tmp_path, wide)
    arguments = list(expand_files([f"@{tmp_path / 'megatron_args.txt'}"]))
    assert arguments[arguments.index("--plan") + 1].endswith("plan.json")
    arguments[arguments.index("--plan") + 1] = str(tmp_path / "plan.json")
    assert problem_of(arguments, machines, {**OPTIONS}).plan.stages == wide.plan.stages
    # Plans that it refuses are no answer.
    assert all(finalist.refusal is None for finalist in (wide.chosen, *wide.others))


def test_flags_of_fsdp_are_read_as_its_level() -> None:
    for strategy, level in (("optim_grads", 2), ("optim_grads_params", 3)):
        words = [*WORDS, *f"{FSDP} {strategy} --pipeline-model-parallel-size 1".split()]
        assert problem_of(words, H100, OPTIONS).plan.stages[0].zero_level == level


def test_a_users_own_fsdp_does_not_bind_the_search_and_the_space_that_has_it_is_named(tmp_path: Path) -> None:
    """The format of its checkpoints is refused without Megatron-FSDP, so it goes with it."""
    words = [*WORDS, *f"{FSDP} optim_grads_params --pipeline-model-parallel-size 1".split()]
    found = search_plan(words, with_memory(GIBS), SearchSettings(target="megatron-lm"), **OPTIONS)
    assert found.plan.stages[0].zero_level == 1 and found.baseline is not None
    assert not any("fsdp" in word for word in found.written.arguments)
    (line,) = (line for line in closing_lines(found, tmp_path, []) if line.startswith("your flags"))
    assert line.endswith("; --search-space zero has plans like yours")
    wide = search_plan(words, with_memory(GIBS), SearchSettings(target="megatron-lm", space="zero"), **OPTIONS)
    assert not any("plans like yours" in line for line in closing_lines(wide, tmp_path, []))


def test_where_the_target_runs_no_layout_the_rule_is_named() -> None:
    words = [*WORDS, "--overlap-moe-expert-parallel-comm"]
    with pytest.raises(ConfigError, match="--overlap-moe-expert-parallel-comm: already overlaps shared experts"):
        search_plan(words, with_memory(GIBS), SearchSettings(target="megatron-lm"), **OPTIONS)
