"""Tests of the changes that a plan makes to a user's flags: every decision alone, as `predict` has it."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from moe_overlap.api import predict, problem_of
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.job import ALWAYS_SHARDED
from moe_overlap.plan_search.changes import PIPELINE, baseline_of, by_decision, changes_of
from moe_overlap.plan_search.flags import Target, as_run
from moe_overlap.plan_search.results import Change
from moe_overlap.report.changes import change_lines, changes_json
from moe_overlap.report.search import closing_lines
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.write.argument_file import layout_flags
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL, searched

PLAN = "--micro-batch-size 2 --expert-model-parallel-size 4 --pipeline-model-parallel-size 1".split()
PLAN.append("--use-distributed-optimizer")
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()


def predicted(words: list[str]) -> Prediction:
    problem = problem_of(words, H100, OPTIONS)
    return predict_plan(problem.plan, problem)


def changed(words: list[str], said: list[str], **options: Any) -> tuple[tuple[Change, ...], Prediction]:
    baseline = predicted(words)
    return changes_of(grouped(words), grouped(said), baseline, H100, **{**OPTIONS, **options}), baseline


def test_each_decision_is_predicted_alone_and_the_largest_gain_comes_first() -> None:
    changes, baseline = changed([*SMALL, "--pipeline-model-parallel-size", "1"], PLAN)
    assert {change.name for change in changes} == {"micro-batch", "expert parallelism"}
    for change in changes:
        words = [word for flag, values in change.after.items() for word in (flag, *values)]
        alone = predict([*SMALL, "--pipeline-model-parallel-size", "1", *words], H100, **OPTIONS)
        assert change.prediction is not None
        assert change.prediction.predicted.step_seconds == alone.predicted.step_seconds
        assert change.gain(baseline) == baseline.predicted.step_seconds - alone.predicted.step_seconds != 0.0
    gains = [change.gain(baseline) for change in changes]
    assert gains == sorted(gains, reverse=True)


def test_what_is_refused_alone_says_why() -> None:
    changes, baseline = changed(SMALL, [*PLAN, "--num-virtual-stages-per-pipeline-rank", "5"])
    (refused,) = (change for change in changes if change.prediction is None)
    assert refused.name == "pipeline" and refused.gain(baseline) == 0.0
    assert "--num-virtual-stages-per-pipeline-rank 5: " in refused.effect(baseline)
    assert refused.effect(baseline).startswith("not possible alone: ")


def test_what_megatron_does_not_run_alone_is_no_reason() -> None:
    """A pipeline without model chunks, in which its overlap of all-to-alls does not start."""
    flag = "--overlap-moe-expert-parallel-comm"
    said = [*SMALL, flag, "--num-virtual-stages-per-pipeline-rank", "2"]
    changes, baseline = changed([*SMALL, "--num-layers", "4"], said, added=(flag,))
    (overlap,) = (change for change in changes if change.name == "overlap")
    assert overlap.effect(baseline) == (
        "not possible alone: --overlap-moe-expert-parallel-comm: needs virtual stages in a pipeline of 2 stages"
    )


def test_what_costs_alone_is_said_to_be_of_others() -> None:
    changes, baseline = changed([*SMALL, "--pipeline-model-parallel-size", "1"], PLAN)
    change = changes[0]
    assert change.prediction is not None
    seconds = baseline.predicted.step_seconds
    for factor, said in ((0.5, ""), (1.5, "; it pays with the other changes only")):
        step = dataclasses.replace(change.prediction.predicted, step_seconds=factor * seconds)
        alone = dataclasses.replace(change.prediction, predicted=step)
        assert dataclasses.replace(change, prediction=alone).effect(baseline).endswith(f" on the fullest stage{said}")
    full = dataclasses.replace(change, prediction=dataclasses.replace(change.prediction, capacity_bytes=1))
    assert full.effect(baseline).endswith("; does not fit; it pays with the other changes only")


def test_a_flag_that_says_its_default_is_no_change() -> None:
    same = [*SMALL, "--context-parallel-size", "1"]
    assert changed(same, SMALL)[0] == ()


def test_lines_name_the_flags_and_what_they_do() -> None:
    words = [*SMALL, *FULL, "--pipeline-model-parallel-size", "1"]
    changes, baseline = changed(words, PLAN)
    lines = change_lines(changes, baseline)
    (removed,) = (line for line in lines if "remove" in line)
    assert removed.startswith("change      remove --recompute-granularity full, remove --recompute-method uniform, ")
    (batch,) = (line for line in lines if "--micro-batch-size" in line)
    assert "--micro-batch-size 1 -> 2: this change alone: " in batch and batch.endswith(" GiB on the fullest stage")
    (row,) = (row for row in changes_json(changes) if row["name"] == "micro-batch")
    assert row["before"] == ["--micro-batch-size", "1"] and row["after"] == ["--micro-batch-size", "2"]


@pytest.mark.parametrize("flag", sorted(layout_flags()))
def test_every_flag_of_a_layout_has_a_decision(flag: str) -> None:
    (decision,) = by_decision({flag: ("2",)})
    of_pipeline = (
        "pipeline",
        "virtual",
        "stage",
        "microbatch-group",
        "tp-pp-dp",
        "decoder-",
        "account-for-",
        "layers are cut",
    )
    assert (decision == PIPELINE) == any(part in flag for part in of_pipeline)


def test_the_users_layout_is_predicted_as_the_target_runs_it() -> None:
    """This fork shards the optimizer's states whether or not a flag says so; Megatron-LM where it does."""
    words = [word for word in SMALL if word not in ("--use-distributed-optimizer", "--overlap-param-gather")]
    levels = {}
    for target in get_args(Target):
        baseline = baseline_of(words, H100, target, {**OPTIONS})
        assert baseline.plan is not None and baseline.prediction is not None
        levels[target] = baseline.plan.stages[0].zero_level
        assert baseline.prediction.assumed == ((ALWAYS_SHARDED,) if levels[target] else ())
        told = closing_lines(dataclasses.replace(searched("moe-overlap"), baseline=baseline.prediction), None, [])
        assert (f"; assumed: {ALWAYS_SHARDED}" in "".join(told)) == bool(levels[target])
    assert levels == {"moe-overlap": 1, "megatron-lm": 0, "any": 0}
    # A plan beside the flags says its own level, and so does Megatron-FSDP.
    for words in (["--plan", "plan.json"], ["--use-megatron-fsdp"], ["--use-distributed-optimizer"]):
        assert as_run(words, "moe-overlap") == words
