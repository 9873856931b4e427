"""A layer made by hand under any layout, with the operators that depend on each axis: what a capture gives, in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_overlap.tuner.capture.dependencies import finished
from moe_overlap.tuner.capture.expression import B, Expression, S
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Collective, Layout, Op, Role, Storage, check
from moe_overlap.tuner.capture.kernels import KERNELS, flops
from moe_overlap.tuner.capture.request import Request

EXPERTS, HIDDEN, HEADS, WIDTH = 8, 64, 16, 96
Extra = Callable[["Tape", Layout], None]


@dataclass
class Tape:
    """Operators and storages in the order in which a recorder would meet them."""

    layout: Layout
    phase: Any = "forward"
    operator: str = "attention"
    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)

    @property
    def ranks(self) -> dict[str, int]:
        """Ranks of the groups that the layer's collectives run in."""
        layout = self.layout
        return {"tp": layout.tensor, "cp": layout.context, "ep": layout.expert, "etp": layout.expert_tensor}

    def hold(self, size: Expression | int, role: Role, name: str = "", replicas: Any = "") -> int:
        """A storage that is there."""
        storage = Storage(id=len(self.storages), bytes=Expression.of(size), role=role, name=name, replicas=replicas)
        self.storages.append(storage)
        return storage.id

    def op(
        self,
        name: str,
        reads: list[int],
        size: Expression | int,
        axis: str = "",
        shape: Any = None,
        module: str = "self_attention",
        into: list[int] | None = None,
        moved: Expression | int = 0,
        touched: Sequence[Expression] = (),
    ) -> int:
        """An operator; its result, or the first storage that it writes.

        Args:
            touched: as in `Op.touched`, where the storages that it reads and writes are told apart.
        """
        writes = into if into is not None else [self.hold(size, "activation")]
        collective = None
        kind: Any = KERNELS[name].cost_class if name in KERNELS else "memory"
        if axis:
            kind = "collective"
            collective = Collective(
                kind="all_gather", axis=axis, size=self.ranks[axis], payload_bytes=Expression.of(size)
            )
        sizes = () if axis else tuple(Expression.of(x) for x in (shape or (size,)))
        self.ops.append(
            Op(
                id=len(self.ops),
                name=name,
                phase=self.phase,
                operator=self.operator,
                module=module,
                cost_class=kind,
                shape=sizes,
                dtype="bfloat16",
                after=(),
                flops=Expression() if axis else flops(name, sizes),
                bytes=sum(touched, Expression.of(size) + moved),
                touched=tuple(touched),
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                collective=collective,
            )
        )
        return writes[0]


def part(
    layout: Layout, vocabulary: int, extra: Extra | None = None, library: bool = False, biases: bool = False
) -> CapturedPart:
    """Attention, router and experts of one layer, forward and a backward pass of the experts and their weights.

    Args:
        library: dispatches tokens, whichever ranks the experts are on.
        biases: every expert adds one to its rows, one after the other, and in the backward pass the last one first.
    """
    tape = Tape(layout)
    t, c, e, x = layout.tensor, layout.context, layout.expert, layout.expert_tensor
    local, rows, own = EXPERTS // e, B * S / c, B * S / (c * t)
    qkv = tape.hold(HIDDEN * HEADS // t * 8, "parameter", "self_attention.linear_qkv.weight", "dp")
    size, replicas = HIDDEN * WIDTH // x * 2, "dp" if (e, x) == (1, t) else "edp"
    weights, gradients, added = [], [], []
    for expert in range(local):
        name = f"mlp.experts.linear_fc1.weight{expert}"
        weights.append(tape.hold(size, "parameter", name, replicas))
        gradients.append(tape.hold(2 * size, "gradient", name, replicas))
        if biases:
            name = f"mlp.experts.linear_fc1.bias{expert}"
            kept = (
                tape.hold(2 * HIDDEN, "parameter", name, replicas),
                tape.hold(4 * HIDDEN, "gradient", name, replicas),
            )
            added.append(kept)
    given = tape.hold(own * HIDDEN, "input")
    whole = tape.op("allgather", [given], rows * HIDDEN, "tp") if t > 1 else given
    heads = tape.op(
        "mm", [whole, qkv], rows * (HEADS * 8 // t), shape=(rows, HEADS * 8 // t, HIDDEN), moved=own * HIDDEN
    )
    keys = tape.op("allgather", [heads], B * S * (HEADS // t), "cp", module="core") if c > 1 else heads
    out = tape.op("core", [heads, keys], own * HIDDEN + (HEADS // t) * 4)
    if extra is not None:
        extra(tape, layout)
    tape.operator = "moe.gate"
    scores = tape.op("topk", [out], own * EXPERTS, module="mlp.router")
    tape.operator = "moe.dispatch"
    sent = tape.op("alltoall", [out, scores], own * HIDDEN, "ep", module="mlp") if e > 1 or library else out
    tape.operator = "moe.experts"
    gathered = tape.op("allgather", [sent], own * (HIDDEN * x), "etp", module="mlp") if x > 1 else sent
    if local > 1:
        gathered = tape.op("te.move_rows", [gathered], own * (HIDDEN * x), module="mlp", moved=own * x * 4)
    made = tape.op(
        *("te.grouped_gemm", [gathered, *weights], own * WIDTH),
        shape=(local, own * x, WIDTH // x, HIDDEN),
        module="mlp.experts",
        moved=size * local + own * (HIDDEN * x),
    )
    if biases:
        with_biases, each = [], own * WIDTH / local
        for bias, _ in added:
            scaled = tape.op("mul", [bias, scores], each, module="mlp.experts")
            with_biases.append(tape.op("add", [made, scaled], each, module="mlp.experts"))
        made = tape.op("cat", with_biases, own * WIDTH, module="mlp.experts")
    end = tape.hold(own * WIDTH, "input")
    tape.phase = "backward"
    for _, gradient in reversed(added):
        of_rows = tape.op("sum", [end], 2 * HIDDEN, module="mlp.experts", moved=own * WIDTH / local)
        tape.op("add_", [gradient, of_rows], 4 * HIDDEN, module="mlp.experts", into=[gradient])
    products = (local, own * x, WIDTH // x, HIDDEN)
    tape.op(
        *("te.grouped_weight_gradient", [end, gathered, *gradients], 0),
        shape=products,
        module="mlp.experts",
        into=gradients,
    )
    back = tape.op("add", [end, made], own * HIDDEN, module="mlp.experts")
    tape.operator = "attention"
    result = tape.op("mm", [back, qkv], own * HIDDEN, shape=(rows, HIDDEN, HEADS * 8 // t), moved=vocabulary * 0)
    roles = [storage.role for storage in tape.storages]
    last = len(tape.ops) - 1
    forward = [op for op in tape.ops if op.phase == "forward"]
    own = {index for op in forward for index in op.writes} - {made}
    # Where nothing keeps them for the backward pass, the layer's own code holds all until the forward pass ends.
    freed = [
        replace(
            s,
            freed_after=last if s.id == made else None,
            released_after=forward[-1].id if s.id in own else None,
        )
        for s in tape.storages
    ]
    kept = tuple(sorted({gathered, made} - {given}))
    whole_part = CapturedPart(
        kind="moe",
        variant="none",
        one_sample=False,
        ops=finished(tape.ops, roles),
        storages=tuple(freed),
        saved=kept,
        inputs=(given,),
        outputs=(made,),
        gradient_inputs=(end,),
        gradient_outputs=(result,),
    )
    check(whole_part)
    return whole_part


def captured(request: Request, extra: Extra | None = None, biases: bool = False) -> CapturedModel:
    """The captured model of a request for the layer."""
    library = request.config.moe.moe_token_dispatcher_type == "flex"
    return CapturedModel(
        parts=(part(request.layout, request.model.vocab_size, extra, library, biases),),
        layer_kinds=("moe",),
        mtp_kinds=(),
        layout=request.layout,
        implementation="te",
        versions=(),
        sha256="",
    )
