"""What the operators of a layer read and write.

Buffers (layer n, micro-batch m, partition p): `h.Ln.m.p` enters layer n (and crosses a boundary before it), `a` follows
attention, `rows` are permuted for sending, `counts` and `splits` say how many, `capacity` hands a gate's state to the
next partition, `received` and `computed` stand at the experts, `returned` is back, `shared` is the shared expert's
output. Gradients carry a `d` in front. `gradient.Ln` sums weight gradients over micro-batches; `saved.Ln.part.weight`
is what a deferred one is computed from.
"""

from __future__ import annotations

from moe_overlap.plan.operators import (
    ATTENTION,
    COMBINE,
    COUNT,
    DISPATCH,
    EXPERTS,
    GATE,
    MERGE,
    MLP,
    SHARED,
)


def forward_buffers(n: int, has_shared: bool, sent: bool) -> dict[str, str]:
    """Part -> `reads -> writes`, without micro-batch and partition.

    Args:
        n: layer.
        sent: whether tokens leave the rank.
    """
    shared = f"shared.L{n}" if has_shared else ""
    return {
        ATTENTION: f"h.L{n} -> a.L{n}",
        MLP: f"a.L{n} -> h.L{n + 1}",
        GATE: f"a.L{n} -> rows.L{n}" + (f" counts.L{n}" if sent else ""),
        COUNT: f"counts.L{n} -> splits.L{n}",
        DISPATCH: f"rows.L{n} splits.L{n} -> received.L{n}",
        SHARED: f"a.L{n} -> {shared}",
        EXPERTS: f"{'received' if sent else 'rows'}.L{n} -> computed.L{n}",
        COMBINE: f"computed.L{n} -> returned.L{n}",
        MERGE: f"{'returned' if sent else 'computed'}.L{n} a.L{n} {shared} -> h.L{n + 1}",
    }


def backward_buffers(n: int, has_shared: bool, sent: bool, total: str) -> dict[str, str]:
    """Part -> `reads -> writes`; what stands on both sides is added to.

    Args:
        total: where weight gradients are summed; empty where all of them are deferred.
    """
    shared = f"dshared.L{n}" if has_shared else ""
    return {
        MERGE: f"dh.L{n + 1} -> {'dreturned' if sent else 'dcomputed'}.L{n} da.L{n} {shared}",
        COMBINE: f"dreturned.L{n} -> dcomputed.L{n}",
        EXPERTS: f"dcomputed.L{n} {total} -> {'dreceived' if sent else 'drows'}.L{n} {total}",
        SHARED: f"dshared.L{n} da.L{n} {total} -> da.L{n} {total}",
        DISPATCH: f"dreceived.L{n} -> drows.L{n}",
        GATE: f"drows.L{n} da.L{n} {total} -> da.L{n} {total}",
        MLP: f"dh.L{n + 1} {total} -> da.L{n} {total}",
        ATTENTION: f"da.L{n} {total} -> dh.L{n} {total}",
    }


def placed(buffer: str, micro_batch: int) -> str:
    """The name with its micro-batch; sums over micro-batches have none."""
    return buffer if buffer.startswith("gradient.") else f"{buffer}.m{micro_batch}"
