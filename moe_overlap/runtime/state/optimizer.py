"""The optimizer of one rank, able to step one layer at a time.

megatron-core's distributed optimizer (ZeRO 1) or parameter stores (ZeRO 0 to 3) hold the state. torch's optimizer steps parameter
by parameter, so stepping the layers one after the other is bitwise the same as stepping them at once. The fused optimizers of
Transformer Engine and apex count their steps by parameter group instead of by parameter: see `_StepCounts`.

A *part* here is what one optimizer instruction of the list updates: `embedding`, `L3`, `mtp0` or `head`, all parameters of it
that this rank holds. torch's own parameter groups (weight decay or not, dense or expert) cut across the parts.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from moe_overlap.plan.operators import parse_group

if TYPE_CHECKING:
    from moe_overlap.runtime.state.stored_chunk import Stores

RATES = ("lr", "weight_decay")
"""Fields of torch's parameter groups that the learning-rate schedule moves."""


@dataclass(frozen=True, slots=True)
class PreparedGradients:
    """Facts that are known before any weight moves; equal on every rank.

    Attributes:
        norm: global norm of the unscaled gradients; nan if the loss scale made one of them overflow.
        zeros: number of zero gradients, where counted.
    """

    norm: float
    zeros: int | None


class MegatronLayerwiseOptimizer:
    """Steps one parameter group of the list at a time, over megatron-core's chained distributed optimizers.

    Args:
        optimizer: megatron-core's optimizer of the chunks (get_megatron_optimizer).
        chunks: the DDP-wrapped model chunks it was built for.
        clip_grad: bound of the gradient norm; 0: no clipping.
        count_zeros: whether to count zero gradients, for the log.
        gathers_later: whether the gather of updated weights is left to DDP's hooks or to an instruction list.
        stores: hold the states, where DDP does not.
    """

    def __init__(
        self,
        optimizer: ChainedOptimizer,
        chunks: Sequence[DistributedDataParallel],
        clip_grad: float,
        count_zeros: bool = False,
        gathers_later: bool = False,
        stores: Stores | None = None,
    ) -> None:
        self.megatron, self._stores = optimizer, stores
        self._chunks = chunks
        self._gathers_later = gathers_later
        # Dense and expert weights each have a scaler. megatron-core 0.16.1 updates only the scaler of the kind that overflowed,
        # but scales every loss by the first: only the first one counts here.
        self._scaler = optimizer.chained_optimizers[0].grad_scaler
        self._clip_grad = clip_grad
        self._count_zeros = count_zeros
        part_of = {id(parameter): part for part, parameter in named_parts(chunks)}
        self._shards = [_shards_by_part(inner, part_of) for inner in optimizer.chained_optimizers]
        self.parts = tuple(sorted({part for shards in self._shards for part in shards}, key=part_order))
        # Parts of the whole stage: a check of this rank's shards alone would stop some ranks and leave the others in a
        # collective.
        self._parts_of_stage = frozenset(part_of.values())
        self._stepped: set[str] = set()
        self._counts: list[_StepCounts] = []
        self._rates: list[list[dict[str, Any]]] = []

    @property
    def loss_scale(self) -> float:
        """The factor of every loss of the step before its backward pass; 1 if gradients are not scaled."""
        return float(self._scaler.scale) if self._scaler is not None else 1.0

    @torch.no_grad()
    def prepare(self) -> PreparedGradients:
        """Take the reduced gradients, undo the loss scale, clip them by the global norm."""
        self._stepped.clear()
        self._counts = [_StepCounts(inner.optimizer.param_groups) for inner in self.megatron.chained_optimizers]
        # A step that the next list makes keeps the rates of its own step: the schedule moves on before it.
        self._rates = [
            [{name: group[name] for name in RATES if name in group} for group in inner.optimizer.param_groups]
            for inner in self.megatron.chained_optimizers
        ]
        if self._scaler is None:
            self.megatron.prepare_grads()
        elif self._overflowed():
            return PreparedGradients(math.nan, None)
        norm = float(self.megatron.get_grad_norm())
        if self._clip_grad > 0.0:
            for inner in self.megatron.chained_optimizers:
                parameters = inner.get_parameters()
                if parameters:
                    # Dense and expert weights have separate optimizers, but share the norm of the model.
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self._clip_grad,
                        total_norm=norm,
                        use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                    )
        return PreparedGradients(norm, self._zero_gradients() if self._count_zeros else None)

    def _overflowed(self) -> bool:
        """Undo the loss scale, and update it if any gradient of the model is not finite. Collective.

        One reduction for all kinds of weights: megatron-core makes one per kind, and stages without experts have one kind
        fewer.
        """
        # Shared by all kinds of weights and reduced once: an overflow anywhere stops the step everywhere.
        not_finite = torch.zeros(1, device=next(self._chunks[0].parameters()).device)
        for inner in self.megatron.chained_optimizers:
            if not inner.is_stub_optimizer:
                inner._copy_model_grads_to_main_grads()
                gradients = inner._collect_main_grad_data_for_unscaling()
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, not_finite, self._scaler.inv_scale)
        dist.all_reduce(not_finite, op=dist.ReduceOp.MAX)
        overflowed = bool(not_finite.item())
        self._scaler.update(overflowed)
        return overflowed

    def _zero_gradients(self) -> int:
        """Count the zeros among the gradients of the whole model, each parameter once. Collective."""
        inner_optimizers = self.megatron.chained_optimizers
        gradients = [gradient for inner in inner_optimizers for gradient in inner.get_main_grads_for_grad_norm()]
        device = next(self._chunks[0].parameters()).device
        # Summed on the device: the host would wait once for every shard.
        zeros = torch.zeros(1, dtype=torch.int64, device=device)
        for gradient in gradients:
            zeros += gradient.numel() - gradient.count_nonzero()
        dist.all_reduce(zeros)
        return int(zeros)

    @torch.no_grad()
    def parameter_norm(self) -> float:
        """Compute the norm of all parameters of the model, each parameter once. Collective.

        Left out are replicas of parameters on tensor-parallel ranks, and the embedding that a last stage has for its head.
        """
        device = next(self._chunks[0].parameters()).device
        squares = []
        for inner in self.megatron.chained_optimizers:
            # Parameter stores may keep the end of a shard in host memory, where the tensor does not reach.
            store_of = {id(shard.main): store for store, shard in getattr(inner, "stores", ())}
            for shard in inner.get_parameters():
                if param_is_not_shared(shard) and param_is_not_tensor_parallel_duplicate(
                    shard, tp_group=inner.tp_group
                ):
                    values = store_of[id(shard)].read_state(shard) if store_of else shard
                    squares.append(values.float().pow(2).sum().to(device))
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(total)
        return float(total.sqrt())

    @torch.no_grad()
    def step(self, part: str) -> None:
        """Update the parameters of one part. A part that only other ranks hold changes nothing here."""
        assert part not in self._stepped, f"{part} was stepped before"
        self._stepped.add(part)
        pairs = zip(self.megatron.chained_optimizers, self._shards, self._counts, self._rates, strict=True)
        for inner, shards, counts, rates in pairs:
            if part not in shards:
                continue
            # The inner optimizer sees this part's shards only, in its own parameter groups: learning rates and decay stay
            # theirs.
            groups = inner.optimizer.param_groups
            saved = [
                {name: group[name] for name in ("params", *of_step)}
                for group, of_step in zip(groups, rates, strict=True)
            ]
            try:
                for group, members, of_step in zip(groups, shards[part], rates, strict=True):
                    group.update(of_step, params=members)
                counts.step(inner.optimizer)
            finally:
                for group, fields in zip(groups, saved, strict=True):
                    group.update(fields)
        if self._stores is not None:
            self._stores.publish(part)
        if self._stepped == self._parts_of_stage:
            for counts in self._counts:
                counts.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy master weights to the model, and gather them unless the gather comes later."""
        missing = self._parts_of_stage - self._stepped
        assert not missing, f"parts without a step: {sorted(missing)}"
        for inner in self.megatron.chained_optimizers if self._stores is None else ():
            if inner.config.reuse_grad_buf_for_mxfp8_param_ag:
                # mxfp8 weights are no views of the gathered buffer, which is that of the gradients.
                inner._copy_main_params_to_param_buffer()
            else:
                inner._copy_main_params_to_model_params()
        if not self._gathers_later:
            self.gather()

    def gather(self) -> None:
        """Gather all weights from the shards that the replicas have updated. Collective over the replicas."""
        if self._stores is not None:
            self._stores.gather_all()
            return
        for chunk in self._chunks:
            chunk.start_param_sync()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """A context in which this rank has all of its weights, to be read or written. Collective over the replicas."""
        self.gather()
        yield
        if self._stores is not None:
            self._stores.close_all()

    def zero_grad(self) -> None:
        """Clear the gradients for the next step, but for those that the next list's updates still need (`Stores.clear`)."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        if self._stores is not None:
            self._stores.begin_step()
        else:
            self.megatron.zero_grad()


class _StepCounts:
    """The step counts of an inner optimizer that counts by parameter group.

    A fused Adam adds one to the count of every group that has parameters at each call, and corrects its moments by the count. A
    step of the model that calls it once per layer would count every layer. So each call starts from the counts of the previous
    step, and the groups get the next counts after all layers have been stepped.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups = groups
        self._before = [_copied(group.get("step")) for group in groups]
        self._after = [_copied(count) for count in self._before]

    def step(self, optimizer: Any) -> None:
        """Make the optimizer step the current parameters of its groups."""
        self._show(self._before)
        optimizer.step()
        for place, group in enumerate(self._groups):
            if group["params"]:
                self._after[place] = _copied(group.get("step"))

    def publish(self) -> None:
        """Count one step for the whole model."""
        self._show(self._after)

    def _show(self, counts: Sequence[Any]) -> None:
        for group, count in zip(self._groups, counts, strict=True):
            if count is not None:
                group["step"] = _copied(count)
            elif "step" in group:
                del group["step"]


def _copied(count: Any) -> Any:
    """A copy of a count: a count on the device is added to in place."""
    return count.clone() if isinstance(count, torch.Tensor) else count


def part_order(part: str) -> tuple[int, int]:
    """Sort key: embedding, layers by number, prediction layers, head."""
    return parse_group(part).order


def named_parts(chunks: Iterable[torch.nn.Module]) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Yield every parameter of the chunks with the part it belongs to; layers carry their number in the whole model."""
    for chunk in chunks:
        module = chunk
        while not hasattr(module, "decoder"):
            module = module.module
        for name, parameter in module.named_parameters():
            layer = re.match(r"(decoder|mtp)\.layers\.(\d+)\.", name)
            if layer and layer[1] == "mtp":
                yield f"mtp{layer[2]}", parameter
            elif layer:
                yield f"L{module.decoder.layers[int(layer[2])].layer_number - 1}", parameter
            else:
                yield ("embedding" if name.startswith("embedding.") else "head"), parameter


def _shards_by_part(inner: Any, part_of: dict[int, str]) -> dict[str, list[list[torch.nn.Parameter]]]:
    """Sort this rank's shards: part -> one list for every parameter group of the inner optimizer."""
    groups = inner.optimizer.param_groups
    shards: dict[str, list[list[torch.nn.Parameter]]] = {}
    for parameter, (group, place) in inner.model_param_group_index_map.items():
        members = shards.setdefault(part_of[id(parameter)], [[] for _ in groups])
        members[group].append(groups[group]["params"][place])
    return shards
