"""ZeRO 0 to 3 on parameter stores: the losses and norms of DDP and its distributed optimizer, and the lists are followed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.plan.plan import Offload
from tests.multiprocess.store_runs import (
    BIASED,
    DENSE,
    EXPERTS,
    SIZES,
    Run,
    Trained,
    memory_each,
    planned,
    resumed,
    trained_each,
    whole_runs,
)
from tests.multiprocess.test_unlike_stages import FOUR, THREE, started
from tests.multiprocess.unlike_runs import MODEL, UNTIED, Shape, unlike_plan, written
from tests.spawn import run

ROUNDING = 1e-6
"""Largest relative difference of a loss in fp32 that another order of sums makes."""
NO_CLIP = "--clip-grad 0 --untie-embeddings-and-output-weights"
"""Flags without which the bits depend on the cut of the shards: the norm's order of sums, and the order of a tied weight's."""
HALF = Offload(weights=0.5, optimizer=0.5, activations=0.5)
OFFLOADS = {
    "weights": Offload(weights=0.25),
    "optimizer": Offload(optimizer=0.5),
    "activations": Offload(activations=0.5),
    "half": HALF,
    "all": Offload(weights=1.0, optimizer=1.0, activations=1.0),
}
Answers = dict[str, list[Trained]]
Levels = Sequence[Sequence[int]]


def runs_of(folder: Path, flags: str, world: int, levels: Levels, steps: int) -> dict[str, Run]:
    """Runs of DDP (`ddp`), of ZeRO 1 on stores (`stored`) and of plans by their levels."""
    runs: dict[str, Run] = {"ddp": (flags, steps, False), "stored": (flags, steps, True)}
    for of_stages in levels:
        runs["".join(map(str, of_stages))] = (planned(folder, flags, world, of_stages), steps, False)
    return runs


def compared(runs: Mapping[str, Run], world: int) -> Answers:
    """The answers of all ranks. Losses, norms and an evaluation agree with DDP's, and every list is followed."""
    answers = run(world, trained_each, dict(runs))
    reference = answers[0]["ddp"]
    for of_rank in answers:
        for name, answer in of_rank.items():
            assert answer.losses == pytest.approx(reference.losses, rel=ROUNDING), name
            assert answer.norms == pytest.approx(reference.norms, rel=2 * ROUNDING), name
            assert answer.evaluated == pytest.approx(reference.evaluated, rel=ROUNDING), name
            assert answer.follows or name == "ddp", name
    return {name: [answer[name] for answer in answers] for name in runs}


def weights(answers: Answers, name: str) -> list[str]:
    """The digests of all ranks' weights."""
    return [trained.weights for trained in answers[name]]


@pytest.mark.parametrize(
    "accumulated", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_levels_share_bits_where_they_sum_alike(accumulated: int, tmp_path: Path) -> None:
    flags = f"{DENSE} {NO_CLIP} --micro-batch-size 1 --global-batch-size {2 * accumulated}"
    answers = compared(runs_of(tmp_path, flags, 2, [(0,), (2,), (3,)], 3), 2)
    assert weights(answers, "ddp") == weights(answers, "stored") == weights(answers, "0")
    assert weights(answers, "2") == weights(answers, "3")
    # ZeRO 2 and 3 reduce every micro-batch, ZeRO 0 and 1 their sum.
    assert (weights(answers, "2") == weights(answers, "stored")) == (accumulated == 1)


def test_experts_with_bias_and_tokens_that_count(tmp_path: Path) -> None:
    """Experts of one replica have nothing to shard; the division by tokens and the expert bias belong to every list."""
    flags = f"{EXPERTS} {BIASED} --expert-model-parallel-size 2 --calculate-per-token-loss"
    flags = f"{flags} --micro-batch-size 1 --global-batch-size 4"
    answers = compared(runs_of(tmp_path, flags, 2, [(2,), (3,)], 2), 2)
    assert weights(answers, "2") == weights(answers, "3")


def test_levels_that_differ_by_stage_and_a_tied_embedding(tmp_path: Path) -> None:
    """SGD, as Adam's updates do not tell a gradient from its double."""
    flags = f"{DENSE} --pipeline-model-parallel-size 2 --optimizer sgd --lr 1e-1 --micro-batch-size 1"
    runs = runs_of(tmp_path, f"{flags} --global-batch-size 8", 4, [(0, 3), (2, 1)], 2)
    del runs["stored"]
    answers = compared(runs, 4)
    for name in runs:
        first, second, third, fourth = weights(answers, name)
        assert first == second != third == fourth, f"{name}: replicas of a stage hold the same weights"


MOE = f"{EXPERTS} --moe-gate topk --expert-model-parallel-size 2 --micro-batch-size 2"
TWO_RANKS = {
    "experts of two replicas": f"{EXPERTS} {BIASED} --micro-batch-size 1",
    "per token": f"{DENSE} --calculate-per-token-loss --micro-batch-size 1",
    "context ranks": f"{DENSE} --context-parallel-size 2 --micro-batch-size 2",
    "all layers again": f"{MOE} --recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "groups of layers again": f"{DENSE} --num-layers 4 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 2 --micro-batch-size 1",
    "modules again": f"{MOE} --recompute-granularity selective --recompute-modules core_attn moe",
    "partitions": f"{MOE} --moe-overlap-partitions 2 --defer-weight-gradients",
    "partitions again": f"{MOE} --moe-overlap-partitions 2 --defer-weight-gradients --recompute-granularity full "
    "--recompute-method block --recompute-num-layers 2",
    "pairs": f"{MOE} --moe-overlap-micro-batches 2 --defer-weight-gradients",
}
FOUR_RANKS: dict[str, tuple[str, Levels]] = {
    "tensor ranks": (f"{DENSE} --tensor-model-parallel-size 2 --sequence-parallel --qk-layernorm", [(0,), (2,), (3,)]),
    "expert-tensor ranks": (
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
        [(0,), (2,), (3,)],
    ),
    "stages": (
        f"{DENSE} --pipeline-model-parallel-size 2",
        [(a, b) for a in range(4) for b in range(4) if (a, b) != (1, 1)],
    ),
    "virtual stages": (
        f"{DENSE} --num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        [(2, 3), (3, 0), (3, 3)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 8, 20])
def test_the_product_on_two_ranks(batch: int, tmp_path: Path) -> None:
    """Accumulation of 1 or 2, 2 or 4, and 5 or 10 micro-batches; levels 2 and 3 share all bits."""
    for name, flags in TWO_RANKS.items():
        if name == "pairs" and batch == 4:
            continue  # two micro-batches are needed
        answers = compared(runs_of(tmp_path, f"{flags} --global-batch-size {batch}", 2, [(0,), (2,), (3,)], 3), 2)
        assert weights(answers, "2") == weights(answers, "3"), name


@pytest.mark.slow
def test_the_product_on_four_ranks(tmp_path: Path) -> None:
    for name, (flags, levels) in FOUR_RANKS.items():
        runs = runs_of(tmp_path, f"{flags} --micro-batch-size 1 --global-batch-size 8", 4, levels, 3)
        if len(levels[0]) > 1:
            del runs["stored"]
        answers = compared(runs, 4)
        if len(levels[0]) == 1:
            assert weights(answers, "2") == weights(answers, "3"), name
        elif name == "stages":
            shared = {tuple(weights(answers, each)) for each in ("22", "23", "32", "33")}
            assert len(shared) == 1


@pytest.mark.slow
def test_bf16_has_the_losses_of_zero_1(tmp_path: Path) -> None:
    """Against ZeRO 1 on stores: DDP runs megatron-core's schedule, which sums the uses of a weight in bf16."""
    flags = f"{DENSE} {NO_CLIP} --bf16 --micro-batch-size 1 --global-batch-size 2"
    answers = run(2, trained_each, runs_of(tmp_path, flags, 2, [(0,), (2,), (3,)], 3))
    for answer in answers:
        assert len({(*answer[name].losses, answer[name].weights) for name in ("ddp", "stored", "0", "2", "3")}) == 1


UNLIKE: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {
    "data ranks behind": (THREE["data ranks behind"], (1, 2)),
    "other data ranks": (THREE["data ranks behind"], (0, 3)),
    "on both": ((Shape(1, data=2), Shape(3, data=2, samples=2)), (3, 2)),
    "experts": (FOUR["experts before"], (3, 1)),
    "tensor ranks": ((Shape(2, tensor=2), Shape(2, data=2)), (0, 3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [UNTIED, "--optimizer sgd --lr 1e-1"])
def test_unlike_stages_train_as_one_process_does(flags: str, tmp_path: Path) -> None:
    reference = started(tmp_path, 3, flags)
    for name, (shapes, levels) in UNLIKE.items():
        plan = unlike_plan(shapes, flags)
        stages = zip(plan.stages, levels, strict=True)
        plan = replace(plan, stages=tuple(replace(stage, zero_level=level) for stage, level in stages))
        words = f"{MODEL} --train-iters 3 {written(tmp_path, {name: plan}, flags)[name]}"
        for answer in run(plan.world_size, trained_each, {name: (words, 3, False)}):
            assert answer[name].follows, name
            steps = zip(answer[name].losses, answer[name].norms[:-1], strict=True)
            assert [*steps] == [pytest.approx(step, rel=2 * ROUNDING) for step in reference[:3]], name
            assert answer[name].evaluated == pytest.approx(reference[3][0], rel=2 * ROUNDING), name


def crossed(words: dict[str, str], pairs: Sequence[tuple[str, str]], world: int, folder: Path) -> dict[Any, float]:
    """(saver, loader) -> largest relative difference of their steps, where both go on with what the saver has saved."""
    answers = run(world, resumed, words, pairs, str(folder))
    return {
        (saver, loader): max(
            abs(figure / expected - 1.0)
            for answer in answers
            for step, saved in zip(answer[saver, loader], answer[saver, saver], strict=True)
            for figure, expected in zip(step, saved, strict=True)
        )
        for saver, loader in pairs
    }


SAVED = "--micro-batch-size 1 --global-batch-size 4 --lr-decay-iters 8"


def test_zero_3_goes_on_with_what_zero_2_has_saved(tmp_path: Path) -> None:
    """Adam's third step depends on the moments of two; weights that are loaded reach the rows, and the host."""
    flags = f"{DENSE} {SAVED}"
    words = {str(level): planned(tmp_path, flags, 2, (level,)) for level in (2, 3)}
    words["half"] = planned(tmp_path, flags, 2, (3,), [OFFLOADS["half"]])
    assert max(crossed(words, [("2", "3"), ("2", "half"), ("half", "2")], 2, tmp_path).values()) < 2 * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("form", [DENSE, f"{EXPERTS} --expert-model-parallel-size 2", f"{DENSE} --bf16"])
def test_any_levels_load_what_others_saved(form: str, tmp_path: Path) -> None:
    flags = f"{form} {SAVED}"
    words = {} if "--bf16" in form else {"ddp": flags}
    words |= {str(level): planned(tmp_path, flags, 2, (level,)) for level in (0, 2, 3)}
    words["all"] = planned(tmp_path, flags, 2, (1,), [OFFLOADS["all"]])
    differences = crossed(words, [*permutations(words, 2)], 2, tmp_path)
    assert len(differences) >= 6 and max(differences.values()) < 2 * ROUNDING, differences


def test_memory_is_that_of_the_plan(tmp_path: Path) -> None:
    """What the levels keep, and what the list has at a time: with ZeRO 3 two groups of six layers at most."""
    flags = f"{SIZES} --num-layers 6 --hidden-size 128 --micro-batch-size 1 --global-batch-size 4"
    words = {str(level): planned(tmp_path, flags, 2, (level,)) for level in (0, 2, 3)}
    for answer in run(2, memory_each, words):
        for name, measured in answer.items():
            assert measured.held == pytest.approx(measured.stored, rel=0.04), name
            assert measured.moving == pytest.approx(measured.used, rel=0.04), name
            # Two groups' weights and gradients, what a reduction sends and receives, and small activations.
            assert measured.peak - measured.held < 9 * measured.largest, name
        assert answer["0"].moving == 0 < answer["2"].moving < answer["3"].moving


def offloaded(folder: Path, flags: str, levels: Sequence[int], names: Iterable[str]) -> dict[str, Run]:
    """Runs of plans of one stage: of ZeRO levels, and of the same with offloaded shares."""
    runs: dict[str, Run] = {"ddp": (flags, 3, False)}
    for level in levels:
        runs[str(level)] = (planned(folder, flags, 2, (level,)), 3, level == 1)
        for name in names:
            runs[f"{level} {name}"] = (planned(folder, flags, 2, (level,), [OFFLOADS[name]]), 3, False)
    return runs


def changed_weights(answers: Answers) -> list[str]:
    """The runs whose weights differ from those of the same ZeRO level without offloading."""
    levels = {name: name.partition(" ")[0] for name in answers if name != "ddp"}
    assert any(name != level for name, level in levels.items())
    return [name for name, level in levels.items() if weights(answers, name) != weights(answers, level)]


def test_offloaded_shares_change_no_bit(tmp_path: Path) -> None:
    """Partitions, deferred weight gradients, experts of one replica beside layers that are gathered, and an evaluation."""
    flags = f"{MOE} --moe-overlap-partitions 2 --defer-weight-gradients --global-batch-size 8"
    assert changed_weights(compared(offloaded(tmp_path, flags, (2, 3), ("half",)), 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["context ranks", "modules again", "partitions", "partitions again", "pairs", "per token"]
)
def test_the_product_of_levels_and_shares(form: str, tmp_path: Path) -> None:
    """An activation is saved by a forward pass alone: recomputed layers save theirs when they are back."""
    flags = f"{TWO_RANKS[form]} {NO_CLIP} --global-batch-size 8"
    assert changed_weights(compared(offloaded(tmp_path, flags, (1, 3), ("half", "all")), 2)) == []


@pytest.mark.slow
def test_shares_of_bf16_weights(tmp_path: Path) -> None:
    """The master weights move with the moments, and the weights by themselves."""
    flags = f"{DENSE} {NO_CLIP} --bf16 --micro-batch-size 1 --global-batch-size 4"
    answers = run(2, trained_each, offloaded(tmp_path, flags, (1, 3), OFFLOADS))
    assert changed_weights({name: [answer[name] for answer in answers] for name in answers[0]}) == []


@pytest.mark.slow
def test_shares_that_differ_by_stage(tmp_path: Path) -> None:
    flags = f"{DENSE} --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 8"
    runs: dict[str, Run] = {"ddp": (flags, 2, False)}
    for levels, shares in (((1, 3), (HALF, Offload())), ((2, 1), (OFFLOADS["activations"], OFFLOADS["all"]))):
        runs[str(levels)] = (planned(tmp_path, flags, 4, levels, shares), 2, False)
    answers = compared(runs, 4)
    for name in runs:
        first, second, third, fourth = weights(answers, name)
        assert first == second and third == fourth, f"{name}: replicas of a stage hold the same weights"


def test_offloaded_shares_leave_the_device(tmp_path: Path) -> None:
    """Between steps the shares that stay are there; in a step also what the list has at a time."""
    flags = f"{SIZES} --bf16 --num-layers 6 --hidden-size 128 --micro-batch-size 1 --global-batch-size 4"
    words = {
        f"{level} {share}": planned(tmp_path, flags, 2, (level,), [Offload(weights=share, optimizer=share)])
        for level in (1, 3)
        for share in (0.25, 1.0)
    }
    for answer in run(2, memory_each, words):
        for name, measured in answer.items():
            assert measured.held == pytest.approx(measured.stored, rel=0.04), name
            assert measured.moving == pytest.approx(measured.used, rel=0.04), name


def test_a_step_that_is_not_finite_moves_nothing(tmp_path: Path) -> None:
    """Also with updates that wait for the next list: the bits of ZeRO 1, which has skipped the same step."""
    flags = f"{DENSE} {NO_CLIP} --no-check-for-nan-in-loss-and-grad --micro-batch-size 1 --global-batch-size 2"
    runs: dict[str, Run] = {"ddp": (flags, 3, False, 2)}
    runs |= {str(level): (planned(tmp_path, flags, 2, (level,)), 3, False, 2) for level in (2, 3)}
    runs["half"] = (planned(tmp_path, flags, 2, (2,), [HALF]), 3, False, 2)
    answers = run(2, trained_each, runs)
    for answer in answers:
        assert len({answer[name].weights for name in runs}) == 1


@pytest.mark.slow
def test_evaluations_and_larger_batches_meet_updates_that_wait(tmp_path: Path) -> None:
    flags = f"{DENSE} --micro-batch-size 1 --global-batch-size 4 --rampup-batch-size 2 2 8 --eval-interval 2"
    flags = f"{flags.replace('--train-iters 8', '--train-samples 32')} --lr-decay-samples 40 --log-params-norm"
    words = {"ddp": flags} | {str(level): planned(tmp_path, flags, 2, (level,)) for level in (0, 2, 3)}
    words["half"] = planned(tmp_path, flags, 2, (2,), [HALF])
    for answer in run(2, whole_runs, words):
        assert len(answer["ddp"]) == 10
        for name in words:
            for step, expected in zip(answer[name], answer["ddp"], strict=True):
                assert step == pytest.approx(expected, rel=2 * ROUNDING), name
