"""Weight gradients behind the send that ends a backward pass, on two ranks of a pipeline: bitwise the training without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.partition_runs import BASE, curves, spans_of_a_step
from tests.spawn import run

pytestmark = pytest.mark.slow

PP2 = "--pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights --moe-gate topk"
VIRTUAL = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {"1f1b": PP2, "interleaved, recomputed": f"{VIRTUAL} {FULL}"}
SEND = "send.S0>S1.backward"


def write_plan(path: Path, flags: str, every: bool, max_bytes: int = 1 << 30) -> str:
    """A plan of flags in which chunks compute their weight gradients behind their send; returns its name.

    Args:
        every: False leaves all but the gate's inside the backward pass.
    """
    import dataclasses

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.plan_flags import plan_from_flags
    from moe_overlap.plan.lowering.deferral import gradient_name, sends_of, split_weights
    from moe_overlap.plan.overlap import LayerOverlap, StageOverlap
    from moe_overlap.plan.serialize import save_plan

    config = parse([*BASE.split(), *flags.split()]).config
    model = describe_model(config, 257)
    plan = plan_from_flags(config, model, 2)
    stages: list[Any] = []
    for index, stage in enumerate(plan.stages):
        layers = []
        for send, chunk in zip(sends_of(plan, index), stage.chunks, strict=True):
            parts = ("moe.experts", "moe.shared", "moe.gate", "attention") if every else ("moe.gate",)
            head = [gradient_name("head.loss", "output")] if every and chunk[1] == model.num_layers else []
            names = [
                gradient_name(part, weight, layer)
                for layer in reversed(range(*chunk))
                for part in parts
                for weight in reversed(split_weights(part, model))
            ]
            if send:
                slots = {send: (*head, *names)}
                layers.append(LayerOverlap(layer=chunk[0], gate="topk", weight_gradient_slots=slots))
        bound = max_bytes if layers else 0
        overlap = StageOverlap(max_deferred_bytes=bound, layers=tuple(layers))
        stages.append(dataclasses.replace(stage, overlap=overlap))
    save_plan(dataclasses.replace(plan, stages=tuple(stages)), path)
    return str(path)


def everything(variants: dict[str, str], flags: str) -> tuple[Any, Any]:
    """Curves of all variants, and the spans of a step of one."""
    return curves(variants), spans_of_a_step(flags)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    variants = {"1f1b, plain": LAYOUTS["1f1b"]}
    bounds = {"none": 1 << 30, "all": 1 << 30, "bounded": 20_000}
    for layout, kind in (*itertools.product(LAYOUTS, ("none", "all")), ("1f1b", "bounded")):
        file = folder / f"{len(variants)}.json"
        plan = write_plan(file, LAYOUTS[layout], kind != "none", bounds[kind])
        variants[f"{layout}, {kind}"] = f"{LAYOUTS[layout]} --plan {plan}"
    return run(2, everything, variants, variants["1f1b, all"])


@pytest.mark.parametrize(("layout", "other"), [*((layout, "none") for layout in LAYOUTS), ("1f1b", "bounded")])
def test_losses_and_gradients_are_bitwise_those_of_the_whole_pass(found, layout, other):
    for answers, _ in found:
        assert answers[f"{layout}, all"] == answers[f"{layout}, {other}"]
        losses = [loss for loss, _ in answers[f"{layout}, all"]]
        assert len(set(losses)) == len(losses), "nothing was learnt"


def test_training_is_that_of_megatron_core(found):
    """The executor's sums of losses and norms are in another order."""
    for answers, _ in found:
        for (loss, norm), (expected, expected_norm) in zip(answers["1f1b, all"], answers["1f1b, plain"], strict=True):
            assert loss == pytest.approx(expected, rel=1e-6) and norm == pytest.approx(expected_norm, rel=1e-5)


def test_they_run_between_the_send_and_the_next_pass(found):
    _, spans = found[1]
    sends = sorted(start for name, _, start, _ in spans if name == SEND)
    later = sorted(start for name, _, start, _ in spans if name.endswith(".dW"))
    back = sorted(start for name, _, start, _ in spans if name.endswith(".backward") and name != SEND)
    assert len(sends) == 4 and len(later) == 4 * len({name for name, *_ in spans if name.endswith(".dW")})
    for sent, following in zip(sends, [*sends[1:], float("inf")], strict=True):
        mine = [start for start in later if sent < start < following]
        assert len(mine) == len(later) // 4
        assert not [start for start in back if sent < start < mine[-1]]
