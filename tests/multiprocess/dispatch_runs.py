"""Passes of dispatchers on integer-valued tensors, run by the processes of `test_dispatch.py`.

T tokens per rank, E experts, H elements per token. Every number is a small integer, so sums are exact in any order and every
path must agree bitwise.
"""

from __future__ import annotations

import io
import os
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

WIDTH = 4


@dataclass(frozen=True)
class Case:
    """One layer: sizes, routing pattern, row type."""

    name: str
    k: int = 2
    experts_per_rank: int = 2
    expert_ranks: int = 2
    tensor_ranks: int = 1
    tokens: tuple[int, ...] = (6, 5)
    pattern: str = "random"
    half_precision: bool = False

    @property
    def experts(self) -> int:
        return self.expert_ranks * self.experts_per_rank

    @property
    def dropless(self) -> bool:
        return self.pattern in ("random", "one expert")


def make_inputs(case: Case, rank: int) -> SimpleNamespace:
    """Tokens, probabilities, map and output gradient of one rank of the expert group; rank + 10 n: of its n-th pass."""
    import torch

    generator = torch.Generator().manual_seed(1000 + rank)
    tokens = case.tokens[rank % 10]

    def integers(low: int, high: int, *shape: int) -> Any:
        return torch.randint(low, high + 1, shape, generator=generator).float()

    scores = torch.rand((tokens, case.experts), generator=generator)
    if case.pattern == "one expert":
        scores[:, 1] = 2.0
    if case.pattern in ("empty expert", "empty rank"):
        scores[:, case.experts_per_rank if case.pattern == "empty rank" else 1 :] -= 3.0
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(case.k, dim=1).indices, True)
    if case.pattern == "empty expert":
        chosen[:, -1] = False
    if case.pattern == "empty rank":
        chosen[:, case.experts_per_rank :] = False
    if case.pattern == "dropped":
        chosen &= torch.rand(chosen.shape, generator=generator) < 0.6
    rows = torch.bfloat16 if case.half_precision else torch.float32
    return SimpleNamespace(
        hidden=integers(-3, 3, tokens, WIDTH).to(rows),
        probs=integers(1, 3, tokens, case.experts) * chosen,
        map=chosen,
        gradient=integers(-2, 2, tokens, WIDTH).to(rows),
    )


def make_weight(case: Case, expert: int, tensor_rank: int) -> Any:
    """[H, H] weight of one slice of one expert."""
    import torch

    generator = torch.Generator().manual_seed(10 * expert + tensor_rank)
    return torch.randint(-2, 3, (WIDTH, WIDTH), generator=generator).float()


def apply_expert(rows: Any, probs: Any, weight: Any) -> Any:
    """(x W) p."""
    return ((rows.float() @ weight) * probs.unsqueeze(-1)).to(rows.dtype)


class Experts:
    """The experts of one rank, called as megatron-core's dispatchers hand rows over."""

    def __init__(self, case: Case, expert_rank: int, tensor_rank: int) -> None:
        first = expert_rank * case.experts_per_rank
        self.weights = [
            make_weight(case, first + local, tensor_rank).requires_grad_() for local in range(case.experts_per_rank)
        ]

    def __call__(self, rows: Any, per_expert: Any, probs: Any) -> Any:
        import torch

        sizes = per_expert.tolist()
        parts = zip(rows.split(sizes), probs.split(sizes), self.weights, strict=True)
        return torch.cat([apply_expert(*part) for part in parts])


def run_stages(dispatcher: Any, inputs: Any, experts: Any, most_rows: int | None = None) -> SimpleNamespace:
    """A pass as an executor makes it: compute as autograd segments, all-to-alls outside autograd."""
    import torch

    hidden, probs = inputs.hidden.requires_grad_(), inputs.probs.requires_grad_()
    rows, handle = dispatcher.permute(hidden, probs, inputs.map, "L0.moe", most_rows)
    dispatcher.start_counts(handle).wait()
    received = dispatcher.start_dispatch(rows.detach(), handle).wait().requires_grad_()
    sorted_rows, per_expert, sorted_probs = dispatcher.sort(received, handle)
    output = dispatcher.unsort(experts(sorted_rows, per_expert, sorted_probs), handle)
    returned = dispatcher.start_combine(output.detach(), handle).wait().requires_grad_()
    merged = dispatcher.unpermute(returned, handle)

    torch.autograd.backward(merged, inputs.gradient)
    gradient = dispatcher.start_combine_backward(returned.grad, handle).wait()
    torch.autograd.backward(output, gradient)
    gradient = dispatcher.start_dispatch_backward(received.grad, handle).wait()
    torch.autograd.backward(rows, gradient)
    order = SimpleNamespace(rows=sorted_rows.detach(), per_expert=per_expert, probs=sorted_probs.detach())
    return _result(merged, inputs, experts, order)


def run_plugged(dispatcher: Any, inputs: Any, experts: Any) -> SimpleNamespace:
    """A pass as MoELayer makes it, on anything with megatron-core's dispatcher interface."""
    hidden, probs = inputs.hidden.requires_grad_(), inputs.probs.requires_grad_()
    tokens, routed = dispatcher.dispatch_preprocess(hidden.view(-1, 1, WIDTH), inputs.map, probs)
    tokens, routed = dispatcher.token_dispatch(tokens, routed)
    tokens, per_expert, routed = dispatcher.dispatch_postprocess(tokens, routed)
    order = SimpleNamespace(rows=tokens.detach(), per_expert=per_expert, probs=routed.detach())
    output = dispatcher.combine_preprocess(experts(tokens, per_expert, routed))
    merged = dispatcher.combine_postprocess(dispatcher.token_combine(output)).view(-1, WIDTH)
    merged.backward(inputs.gradient)
    return _result(merged, inputs, experts, order)


def run_chunks(
    dispatcher: Any, inputs: Any, experts: Any, degree: int, most_rows: int | None = None
) -> SimpleNamespace:
    """A pass of the capacity-chunk baseline: every dispatch is started first, then chunk by chunk the experts run."""
    import torch

    from moe_overlap.runtime.dispatch.capacity_chunks import capacity_chunks, join_chunks

    hidden, probs = inputs.hidden.requires_grad_(), inputs.probs.requires_grad_()
    rows, handle = dispatcher.permute(hidden, probs, inputs.map, "L0.moe", most_rows)
    dispatcher.start_counts(handle)
    chunks = capacity_chunks(dispatcher, handle, degree)
    dispatches = [dispatcher.start_dispatch(chunk.of(rows.detach()), chunk.handle) for chunk in chunks]
    computed, combines = [], []
    for chunk, dispatch in zip(chunks, dispatches, strict=True):
        received = dispatch.wait().requires_grad_()
        output = dispatcher.unsort(experts(*dispatcher.sort(received, chunk.handle)), chunk.handle)
        computed.append((received, output))
        combines.append(dispatcher.start_combine(output.detach(), chunk.handle))
    returned = join_chunks(chunks, [combine.wait() for combine in combines]).requires_grad_()
    merged = dispatcher.unpermute(returned, handle)

    torch.autograd.backward(merged, inputs.gradient)
    combines = [dispatcher.start_combine_backward(chunk.of(returned.grad), chunk.handle) for chunk in chunks]
    dispatches = []
    for chunk, combine, (received, output) in zip(chunks, combines, computed, strict=True):
        torch.autograd.backward(output, combine.wait())
        dispatches.append(dispatcher.start_dispatch_backward(received.grad, chunk.handle))
    gradient = join_chunks(chunks, [dispatch.wait() for dispatch in dispatches], rows.shape[0])
    torch.autograd.backward(rows, gradient)
    return _result(merged, inputs, experts, None)


def _result(merged: Any, inputs: Any, experts: Any, order: Any) -> SimpleNamespace:
    return SimpleNamespace(
        output=merged.detach(),
        hidden_grad=inputs.hidden.grad,
        probs_grad=inputs.probs.grad,
        weight_grads=[weight.grad for weight in experts.weights],
        order=order,
    )


def make_groups(expert_ranks: int, tensor_ranks: int, seconds: float | None = None) -> Any:
    """Groups of this rank: expert-tensor ranks fastest, as in the stages of a plan."""
    import datetime

    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    timeout = None if seconds is None else datetime.timedelta(seconds=seconds)
    size, me = expert_ranks * tensor_ranks, dist.get_rank()
    fields: dict[str, Any] = {}
    for start in range(0, dist.get_world_size(), size):
        ranks = list(range(start, start + size))
        sets = {
            "tp_ep": [ranks],
            "ep": [ranks[tensor::tensor_ranks] for tensor in range(tensor_ranks)],
            "expt_tp": [ranks[place * tensor_ranks :][:tensor_ranks] for place in range(expert_ranks)],
        }
        for kind, members in sets.items():
            for ranks_of_one in members:
                group = dist.new_group(ranks_of_one, timeout=timeout)
                if me in ranks_of_one:
                    fields[kind] = group
    fields["tp"] = fields["expt_tp"]
    return ProcessGroupCollection(**fields)


def make_config(case: Case) -> Any:
    """A TransformerConfig for the dispatchers."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_moe_experts=case.experts,
        moe_router_topk=case.k,
        moe_token_dispatcher_type="alltoall",
        moe_expert_capacity_factor=None if case.dropless else 1.0,
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=case.k == 1,
        add_bias_linear=False,
    )


def as_bytes(value: Any) -> bytes:
    """Something with tensors, for the way to the parent: a tensor itself would be shared with a process that has ended."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Undo `as_bytes`."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def compare(cases: list[Case], degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    """Every path of every case on this rank, with the bytes that left it and the copies of counts."""
    import torch.distributed as dist
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires
    from moe_overlap.runtime.dispatch.plug_in import IrregularTokenDispatcher

    groups: dict[tuple[int, int], Any] = {}
    sent = SentBytes()
    results = []
    for case in cases:
        layout = (case.expert_ranks, case.tensor_ranks)
        if layout not in groups:
            groups[layout] = make_groups(*layout)
        collection = groups[layout]
        rank = dist.get_rank() % (case.expert_ranks * case.tensor_ranks)
        place = (rank // case.tensor_ranks, rank % case.tensor_ranks)
        wires = Wires(collection)
        exact, bounded = IrregularDispatcher(wires), IrregularDispatcher(wires, takes_bounds=True)
        most_rows = case.tokens[rank] * case.k

        def fresh(case: Case = case, rank: int = rank, place: tuple[int, int] = place) -> tuple[Any, Any]:
            return make_inputs(case, rank), Experts(case, *place)

        with sent:
            found = {"stages": run_stages(exact, *fresh())}
        numbers = {"wire": sent.bytes, "counted": wires.sent_bytes, "host_copies": wires.counts.host_copies}
        found["bounded"] = run_stages(bounded, *fresh(), most_rows)
        local = list(range(place[0] * case.experts_per_rank, (place[0] + 1) * case.experts_per_rank))
        for name, kind in (("plugged", IrregularTokenDispatcher), ("megatron-core", MoEAlltoAllTokenDispatcher)):
            dispatcher = kind(len(local), local, config=make_config(case), pg_collection=collection)
            found[name] = run_plugged(dispatcher, *fresh())
        for degree in degrees:
            found[f"degree {degree}"] = run_chunks(exact, *fresh(), degree)
        found["degree 4, bounded"] = run_chunks(bounded, *fresh(), 4, most_rows)
        results.append({"paths": found, "numbers": numbers})
    return results


class SentBytes:
    """Counts what goes through torch's isend, independently of the code under test."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> None:
        import torch.distributed as dist

        self.bytes, self._stock = 0, dist.isend

        def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            assert tensor.numel() > 0, "nothing is sent for zero rows"
            self.bytes += tensor.numel() * tensor.element_size()
            return self._stock(tensor, *args, **kwargs)

        dist.isend = counting

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.isend = self._stock


def several_in_flight(case: Case, passes: int) -> list[Any]:
    """Passes of one dispatcher at once: rank 1 starts them in the opposite order, and every rank waits in another order."""
    import torch
    import torch.distributed as dist

    from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires

    rank = dist.get_rank()
    dispatcher = IrregularDispatcher(Wires(make_groups(case.expert_ranks, case.tensor_ranks)))
    inputs = [make_inputs(case, rank + 10 * number) for number in range(passes)]
    permuted = [dispatcher.permute(one.hidden, one.probs, one.map, f"L{n}.moe") for n, one in enumerate(inputs)]
    order = list(range(passes)) if rank == 0 else list(reversed(range(passes)))
    for number in order:
        dispatcher.start_counts(permuted[number][1])
    dispatches = {number: dispatcher.start_dispatch(*permuted[number]) for number in order}
    experts, combines = Experts(case, rank, 0), {}
    with torch.no_grad():
        # Neither rank's order of starting, so that exchanges matched by order instead of tag would go astray.
        for number in [*range(1, passes), 0]:
            handle = permuted[number][1]
            output = dispatcher.unsort(experts(*dispatcher.sort(dispatches[number].wait(), handle)), handle)
            combines[number] = dispatcher.start_combine(output, handle)
        returned = {number: combines[number].wait() for number in reversed(order)}
        return [dispatcher.unpermute(returned[number], permuted[number][1]) for number in range(passes)]


def lose_a_peer(case: Case, how: str, seconds: float) -> str:
    """The last rank dies after the counts, or stays away until the others have given up; these return the error's text.

    Raises:
        RuntimeError: on the last rank, where the others have not given up long after their timeout.
    """
    import datetime

    import torch.distributed as dist

    from moe_overlap.runtime.dispatch.irregular import IrregularDispatcher, Wires
    from moe_overlap.runtime.dispatch.wire import AllToAllError

    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dispatcher = IrregularDispatcher(Wires(make_groups(case.expert_ranks, case.tensor_ranks, seconds)))
    inputs = make_inputs(case, rank)
    rows, handle = dispatcher.permute(inputs.hidden, inputs.probs, inputs.map, "L3.moe")
    dispatcher.start_counts(handle).wait()
    if rank == last:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        others = [f"rank {other} gave up" for other in range(last)]
        dist.distributed_c10d._get_default_store().wait(others, datetime.timedelta(seconds=30 * seconds))
        return "stayed away"
    try:
        dispatcher.start_dispatch(rows, handle).wait()
    except AllToAllError as error:
        assert error.name == "L3.moe.dispatch" and last in error.peers
        if how == "killed":
            raise
        dist.distributed_c10d._get_default_store().set(f"rank {rank} gave up", "")
        return str(error)
    raise AssertionError("the exchange went through without its peer")
