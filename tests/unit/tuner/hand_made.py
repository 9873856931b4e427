"""Graphs of GPT and MoE layers written by hand, from the textbook: what the cost model's tests read, and a twin of the capture.

Fused kernels as Transformer Engine has them. Widths in elements, sizes in bf16; T tokens of a rank outside sequence parallelism.
"""

from __future__ import annotations

from fractions import Fraction

from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.capture.expression import B, Expression, S
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Collective, CostClass, Layout, Op, Storage

E = Expression


class Pass:
    """Collects the operators and storages of a part."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.saved: list[int] = []
        self.phase = "forward"
        self.loaded = False

    def hold(self, elements: E, role: str = "activation", replicas: str = "", bytes_each: int = 2) -> int:
        """A storage."""
        index = len(self.storages)
        self.storages.append(Storage(id=index, bytes=E.of(elements) * bytes_each, role=role, replicas=replicas))  # type: ignore[arg-type]
        return index

    def save(self, elements: E, bytes_each: int = 2) -> None:
        """An activation that is kept."""
        self.saved.append(self.hold(elements, bytes_each=bytes_each))

    def op(
        self,
        name: str,
        operator: str,
        cost_class: CostClass,
        shape: tuple[E | int, ...] = (),
        flops: E | int = 0,
        size: E | int = 0,
        collective: Collective | None = None,
        after_previous: bool = True,
        weight: bool = False,
    ) -> None:
        """An operator, in order."""
        index = len(self.ops)
        self.ops.append(
            Op(
                id=index,
                name=name,
                phase=self.phase,  # type: ignore[arg-type]
                operator=operator,
                module="",
                cost_class=cost_class,
                shape=tuple(E.of(n) for n in shape),
                dtype="bf16",
                flops=E.of(flops),
                bytes=E.of(size),
                reads=(),
                writes=(),
                after=(index - 1,) if index and after_previous else (),
                collective=collective,
                is_weight_gradient=weight,
                scales_with_load=self.loaded,
            )
        )

    def gemm(self, operator: str, m: E, n: int, k: int, weight: bool = False, free: bool = False) -> None:
        """m × k by k × n."""
        size = (m * k + E.of(n * k) + m * n) * 2
        self.op("mm", operator, "gemm", (m, n, k), m * (2 * n * k), size, weight=weight, after_previous=not free)

    def grouped(self, groups: int, rows: E, n: int, k: int, weight: bool = False) -> None:
        """The experts' product."""
        size = (rows * k + E.of(groups * n * k) + rows * n) * 2
        shape = (groups, rows, n, k)
        self.op("grouped_mm", "moe.experts", "grouped_gemm", shape, rows * (2 * n * k), size, weight=weight)

    def stream(self, name: str, operator: str, elements: E) -> None:
        """A kernel that reads and writes this many elements."""
        self.op(name, operator, "memory", (), 0, elements * 2)

    def communicate(self, kind: str, axis: str, elements: E, operator: str) -> None:
        """A collective over an axis, if there is one."""
        sizes = {"tp": self.layout.tensor, "cp": self.layout.context, "ep": self.layout.expert}
        if sizes[axis] > 1:
            collective = Collective(kind=kind, axis=axis, size=sizes[axis], payload_bytes=elements * 2)  # type: ignore[arg-type]
            self.op(kind, operator, "collective", (), 0, 0, collective)

    def part(self, kind: str, variant: str) -> CapturedPart:
        """The finished part."""
        return CapturedPart(
            kind=kind,
            variant=variant,
            one_sample=False,
            ops=tuple(self.ops),
            storages=tuple(self.storages),
            saved=tuple(self.saved),
            inputs=(),
            outputs=(),
            gradient_inputs=(),
            gradient_outputs=(),
        )


class Maker:
    """Parts of one model under one layout."""

    passes: type[Pass] = Pass

    def __init__(self, model: ModelDescription, layout: Layout, fused: bool = True) -> None:
        self.model, self.layout, self.fused = model, layout, fused
        self.tokens = B * S / layout.context
        self.local = self.tokens / layout.tensor
        self.hidden = model.hidden_size

    def widths(self) -> tuple[int, int]:
        """Query and value width per head."""
        latent = self.model.latent_attention
        if latent is None:
            return self.model.kv_channels, self.model.kv_channels
        return latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim

    def linears(self) -> list[tuple[int, int, bool]]:
        """n, k of attention's projections before the core, and whether they are split over TP."""
        model, latent, tp = self.model, self.model.latent_attention, self.layout.tensor
        heads = model.num_attention_heads // tp
        if latent is None:
            groups = max(1, model.num_query_groups // tp)
            return [((heads + 2 * groups) * model.kv_channels, self.hidden, True)]
        qk = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
        rank = latent.q_lora_rank
        queries = [(qk, self.hidden, True)] if rank is None else [(rank, self.hidden, False), (qk, rank, True)]
        up = heads * (latent.qk_head_dim + latent.v_head_dim)
        down = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        return [*queries, (down, self.hidden, False), (up, latent.kv_lora_rank, True)]

    def attention(self, run: Pass, window: int, phase: str) -> None:
        """Norm, projections, core, output, residual; backward the mirror."""
        model, tp, cp = self.model, self.layout.tensor, self.layout.context
        heads, (qk, v) = model.num_attention_heads // tp, self.widths()
        length = S if not window else E.of(2 * window)
        core = B * S * length * heads * (qk + v) / cp
        shape = (B, heads, max(1, model.num_query_groups // tp), S / cp, S, qk, v, window)
        out = heads * v
        forward = phase == "forward"
        if forward:
            run.stream("norm", "attention", self.local * self.hidden * 2)
            run.communicate("all_gather", "tp", self.tokens * self.hidden, "attention")
            for n, k, split in self.linears():
                run.gemm("attention", self.tokens if split else self.local, n, k)
            run.stream("rotary", "attention", self.tokens * heads * qk * 3)
            run.communicate(
                "all_gather", "cp", self.tokens * cp * 2 * max(1, model.num_query_groups // tp) * v, "attention"
            )
            self.core(run, core, shape, 1)
            run.gemm("attention", self.tokens, self.hidden, out)
            run.communicate("reduce_scatter", "tp", self.tokens * self.hidden, "attention")
            run.stream("add", "attention", self.local * self.hidden * 3)
            return
        run.communicate("all_gather", "tp", self.tokens * self.hidden, "attention")
        run.gemm("attention", self.tokens, out, self.hidden)
        self.weight(run, "attention", out, self.hidden)
        self.core(run, core, shape, Fraction(5, 2))
        run.communicate(
            "reduce_scatter", "cp", self.tokens * cp * 2 * max(1, model.num_query_groups // tp) * v, "attention"
        )
        run.stream("rotary", "attention", self.tokens * heads * qk * 3)
        for n, k, split in self.linears():
            run.gemm("attention", self.tokens if split else self.local, k, n)
        run.communicate("reduce_scatter", "tp", self.tokens * self.hidden, "attention")
        for n, k, _ in self.linears():
            self.weight(run, "attention", n, k, free=True)
        run.stream("norm", "attention", self.local * self.hidden * 5)

    def core(self, run: Pass, flops: E, shape: tuple[E | int, ...], factor: int | Fraction) -> None:
        """Flash attention, or scores, softmax and values with an unfused softmax."""
        model, tp, cp = self.model, self.layout.tensor, self.layout.context
        size = self.tokens * (model.num_attention_heads // tp) * sum(self.widths()) * 4
        if self.fused:
            run.op("flash", "attention", "attention", shape, flops * factor, size * factor)
            return
        scores = B * S * S * (model.num_attention_heads // tp) / cp
        steps = 1 if factor == 1 else 2
        run.op("scores", "attention", "attention", shape, flops * 2 * steps, size * steps + scores * 4 * steps)
        run.stream("softmax", "attention", scores * 2 * steps)
        run.stream("dropout", "attention", scores * Fraction(5, 2))

    def weight(self, run: Pass, operator: str, n: int, k: int, free: bool = False, tokens: E | None = None) -> None:
        """A weight gradient [n, k] over the tokens."""
        m = self.tokens if tokens is None else tokens
        size = (m * (n + k) + E.of(n * k * 4)) * 2
        run.op("dW", operator, "gemm", (n, k, m), m * (2 * n * k), size, weight=True, after_previous=not free)

    def mlp(self, run: Pass, width: int, phase: str, operator: str) -> None:
        """A dense MLP or the shared experts."""
        tp, gates = self.layout.tensor, 2 if self.model.gated else 1
        part = width // tp
        if phase == "forward":
            if operator == "mlp":
                run.stream("norm", operator, self.local * self.hidden * 2)
            run.communicate("all_gather", "tp", self.tokens * self.hidden, operator)
            run.gemm(operator, self.tokens, gates * part, self.hidden)
            run.stream("activation", operator, self.tokens * part * (gates + 1))
            run.gemm(operator, self.tokens, self.hidden, part)
            run.communicate("reduce_scatter", "tp", self.tokens * self.hidden, operator)
            run.stream("add", operator, self.local * self.hidden * 3)
            return
        run.communicate("all_gather", "tp", self.tokens * self.hidden, operator)
        run.gemm(operator, self.tokens, part, self.hidden)
        self.weight(run, operator, part, self.hidden)
        run.stream("activation", operator, self.tokens * part * (2 * gates + 1))
        run.gemm(operator, self.tokens, self.hidden, gates * part)
        run.communicate("reduce_scatter", "tp", self.tokens * self.hidden, operator)
        self.weight(run, operator, gates * part, self.hidden, free=True)
        run.stream("norm", operator, self.local * self.hidden * 5)

    def experts(self, run: Pass, phase: str) -> None:
        """Router, all-to-all, experts, all-to-all, merge; the shared experts beside."""
        model, layout = self.model, self.layout
        rows = self.local * model.router_topk
        local = model.num_experts // layout.expert
        width, gates = model.moe_ffn_hidden_size // layout.expert_tensor, 2 if model.gated else 1
        factor = 1 if phase == "forward" else 2
        run.stream("norm", "moe.gate", self.local * self.hidden * (2 if factor == 1 else 5))
        for _ in range(factor):
            run.gemm("moe.gate", self.local, model.num_experts, self.hidden)
        for name in ("scores", "topk", "map", "loss"):
            run.stream(name, "moe.gate", self.local * model.num_experts * 4)
        run.loaded = True
        run.stream("permute", "moe.dispatch", rows * self.hidden * 2)
        run.communicate("all_to_all", "ep", rows * self.hidden, "moe.dispatch")
        run.stream("sort", "moe.dispatch", rows * self.hidden * 2)
        run.grouped(local, rows, gates * width, self.hidden)
        run.stream("activation", "moe.experts", rows * width * ((gates + 1) if factor == 1 else (2 * gates + 1)))
        run.grouped(local, rows, self.hidden, width)
        if factor == 2:
            run.grouped(local, rows, gates * width, self.hidden, weight=True)
            run.grouped(local, rows, self.hidden, width, weight=True)
        run.stream("unsort", "moe.combine", rows * self.hidden * 2)
        run.communicate("all_to_all", "ep", rows * self.hidden, "moe.combine")
        run.stream("unpermute", "moe.merge", rows * self.hidden * 2)
        run.loaded = False
        if model.shared_expert_hidden_size:
            self.mlp(run, model.shared_expert_hidden_size, phase, "moe.shared")
        run.stream("add", "moe.merge", self.local * self.hidden * 3)

    def layer(self, kind: str, variant: str) -> CapturedPart:
        """A layer of a kind."""
        run, moe = self.passes(self.layout), kind.startswith("moe")
        window = int(kind.partition("window")[2] or 0)
        for phase in ("forward", "backward"):
            run.phase = phase
            if phase == "forward" or variant == "full":
                self.attention(run, window, "forward")
                self.experts(run, "forward") if moe else self.mlp(run, self.model.ffn_hidden_size, "forward", "mlp")
            if phase == "backward":
                self.experts(run, "backward") if moe else self.mlp(run, self.model.ffn_hidden_size, "backward", "mlp")
                self.attention(run, window, "backward")
        self.keep(run, moe, variant)
        return run.part(kind, variant)

    def keep(self, run: Pass, moe: bool, variant: str) -> None:
        """Parameters and what the backward pass reads."""
        model, layout, tp = self.model, self.layout, self.layout.tensor
        out = model.num_attention_heads // tp * self.widths()[1]
        attention = sum(n * k for n, k, _ in self.linears()) + out * self.hidden
        run.hold(E.of(attention + 2 * self.hidden), "parameter", "dp")
        gates = 2 if model.gated else 1
        width = model.ffn_hidden_size // tp
        if moe:
            local, wide = model.num_experts // layout.expert, model.moe_ffn_hidden_size // layout.expert_tensor
            run.hold(E.of(local * (gates + 1) * wide * self.hidden), "parameter", "edp")
            shared = model.shared_expert_hidden_size // tp
            run.hold(E.of((gates + 1) * shared * self.hidden + model.num_experts * self.hidden), "parameter", "dp")
        else:
            run.hold(E.of((gates + 1) * width * self.hidden), "parameter", "dp")
        run.save(self.local * self.hidden)
        if variant == "full":
            return
        run.save(self.local * self.hidden * 2)
        run.save(self.tokens * (sum(n for n, _, _ in self.linears()) + out))
        if moe:
            rows = self.local * model.router_topk
            run.save(rows * (self.hidden + (gates + 1) * (model.moe_ffn_hidden_size // layout.expert_tensor)))
            run.save(self.tokens * (gates + 1) * (model.shared_expert_hidden_size // tp))
        else:
            run.save(self.tokens * (gates + 1) * width)

    def ends(self) -> tuple[CapturedPart, CapturedPart]:
        """Embedding and head."""
        model, words = self.model, self.model.vocab_size // self.layout.tensor
        first, last = self.passes(self.layout), self.passes(self.layout)
        first.stream("embedding", "embedding", self.tokens * self.hidden * 2)
        first.communicate("reduce_scatter", "tp", self.tokens * self.hidden, "embedding")
        first.hold(E.of(words * self.hidden), "parameter", "dp")
        first.phase = "backward"
        first.stream("embedding", "embedding", self.tokens * self.hidden * 2)
        last.stream("norm", "head.norm", self.local * self.hidden * 2)
        last.communicate("all_gather", "tp", self.tokens * self.hidden, "head.loss")
        last.gemm("head.loss", self.tokens, words, self.hidden)
        last.stream("cross_entropy", "head.loss", self.tokens * words * 6)
        last.phase = "backward"
        last.stream("cross_entropy", "head.loss", self.tokens * words * 4)
        last.gemm("head.loss", self.tokens, self.hidden, words)
        last.communicate("reduce_scatter", "tp", self.tokens * self.hidden, "head.loss")
        self.weight(last, "head.loss", words, self.hidden, free=True)
        if not model.tied_embeddings:
            last.hold(E.of(words * self.hidden), "parameter", "dp")
        last.save(self.tokens * words, 4)
        return first.part("embedding", "none"), last.part("head", "none")


def captured_by_hand(
    model: ModelDescription, layout: Layout, variants: tuple[str, ...] = ("none", "full"), fused: bool = True
) -> CapturedModel:
    """All parts of a model, as a capture would give them."""
    maker = Maker(model, layout, fused)
    kinds = tuple("moe" if moe else "dense" for moe in model.moe_layers)
    parts = [maker.layer(kind, variant) for kind in dict.fromkeys(kinds) for variant in variants]
    return CapturedModel(
        parts=(*parts, *maker.ends()),
        layer_kinds=kinds,
        mtp_kinds=(),
        layout=layout,
        implementation="te",
        versions=(),
        sha256="",
    )
