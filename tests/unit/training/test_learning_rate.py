"""The schedules that a run's flags choose, against their analytic formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.validation import validate
from megatron.training.optimizer import make_scheduler

PEAK, LOWEST, STEPS, WARMUP, BATCH = 1e-2, 1e-3, 100, 10, 16
SIZES = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --max-position-embeddings 8"
LENGTH = f"--micro-batch-size 1 --global-batch-size {BATCH} --lr {PEAK} --min-lr {LOWEST}"
BY_STEPS = f"--train-iters {STEPS} --lr-warmup-iters {WARMUP}"


def rates(words: str) -> Callable[[int], tuple[float, float]]:
    """Learning rate and weight decay of the step that follows a number of finished ones."""
    config = parse(f"{SIZES} {LENGTH} {words}".split()).config
    validate(config, 1)
    group = {"lr": math.nan, "weight_decay": math.nan, "wd_mult": 1.0}
    steps = config.training.train_iters or (config.training.train_samples or 0) // BATCH

    def after(done: int) -> tuple[float, float]:
        scheduler = make_scheduler(config, SimpleNamespace(param_groups=[group]), BATCH, steps)
        scheduler.step(increment=done * BATCH)
        return group["lr"], group["weight_decay"]

    return after


def between(share: float) -> float:
    return LOWEST + share * (PEAK - LOWEST)


def stable_then(last: Callable[[float], float]) -> Callable[[int], float]:
    return lambda done: PEAK if done <= 80 else between(last((done - 80) / 20))


SHAPES: dict[str, Callable[[int], float]] = {
    "constant": lambda done: PEAK,
    "linear": lambda done: between(1 - (done - WARMUP) / (STEPS - WARMUP)),
    "cosine": lambda done: between((1 + math.cos(math.pi * (done - WARMUP) / (STEPS - WARMUP))) / 2),
    "inverse-square-root": lambda done: PEAK * math.sqrt(WARMUP / done),
    "WSD --lr-wsd-decay-iters 20": stable_then(lambda part: 2 * 0.5**part - 1),
    "WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style linear": stable_then(lambda part: 1 - part),
    "WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style cosine": stable_then(lambda p: (1 + math.cos(math.pi * p)) / 2),
    "WSD --lr-wsd-decay-iters 20 --lr-wsd-decay-style minus_sqrt": stable_then(lambda part: 1 - math.sqrt(part)),
}


@pytest.mark.parametrize("style", SHAPES)
def test_warm_up_then_the_style(style: str) -> None:
    after = rates(f"{BY_STEPS} --lr-decay-style {style}")
    for done in (0, 3, WARMUP):
        assert after(done)[0] == pytest.approx(PEAK * done / WARMUP)
    for done in (11, 55, 81, 99, 100):
        assert after(done)[0] == pytest.approx(SHAPES[style](done)), done


def test_lengths_by_samples_fraction_and_own_decay() -> None:
    linear = rates(f"{BY_STEPS} --lr-decay-style linear")
    by_samples = f"--train-samples {STEPS * BATCH} --lr-warmup-samples {WARMUP * BATCH}"
    as_fraction = f"--train-iters {STEPS} --lr-warmup-fraction {WARMUP / STEPS}"
    shorter = rates(f"{BY_STEPS} --lr-decay-iters 40")
    for done in (0, 5, 20, 70):
        assert rates(by_samples)(done) == rates(as_fraction)(done) == linear(done)
    assert shorter(25)[0] == pytest.approx(between(0.5))
    assert shorter(60)[0] == LOWEST


def test_lengths_are_exact_where_they_fill_no_step_and_no_sample() -> None:
    # 110 samples: six steps of 16, and 14 samples that no step takes.
    rest = rates("--train-samples 110 --start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear")
    assert rest(6) == pytest.approx((between(1 - 96 / 110), 0.1 + 0.2 * 96 / 110))
    part = rates(f"--train-iters {STEPS} --lr-warmup-fraction 0.0133")  # 21.28 samples
    assert part(1)[0] == pytest.approx(PEAK * 16 / 21.28)
    assert part(50)[0] == pytest.approx(between(1 - (800 - 21.28) / (1600 - 21.28)))


def test_weight_decay_moves_from_start_to_end() -> None:
    ends = "--start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style"
    assert [rates(f"{BY_STEPS} {ends} linear")(done)[1] for done in (0, 25, 100)] == pytest.approx([0.1, 0.15, 0.3])
    assert rates(f"{BY_STEPS} {ends} cosine")(25)[1] == pytest.approx(0.1 + 0.2 * (1 - math.cos(math.pi / 4)) / 2)
    assert rates(f"{BY_STEPS} --weight-decay 0.2")(25)[1] == 0.2
