"""Stages of unlike shape: the losses and norms of one process, whatever the shapes, and every element crosses once."""

from __future__ import annotations

import random
import re
from itertools import chain
from pathlib import Path

import pytest

from moe_overlap.plan.plan import Plan
from moe_overlap.plan.rules.stages import validate_plan
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.multiprocess.unlike_runs import (
    UNTIED,
    Curve,
    Shape,
    curve_of,
    curves_of,
    one_step_of,
    planned,
    told_of_a_lost_rank,
    trained,
    unlike_plan,
    written,
)
from tests.spawn import run

ROUNDING = 2e-6
"""Relative difference that another order of sums makes in single precision."""
LIMIT = 1e-5
ALONE = "--make-vocab-size-divisible-by 128 --micro-batch-size 1 --moe-token-dispatcher-type irregular"
"""Flags of one process."""
PARTITIONS = OverlapWords(
    partitions=2, range_word="around", gate="topk", dispatcher="irregular", defer=True, max_deferred_bytes=1 << 30
)
THREE = {
    "data ranks behind": (Shape(2), Shape(2, data=2)),
    "tensor ranks behind": (Shape(2), Shape(2, tensor=2)),
    "tensor ranks before": (Shape(1, tensor=2), Shape(3)),
    "larger micro-batches before": (Shape(2, samples=4), Shape(2, data=2, again=1)),
}
BEFORE = (Shape(1, data=2), Shape(3))
FOUR = {
    "layers, micro-batches and recomputation": (
        Shape(1, samples=2, again=1),
        Shape(3, data=2),
    ),
    "data ranks before": BEFORE,
    "context ranks before": (Shape(2, context=2), Shape(2)),
    "context ranks behind": (Shape(2), Shape(2, context=2)),
    "experts before": (Shape(2, data=2, expert=2), Shape(2)),
    "experts behind, whole": (Shape(2, data=2), Shape(2, tensor=2, expert=2, expert_tensor=1, again=1)),
    "three stages": (Shape(1, data=2), Shape(2), Shape(1, samples=2)),
    "tensor and context": (Shape(2, tensor=2), Shape(2, context=2)),
    "tensor and data": (Shape(1, tensor=2), Shape(3, data=2, samples=2)),
}
CUT = {
    "partitions before": (Shape(2, samples=2, data=2, expert=2), Shape(2, samples=4)),
    "partitions on both": (
        Shape(2, samples=2, data=2, expert=2),
        Shape(2, samples=2, tensor=2, expert=2, expert_tensor=1),
    ),
    "partitions behind, recomputed": (Shape(2), Shape(2, samples=2, data=2, expert=2, again=1)),
}


def started(folder: Path, steps: int, flags: str) -> Curve:
    """The reference: one process, which saves its weights before the first step."""
    return run(1, curve_of, f"{flags} {ALONE}", steps, str(folder / "start"))[0]


def apart(plans: dict[str, Plan], reference: Curve, folder: Path, steps: int, flags: str) -> dict[str, float]:
    """Plan -> the largest relative difference of its losses and gradient norms from those of one process."""
    largest = {}
    for world in sorted({plan.world_size for plan in plans.values()}):
        of_world = {name: plan for name, plan in plans.items() if plan.world_size == world}
        answers = run(world, curves_of, written(folder, of_world, flags), steps)
        for name in of_world:
            assert all(answer[name] == answers[0][name] for answer in answers), name
            pairs = zip(chain(*answers[0][name]), chain(*reference), strict=True)
            largest[name] = max(abs(value / expected - 1.0) for value, expected in pairs)
    return largest


def test_a_few_shapes_train_as_one_process_does(tmp_path: Path) -> None:
    plans = {name: unlike_plan(shapes, UNTIED) for name, shapes in THREE.items()}
    assert max(apart(plans, started(tmp_path, 3, UNTIED), tmp_path, 3, UNTIED).values()) < ROUNDING
    plan = plans["data ranks behind"]
    steps = run(3, one_step_of, written(tmp_path, {"bytes": plan}, UNTIED))
    # Hidden states forward, their gradients back: every element once.
    assert sum(step["bytes"][2] for step in steps) == 2 * plan.global_batch_size * plan.sequence_length * 64 * 4


def test_a_tied_embedding_moves_alike_at_both_ends(tmp_path: Path) -> None:
    """SGD, as Adam's updates do not tell a gradient from its double; on the first end the norm tells, too."""
    flags = "--optimizer sgd --lr 1e-1"
    names = ("data ranks behind", "tensor ranks behind")
    plans = {name: unlike_plan(shapes, flags) for name, shapes in (*((n, THREE[n]) for n in names), ("before", BEFORE))}
    assert max(apart(plans, started(tmp_path, 3, flags), tmp_path, 3, flags).values()) < ROUNDING


@pytest.mark.slow
def test_tied_embeddings_and_losses_per_token(tmp_path: Path) -> None:
    shared = {name: FOUR[name] for name in ("context ranks behind", "tensor and context")}
    for flags, shapes in (("", THREE), ("--calculate-per-token-loss", THREE | shared)):
        folder = tmp_path / (flags or "tied")
        plans = {name: unlike_plan(each, flags) for name, each in shapes.items()}
        folder.mkdir()
        assert max(apart(plans, started(folder, 4, flags), folder, 4, flags).values()) < ROUNDING


BASE = (Shape(2), Shape(2, data=2))
CHANGED = {
    "nothing": BASE,
    "layers": (Shape(1), Shape(3, data=2)),
    "micro-batch": (Shape(2, samples=2), Shape(2, data=2)),
    "recomputed layers": (Shape(2), Shape(2, data=2, again=1)),
    "data": (Shape(2, data=2), Shape(2)),
    "tensor": (Shape(2), Shape(2, tensor=2)),
    "context": (Shape(2), Shape(2, context=2)),
    "expert": (Shape(2), Shape(2, data=2, expert=2)),
    "expert tensor": (Shape(2), Shape(2, tensor=2, expert=2, expert_tensor=1)),
}


@pytest.mark.slow
def test_each_field_alone_changes_what_ranks_do_as_the_plan_says(tmp_path: Path) -> None:
    plans = {name: unlike_plan(shapes, UNTIED) for name, shapes in CHANGED.items()}
    answers = run(3, one_step_of, planned(tmp_path, plans, UNTIED))
    told = {}
    for name, plan in plans.items():
        told[name] = [answer[name] for answer in answers]
        for rank, (done, listed, sent) in enumerate(told[name]):
            stage = plan.stages[plan.stage_of(rank)]
            count, exchanges = stage.gradient_accumulation_steps, stage.expert * stage.expert_tensor > 1
            assert done == listed, name
            layers = {layer: layer - stage.chunks[0][0] < stage.recompute.layers for layer in range(4)}
            for layer, again in layers.items():
                own = count if layer in stage.layers else 0
                assert done.get(f"L{layer}.attention", 0) == done.get(f"L{layer}.attention.backward", 0) == own, name
                assert done.get(f"L{layer}.attention.recompute", 0) == own * again, name
                assert done.get(f"L{layer}.moe.dispatch", 0) == own * exchanges, name
            # A boundary tensor, or its gradient; rows of the experts are sent from rank to rank, too.
            boundary = plan.global_batch_size * plan.sequence_length * 64 * 4 // len(stage.devices.ranks)
            assert sent > boundary if exchanges else sent == boundary, name
    assert all(told[name] != told[other] for name in told for other in told if name != other)


@pytest.mark.slow
def test_six_layouts_resume_from_the_checkpoints_of_each_other(tmp_path: Path) -> None:
    """Weights and moments, of a tied embedding too: Adam's third step depends on those of the first two."""
    shapes = {name: {**THREE, **FOUR}[name] for name in (*THREE, "experts before")}
    words = planned(tmp_path, {name: unlike_plan(each, "") for name, each in shapes.items()}, "")
    words["one process"] = ALONE
    worlds = {name: 1 if name == "one process" else 3 for name in words}
    names = [*words]
    for number, (name, other) in enumerate(zip(names, names[1:] + names[:1], strict=True)):
        saved, log = tmp_path / f"saved-{number}", tmp_path / f"{number}.jsonl"
        flags = f"{words[name]} --train-iters 4 --save {saved} --save-interval 2"
        whole = run(worlds[name], trained, flags, str(log))[0]
        assert len(whole) == 4
        flags = f"{words[other]} --train-iters 4 --load {saved} --ckpt-step 2"
        resumed = run(worlds[other], trained, flags, str(log.with_suffix(".resumed")))[0]
        for value, expected in zip(resumed, whole[2:], strict=True):
            assert value == pytest.approx(expected, rel=ROUNDING), (name, other)


@pytest.mark.slow
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.sweep)])
def test_fifty_steps_of_every_shape_stay_with_one_process(every: int, tmp_path: Path) -> None:
    plans = {name: unlike_plan(shapes, UNTIED) for name, shapes in {**THREE, **FOUR}.items()}
    plans |= {name: unlike_plan(shapes, UNTIED, PARTITIONS) for name, shapes in CUT.items()}
    assert len(plans) >= 12
    plans = {name: plans[name] for name in [*plans][::every]}
    assert max(apart(plans, started(tmp_path, 50, UNTIED), tmp_path, 50, UNTIED).values()) < LIMIT


@pytest.mark.slow
def test_random_shapes_train_as_one_process_does(tmp_path: Path) -> None:
    draw, plans = random.Random(7), {}
    while len(plans) < 8:
        cuts = sorted(draw.sample(range(1, 4), draw.choice((1, 1, 2))))
        layers = [end - first for first, end in zip([0, *cuts], [*cuts, 4], strict=True)]
        shapes = tuple(
            Shape(
                number,
                samples=draw.choice((1, 2)),
                data=draw.choice((1, 1, 2)),
                tensor=draw.choice((1, 1, 2)),
                context=draw.choice((1, 1, 1, 2)),
                again=draw.choice((0, 0, 1)),
            )
            for number in layers
        )
        plan = unlike_plan(shapes, UNTIED)
        if plan.transfers and plan.world_size <= 4:
            validate_plan(plan)
            plans[f"random {len(plans)}: {shapes}"] = plan
    assert max(apart(plans, started(tmp_path, 3, UNTIED), tmp_path, 3, UNTIED).values()) < ROUNDING


@pytest.mark.slow
def test_ranks_that_wait_for_a_lost_one_name_the_operation_and_the_piece(tmp_path: Path) -> None:
    plan = unlike_plan(THREE["data ranks behind"], UNTIED)
    told = run(3, told_of_a_lost_rank, planned(tmp_path, {"lost": plan}, UNTIED)["lost"])
    transfer = r"(send\.S0>S1|receive\.S0>S1\.backward) piece \d with rank 2: .*(closed|reset).*"
    assert re.fullmatch(transfer, told[0], re.IGNORECASE), told[0]
    assert re.match(r"(receive|send)\.S0>S1|gradients|optimizer\.norm", told[1]) and told[2] == "gone"
