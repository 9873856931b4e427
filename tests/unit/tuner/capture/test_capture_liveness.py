"""Live bytes of the captured graphs against torch's MemTracker on whole models, and against a slow count."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed._tools.mem_tracker import MemTracker

from moe_overlap.tuner.capture.graph import CapturedPart
from moe_overlap.tuner.cost.memory import lifetimes
from tests.unit.tuner.capture.capture_cases import (
    AHEAD,
    DENSE,
    LATENT,
    MOE,
    SHARED,
    TP2,
    TP2_EP2,
    recorded,
    request,
    running,
)
from tests.unit.tuner.cost.part_memory import kept_bytes, live_bytes, peak_of_sequence

SAMPLES, TOKENS = 2, 512
WIDE = "--hidden-size 256"
"""Wide enough that tokens, labels and masks, which live a little longer in the whole model, do not matter."""
CASES = {
    "moe": (f"{MOE} {SHARED}", "none"),
    "dense, TP2": (f"{DENSE} {TP2}", "none"),
    "moe, TP2 EP2, prediction": (f"{MOE} {TP2_EP2} {AHEAD} --bf16", "none"),
    "moe, TP2 EP2": (f"{MOE} {TP2_EP2} --bf16", "none"),
    "moe, TP2 EP2, full": (f"{MOE} {TP2_EP2} --bf16", "full"),
    "moe, TP2 EP2, core_attn": (f"{MOE} {TP2_EP2} --bf16", "core_attn"),
    "moe, EP2, whole MoE layer": (f"{MOE} --expert-model-parallel-size 2", "moe"),
}


class Totals(MemTracker):
    """Without books by module, which refuse modules that run twice: the head beside prediction layers."""

    def _no_books(self, *_: Any) -> None:
        """Nothing to note."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _no_books  # type: ignore[assignment]


def tracked_peak(asked: Any) -> float:
    """Peak of forward and backward of the whole model by MemTracker; parameters and gradient buffers taken out."""
    with running(asked) as (runner, _):
        pieces = list(runner.runnable_parts.values())

        def step() -> None:
            tokens, positions = pieces[0].inputs(SAMPLES, TOKENS)
            labels, mask = pieces[-1].inputs(SAMPLES, TOKENS)[1:]
            hidden = pieces[0].run(tokens, positions)
            for piece in pieces[1:-1]:
                hidden = piece.run(hidden, *piece.inputs(SAMPLES, TOKENS)[1:])
            loss = pieces[-1].run(hidden, labels, mask)
            del hidden
            loss.backward()

        with runner._recorder:
            step()
        runner._buffer.buffer.clear()
        held = [*runner._model.parameters(), *(p.main_grad for p in runner._model.parameters())]
        tracker = Totals()
        tracker.track_external(*held)
        before = total(tracker, "current")
        runner._recorder.begin()
        with tracker, runner._recorder:
            step()
        return total(tracker, "peak") - before


def total(tracker: MemTracker, kind: str) -> float:
    """Bytes on all devices."""
    return float(sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot(kind).values()))


@pytest.mark.parametrize(
    "case", ["moe, TP2 EP2", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "moe, TP2 EP2")]
)
def test_peak_equals_mem_tracker(case: str) -> None:
    flags, variant = CASES[case]
    asked = request(f"{flags} {WIDE}", "torch", variant, vocabulary=64)
    parts = [batches[0] for batches in recorded(asked, [(SAMPLES, TOKENS)]).values()]
    shared = [
        float(storage.bytes.value(1, 1)) for part in parts for storage in part.storages if "shared" in storage.name
    ]
    found = peak_of_sequence(parts, SAMPLES, TOKENS) + max(shared, default=0)
    # Whole layers recomputed inside the backward pass of a whole model hold 1.7 % that the part alone does not show.
    assert found == pytest.approx(tracked_peak(asked), rel=0.02 if variant == "full" else 0.01)


def test_discarded_outputs_are_held_by_nobody_between_the_passes() -> None:
    """megatron-core empties the queries, keys and values that it recomputes; the backward pass fills them again."""
    plain, again = (
        recorded(request(LATENT, "te", variant), [(2, 128)])["moe"][0] for variant in ("none", "mla_up_proj")
    )
    (core,) = (op for op in again.ops if op.name == "te.attention")
    operands = sum(float(again.storages[index].bytes.value(2, 128)) for index in core.reads)
    assert not set(core.reads) & set(again.saved)
    assert operands <= float(kept_bytes(plain, 2, 128)) - float(kept_bytes(again, 2, 128))
    (backward,) = (op for op in again.ops if op.name == "te.attention_backward")
    filled = {index for op in again.ops if op.name == "copy_" for index in op.writes}
    assert len(filled & set(backward.reads)) == len(core.reads)
    assert not [op for op in again.ops if op.name == "set_"]


def test_sliced_keys_and_values_are_copied_and_their_product_goes() -> None:
    part = recorded(request(MOE, "te"), [(2, 128)])["moe"][0]
    (core,) = (op for op in part.ops if op.name == "te.attention")
    (product,) = (
        op for op in part.ops if op.module == "self_attention.linear_qkv" and op.name == "mm" and op.phase == "forward"
    )
    assert set(core.reads) <= set(part.saved)
    assert not set(product.writes) & set(part.saved)


def test_live_bytes_equal_a_slow_count() -> None:
    part: CapturedPart = recorded(request(f"{MOE} --bf16"), [(2, 128)])["moe"][0]
    spans = lifetimes(part)
    for phase in ("forward", "backward"):
        ids = [op.id for op in part.ops if op.phase == phase]
        slow = [
            sum(
                float(part.storages[i].bytes.value(2, 128)) for i, (first, last) in spans.items() if first <= op <= last
            )
            for op in ids
        ]
        assert live_bytes(part, phase, 2, 128).tolist() == slow  # type: ignore[arg-type]
