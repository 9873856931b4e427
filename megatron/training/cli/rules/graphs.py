"""Rules of captured CUDA graphs (--moe-overlap-cuda-graphs): they refuse all work that a replay would not repeat.

A graph repeats its kernels on its memory. It repeats no draw of a generator, no decision of the host, and no collective.
Properties of the built model are refused when it is built (runtime/executor/graphs.py, `refuse_uncapturable`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.training.cli.config import Config
from megatron.training.cli.rules.moe import may_follow_lists
from megatron.training.cli.sizes import expert_tensor_size
from moe_overlap.describe.errors import require
from moe_overlap.plan.capabilities import GRAPHS_FLAG as FLAG


def graphs_capture_what_repeats(config: Config) -> None:
    if not config.overlap.moe_overlap_cuda_graphs:
        return
    rule = "captures the operators of instruction lists, and nothing is overlapped"
    require(may_follow_lists(config), FLAG, "", rule, "drop it, or add --defer-weight-gradients")
    for flag, value, stays, rule, fix in _refused(config):
        require(value == stays, flag, "" if value is True else value, rule, f"{fix} or drop {FLAG}")
    cut = (config.overlap.moe_overlap_partitions or 1) > 1 or config.overlap.plan is not None
    named = config.overlap.moe_gate is not None or cut or config.moe.num_experts is None
    rule = "megatron-core's router logs its losses where a graph must not keep them"
    require(named, FLAG, "", rule, "add --moe-gate topk")


def _refused(config: Config) -> Iterator[tuple[str, Any, Any, str, str]]:
    """Flag, its value, the value that works with graphs, the reason, and the fix."""
    parallel, model, moe = config.parallel, config.model, config.moe
    inside = "its collectives run inside operators, and a graph holds none"
    yield "--tensor-model-parallel-size", parallel.tensor_model_parallel_size, 1, inside, "use 1"
    yield "--context-parallel-size", parallel.context_parallel_size, 1, inside, "use 1"
    yield "--expert-tensor-parallel-size", expert_tensor_size(config), 1, inside, "use 1"
    again = "graphs hold what recomputation would free"
    yield "--recompute-granularity", parallel.recompute_granularity, None, again, "drop it"
    draws = "a graph would draw the same numbers in every micro-batch"
    yield "--hidden-dropout", model.hidden_dropout, 0.0, draws, "use 0"
    yield "--attention-dropout", model.attention_dropout, 0.0, draws, "use 0"
    yield "--moe-input-jitter-eps", moe.moe_input_jitter_eps, None, draws, "drop it"
    yield "--moe-router-force-load-balancing", moe.moe_router_force_load_balancing, False, draws, "drop it"
    if config.overlap.moe_gate == "random":
        yield "--moe-gate", "random", None, draws, "use hash"
    narrow = "scales of products in 8 and 4 bits are kept by the host"
    yield "--fp8-format", config.precision.fp8, None, narrow, "drop it"
    yield "--fp4-format", config.precision.fp4, None, narrow, "drop it"
    if "global_aux_loss" in moe.moe_router_load_balancing_type:
        rule = "the host counts the micro-batches over which this loss is averaged"
        yield "--moe-router-load-balancing-type", "global_aux_loss", None, rule, "use seq_aux_loss"
