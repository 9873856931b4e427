"""What the operators of a layer read and write.

Buffers (layer n, micro-batch m, partition p): `h.Ln.m.p` enters layer n (and crosses a boundary before it; in a prediction
layer n: `h.mtpn`, behind it `h.mtpn.loss`), `a` follows
attention, `rows` are permuted for sending, `counts` and `splits` say how many, `capacity` hands a gate's state to the
next partition, `received` and `computed` stand at the experts, `returned` is back, `shared` is the shared expert's
output. Gradients carry a `d` in front. `gradient.Ln` sums weight gradients over micro-batches; `saved.Ln.part.weight`
is what a deferred one is computed from.

Fused kernels (COMET, section 3.1) hand over nothing but `inner`, the activated output of the first product, and `dinner`, its
gradient. The whole matrix between product and exchange, which COMET calls the shared tensor, is there while its kernel runs
(`computed`, `dcomputed`, `dreceived`); `received` is kept with what else a forward pass saves.
"""

from __future__ import annotations

from moe_overlap.plan.operators import (
    ATTENTION,
    COMBINE,
    COUNT,
    DISPATCH,
    DISPATCH_FC1,
    EXPERTS,
    FC2_COMBINE,
    GATE,
    MERGE,
    MLP,
    SHARED,
)


def forward_buffers(n: str, after: str, has_shared: bool, sent: bool) -> dict[str, str]:
    """Part -> `reads -> writes`, without micro-batch and partition.

    Args:
        n: layer, such as `L3`.
        after: what its output enters.
        sent: whether tokens leave the rank.
    """
    shared = f"shared.{n}" if has_shared else ""
    return {
        ATTENTION: f"h.{n} -> a.{n}",
        MLP: f"a.{n} -> h.{after}",
        GATE: f"a.{n} -> rows.{n}" + (f" counts.{n}" if sent else ""),
        COUNT: f"counts.{n} -> splits.{n}",
        DISPATCH: f"rows.{n} splits.{n} -> received.{n}",
        SHARED: f"a.{n} -> {shared}",
        EXPERTS: f"{'received' if sent else 'rows'}.{n} -> computed.{n}",
        COMBINE: f"computed.{n} -> returned.{n}",
        DISPATCH_FC1: f"rows.{n} splits.{n} -> received.{n} inner.{n}",
        FC2_COMBINE: f"inner.{n} -> computed.{n} returned.{n}",
        MERGE: f"{'returned' if sent else 'computed'}.{n} a.{n} {shared} -> h.{after}",
    }


def backward_buffers(n: str, after: str, has_shared: bool, sent: bool, total: str) -> dict[str, str]:
    """Part -> `reads -> writes`; what stands on both sides is added to.

    Args:
        total: where weight gradients are summed; empty where all of them are deferred.
    """
    shared = f"dshared.{n}" if has_shared else ""
    return {
        MERGE: f"dh.{after} -> {'dreturned' if sent else 'dcomputed'}.{n} da.{n} {shared}",
        COMBINE: f"dreturned.{n} -> dcomputed.{n}",
        EXPERTS: f"dcomputed.{n} {total} -> {'dreceived' if sent else 'drows'}.{n} {total}",
        SHARED: f"dshared.{n} da.{n} {total} -> da.{n} {total}",
        DISPATCH: f"dreceived.{n} -> drows.{n}",
        FC2_COMBINE: f"dreturned.{n} {total} -> dcomputed.{n} dinner.{n} {total}",
        DISPATCH_FC1: f"dinner.{n} {total} -> dreceived.{n} drows.{n} {total}",
        GATE: f"drows.{n} da.{n} {total} -> da.{n} {total}",
        MLP: f"dh.{after} {total} -> da.{n} {total}",
        ATTENTION: f"da.{n} {total} -> dh.{n} {total}",
    }


def placed(buffer: str, micro_batch: int) -> str:
    """The name with its micro-batch; sums over micro-batches have none."""
    return buffer if buffer.startswith("gradient.") else f"{buffer}.m{micro_batch}"
