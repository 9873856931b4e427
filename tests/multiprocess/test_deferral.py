"""Training with weight gradients put aside is bitwise the training without, in every layout; a lost one is noticed.

One launch of two processes runs every layout; then each process runs the layouts of one rank by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.checkpoint_runs import alone
from tests.multiprocess.deferral_runs import MODERN, UNTIED, Outcome, train, train_deferred
from tests.spawn import run

pytestmark = pytest.mark.slow

EP2, PP2 = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn moe"

TOGETHER = {
    "EP2": f"{MODERN} {UNTIED} {EP2}",
    "EP2, overlapped reduce and gather": f"{MODERN} {UNTIED} {EP2} {OVERLAP}",
    "EP2, accumulation 4": f"{MODERN} {UNTIED} {EP2} {OVERLAP} --global-batch-size 8 --num-layers 4",
    "EP2, bf16": f"{MODERN} {UNTIED} {EP2} {OVERLAP} --bf16",
    "EP2, full recompute": f"{MODERN} {UNTIED} {EP2} {OVERLAP} {FULL}",
    "EP2, selective recompute, loss per token": f"{MODERN} {UNTIED} {EP2} {SELECTIVE} --calculate-per-token-loss",
    "EP2, tied": f"{MODERN} {EP2} {OVERLAP}",
    "EP2, biases and dense layers": f"{EP2} {OVERLAP} --moe-layer-freq 2",
    "TP2 with sequence parallel": f"{MODERN} {UNTIED} {TP2}",
    "TP2, EP2 ETP1": f"{MODERN} {UNTIED} {TP2} {EP2} --expert-tensor-parallel-size 1 {FULL}",
    "TP2, ETP1, biases": f"{TP2} --expert-tensor-parallel-size 1 --moe-layer-freq 2",
    "PP2": f"{MODERN} {UNTIED} {PP2}",
    "PP2, tied, overlapped reduce": f"{MODERN} {PP2} {OVERLAP}",
    "PP2, 2 virtual stages": f"{MODERN} {UNTIED} {VPP2}",
    "PP2, 2 virtual stages, tied, overlapped reduce": f"{MODERN} {VPP2} {OVERLAP}",
}
ALONE = {"one process": f"{MODERN} {UNTIED} {OVERLAP}", "one process, tied": f"{MODERN} {FULL}"}
BOUND = 30_000
"""Bytes; less than one micro-batch's weight gradients hold."""

Pair = tuple[Outcome, Outcome]


def drop_the_oldest(queue: Any) -> None:
    """Every drain leaves out one closure and says nothing."""
    run_all = queue.run_all

    def drop_and_run() -> None:
        del queue._entries[next(iter(queue._entries))]
        run_all()

    queue.run_all = drop_and_run


def drop_unseen(queue: Any) -> None:
    """One operator's closures are never put, so that no count can tell."""
    put = queue.put

    def put_others(name: str, *rest: Any, **options: Any) -> None:
        if name != "L1.moe.experts.fc1.dW":
            put(name, *rest, **options)

    queue.put = put_others


def never_drain(queue: Any) -> None:
    queue.run_all = lambda: None


def message_of(flags: str, break_queue: Any, max_bytes: int | None = None) -> str:
    from moe_overlap.runtime.weight_grad.queue import DeferralError, DeferredBytesExceeded

    try:
        train_deferred(flags, max_bytes, break_queue)
    except (DeferralError, DeferredBytesExceeded) as error:
        return str(error)
    return "no error"


def everything(folder: str) -> dict[str, Any]:
    """The results of one rank: pairs of runs in every layout, and runs of broken queues."""
    import torch.distributed as dist

    pairs = {name: (train(flags), train_deferred(flags)) for name, flags in TOGETHER.items()}
    plain = TOGETHER["EP2"]
    broken = {
        "lost": message_of(plain, drop_the_oldest),
        "never drained": message_of(plain, never_drain),
        "unseen": train_deferred(plain, None, drop_unseen),
        "beyond the bound": message_of(plain, None, BOUND),
    }
    name = list(ALONE)[dist.get_rank()]
    with alone(Path(folder), 1):
        pairs[name] = (train(ALONE[name]), train_deferred(ALONE[name]))
    return {"pairs": pairs, "broken": broken}


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict[str, Any]]:
    return run(2, everything, str(tmp_path_factory.mktemp("deferral")))


def pairs_of(seen: list[dict[str, Any]], name: str) -> list[Pair]:
    return [rank["pairs"][name] for rank in seen if name in rank["pairs"]]


@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_losses_norms_and_parameters_are_bitwise_equal(seen, name):
    pairs = pairs_of(seen, name)
    assert pairs
    for plain, deferred in pairs:
        assert deferred.steps == plain.steps
        assert len({loss for loss, _ in plain.steps}) == len(plain.steps), "nothing was learnt"
        different = [key for key, digest in plain.parameters.items() if deferred.parameters[key] != digest]
        assert not different
        assert deferred.peak_bytes > 0
        assert any(".attention.qkv.dW" in key for key in deferred.names)
        assert any(".moe.experts.fc1.dW" in key for key in deferred.names)


def test_a_tied_head_is_put_aside_only_where_the_embedding_is_not(seen):
    head = "head.loss.output.dW"
    assert all(head not in deferred.names for _, deferred in pairs_of(seen, "EP2, tied"))
    assert [head in deferred.names for _, deferred in pairs_of(seen, "PP2, tied, overlapped reduce")] == [False, True]


def test_bytes_beyond_the_bound_stop_the_run(seen):
    for rank in seen:
        assert rank["broken"]["beyond the bound"].startswith(
            f"--max-deferred-bytes {BOUND}: weight gradients that wait hold "
        )


def test_a_lost_closure_stops_the_run(seen):
    for rank in seen:
        assert rank["broken"]["lost"] == "weight gradients put aside and not computed: head.loss.output.dW (2)"


def test_a_queue_that_is_not_empty_at_the_end_of_a_step_stops_the_run(seen):
    for rank in seen:
        assert rank["broken"]["never drained"].startswith(
            "weight gradients put aside and not computed: head.loss.output.dW (2)"
        )
        assert "more" in rank["broken"]["never drained"]


def test_the_comparison_sees_one_missing_weight_gradient(seen):
    for rank in seen:
        plain, broken = rank["pairs"]["EP2"][0], rank["broken"]["unseen"]
        assert broken.steps != plain.steps
        assert {key for key in plain.parameters if "layers.1.mlp.experts" in key and "fc1" in key} <= {
            key for key, digest in plain.parameters.items() if broken.parameters[key] != digest
        }
