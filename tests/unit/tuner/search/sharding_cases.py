"""A captured model of one dense and one MoE layer, whole and on several ranks, for the tests of the intra-operator search.

`tests/golden/sharding_whole.json` has the parts as captured on one rank, `sharding_collectives.json` the collectives of layouts
on several ranks. `python -m tests.unit.tuner.search.sharding_cases` writes both; a slow test compares it with a fresh capture.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_overlap.describe.cluster import GIB, Cluster, cluster_of, known_gpus, node_group
from moe_overlap.tuner.capture.cache import load_captured, save_captured
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import CapturedModel, Collective, Layout
from moe_overlap.tuner.cost.links import Group, axis_group
from moe_overlap.tuner.search.layer.sharding_algorithms import Workload
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS as COST_CONSTANTS

GOLDEN = Path(__file__).parents[3] / "golden"
WHOLE, COLLECTIVES = GOLDEN / "sharding_whole.json", GOLDEN / "sharding_collectives.json"
FLAGS = (
    "--num-layers 2 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --mock-data --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 1e-3 --make-vocab-size-divisible-by 64 --attention-dropout 0 "
    "--hidden-dropout 0 --bf16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336 "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0]+[1]"
)
LAYOUTS = (
    Layout(tensor=2, expert=8, sequence_parallel=True),
    Layout(tensor=4, expert=2, expert_tensor=4, sequence_parallel=True),
    Layout(context=2, expert=2),
)
CONSTANTS = replace(COST_CONSTANTS.gpus["H100"], host_seconds=1e-6)
Row = tuple[str, str, Collective]
"""Kind of part, operator, and collective."""


def cluster(nodes: int, per_node: int) -> Cluster:
    """Nodes of H100s."""
    group = node_group(known_gpus()["H100"], nodes, per_node)
    return cluster_of({"name": "test", "groups": [{**group, "domain_gpus": per_node}]}, "test")


def workload(samples: int = 16, micro_batches: int = 8, memory_gib: float | None = None, **changed: Any) -> Workload:
    """Sequences of 4096 tokens on H100s, or on GPUs that have another memory and are like them in all else."""
    gpu = cluster(1, 8).group_of(0).gpu
    gpu = gpu if memory_gib is None else replace(gpu, memory_gib=memory_gib)
    given = {
        "samples": samples,
        "tokens": 4096,
        "micro_batches": micro_batches,
        "usable_bytes": gpu.memory_gib * GIB,
        "gpu": gpu,
        "constants": CONSTANTS,
    }
    return Workload(**{**given, **changed})


@functools.cache
def whole() -> CapturedModel:
    """The model on one rank."""
    return load_captured(WHOLE)


def dense() -> CapturedModel:
    """The model without its MoE layer."""
    return replace(whole(), layer_kinds=("dense",), parts=tuple(part for part in whole().parts if part.kind != "moe"))


def collectives(layout: Layout) -> list[Row]:
    """The collectives of a layout's ranks, in order; counts of rows and sums of the router apart, which are a few numbers."""
    rows = json.loads(COLLECTIVES.read_text(encoding="utf-8"))[_key(layout)]
    return [
        (part, operator, Collective(kind=kind, axis=axis, size=size, payload_bytes=Expression.parse(payload)))
        for part, operator, kind, axis, size, payload in rows
    ]


def group_of(axis: str, layout: Layout, cluster: Cluster) -> Group:
    """The ranks of an axis, as `stage_groups` lays them out."""
    size, stride = {
        "tp": (layout.tensor, 1),
        "cp": (layout.context, layout.tensor),
        "ep": (layout.expert, layout.expert_tensor),
        "etp": (layout.expert_tensor, 1),
    }[axis]
    return axis_group(size, stride, cluster.gpus, cluster.group_of(0))


def _key(layout: Layout) -> str:
    return f"TP{layout.tensor} CP{layout.context} EP{layout.expert} ETP{layout.expert_tensor}"


def captured_now(layout: Layout, flags: str = FLAGS) -> CapturedModel:
    """A fresh capture under a layout."""
    import torch.distributed as dist

    from moe_overlap.tuner.capture.capture import capture
    from tests.unit.tuner.capture.capture_cases import request

    if dist.is_initialized():
        dist.destroy_process_group()
    asked = request(flags, "te", vocabulary=32000)
    return capture(replace(asked, layout=replace(layout, precision="bf16")))


def rows_of(captured: CapturedModel) -> list[list[Any]]:
    """The collectives of a captured model's parts as JSON values."""
    return [
        [
            part.kind,
            op.operator,
            op.collective.kind,
            op.collective.axis,
            op.collective.size,
            str(op.collective.payload_bytes),
        ]
        for part in captured.parts
        if not part.one_sample
        for op in part.ops
        if op.collective is not None and op.collective.size > 1 and op.collective.axis in ("tp", "cp", "ep", "etp")
    ]


def main() -> None:
    """Write both files."""
    from megatron.training import cpu_backend

    cpu_backend.install()
    save_captured(captured_now(Layout()), WHOLE)
    rows = {_key(layout): rows_of(captured_now(layout)) for layout in LAYOUTS}
    lines = [
        f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(row) for row in values) + "\n]"
        for key, values in rows.items()
    ]
    COLLECTIVES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
