"""`tools/autotune.py` without --overlap-only: from flags to a plan that is read back, predicted the same, and written."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from megatron.training.cli.arguments import expand_files
from megatron.training.cli.config import Config
from moe_overlap.api import predict, tune
from moe_overlap.commands import autotune
from moe_overlap.describe.cluster import GIB, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad
from moe_overlap.describe.model import ModelDescription
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.job import read_job
from moe_overlap.plan.capabilities import refuse_unsupported
from moe_overlap.plan.plan import Plan, Precision
from moe_overlap.plan.serialize import load_plan, save_plan
from moe_overlap.plan_search import task as search_task
from moe_overlap.plan_search.finalists import in_order
from moe_overlap.plan_search.flags import Target, as_priced, without_layout
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import Finalist, PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.answer import UNTRIED
from moe_overlap.report.changes import helpful
from moe_overlap.report.search import (
    _stages_lines,
    closing_lines,
    detail_lines,
    search_json,
    search_lines,
    write_search,
)
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.search.layer.candidates import PLAIN
from moe_overlap.tuner.write.upstream_rules import upstream_errors
from moe_overlap.tuner.write.upstream_values import parser_errors, values_of
from tests.unit.plan import plan_samples
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB
from tests.unit.tuner.hand_made import captured_by_hand
from tests.unit.tuner.search.spaces import SPACES

H100 = shipped_cluster("H100", 8)
SMALL = [*JOB, *"--num-layers 2 --moe-ffn-hidden-size 4095 --num-experts 4 --expert-model-parallel-size 2".split()]
SMALL += ["--global-batch-size", "16"]


HALF = ["--fp16" if word == "--bf16" else word for word in SMALL]
"""In a precision that is executed with ZeRO-1 alone."""


@cache
def graph_of(model: ModelDescription, layout: Layout) -> CapturedModel:
    whole = captured_by_hand(model, layout)
    # Modules that are recomputed cost nothing by hand.
    modules = [
        dataclasses.replace(part, variant="layernorm+moe_act")
        for part in whole.parts
        if part.variant == "none" and part.kind not in ("embedding", "head")
    ]
    return dataclasses.replace(whole, parts=(*whole.parts, *modules))


def by_hand(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
    return {
        index: graph_of(
            model,
            Layout(tensor=stage.tensor, context=stage.context, expert=stage.expert, expert_tensor=stage.expert_tensor),
        )
        for index, stage in enumerate(plan.stages)
    }


OPTIONS: dict[str, Any] = {"graphs": by_hand, "constants": CONSTANTS}


@cache
def searched(target: Target, *words: str) -> PlanSearch:
    """In the space that both targets execute; test_upstream_states.py searches the default of this fork."""
    settings = SearchSettings(target=target, space="stages", solver_seconds=0.5)
    return search_plan([*SMALL, *words], H100, settings, **OPTIONS)


def test_the_layout_of_the_flags_binds_nothing() -> None:
    words = [*SMALL, "--recompute-activations", "--moe-shared-expert-overlap", "--optimizer-cpu-offload"]
    bare, dropped = without_layout(words, "moe-overlap")
    flags = grouped(bare)
    gone = {"--pipeline-model-parallel-size", "--expert-model-parallel-size", "--micro-batch-size"}
    gone |= {"--recompute-activations", "--optimizer-cpu-offload", "--moe-shared-expert-overlap"}
    assert not gone & flags.keys() and gone <= grouped(words).keys()
    assert {"--global-batch-size", "--seq-length", "--bf16", "--num-layers", "--lr"} <= flags.keys()
    assert list(dropped) == ["--moe-shared-expert-overlap"]
    assert "--moe-shared-expert-overlap" in without_layout(words, "megatron-lm")[0]


def test_settings_of_the_device_are_no_layout() -> None:
    kept = ["--global-batch-size", "8", "--moe-overlap-device-connections", "8", "--moe-overlap-nccl-ctas", "2"]
    bare, dropped = without_layout([*kept, "--moe-overlap-partitions", "2"], "moe-overlap")
    assert bare == kept and list(dropped) == ["--moe-overlap-partitions"]


def test_megatron_lm_is_told_to_group_the_products_of_experts_as_they_are_priced() -> None:
    flag = "--moe-grouped-gemm"
    assert flag not in SMALL
    assert as_priced(SMALL, "megatron-lm") == [*SMALL, flag]
    assert as_priced([flag, *SMALL], "megatron-lm") == [flag, *SMALL]
    for words, target in ((SMALL, "moe-overlap"), (["--bf16"], "megatron-lm"), (["--num-experts", "4"], "megatron-lm")):
        assert as_priced(words, target) == words
    written = searched("megatron-lm").written
    assert (
        flag in written.flags
        and f"# the products of a rank's experts are one call; the prediction assumes it\n{flag}" in written.text
    )
    assert flag not in searched("moe-overlap").written.flags


@pytest.mark.parametrize("target", ["moe-overlap", "megatron-lm"])
def test_the_written_flags_are_predicted_as_the_search_has_them(target: Target, tmp_path: Path) -> None:
    found = searched(target)
    write_search(tmp_path, found)
    words = list(expand_files([f"@{tmp_path / 'megatron_args.txt'}"]))
    again = predict(words, H100, **OPTIONS)
    assert again.predicted == found.prediction.predicted
    for finalist in (found.chosen, *found.others):
        ranked = next(plan for plan in found.uniform.ranked if plan.name == finalist.name)
        assert finalist.seconds == pytest.approx(ranked.seconds, rel=1e-9)
        assert finalist.prediction.fullest.needed_bytes == pytest.approx(ranked.needed_bytes, rel=1e-6)
    assert (tmp_path / "launch.sbatch").exists() and (tmp_path / "plan.json").exists()
    if target == "megatron-lm":
        flags = grouped(words)
        assert not parser_errors(flags) and not upstream_errors(values_of(flags), 8)
        assert found.tuned is None
    else:
        refuse_unsupported(found.plan)


def test_overlap_is_decided_for_this_runtime() -> None:
    """A plan that overlaps slow all-to-alls is predicted to be faster than any plan without overlap."""
    group = H100.groups[0]
    slow = dataclasses.replace(H100, groups=(dataclasses.replace(group, domain_gb_per_s=8.0, node_gb_per_s=8.0),))
    # Experts do not fit one GPU, so that tokens must travel.
    wide = [*SMALL, "--num-experts", "16", "--moe-ffn-hidden-size", "32767", "--global-batch-size", "16"]
    found = search_plan(wide, slow, SearchSettings(solver_seconds=0.5), **OPTIONS)
    assert found.tuned is not None and found.tuned.chosen.name != PLAIN
    assert found.prediction.predicted.step_seconds < min(
        found.chosen.seconds, *(other.seconds for other in found.others)
    )
    # Its flags name a file that says the layout: what changes is told from that.
    assert "--plan" in found.written.flags and found.baseline is not None
    assert "# its layout:\n#   --" in found.written.text
    changed = {change.name: change.after for change in found.changes}
    stage, given = found.plan.stages[0], grouped(wide)
    assert ("expert parallelism" in changed) == (str(stage.expert) != given["--expert-model-parallel-size"][0])
    said = {name: values for after in changed.values() for name, values in after.items()}
    assert said.get("--micro-batch-size", given.get("--micro-batch-size", ("1",))) == (str(stage.micro_batch_size),)


def test_ties_are_broken_towards_less_memory() -> None:
    """The smallest of three plans within a hundredth leads, whatever the others need; a slower one does not."""
    chosen = searched("megatron-lm").chosen

    def finalist(name: str, slower: float, factor: int) -> Finalist:
        predicted = chosen.prediction.predicted
        stages = tuple(
            dataclasses.replace(stage, peak_bytes=stage.peak_bytes + factor * GIB) for stage in predicted.stages
        )
        predicted = dataclasses.replace(predicted, step_seconds=(1 + slower) * predicted.step_seconds, stages=stages)
        return dataclasses.replace(
            chosen, name=name, prediction=dataclasses.replace(chosen.prediction, predicted=predicted)
        )

    plans = [
        finalist("slow", 0.02, 0),
        finalist("fast", 0.0, 3),
        finalist("near", 0.009, 2),
        finalist("even", 0.005, 4),
    ]
    assert [plan.name for plan in in_order(plans)] == ["near", "fast", "even", "slow"]


def test_a_library_leads_only_where_it_is_faster_than_a_tie() -> None:
    chosen = searched("megatron-lm").chosen
    features = dataclasses.replace(chosen.problem.features, dispatcher="deepep")
    by_library = dataclasses.replace(
        chosen, name="deepep", problem=dataclasses.replace(chosen.problem, features=features)
    )
    slower = dataclasses.replace(
        chosen.prediction.predicted, step_seconds=1.005 * chosen.prediction.predicted.step_seconds
    )
    tied = dataclasses.replace(chosen, prediction=dataclasses.replace(chosen.prediction, predicted=slower))
    assert in_order([by_library, tied])[0] is tied
    far = dataclasses.replace(slower, step_seconds=1.1 * slower.step_seconds)
    behind = dataclasses.replace(chosen, prediction=dataclasses.replace(chosen.prediction, predicted=far))
    assert in_order([behind, by_library])[0] is by_library


def test_answer_and_json(tmp_path: Path) -> None:
    found = searched("megatron-lm")
    files = write_search(tmp_path, found)
    lines = search_lines(found, tmp_path, files, 1e12)
    assert len(lines) <= 11 and lines[0].startswith("plan ") and lines[-1].startswith("next ")
    odd = search_lines(found, Path("a b/$(touch c)"), files, 1e12)[-1]
    assert shlex.split(odd)[:3] == ["next", "sbatch", "a b/$(touch c)/launch.sbatch"] and "'a b/$(touch c)/" in odd
    # What the flags of this job lack stands behind the command, for the user to fill in.
    assert lines[-1].endswith("launch.sbatch --data-path PREFIX --tokenizer-type TYPE --tokenizer-model PATH")
    assert any(line.startswith("your flags") for line in lines)
    assert ["pruned by bounds" in "".join(text) for text in (lines, detail_lines(found))] == [False, True]
    shown = [line for line in (*lines, *detail_lines(found)) if line.startswith("runner-up ")]
    assert len(shown) == len(found.others) and sum(line in lines for line in shown) == 1
    # Megatron-LM runs on GPUs; this runtime has not yet, and an answer for GPUs says so once.
    ours = search_lines(searched("moe-overlap"), tmp_path, files, 1e12)
    assert ours.count(f"beware      {UNTRIED}") == 1 and not any(UNTRIED in line for line in lines)
    values = json.loads(json.dumps(search_json(found)))
    assert values["step_seconds"] == found.prediction.predicted.step_seconds
    assert values["search"]["status"] == "optimal" and values["search"]["gap"] == 0
    assert values["search"]["layouts"] == values["search"]["pruned"] + values["search"]["evaluations"]
    assert len(values["runners_up"]) == len(found.others) and values["plan"]["stages"]


def test_a_plan_that_nothing_runs_is_marked_with_what_refuses_it(tmp_path: Path) -> None:
    """ZeRO-3 in fp16 is written as a plan alone, and no next step is named."""
    found = search_plan(HALF, H100, SearchSettings(target="any", space=SPACES["zero3"]), **OPTIONS)
    assert found.plan.stages[0].zero_level == 3 and found.tuned is None
    assert found.chosen.seconds >= found.uniform.solution.objective * (1.0 - 1e-9)
    assert write_search(tmp_path, found) == ["plan.json"]
    assert load_plan(tmp_path / "plan.json").stages == found.plan.stages
    lines = search_lines(found, tmp_path, ["plan.json"], None)
    rule = "executed with ZeRO 1 on the device alone; use bf16, or write zero_level 1 and no offload"
    refusal = f"pretrain_moe.py refuses it today: plan.json precision fp16: {rule}"
    assert f"not run     {refusal}" in lines and not any(line.startswith("next") for line in lines)
    values = json.loads(json.dumps(search_json(found)))
    assert values["not_executed"] in refusal and values["arguments"] == []
    assert values["search"]["status"] == "optimal" and values["search"]["gap"] == 0


def test_another_level_is_run_from_the_file_and_by_instruction_lists(tmp_path: Path) -> None:
    """No flag says the level: the flags name the plan's file, and the dispatcher of lists in the place of the priced one."""
    found = search_plan(SMALL, H100, SearchSettings(target="any", space=SPACES["zero3"]), **OPTIONS)
    assert found.plan.stages[0].zero_level == 3 and found.refusal is None
    assert "plan.json" in write_search(tmp_path, found)
    arguments = found.written.arguments
    assert arguments[arguments.index("--plan") + 1] == "plan.json"
    assert arguments[arguments.index("--moe-token-dispatcher-type") + 1] == "irregular"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--moe-ffn-hidden-size", "999999"],
            "H100: no plan fits: weights, gradients and optimizer states take 826.7 GiB",
        ),
        (["--moe-ffn-hidden-size", "718800"], "H100: none of 270 layouts fits"),
        (["--num-layer", "3"], "--num-layer"),
    ],
)
def test_what_cannot_be_answered_is_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        search_plan([*SMALL, *words], H100, SearchSettings(space="stages"), **OPTIONS)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_no_layout_divides() -> None:
    with pytest.raises(ConfigError, match="--global-batch-size 16: no layout of 7 GPUs divides"):
        search_plan(SMALL, shipped_cluster("H100", 7), SearchSettings(), **OPTIONS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--search-space", "full", "--target", "megatron-lm"], "in host memory); use --target moe-overlap"),
        (
            ["--search-space", "zero3"],
            "--search-space zero3: was removed: papers compare with it, and tools/benchmark_papers.py searches it; use zero",
        ),
        (["--overlap-only", "--no-imbalance"], "--no-imbalance: has no effect with --overlap-only"),
        (["--overlap-only", "--target", "megatron-lm"], "--target megatron-lm: has no effect with --overlap-only"),
        (["--search-space", "wide"], "--search-space wide: is no search space"),
        (["--time-limit", "0"], "--time-limit 0.0: must be greater than 0 seconds"),
        (["--time-limit", "nan"], "--time-limit nan: must be greater than 0 seconds"),
        (["--train-tokens", "many"], "--train-tokens many: is no number of tokens"),
        (["--refine", "trace.json"], "--refine trace.json: traces refine the overlap of one layout"),
        (["--global-batch-size", "-4"], "--global-batch-size"),
        (["--output", f"{__file__}/inside"], f"{__file__} cannot be written (Not a directory); give another folder"),
        (
            ["--output", "/proc/tuned"],
            "--output /proc/tuned: /proc cannot be written (",
        ),  # Whatever its permissions say.
        (["--overlap-max-partitions", "0"], "--overlap-max-partitions 0: must be at least 1 and finite"),
        (["--overlap-group-seconds", "nan"], "--overlap-group-seconds nan: must be at least 0 and finite"),
        (["--overlap-range-limit", "-1"], "--overlap-range-limit -1: must be at least 1 and finite"),
        (
            ["--target", "megatron-lm", "--overlap-max-partitions", "2"],
            "--overlap-max-partitions 2: partitions are this fork's overlap, which --target megatron-lm does not execute; drop",
        ),
        (
            ["--target", "megatron-lm", "--overlap-group-seconds", "1e-5"],
            "--overlap-group-seconds 1e-05: partitions are this fork's overlap",
        ),
        (
            ["--target", "megatron-lm", "--overlap-range-limit", "4"],
            "--overlap-range-limit 4: partitions are this fork's overlap",
        ),
    ],
)
def test_mistakes_of_the_command_line(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = tmp_path / "job.args"
    flags.write_text("\n".join(SMALL))
    job = ["--megatron-args", str(flags), "--gpu", "H100", "--num-gpus", "8", "--output", str(tmp_path / "tuned")]
    assert autotune.main([*job, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1
    assert not (tmp_path / "tuned").exists()


def test_recorded_loads_count_at_every_number_of_expert_ranks(tmp_path: Path) -> None:
    """One expert has most of the rows: the more ranks the experts are spread over, the busier one of them is."""
    path = tmp_path / "load.jsonl"
    path.write_text(ExpertLoad(1, 10, 0, 4, (70, 10, 10, 10), (0, 0, 0, 0), 2.8).to_line() + "\n")
    options = {**OPTIONS, "expert_load": str(path)}
    found = search_plan(SMALL, H100, SearchSettings(target="megatron-lm"), **options)
    for finalist in (found.chosen, *found.others):
        ranked = next(plan for plan in found.uniform.ranked if plan.name == finalist.name)
        assert finalist.seconds == pytest.approx(ranked.seconds, rel=1e-9)
        expected = {1: 1.0, 2: 1.6, 4: 2.8}[finalist.plan.stages[0].expert]
        assert finalist.problem.machine.load == pytest.approx(expected)
    assert any(other.plan.stages[0].expert > 1 for other in (found.chosen, *found.others))


@pytest.mark.slow
def test_what_the_flags_say_of_layout_and_overlap_changes_no_price() -> None:
    plain = searched("moe-overlap").uniform
    said = "--overlap-moe-expert-parallel-comm --recompute-granularity full --recompute-method block --recompute-num-layers 1"
    assert searched("moe-overlap", *said.split()).uniform.ranked == plain.ranked
    by_hand_overlap = "--defer-weight-gradients --moe-token-dispatcher-type alltoall".split()
    assert searched("moe-overlap", *by_hand_overlap).dropped == {"--defer-weight-gradients": "the search decides it"}


def test_a_rule_across_flags_loses_no_plan_that_it_allows() -> None:
    """A batch that grows from 2 samples leaves few layouts; those that it refuses take no place among the best."""
    ramp = "--rampup-batch-size 4 4 1000 --train-samples 4000".split()
    words = [word for word in SMALL if word not in ("--train-iters", "10")]
    found = search_plan([*words, *ramp], H100, SearchSettings(target="megatron-lm"), **OPTIONS)
    assert found.refused and found.others
    assert all(finalist.plan.stages[0].data <= 4 for finalist in (found.chosen, *found.others))


@pytest.mark.parametrize(
    ("words", "several"),
    [
        ("--bf16", True),
        ("--fp8-format e4m3", False),
        ("--fp8-format e4m3 --fp8-recipe delayed", False),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", True),
    ],
)
def test_scales_of_whole_passes_are_kept_on_one_stage(words: str, several: bool) -> None:
    """One stage keeps such scales, as a start of the runtime demands; Megatron-LM has a group for them."""
    ranked, job = searched("moe-overlap").uniform.ranked[0], read_job(SMALL, 8)
    task: Any = SimpleNamespace(templates=lambda tensor: (job.plan, job.model))
    one = dataclasses.replace(ranked.layout, tensor=1, context=1, expert=1, expert_tensor=1, pipeline=1)
    two = dataclasses.replace(one, pipeline=2)
    accepts = search_task.accepted(search_task.refusals(task, "moe-overlap", [*SMALL, *words.split()]))
    assert (accepts(one, ranked.memory), accepts(two, ranked.memory)) == (True, several)
    assert search_task.refusals(task, "any", [*SMALL, *words.split()])(two, ranked.memory) is None


def test_a_precision_is_written_as_it_was_said() -> None:
    words = [*SMALL, *"--moe-ffn-hidden-size 4096 --fp8-format e4m3 --fp8-recipe tensorwise".split()]
    flags = grouped(search_plan(words, H100, SearchSettings(target="megatron-lm"), **OPTIONS).chosen.arguments)
    assert flags["--fp8-format"] == ("e4m3",) and flags["--fp8-recipe"] == ("tensorwise",)
    options, blackwell = {**OPTIONS, "precision": "mxfp8"}, shipped_cluster("B200", 8)
    flags = grouped(search_plan(words, blackwell, SearchSettings(target="megatron-lm"), **options).chosen.arguments)
    assert flags["--fp8-recipe"] == ("mxfp8",) and flags["--bf16"] == ()


@pytest.mark.parametrize(
    ("gpu", "words", "precision", "message"),
    [
        (
            "A100",
            "--fp8-format e4m3",
            None,
            "--fp8-format e4m3: A100 is described without such units (fp8_tflops is null)",
        ),
        ("A100", "", "fp8", "--precision fp8: A100 is described without such units (fp8_tflops is null); use bf16, or"),
        (
            "H100",
            "",
            "nvfp4",
            "--precision nvfp4: H100 is described without such units (fp4_tflops is null); use fp8 or",
        ),
        ("H100", "", "mxfp8", "--precision mxfp8: H100 (Hopper) has no units for scales of blocks, which came with"),
    ],
)
def test_no_run_is_written_for_units_that_the_gpu_has_not(
    gpu: str, words: str, precision: Precision | None, message: str
) -> None:
    """A prediction answers what if, and warns."""
    flags, cluster = [*SMALL, "--moe-ffn-hidden-size", "4096", *words.split()], shipped_cluster(gpu, 8)
    options: Any = {**OPTIONS, "precision": precision}
    for target in get_args(Target):
        with pytest.raises(ConfigError, match=re.escape(message)):
            search_plan(flags, cluster, SearchSettings(target=target), **options)
    with pytest.raises(ConfigError, match=re.escape(message)):
        tune(flags, cluster, SearchSettings().overlap_limits, **options)
    warned = predict([*JOB, *words.split()], shipped_cluster(gpu, 32), **options).extrapolating[0]
    assert "rate of" in warned or "has no units for" in warned


def test_a_disk_that_is_full_leaves_earlier_flags_and_script_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = {name: f"{name} of an earlier answer" for name in ("megatron_args.txt", "launch.sbatch")}
    for name, text in earlier.items():
        (tmp_path / name).write_text(text)
    stock = Path.write_text

    def half_written(path: Path, text: str, **options: Any) -> None:
        stock(path, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(ConfigError, match="--output .*: cannot be written: No space left on device"):
        write_search(tmp_path, searched("megatron-lm"))
    assert {name: (tmp_path / name).read_text() for name in earlier} == earlier
    # The new plan stands beside them: flags that name a plan are compared with it, and a plan is of no flags.
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*earlier, "plan.json"])


def test_a_capacity_of_experts_keeps_the_micro_batch(tmp_path: Path) -> None:
    """Its share of a micro-batch's tokens is what an expert takes: another micro-batch drops others."""
    words = [*SMALL, "--micro-batch-size", "2"]
    capacity = [*words, "--moe-expert-capacity-factor", "1.25"]
    settings = SearchSettings(target="megatron-lm", solver_seconds=0.5)
    allowing = dataclasses.replace(settings, changes_micro_batch=True)
    kept, free, dropless = (
        search_plan(flags, H100, given, **OPTIONS)
        for flags, given in ((capacity, settings), (capacity, allowing), (words, settings))
    )
    sizes = [
        {ranked.layout.micro_batch for ranked in (*search.uniform.ranked, *search.uniform.frontier)}
        for search in (kept, free, dropless)
    ]
    assert sizes[0] == {2} and len(sizes[1]) > 1 and len(sizes[2]) > 1
    assert kept.uniform.counts.layouts < free.uniform.counts.layouts == dropless.uniform.counts.layouts
    assert kept.prediction.predicted.step_seconds >= free.prediction.predicted.step_seconds
    told = ["\n".join(closing_lines(search, tmp_path, [])) for search in (kept, free, dropless)]
    line = "kept        --micro-batch-size 2: with --moe-expert-capacity-factor another size drops different tokens; --allow-"
    assert [line in text for text in told] == [True, False, False]
    for size, rule in (
        ("3", "no layout of 8 GPUs has micro-batches of so many samples"),
        ("0", "must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=f"--micro-batch-size {size}: {rule}"):
            search_plan([*capacity, "--micro-batch-size", size], H100, settings, **OPTIONS)


def test_written_flags_bear_the_name_of_the_model(tmp_path: Path) -> None:
    found = search_plan(SMALL, H100, SearchSettings(target="megatron-lm"), **{**OPTIONS, "name": "tiny-mixtral"})
    write_search(tmp_path, found)
    assert (tmp_path / "megatron_args.txt").read_text().startswith(f"# tiny-mixtral on {H100.gpus} × H100\n")
    # A file of flags names it, too.
    (tmp_path / "phi-moe.args").write_text("\n".join(SMALL))
    found = search_plan([f"@{tmp_path / 'phi-moe.args'}"], H100, SearchSettings(target="megatron-lm"), **OPTIONS)
    write_search(tmp_path / "by-file", found)
    assert (tmp_path / "by-file" / "megatron_args.txt").read_text().startswith(f"# phi-moe on {H100.gpus} × H100\n")
    assert found.plan.model.name == "phi-moe"


def test_a_batch_must_be_named() -> None:
    words = [word for word in SMALL if word not in ("--global-batch-size", "128", "16")]
    with pytest.raises(ConfigError, match="--global-batch-size: is not among the flags"):
        search_plan(words, H100, SearchSettings(), **OPTIONS)


def test_progress_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 5.0, 11.0])
    monkeypatch.setattr(autotune.time, "monotonic", lambda: next(now))
    stream = io.StringIO()
    progress = autotune.SearchProgress(stream)
    progress(1, 10, None)
    progress(2, 10, None)
    assert stream.getvalue() == "2 of at most 10 layouts evaluated; nothing that fits yet\n"


def test_the_answer_says_what_of_the_users_flags_costs_most() -> None:
    search = searched("megatron-lm")
    assert search.baseline is not None and search.changes
    gains = [change.gain(search.baseline) for change in search.changes]
    assert gains == sorted(gains, reverse=True)
    (line,) = [line for line in search_lines(search, Path("tuned"), [], None) if line.startswith("your flags ")]
    most = helpful(search.changes, search.baseline)[0]
    assert gains[0] > 0.0 and f"; its best single change ({most.sentence}): {most.saved(search.baseline)}" in line
    details = detail_lines(search)
    assert sum(line.startswith("change ") for line in details) == len(search.changes)
    assert sum(line.startswith("refused ") for line in details) == len(search.refused)
    first = search.changes[0]
    assert [row["name"] for row in search_json(search)["changes"]] == [change.name for change in search.changes]
    if first.after and first.prediction is not None:
        assert f"in your flags, {first.effect(search.baseline)}" in " ".join(
            search.written.text.replace("# ", "").split()
        )


def test_a_plan_file_is_of_the_users_layout_alone(tmp_path: Path) -> None:
    save_plan(read_job(SMALL, 8).plan, tmp_path / "own.json")
    options = {**OPTIONS, "plan": str(tmp_path / "own.json")}
    search = search_plan(SMALL, H100, SearchSettings(target="megatron-lm", solver_seconds=0.5), **options)
    assert search.chosen.name == searched("megatron-lm").chosen.name
    assert search.plan.stages == searched("megatron-lm").plan.stages


def test_upstreams_overlap_flags_are_no_ones_but_upstreams() -> None:
    for target in ("moe-overlap", "any"):
        words, dropped = without_layout([*SMALL, "--overlap-moe-expert-parallel-comm"], target)  # type: ignore[arg-type]
        assert "--overlap-moe-expert-parallel-comm" not in words and dropped


def test_a_dispatch_librarys_layout_binds_nothing_either() -> None:
    """One rank has none to send tokens to, so that its flags are read with two; the user's own ranks do not divide these GPUs."""
    library = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"]
    words = [
        *SMALL,
        *library,
        "--num-layers",
        "4",
        "--pipeline-model-parallel-size",
        "4",
        "--expert-model-parallel-size",
        "4",
    ]
    found = search_plan(words, H100, SearchSettings(target="megatron-lm", solver_seconds=0.5), **OPTIONS)
    assert found.plan.world_size == 8 and found.baseline is None
    assert found.baseline_refusal
    odd = search_plan(
        [*SMALL, "--tensor-model-parallel-size", "3"], H100, SearchSettings(solver_seconds=0.5), **OPTIONS
    )
    assert odd.baseline is None and odd.baseline_refusal.startswith("--tensor-model-parallel-size 3: ")
    (line,) = (line for line in closing_lines(odd, None, []) if line.startswith("your flags"))
    assert line.split(maxsplit=2)[2] == f"do not run on these GPUs: {odd.baseline_refusal}"
    assert found.prediction.fits


@pytest.mark.parametrize(
    ("is_staged", "ended_early", "equal", "told"),
    [
        (
            True,
            False,
            16.0,
            "3+1 layers: unequal stages save 4.000 s (25.0 %); the best plan with equal ones takes 16.000 s",
        ),
        (True, False, math.inf, "3+1 layers; no plan with equal stages fits"),
        (
            False,
            False,
            12.0,
            "equal stages are fastest; other layers and recomputation for each stage were searched, too",
        ),
        (False, True, 12.0, "equal; the search ended before all plans with unequal stages were compared"),
    ],
)
def test_the_answer_says_what_stages_that_differ_gain(
    is_staged: bool, ended_early: bool, equal: float, told: str
) -> None:
    even = plan_samples.plan(4, 2)
    chunks = ((0, 3),), ((3, 4),)
    stages = tuple(dataclasses.replace(stage, chunks=own) for stage, own in zip(even.stages, chunks, strict=True))
    search: Any = SimpleNamespace(
        equal_stages_seconds=equal,
        prediction=SimpleNamespace(predicted=SimpleNamespace(step_seconds=12.0)),
        staged=SimpleNamespace(layouts=1),
        chosen=SimpleNamespace(is_staged=is_staged),
        ended_early=ended_early,
        plan=dataclasses.replace(even, stages=stages),
    )
    (line,) = _stages_lines(search)
    assert line.split(maxsplit=1) == ["stages", told]
