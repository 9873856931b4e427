"""Optimizer state in the shape of the model's parameters, so that a checkpoint loads at any parallel sizes.

The distributed optimizer (ZeRO-1) cuts gradient buckets, not parameters: a rank holds a flat shard of most parameters, and
neighbouring ranks share a parameter at a cut. So do parameter stores (ZeRO 2, 3); with ZeRO 0 a rank holds all. Saving joins
the shards on the first of these ranks; loading reads the complete parameter and keeps the shard. megatron-core's own formats lose
Adam's step count or corrupt state with several buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory

from megatron.training.messages import of_all

KEY_PREFIX = "optimizer.state."
MASTER_WEIGHT = "fp32_param"
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's flat shard of one parameter.

    Attributes:
        inner: the torch optimizer that steps `main`.
        group: its parameter group.
        data_parallel_group: the ranks among which the parameter's bucket is cut.
        main: the shard, fp32; for fp32 parameters a view of the parameter.
        place: index of this rank in `holders`.
        holders: (rank in the data-parallel group, first, last element) of every rank with a shard.
        replica: number of this copy, where every rank holds all of the state.
        store: the parameter store that keeps the shard, maybe on the host; None: an optimizer keeps it.
    """

    inner: Any
    group: dict[str, Any]
    data_parallel_group: Any
    parameter: torch.nn.Parameter
    main: torch.Tensor
    place: int
    holders: tuple[tuple[int, int, int], ...]
    replica: int = 0
    store: Any = None

    def kinds(self, optimizer: str) -> tuple[str, ...]:
        """Kinds of state that are stored for the parameter. An fp32 parameter is its own master weight."""
        master = () if self.parameter.dtype == torch.float32 else (MASTER_WEIGHT,)
        return MOMENTS[optimizer] + master

    def tensor(self, kind: str) -> torch.Tensor:
        """The flat shard of a kind; moments are zero before the first step. On the host where its storage is offloaded."""
        held = self.main if kind == MASTER_WEIGHT else self.inner.state.get(self.main, {}).get(kind)
        if held is None:
            return torch.zeros_like(self.main).detach()
        return held.detach() if self.store is None else self.store.read_state(held.detach())

    def store_tensor(self, held: torch.Tensor, values: torch.Tensor) -> None:
        """Store the values of `main` or of a moment."""
        if self.store is None:
            held.copy_(values)
        else:
            self.store.write_state(held, values)


def _shards(optimizer: Any) -> Iterator[_Shard]:
    """This rank's shards, in an order that all ranks of a data-parallel group share."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:  # nothing to train on this rank
            continue
        if hasattr(part, "stores"):
            yield from _stored_shards(part)
            continue
        ranks = part.data_parallel_group
        for buffer in part.buffers:
            for parameter, (first, last, bucket_index) in buffer.param_index_map.items():
                place = part.model_param_group_index_map.get(parameter)
                if place is None:
                    continue
                bucket = buffer.buckets[bucket_index]
                # DDP pads buckets to a multiple of the ranks: rank r owns elements [r · length, (r + 1) · length).
                length = bucket.grad_data.numel() // ranks.size()
                first, last = first - bucket.offset, last - bucket.offset
                holders = tuple(
                    (rank, max(first, rank * length) - first, min(last, (rank + 1) * length) - first)
                    for rank in range(first // length, (last - 1) // length + 1)
                )
                group = part.optimizer.param_groups[place[0]]
                place_in_holders = [rank for rank, _, _ in holders].index(ranks.rank())
                yield _Shard(
                    part.optimizer, group, ranks, parameter, group["params"][place[1]], place_in_holders, holders
                )


def _stored_shards(part: Any) -> Iterator[_Shard]:
    """The same of the optimizer of parameter stores (row_optimizer.py)."""
    for store, shard in part.stores:
        group_index, place = part.model_param_group_index_map[shard.parameter]
        group, rank = part.optimizer.param_groups[group_index], store.replicas.rank
        holder = [holding for holding, _, _ in shard.holders].index(rank)
        replica = rank if store.zero_level == 0 else 0
        main, ranks = group["params"][place], store.replicas.group
        yield _Shard(part.optimizer, group, ranks, shard.parameter, main, holder, shard.holders, replica, store)


@torch.no_grad()
def step_count(optimizer: Any) -> int:
    """Number of updates so far, the same on every rank. Collective."""
    steps = [0]
    for shard in _shards(optimizer):
        # torch's optimizers count per parameter, the fused ones of Transformer Engine and apex per group.
        state = shard.inner.state.get(shard.main, {})
        steps.append(int(state.get("step", shard.group.get("step", 0))))
    assert len(set(steps[1:])) <= 1, f"parameters were stepped unequally: {sorted(set(steps))}"
    return max(of_all(max(steps)))


@torch.no_grad()
def optimizer_state(optimizer: Any, name: str, model_state: Any, *, loading: bool) -> dict[str, Any]:
    """The sharded state of megatron-core's chained distributed optimizers. Collective over the data-parallel groups.

    Args:
        name: "adam" or "sgd".
        model_state: the chunks' sharded states, whose tensors are the parameters themselves.
        loading: whether to make empty tensors to load into, instead of joining the shards.
    Returns:
        Entries by position and kind; entries that another rank stores are left out.
    """
    sharded = {id(s.data): s for s in nested_values(model_state) if isinstance(s, ShardedBase)}
    state: dict[str, Any] = {}
    for index, shard in enumerate(_shards(optimizer)):
        like = sharded[id(shard.parameter)]
        for kind in shard.kinds(name):
            # Every holder walks the same shards in the same order: sends meet their receives without tags, and ranks never
            # wait for each other in a circle.
            parameter_state = _empty(shard) if loading else _joined(shard, shard.tensor(kind))
            if parameter_state is None:
                continue
            # A factory has no such field and takes the type from its data; a tensor's own field has the parameter's type.
            dtype = {} if isinstance(like, ShardedTensorFactory) else {"dtype": parameter_state.dtype}
            state[f"{index}.{kind}"] = replace(
                like,
                key=f"{KEY_PREFIX}{kind}.{like.key}",
                data=parameter_state.view(shard.parameter.shape),
                # The last number counts replicas over the data-parallel ranks; here only the holders load the parameter.
                replica_id=(*like.replica_id[:-1], shard.place + shard.replica),
                **dtype,
            )
    return state


def _empty(shard: _Shard) -> torch.Tensor:
    # On the host: the complete parameters of all kinds take several times the memory of a rank's shards, so a run that fits its
    # device might not fit it at a resume.
    return torch.zeros(shard.parameter.numel(), dtype=torch.float32)


def _joined(shard: _Shard, own_shard: torch.Tensor) -> torch.Tensor | None:
    """The complete parameter's flat state on its first holder; None on the others."""
    group = shard.data_parallel_group
    if shard.place > 0:
        dist.send(own_shard.to(shard.main.device).contiguous(), group=group, group_dst=shard.holders[0][0])
        return None
    parts = [own_shard]
    for rank, first, last in shard.holders[1:]:
        part = torch.empty(last - first, dtype=own_shard.dtype, device=shard.main.device)
        dist.recv(part, group=group, group_src=rank)
        # Offloaded states are joined on the host: all of them have no room on the device.
        parts.append(part.to(own_shard.device))
    return torch.cat(parts) if len(parts) > 1 else own_shard


@torch.no_grad()
def restore_optimizer(optimizer: Any, name: str, state: dict[str, Any], steps: int) -> None:
    """Restore a loaded state, after the model's parameters have been loaded.

    Args:
        state: the loaded `optimizer_state(..., loading=True)`, which is emptied; a parameter without an entry gets a fresh
        state.
        steps: number of updates so far.
    """
    for index, shard in enumerate(_shards(optimizer)):
        _, first, last = shard.holders[shard.place]
        # Each complete parameter is freed when its shard exists, which is a copy: a slice would keep it alive.
        stored = {kind: state.pop(f"{index}.{kind}") for kind in shard.kinds(name) if f"{index}.{kind}" in state}
        loaded = {
            kind: parameter_state.reshape(-1)[first:last].to(shard.main.device, copy=True)
            for kind, parameter_state in stored.items()
        }
        del stored
        loaded |= {kind: torch.zeros_like(shard.main) for kind in MOMENTS[name] if kind not in loaded}
        if MASTER_WEIGHT in loaded:
            shard.store_tensor(shard.main, loaded.pop(MASTER_WEIGHT))
        if name == "adam" and isinstance(shard.inner, (torch.optim.Adam, torch.optim.AdamW)):
            # Every parameter gets a tensor of its own: the update adds to it in place.
            on_device = shard.group.get("fused") or shard.group.get("capturable")
            loaded["step"] = torch.tensor(float(steps), device=shard.main.device if on_device else "cpu")
        elif name == "adam":
            shard.group["step"] = steps
        present = shard.inner.state.get(shard.main, {})
        for kind in present.keys() & loaded.keys():
            # Moments of parameter stores are parts of one storage.
            if kind in MOMENTS[name]:
                shard.store_tensor(present[kind], loaded[kind])
                loaded[kind] = present[kind]
        shard.inner.state[shard.main] = loaded
