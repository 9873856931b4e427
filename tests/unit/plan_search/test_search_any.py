"""`--target any`: the fastest plan whoever runs it, with the overlap of Megatron-LM or of this runtime where one is faster."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import pytest

from moe_overlap.api import predict
from moe_overlap.describe.readers.predicted_flags import grouped
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan_search import overlapped as overlapped_search
from moe_overlap.plan_search import search as plan_search
from moe_overlap.plan_search.flags import Target
from moe_overlap.plan_search.free import FREED, freed_layouts
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import TIE, PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.report.search import closing_lines, search_json, search_sentence, write_search
from moe_overlap.tuner.search.layer.candidates import PLAIN
from moe_overlap.tuner.search.space import SearchSpace
from moe_overlap.tuner.write.upstream_rules import PAIRED
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL
from tests.unit.tuner.search.spaces import SPACES

GROUP = H100.groups[0]
SLOW = dataclasses.replace(H100, groups=(dataclasses.replace(GROUP, domain_gb_per_s=8.0, node_gb_per_s=8.0),))
WIDE = [*SMALL, "--num-experts", "16", "--moe-ffn-hidden-size", "32767"]
"""Experts that are not split over ranks, and do not fit one GPU: all-to-alls take half of the step."""
UPSTREAMS = ("--moe-input-jitter-eps", "0.1")
"""What this runtime's gates lack, and Megatron-LM overlaps."""


@cache
def searched(target: Target, *words: str, space: str | SearchSpace = "recompute") -> PlanSearch:
    # Few partitions of few plans are enough to be faster, and quicker to search.
    few = SearchLimits(max_partitions=2, group_seconds=0.0, range_limit=2)
    settings = SearchSettings(target=target, space=space, solver_seconds=0.2, overlap_limits=few)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overlapped_search, "DECIDED", 1)
        patched.setattr(plan_search, "SCREENED", 1)
        return search_plan([*WIDE, *words], SLOW, settings, **OPTIONS)


def step(found: PlanSearch) -> float:
    return found.prediction.predicted.step_seconds


def test_this_runtimes_overlap_is_its_answer_where_that_is_faster(tmp_path: Path) -> None:
    found, ours = searched("any"), searched("moe-overlap")
    assert step(found) == step(ours) < (1.0 - TIE) * step(searched("megatron-lm"))
    assert (
        found.tuned is not None and found.tuned.chosen.name != PLAIN and search_sentence(found) == search_sentence(ours)
    )
    # Its runners-up are of both.
    assert {PAIRED[0] in other.plan_arguments for other in found.others} == {False, True}
    assert found.written.text == ours.written.text
    assert "plan.json" in write_search(tmp_path, found) and found.written_for == "moe-overlap"


def test_megatron_lms_overlap_is_written_for_megatron_lm(tmp_path: Path) -> None:
    """The user's own flag of it makes way for this runtime's overlap, and is among those of the answer again."""
    found, theirs = searched("any", *UPSTREAMS, PAIRED[0]), searched("megatron-lm", *UPSTREAMS)
    assert step(found) == step(theirs) < (1.0 - TIE) * step(searched("moe-overlap", *UPSTREAMS))
    assert found.tuned is None and found.refusal is None and search_sentence(found) == search_sentence(theirs)
    written = found.written
    assert written.flags.keys() >= {*PAIRED, "--moe-grouped-gemm"} and not set(PAIRED) & {
        n for n, _ in written.left_out
    }
    assert grouped(written.arguments) == grouped(theirs.written.arguments)
    assert predict(written.arguments, SLOW, **OPTIONS).predicted.step_seconds == step(found)
    files = write_search(tmp_path, found)
    assert (tmp_path / "launch.sbatch").read_text() == _script(theirs, tmp_path / "theirs")
    last = closing_lines(found, tmp_path, files)[-1]
    assert last.endswith("launch.sbatch --data-path PREFIX --tokenizer-type TYPE --tokenizer-model PATH")
    values = search_json(found)
    assert values["written_for"] == "megatron-lm" and values["target"] == "any" and values["not_executed"] is None
    assert {PAIRED[1]} <= {name for change in found.changes for name in change.after}


def _script(found: PlanSearch, folder: Path) -> str:
    write_search(folder, found)
    return (folder / "launch.sbatch").read_text()


@pytest.mark.slow
def test_plans_of_a_wider_space_must_be_faster_than_overlapped_ones() -> None:
    """ZeRO-2 and 3 gain nothing here: what is found in the wider space is what was found before."""
    wide = searched("any", *UPSTREAMS, space="zero")
    assert step(wide) == step(searched("any", *UPSTREAMS)) and wide.written_for == "megatron-lm"
    # Stages are freed for layouts without Megatron-LM's overlap, each once.
    layouts = [dataclasses.replace(plan.layout, pipeline=2, paired=False) for plan in wide.uniform.ranked]
    for pairs in ((True,), (True, False)):
        ranked = [
            dataclasses.replace(plan, layout=dataclasses.replace(layout, paired=paired, virtual=2))
            for layout, plan in zip(layouts, wide.uniform.ranked, strict=True)
            for paired in pairs
        ]
        freed = freed_layouts(dataclasses.replace(wide.uniform, ranked=tuple(ranked)), layouts)
        assert len(set(freed)) == len(freed) >= len({layout.ranks for layout in layouts[:FREED]})


@pytest.mark.parametrize(
    "space", ["data", "zero2", "zero3", "equal-layer", "intra-only", "inter-only", "equal-operator"]
)
def test_spaces_that_papers_compare_with_overlap_nothing(space: str) -> None:
    assert not SPACES[space].overlaps and SPACES["full"].overlaps
    if space == "equal-layer":
        found = searched("any", space=SPACES[space])
        assert found.tuned is None and not any(plan.layout.paired for plan in found.uniform.ranked)
        assert step(found) > (1.0 + TIE) * step(searched("any"))
