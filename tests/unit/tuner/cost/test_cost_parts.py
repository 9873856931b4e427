"""What parts cost beside their operators: copies, products of weight gradients, and gradients without room to wait."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_overlap.api import read_job, simulated
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.serialize import save_plan
from moe_overlap.tuner.cost import instruction_seconds
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.copied_bytes import Place, copied_bytes
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.simulate.memory import RowBytes
from tests.unit.tuner.cost.test_cost_listed_step import BASE, BATCH, DEFERRED, PARTS, predicted
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.cost.test_cost_simulate_step import CLUSTER, STAGES

CHUNKED = "--moe-overlap-capacity-chunks 2 --moe-expert-capacity-factor 1.0"
WHOLE_GATE = "--moe-gate batch_prioritized --moe-expert-capacity-factor 1.0 --moe-overlap-range after"
HIDDEN, ROWS = 4 * 4096 * 2048 * 2, 4 * 4096 * 2048 * 2 * 4
"""Bytes of a micro-batch of BASE: four sequences of 4096 tokens, 2048 wide; four experts for each token."""
LAYERS = 16


def prices_of(words: str, stage: int = 0) -> StagePrices:
    step = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    return list(step.prices.values())[stage]


def copies(words: str, stage: int = 0) -> dict[str, float]:
    """Of one micro-batch, by operator without its layer, all layers and parts added up."""
    found: dict[str, float] = {}
    for (name, micro_batch, _), size in copied_bytes(prices_of(words, stage).instructions, HIDDEN, ROWS).items():
        if micro_batch == 0:
            kind = re.sub(r"^L\d+\.", "", name)
            found[kind] = found.get(kind, 0.0) + size
    return found


def test_parts_are_joined_where_somebody_reads_several() -> None:
    """All layers in parts without a barrier: the head joins on the way forward, the embedding on the way back."""
    assert copies(f"{STAGES} 1") == {}
    assert copies(f"{STAGES} 1 {PARTS}") == {"head.norm": HIDDEN, "embedding.backward": HIDDEN}
    assert copies(f"{STAGES} 2 {PARTS} {BATCH} 256") == {"moe.merge": HIDDEN, "embedding.backward": HIDDEN}
    assert copies(f"{STAGES} 2 {PARTS} {BATCH} 256", 1) == {"head.norm": HIDDEN, "attention.backward": HIDDEN}


def test_a_whole_gate_copies_what_leaves_it_in_parts() -> None:
    found = copies(f"{STAGES} 1 {PARTS} {WHOLE_GATE}")
    assert found["moe.gate"] == (LAYERS + LAYERS - 1) * HIDDEN, (
        "of all but the first layer it joins what attention made"
    )
    assert found["moe.gate.backward"] == LAYERS * HIDDEN, "gradients are added part by part"
    assert "moe.dispatch" not in found


def test_chunks_of_capacity_pick_and_place_their_rows() -> None:
    found = copies(f"{STAGES} 1 {CHUNKED}")
    kinds = ("moe.dispatch", "moe.merge", "moe.combine.backward", "moe.gate.backward")
    assert found == {kind: pytest.approx(LAYERS * ROWS) for kind in kinds}


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_static_capacity_copies_and_holds_its_empty_places(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of balanced routing, whatever the capacity, and those of experts grew with the load of the busiest rank."""
    asked: list[float] = []

    def copied(made: Sequence[Instruction], hidden: float, rows: float) -> dict[Place, float]:
        asked.append(rows)
        return copied_bytes(made, hidden, rows)

    monkeypatch.setattr(instruction_seconds, "copied_bytes", copied)
    padded = f"--moe-overlap-capacity-chunks 2 --moe-expert-capacity-factor {factor} --moe-pad-expert-input-to-capacity"
    prices = prices_of(f"{STAGES} 1 {padded}")
    assert asked and set(asked) == {factor * ROWS}
    setting = dataclasses.replace(prices.priced.setting, load=2.0)
    prices.priced = dataclasses.replace(prices.priced, setting=setting)
    held = RowBytes(prices, prices.model, prices.instructions)
    # Experts compute chunk by chunk.
    assert held.of("rows.L0.m0") == 2 * held.of("computed.L0.m0") == factor * ROWS


def test_copies_are_priced_by_the_memory_of_the_device() -> None:
    cut, whole = prices_of(f"{STAGES} 1 {PARTS}"), prices_of(f"{STAGES} 1")
    joining, plain = (next(p.seconds(i) for i in p.instructions if i.name == "head.norm") for p in (cut, whole))
    constants = CONSTANTS.gpus["H100"]
    assert joining - plain == pytest.approx(2 * HIDDEN / (3350e9 * constants.memory) + constants.kernel_seconds)


def test_a_weight_gradient_of_parts_is_so_many_products() -> None:
    """Each reads the gradient's weights and starts its kernels: as the parts of the operator itself do."""
    seconds = []
    for words in (DEFERRED, f"{DEFERRED} {PARTS}", f"{DEFERRED} {PARTS.replace('2', '4')}"):
        prices = prices_of(f"{STAGES} 1 {words}")
        seconds.append(
            sum(prices.seconds(i) for i in prices.instructions if re.fullmatch(r"L0\.moe\.experts\.fc.\.dW", i.name))
        )
    whole, halves, quarters = seconds
    assert halves > whole and quarters - halves == pytest.approx(2 * (halves - whole), rel=0.01)


def test_without_room_the_backward_pass_takes_what_its_weight_gradients_took(tmp_path: Path) -> None:
    """In a CPU's order, down to a byte nothing is hidden and nothing is lost: the step is that without deferral."""
    words = f"{STAGES} 1 --expert-model-parallel-size 16"

    def on_cpu(added: str) -> Prediction:
        save_plan(read_job([*BASE, *f"{words} {added}".split()], 32).plan, tmp_path / "plan.json")
        return predicted(words, tmp_path / "plan.json")

    bare, deferred, tight = map(on_cpu, ("", DEFERRED, f"{DEFERRED} --max-deferred-bytes 1"))
    assert deferred.computed_early == bare.computed_early == ()
    assert deferred.predicted.step_seconds < 0.99 * bare.predicted.step_seconds
    assert tight.predicted.step_seconds == pytest.approx(bare.predicted.step_seconds)
    some = on_cpu(f"{DEFERRED} --max-deferred-bytes 1000000000")
    assert deferred.predicted.step_seconds < some.predicted.step_seconds < tight.predicted.step_seconds
    assert (
        some.computed_early[0].startswith("stage 0: --max-deferred-bytes 1000000000 does not let ")
        and some.not_modelled == ()
    )
    assert dataclasses.asdict(tight)["computed_early"]


def test_without_room_a_gpu_still_sends_beside_its_weight_gradients() -> None:
    """Its all-to-alls wait for what they read, not for a weight gradient that stands in front of them."""
    words = f"{STAGES} 1 --expert-model-parallel-size 16"
    bare, deferred = predicted(words), predicted(f"{words} {DEFERRED}")
    tight = predicted(f"{words} {DEFERRED} --max-deferred-bytes 1")
    assert tight.computed_early and deferred.computed_early == ()
    seconds = [each.predicted.step_seconds for each in (deferred, tight, bare)]
    assert seconds[0] <= seconds[1] < 0.99 * seconds[2], seconds


def test_hidden_states_cross_a_stage_in_the_precision_of_the_run() -> None:
    """Four bytes an element in fp32, two in bf16: what one sends is what the list says it sends."""
    for words, width in ((BASE, 2), ([word for word in BASE if word != "--bf16"], 4)):
        step = simulated([*words, STAGES, "2"], CLUSTER, graphs=by_hand, constants=CONSTANTS)
        prices = step.prices[0]
        (sent, *_) = (i.bytes for i in prices.instructions if i.name == "send.S0>S1")
        assert prices.priced.family.boundary_bytes == sent == 4 * 4096 * 2048 * width
