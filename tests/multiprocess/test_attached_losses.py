"""Losses beside the main one keep their weight: gradients against those of one process with the batch in one micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.attached_loss_runs import Case, Gradients, gradients_of
from tests.spawn import run

LIMIT = 3e-6
"""Relative; another order of sums in single precision makes a third of it."""
BALANCE = "--moe-router-load-balancing-type"
LOSSES = {
    "aux": f"{BALANCE} aux_loss --moe-aux-loss-coeff 3",
    "seq_aux": f"{BALANCE} seq_aux_loss --moe-aux-loss-coeff 3",
    "global_aux": f"{BALANCE} global_aux_loss --moe-aux-loss-coeff 3",
    "z": "--moe-z-loss-coeff 0.3",
    "prediction": "--mtp-num-layers 2 --mtp-loss-scaling-factor 2",
}
"""Large coefficients: each loss makes at least half of the gradient of the routers."""
ROUTERS = f"{BALANCE} aux_loss seq_aux_loss global_aux_loss --moe-aux-loss-coeff 1 2 3 --moe-z-loss-coeff 0.1"
LINEAR = ("seq_aux", "z", "prediction")
"""Losses that are means over samples or tokens: their sum over micro-batches does not depend on what those hold."""
PER_TOKEN = {"": "", "per token": "--calculate-per-token-loss"}
WHOLE = "--make-vocab-size-divisible-by 256"
ONE = f"{WHOLE} --micro-batch-size 8 --moe-token-dispatcher-type alltoall"
PLAIN, LISTED = (
    "--moe-token-dispatcher-type alltoall",
    ("--moe-token-dispatcher-type irregular --moe-gate topk --defer-weight-gradients"),
)
EP, PP = f"{WHOLE} --expert-model-parallel-size 2", f"{WHOLE} --pipeline-model-parallel-size 2"
TP = (
    "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1"
)
CP = f"{EP} --context-parallel-size 2"
Layouts = dict[str, tuple[int, str]]
"""Name -> ranks, flags."""
LAYOUTS = {
    "tensor ranks": (2, f"{TP} --micro-batch-size 2"),
    "context ranks": (2, f"{CP} --micro-batch-size 4"),
    "expert ranks": (2, f"{EP} --micro-batch-size 2"),
}
"""All accumulate over several micro-batches."""
STAGES = {"stages": (2, f"{PP} --micro-batch-size 1")}
MORE = {
    "one process, 8 micro-batches": (1, f"{WHOLE} --micro-batch-size 1"),
    "one process, 2 micro-batches": (1, f"{WHOLE} --micro-batch-size 4"),
    "tensor ranks, one micro-batch": (2, f"{TP} --micro-batch-size 8"),
    "context ranks, 8 micro-batches": (2, f"{CP} --micro-batch-size 1"),
    "expert ranks, one micro-batch": (2, f"{EP} --micro-batch-size 4"),
    "tensor and context ranks": (4, f"{TP} --context-parallel-size 2 --micro-batch-size 2"),
    "tensor and expert ranks": (4, f"{TP} --expert-model-parallel-size 4 --micro-batch-size 1"),
    "expert ranks in stages": (4, f"{EP} --pipeline-model-parallel-size 2 --micro-batch-size 2"),
}


def on(path: str, layouts: Layouts) -> Layouts:
    """The layouts with the flags of a path."""
    return {name: (ranks, f"{flags} {path}") for name, (ranks, flags) in layouts.items()}


def apart(gradients: Gradients, reference: Gradients) -> float:
    """Relative norm of the difference."""
    assert gradients.keys() == reference.keys()
    pairs = [pair for name in reference for pair in zip(gradients[name], reference[name], strict=True)]
    return float((sum((a - b) ** 2 for a, b in pairs) / sum(b**2 for _, b in pairs)) ** 0.5)


def together(ranks: int, cases: dict[str, Case]) -> dict[str, Gradients]:
    """Every run's gradients, of whichever rank has them."""
    answers = run(ranks, gradients_of, cases)
    return {name: {weight: g for answer in answers for weight, g in answer[name].items()} for name in cases}


def saved_and_loaded(folder: Path) -> tuple[str, str]:
    """Flags that save the weights of the first run, and that begin another one with them."""
    return f"--save {folder}", f"--load {folder} --finetune --ckpt-step 0 --resume-with-changes"


def too_far(families: dict[str, tuple[str, Layouts]], alike: bool, folder: Path) -> dict[str, float]:
    """Runs whose gradient is not that of one process and one micro-batch -> how far it is from it.

    Args:
        families: name -> flags of the losses, and layouts with the flags of a path.
    """
    whole: dict[str, Case] = {}
    cases: dict[int, dict[str, Case]] = {}
    of_case: dict[str, str] = {}
    for family, (losses, layouts) in families.items():
        save, load = saved_and_loaded(folder / family)
        for form, flag in PER_TOKEN.items():
            # A mean over each micro-batch is another one where samples have unlike numbers of tokens that count.
            shared, reference = (f"{losses} {flag}", alike, bool(flag)), f"{family} {form}"
            whole[reference] = Case(f"{ONE} {load if flag else save} {shared[0]}", *shared[1:])
            for layout, (ranks, flags) in layouts.items():
                name = f"{reference}: {layout}"
                of_case[name] = reference
                cases.setdefault(ranks, {})[name] = Case(f"{flags} {load} {shared[0]}", *shared[1:])
    expected = together(1, whole)
    gradients = {name: g for ranks, each in cases.items() for name, g in together(ranks, each).items()}
    far = {name: apart(gradient, expected[of_case[name]]) for name, gradient in gradients.items()}
    assert far.keys() == of_case.keys()
    return {name: value for name, value in far.items() if not value < LIMIT}


def test_every_layout_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    """On megatron-core's path all losses at once, on ours all that it has.

    All samples have the same tokens; with a loss per token they have unlike numbers of tokens that count.
    """
    families = {
        "plain": (f"{ROUTERS} {LOSSES['prediction']}", on(PLAIN, LAYOUTS | STAGES)),
        "listed": (ROUTERS, on(LISTED, LAYOUTS)),
    }
    assert too_far(families, True, tmp_path) == {}


def test_where_every_token_counts_a_loss_per_token_is_the_mean(tmp_path: Path) -> None:
    """Each loss by itself, so that none hides another; and none is small beside the main loss."""
    (save, load), all_losses = saved_and_loaded(tmp_path), LOSSES["prediction"].replace("factor 2", "factor 0")
    cases = {"": Case(f"{ONE} {all_losses} {save}")}
    for name, flags in LOSSES.items():
        flags = flags if name == "prediction" else f"{all_losses} {flags}"
        cases |= {f"{name} {form}": Case(f"{ONE} {flags} {flag} {load}") for form, flag in PER_TOKEN.items()}
    gradients = together(1, cases)
    for name in LOSSES:
        assert apart(gradients[f"{name} per token"], gradients[f"{name} "]) < LIMIT, name
        assert apart(gradients[f"{name} "], gradients[""]) > 1.0, name


def test_a_loss_scale_changes_no_weight() -> None:
    """The scale of fp16 belongs to all losses: it is undone for their sum."""
    losses = f"{ROUTERS} {LOSSES['prediction']}"
    flags = {f"{scale:g}": f"{ONE} {losses} --fp16 --loss-scale {scale:g}" for scale in (16.0, 256.0)}
    gradients = together(1, {scale: Case(each) for scale, each in flags.items()})
    assert apart(gradients["256"], gradients["16"]) < 1e-2


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("path", "loss"),
    # Instruction lists refuse prediction layers.
    [("plain", loss) for loss in LOSSES] + [("listed", loss) for loss in LOSSES if loss != "prediction"],
)
def test_every_loss_in_every_layout(path: str, loss: str, tmp_path: Path) -> None:
    """Samples with tokens of their own as well, where the loss is a mean over samples or tokens."""
    layouts = LAYOUTS | STAGES | MORE
    if path == "listed":
        layouts = {name: layout for name, layout in layouts.items() if "--expert-model-parallel-size" in layout[1]}
    families = {loss: (LOSSES[loss], on(PLAIN if path == "plain" else LISTED, layouts))}
    for alike in (True, False) if loss in LINEAR else (True,):
        assert too_far(families, alike, tmp_path / str(alike)) == {}
