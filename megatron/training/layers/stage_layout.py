"""The plan's layers in megatron-core's form, which numbers the layers of a stage by it."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from moe_overlap.plan.plan import Plan


class StageLayout(PipelineParallelLayerLayout):
    """What every stage holds, and where this rank's stage begins.

    megatron-core asks for the layers before a stage without naming it, and reads `parallel_state` for the answer.

    Args:
        predictions: multi-token-prediction layers, which stand with the loss.
    """

    def __init__(self, plan: Plan, stage: int, predictions: int) -> None:
        parts = [
            ["decoder"] * (last - first)
            for chunk in range(len(plan.stages[0].chunks))
            for first, last in (other.chunks[chunk] for other in plan.stages)
        ]
        parts[0].insert(0, "embedding")
        parts[-1] += ["mtp"] * predictions + ["loss"]
        super().__init__(parts, len(plan.stages))
        self._chunks = plan.stages[stage].chunks

    def get_layer_offset(
        self, layer_type: Any = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Layers of that type before a chunk of this rank; all prediction layers stand in one."""
        return self._chunks[vp_stage or 0][0] if layer_type == LayerType.decoder else 0
