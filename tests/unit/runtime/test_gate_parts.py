"""A gate that decides on the whole micro-batch and lets its rows travel in parts: what leaves it, and what comes back."""

from __future__ import annotations

import pytest
import torch

from moe_overlap.plan.instructions import Instruction
from moe_overlap.runtime.build import gate_and_dispatcher
from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires
from moe_overlap.runtime.dispatch.wire import Columns
from moe_overlap.runtime.executor.bindings import ChunkOperators
from moe_overlap.runtime.executor.buffers import BATCH, Buffers
from moe_overlap.runtime.executor.state import StepState
from moe_overlap.runtime.megatron_core.moe_layer import adapt_layer
from moe_overlap.runtime.routing.state import DrawClock
from moe_overlap.runtime.spans import SpanRecorder
from tests.unit.runtime import one_process

SEQUENCE, SAMPLES, HIDDEN, EXPERTS = one_process.SEQUENCE, 12, 32, 4
PACKED = HIDDEN + Columns.of(torch.float32, torch.float32).appended
IRREGULAR = f"{one_process.MOE} {one_process.SHARED} --moe-token-dispatcher-type irregular"
GATES = {
    "batch_prioritized": "--moe-gate batch_prioritized",
    "expert_choice": "--moe-gate expert_choice --moe-router-load-balancing-type none --moe-aux-loss-coeff 0",
}


def operators(gate: str, factor: float) -> ChunkOperators:
    small = one_process.small(f"{IRREGULAR} {GATES[gate]} --moe-expert-capacity-factor {factor}")
    groups = small.groups.collection
    recorder = SpanRecorder()
    parts = gate_and_dispatcher(gate, "irregular", DrawClock(1))
    model = small.adapted(recorder, adapt_layer(recorder, groups, *parts))
    return ChunkOperators(
        model, SEQUENCE, lambda losses, mask: (losses, mask), IrregularDispatcher(Wires(groups)), recorder
    )


def gate(suffix: str, reads: list[str], writes: list[str]) -> Instruction:
    name = f"L0.moe.gate{suffix}"
    return Instruction(
        id=0, kind="compute", name=name, stage=0, chunk=0, micro_batch=0, reads=tuple(reads), writes=tuple(writes)
    )


class Pass:
    """The gate forward and backward, its rows in so many parts.

    Attributes:
        rows: packed rows of every part.
        map_SBE, normed_SBH, da_SBH, router_gradient: what must not depend on the parts.
    """

    def __init__(self, made: ChunkOperators, parts: int) -> None:
        def names(stem: str) -> list[str]:
            return [f"{stem}.L0.m0"] if parts == 1 else [f"{stem}.L0.m0.p{part}" for part in range(parts)]

        generator = torch.Generator().manual_seed(5)
        a_SBH, dnormed_SBH = torch.randn(2, SEQUENCE, SAMPLES, HIDDEN, generator=generator)
        # A row's gradient depends on its token and its expert alone, however it travels.
        drow_SBEX = torch.randn(SEQUENCE, SAMPLES, EXPERTS, PACKED, generator=generator)
        state = StepState(Buffers(lambda instruction: 1), [{}], 1, seed=1, first_micro_batch=0)
        router = made._layers[0].mlp.router
        router.zero_grad()
        tensors = state.buffers._tensors
        tensors["a.L0.m0"] = a_SBH
        made.compute(gate("", ["a.L0.m0"], [*names("rows"), *names("counts")]), state)
        # With the probability behind them; further columns hold nothing.
        self.rows = [tensors[name][:, : HIDDEN + 1] for name in names("rows")]
        handles = [state.handles[0, 0, part] for part in range(parts)]
        self.map_SBE = torch.cat([handle.map_TE.view(SEQUENCE, -1, EXPERTS) for handle in handles], BATCH)
        self.normed_SBH = torch.cat([state.normed[0, 0, part] for part in range(parts)], BATCH)
        for part, name in enumerate(names("drows")):
            given = drow_SBEX.chunk(parts, BATCH)[part].reshape(-1, PACKED)
            tensors[name] = given.index_select(0, handles[part].row_sources_N)
            state.normed[0, 0, part] = dnormed_SBH.chunk(parts, BATCH)[part]
        made.compute(gate(".backward", [*names("drows"), *names("da")], names("da")), state)
        self.da_SBH = torch.cat([tensors[name] for name in names("da")], BATCH)
        self.router_gradient = router.weight.grad.clone()


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 1.25])
@pytest.mark.parametrize("name", GATES)
def test_parts_change_nothing(name: str, factor: float) -> None:
    made = operators(name, factor)
    whole = Pass(made, 1)
    drops = factor < 1
    assert not drops or whole.map_SBE.sum() < 2 * SEQUENCE * SAMPLES
    for parts in (2, 3, 4, 12):
        cut = Pass(made, parts)
        assert torch.equal(cut.map_SBE, whole.map_SBE)
        assert torch.equal(cut.normed_SBH, whole.normed_SBH)
        assert torch.equal(cut.da_SBH, whole.da_SBH)
        assert torch.equal(cut.router_gradient, whole.router_gradient)
        sent = [rows.shape[0] for rows in cut.rows]
        assert sum(sent) == whole.rows[0].shape[0] and (not drops or len(set(sent)) > 1), "parts of unequal length"
        assert torch.equal(torch.cat(cut.rows).sort(0).values, whole.rows[0].sort(0).values)
        assert factor > 0.05 or parts < 12 or 0 in sent, "a part without a row"
