"""How a configuration runs, beside its plan: what hides what, in which formats, launched how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dispatcher = Literal["allgather", "alltoall", "deepep", "hybridep"]
Graphs = Literal["none", "partial", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What of a run's flags changes seconds or bytes."""

    precision: str = "bf16"
    flash: bool = True
    """Attention in one kernel; else its scores go through memory, and are kept."""
    dropped_scores: bool = False
    """Dropout on attention's probabilities: without a fused kernel its mask and result are kept as well."""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    overlap_tensor: bool = False
    """Tensor-parallel collectives run in pieces beside their products (--tp-comm-overlap)."""
    overlap_experts: bool = False
    """Exchanges of one micro-batch under the computation of another (--overlap-moe-expert-parallel-comm)."""
    overlap_shared_expert: bool = False
    overlap_transfers: bool = True
    """Of an interleaved pipeline's stages."""
    context_exchange: Literal["p2p", "a2a", "all_gather"] = "p2p"
    """Keys and values go around while attention computes, heads are exchanged before it, or keys are gathered before it."""
    dispatcher: Dispatcher = "alltoall"
    graphs: Graphs = "none"
    """CUDA graphs: of all but the experts (partial), or of a whole step."""
    gradient_bytes: int = 4
    """Of one element, accumulated and reduced."""
    gathered_bytes: int = 2
    """Of one parameter, gathered after the step."""
    weight_bytes: float = 2.0
    """Of one parameter, as the products read it."""
    optimizer_bytes: float = 12.0
    """Of one parameter: master weight and moments."""
    not_modelled: tuple[str, ...] = ()
    """Flags that change seconds or bytes and that no formula here knows."""
