"""Stages that recompute unlike numbers of layers: the bits of the run without recomputation, and what each stage holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_overlap.api import Options, problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.plan import Plan, Recompute
from moe_overlap.plan.serialize import load_plan
from moe_overlap.tuner.capture.cache import cpu_graphs
from moe_overlap.tuner.cost.prediction import predict_plan
from tests.multiprocess.partition_runs import BASE, Curve, curves, peak_bytes
from tests.multiprocess.stage_runs import write_stages
from tests.spawn import run

NOTHING = Recompute()
EP = "--expert-model-parallel-size 2"
OVERLAPPED = f"{EP} --moe-gate topk --moe-overlap-partitions 2 --defer-weight-gradients"
UNEVEN = "--pipeline-model-parallel-size 2 --num-layers 5 --decoder-first-pipeline-num-layers 3"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"
ENDS = "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
FOUR = f"--pipeline-model-parallel-size 4 --num-layers 6 {ENDS}"
FOUR_VIRTUAL = "--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
HELD = "--pipeline-model-parallel-size 2 --num-layers 8 --global-batch-size 32 --seq-length 64 --max-position-embeddings 64"
TENSOR_BYTES = 4 * 4 * 64 * 32
"""Hidden states of a micro-batch of HELD, in fp32."""


def layers(*numbers: int) -> tuple[Recompute, ...]:
    """Whole layers of each stage that are recomputed."""
    return tuple(Recompute(layers=number, granularity="full") if number else NOTHING for number in numbers)


def modules(*names: str) -> Recompute:
    """Modules of both layers of a stage that are recomputed."""
    return Recompute(layers=2, granularity="selective", modules=names)


def variants_of(cases: dict[str, tuple[str, tuple[Recompute, ...]]], folder: Path) -> dict[str, str]:
    """Flags of every case, and under `plain: NAME` those without recomputation."""
    found = {}
    for number, (name, (flags, recomputes)) in enumerate(cases.items()):
        found[name] = write_stages(folder / f"{number}.json", flags, recomputes)
        found[f"plain: {name}"] = flags
    return found


def assert_same_bits(answers: list[dict[str, Curve]], cases: dict[str, tuple[str, tuple[Recompute, ...]]]) -> None:
    for of_rank in answers:
        for name in cases:
            assert of_rank[name] == of_rank[f"plain: {name}"], name


def test_two_stages_have_the_bits_of_the_run_without_recomputation(tmp_path: Path) -> None:
    cases = {
        "three and two layers": (UNEVEN, layers(2, 1)),
        "nothing on the first": (UNEVEN, layers(0, 2)),
        "interleaved": (VIRTUAL, layers(1, 0)),
        "layers and modules": (UNEVEN, (layers(3)[0], modules("moe", "core_attn"))),
    }
    assert_same_bits(run(2, curves, variants_of(cases, tmp_path)), cases)


@pytest.mark.slow
def test_four_ranks_have_the_bits_of_the_run_without_recomputation(tmp_path: Path) -> None:
    cases = {
        "overlapped": (f"{UNEVEN} {OVERLAPPED}", layers(2, 1)),
        "overlapped, nothing on the first": (f"{UNEVEN} {OVERLAPPED}", layers(0, 2)),
        "overlapped, modules": (f"{UNEVEN} {OVERLAPPED}", (layers(3)[0], modules("moe"))),
        "overlapped, interleaved": (f"{VIRTUAL} {EP} --moe-gate topk --defer-weight-gradients", layers(1, 0)),
        "four stages": (FOUR, layers(2, 1, 0, 1)),
        "four stages, modules": (FOUR, (modules("moe"), layers(1)[0], NOTHING, modules("core_attn"))),
        "four stages, interleaved": (FOUR_VIRTUAL, layers(1, 1, 0, 0)),
    }
    assert_same_bits(run(4, curves, variants_of(cases, tmp_path)), cases)


@pytest.mark.slow
def test_four_stages_with_overlap_have_the_bits_of_the_run_without_recomputation(tmp_path: Path) -> None:
    cases = {"overlapped": (f"{FOUR} {OVERLAPPED}", layers(2, 0, 1, 0))}
    assert_same_bits(run(8, curves, variants_of(cases, tmp_path)), cases)


@pytest.mark.slow
def test_a_stage_holds_less_by_what_is_predicted_for_its_layers(tmp_path: Path) -> None:
    """The saving per recomputed layer and micro-batch that the stage holds at once, to a tensor of hidden states."""
    spread = f"{HELD} --moe-router-force-load-balancing"
    cases = ((2, 1), (0, 3), (1, 0))
    files = {
        case: write_stages(tmp_path / f"{number}.json", spread, layers(*case)) for number, case in enumerate(cases)
    }
    held = run(2, peak_bytes, {"plain": spread} | {str(case): flags for case, flags in files.items()})
    words = [*BASE.split(), *spread.split(), "--use-distributed-optimizer", "--transformer-impl", "local"]

    def predicted(plan: Plan | None) -> list[float]:
        problem = problem_of(words, shipped_cluster("H100", 2), Options(graphs=cpu_graphs, decided=plan))
        stages = predict_plan(problem.plan, problem).predicted.stages
        return [stage.peak_bytes_by_category.activations for stage in stages]

    plain = predicted(None)
    for number, case in enumerate(cases):
        changed = predicted(load_plan(tmp_path / f"{number}.json"))
        for stage, in_flight in enumerate((2, 1)):
            saved = held[stage]["plain"] - held[stage][str(case)]
            apart = abs(saved - (plain[stage] - changed[stage]))
            assert apart <= TENSOR_BYTES * in_flight * case[stage], (case, stage, saved, plain[stage] - changed[stage])
            assert (saved > 0) == (case[stage] > 0)
