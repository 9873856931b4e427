"""Megatron-LM's overlap of two micro-batches at a time as a choice of the search: with layouts that have it not, in one space."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moe_overlap.api import predict
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.search import search_plan
from moe_overlap.plan_search.task import paired_task
from moe_overlap.report.search import search_sentence
from moe_overlap.tuner.search.paired import CostsOfBoth, with_paired
from moe_overlap.tuner.search.space import MemoryChoice, UniformLayout
from moe_overlap.tuner.search.uniform import search_uniform
from moe_overlap.tuner.search.uniform_cost import UniformCosts
from moe_overlap.tuner.write.upstream_rules import PAIRED
from tests.unit.plan_search.test_plan_search import H100, OPTIONS, SMALL
from tests.unit.tuner.search.test_search_uniform import case_of

SLOW = case_of(domain_gb_per_s=12.0, node_gb_per_s=12.0)


def test_layouts_with_overlap_and_without_are_one_space() -> None:
    """What is kept is the best of both, each predicted by itself; graphs by hand recompute nothing in part."""
    paired = paired_task(SLOW.task, [])
    assert paired is not None
    layouts = [*with_paired([layout for layout in SLOW.sound if layout.expert > 1])]
    assert 0.1 < sum(layout.paired for layout in layouts) / len(layouts) < 0.5
    apart = {False: SLOW, True: dataclasses.replace(SLOW, task=paired)}
    best: dict[object, float] = {}
    for layout in layouts:
        plain = dataclasses.replace(layout, paired=False)
        assert plain in layouts
        shape = layout.ranks, layout.pipeline, layout.dispatcher, layout.paired
        # Nothing is recomputed by the fastest plans where everything fits.
        seconds, _ = apart[layout.paired].predicted(plain, MemoryChoice())
        best[shape] = min(best.get(shape, math.inf), seconds)
    costs = CostsOfBoth(SLOW.task, paired)
    found = search_uniform(layouts, costs, costs.bounds(lambda layout: SLOW.bounds), keep=10)
    assert [plan.seconds for plan in found.ranked] == pytest.approx(sorted(best.values())[:10], rel=1e-9)
    assert found.ranked[0].layout.paired and not all(plan.layout.paired for plan in found.ranked)
    assert found.counts.stages == costs.stages_priced > 0


def test_costs_that_are_shared_with_layouts_without_overlap_keep_hosts_of_their_own() -> None:
    """Of a host so slow that its launches set the pace: layers in nodes take more of them, whichever layout is priced first."""
    constants = SLOW.task.machine.constants
    machine = dataclasses.replace(SLOW.task.machine, constants=dataclasses.replace(constants, host_seconds=1e-3))
    task = dataclasses.replace(SLOW.task, machine=machine)
    paired = paired_task(task, [])
    assert paired is not None
    plain = next(layout for layout in SLOW.sound if layout.expert > 1 and layout.pipeline == 1)
    for order in ((False, True), (True, False)):
        costs = CostsOfBoth(task, paired)
        shared = {
            is_paired: costs.evaluate(dataclasses.replace(plain, paired=is_paired)).seconds for is_paired in order
        }
        for is_paired, alone in ((False, task), (True, paired)):
            assert (shared[is_paired] == UniformCosts(alone).evaluate(plain).seconds).all()
        assert (shared[True][0, 0] > 1.01 * shared[False][0, 0]).all()


def test_only_what_megatron_core_runs_has_it() -> None:
    one = UniformLayout(tensor=1, context=1, expert=2, expert_tensor=1, pipeline=2, virtual=2, micro_batch=1)
    assert [layout.paired for layout in with_paired([one])] == [False, True]
    for change in ({"virtual": 1}, {"expert": 1}):
        assert [layout.paired for layout in with_paired([dataclasses.replace(one, **change)])] == [False]
    assert dataclasses.replace(one, paired=True).name == "PP2 VPP2 EP2, two at a time of micro-batch 1"


def test_the_flags_that_say_it_are_written_and_predicted_alike() -> None:
    """Experts that do not fit one GPU, and slow links: without the flags the plan takes longer."""
    group = H100.groups[0]
    slow = dataclasses.replace(H100, groups=(dataclasses.replace(group, domain_gb_per_s=8.0, node_gb_per_s=8.0),))
    wide = [*SMALL, "--num-experts", "16", "--moe-ffn-hidden-size", "32767", "--global-batch-size", "16"]
    settings = SearchSettings(target="megatron-lm")
    found = search_plan(wide, slow, settings, **OPTIONS)
    step = found.prediction.predicted.step_seconds
    assert found.written.flags.keys() >= {*PAIRED} and "overlap: two micro-batches at a time" in search_sentence(found)
    arguments = found.written.arguments
    assert predict(arguments, slow, **OPTIONS).predicted.step_seconds == step
    without = [word for word in arguments if word not in PAIRED]
    assert predict(without, slow, **OPTIONS).predicted.step_seconds > 1.02 * step
    assert any({*PAIRED} <= set(change.after) for change in found.changes)
    # Flags that overlap otherwise are the user's, and keep it out.
    for flag in ("--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm"):
        shared = [*wide, "--moe-shared-expert-intermediate-size", "512", flag]
        assert PAIRED[1] not in search_plan(shared, slow, settings, **OPTIONS).written.flags
