"""megatron-core's schedules run what the instruction list says: per channel the recorded order is the list's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.recorded_order import check_broken_lists, check_evaluation, check_order, inside_operators
from tests.spawn import run

SHARED = "--moe-shared-expert-intermediate-size 32"
EP2, PP2 = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-num-layers 2 --recompute-method"
PREDICTION = "--mtp-num-layers 2"
LAYOUT = "--pipeline-model-parallel-layout"
DENSE_FIRST = "--moe-layer-freq [0]*1+[1]*3"

TWO_RANKS = {
    "EP2": EP2,
    "EP2, shared expert": f"{EP2} {SHARED}",
    "TP2 with sequence parallel, ETP2": TP2,
    "TP2 with sequence parallel, ETP2, shared expert": f"{TP2} {SHARED}",
    "TP2 with sequence parallel, EP2 ETP1": f"{TP2} {EP2} --expert-tensor-parallel-size 1",
    "DP2, nothing is exchanged": SHARED,
    "EP2, overlapped reduce and gather": f"{EP2} --overlap-grad-reduce --overlap-param-gather",
    "EP2, allgather": f"{EP2} {SHARED} --moe-token-dispatcher-type allgather",
    "EP2, first layer dense": f"{EP2} {SHARED} {DENSE_FIRST}",
    "PP2": PP2,
    "PP2, shared expert": f"{PP2} {SHARED}",
    "PP2, tied embeddings of a dense model": f"{PP2} --moe-layer-freq 5",
    "PP2, 2 virtual stages": VPP2,
    "PP2, 2 virtual stages, shared expert": f"{VPP2} {SHARED}",
    "EP2, full recompute of groups": f"{EP2} {SHARED} {FULL} uniform",
    "EP2, full recompute of some layers": f"{EP2} {SHARED} {FULL} block",
    "EP2, recompute of MoE layers": f"{EP2} {SHARED} --recompute-granularity selective --recompute-modules moe",
    "EP2, recompute of attention": f"{EP2} {SHARED} --recompute-granularity selective --recompute-modules core_attn",
    "EP2, prediction": f"{EP2} {SHARED} {PREDICTION}",
    "EP2, prediction, full recompute": f"{EP2} {SHARED} {PREDICTION} {FULL.replace('2', '1')} uniform",
    "EP2, prediction, recompute of MoE layers": f"{EP2} {PREDICTION} --recompute-granularity selective --recompute-modules moe",
    "PP2, 2 virtual stages, prediction": f"{VPP2} {PREDICTION}",
    "PP2, prediction behind the layers": f"{PP2} {PREDICTION} {LAYOUT} Et*4|mmL",
    "PP2, unequal virtual stages": f"{PP2} {LAYOUT} E|tt|t|tL",
    "PP2, recompute of dense layers": f"{PP2} {DENSE_FIRST} --recompute-granularity selective --recompute-modules mlp",
}
COVERED = (
    *("EP2", "TP2 with sequence parallel, ETP2", "TP2 with sequence parallel, ETP2, shared expert"),
    *("DP2, nothing is exchanged", "PP2", "PP2, shared expert", "PP2, 2 virtual stages"),
    *("EP2, full recompute of some layers", "EP2, recompute of attention", "EP2, prediction"),
    *("EP2, prediction, full recompute", "PP2, recompute of dense layers"),
)
"""Those whose operators and waits others have as well: the slow tests run them."""
SHORT = "--global-batch-size 4"
"""As many micro-batches as groups of two stages need to follow one another."""
TP2_AGAIN = f"{TP2} {FULL} uniform"
CP2 = "--context-parallel-size 2"
FOUR_RANKS = {
    "EP2 × PP2, 2 virtual stages": f"{EP2} {VPP2}",
    "EP2 × PP2, 2 virtual stages, prediction": f"{EP2} {VPP2} {PREDICTION}",
    "EP2 × PP2, 2 virtual stages, shared expert": f"{EP2} {VPP2} {SHARED}",
}


def on_two_ranks() -> tuple[dict[str, dict[str, str]], list[list[int]], list[dict[str, str]], list[dict[str, Any]]]:
    order = check_order({name: f"{flags} {SHORT}" for name, flags in TWO_RANKS.items() if name not in COVERED})
    broken = [check_broken_lists(f"{flags} {SHARED} {SHORT}") for flags in (EP2, VPP2)]
    evaluation = [check_evaluation(f"{flags} {SHARED}") for flags in (EP2, f"{VPP2} {PREDICTION}")]
    return order, broken, evaluation, [inside_operators(flags) for flags in (TP2_AGAIN, CP2)]


def test_two_ranks() -> None:
    for rank, (order, broken, evaluation, inside) in enumerate(run(2, on_two_ranks)):
        assert order == dict.fromkeys((name for name in TWO_RANKS if name not in COVERED), {}), rank
        assert evaluation == [{}, {}], rank
        for missed, attempts in broken:
            assert missed == 0 and attempts > 50, rank
        _check_inside(*inside)


@pytest.mark.slow
def test_two_ranks_under_flags_whose_operators_others_have() -> None:
    covered = {name: TWO_RANKS[name] for name in COVERED}
    for rank, order in enumerate(run(2, check_order, covered)):
        assert order == dict.fromkeys(COVERED, {}), rank


def _check_inside(tensor: dict[str, Any], context: dict[str, Any]) -> None:
    """Collectives inside operators are communication, in both passes and where they are recomputed."""
    passes = ("", ".backward", ".recompute")
    ends = [f"{name}{phase}" for name in ("embedding", "head.loss") for phase in ("", ".backward")]
    assert tensor["kinds"] == {
        "tp": sorted([*(f"attention{phase}" for phase in passes), *ends]),
        "etp": sorted(f"moe.experts{phase}" for phase in passes),
    }
    assert context["kinds"] == {"cp": ["attention", "attention.backward"]}
    assert {"tp", "etp"} <= {*tensor["lanes"]} and "cp" in context["lanes"]
    assert tensor["exposed"] > 0 and context["exposed"] > 0
    for found in (tensor, context):
        assert found["order"] == {} and found["restored"]


def test_four_ranks() -> None:
    for rank, order in enumerate(run(4, check_order, FOUR_RANKS)):
        assert order == dict.fromkeys(FOUR_RANKS, {}), rank
