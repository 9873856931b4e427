"""A model chunk whose states parameter stores hold, in the place of megatron-core's DDP; and all stores of a rank.

`StoredChunk` is built and used as DDP is. It starts no communication: instruction lists reduce and gather, over `Stores`. What
DDP's hooks do for a parameter, adding its gradient to the sum, the chunk's hooks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.finalize_model_grads import _get_shared_word_embedding_weight
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.operators import Copied, OperatorKind
from moe_overlap.plan.plan import Offload
from moe_overlap.runtime.dispatch.wire import AllToAll
from moe_overlap.runtime.groups import StageGroups
from moe_overlap.runtime.state.host_memory import HostMemory
from moe_overlap.runtime.state.optimizer import named_parts
from moe_overlap.runtime.state.saved_activations import SavedActivations
from moe_overlap.runtime.state.store import ParameterStore, Wait


class StoredChunk(_BaseDataParallel):
    """A model chunk and its parameter stores.

    Args:
        config, ddp_config, module, disable_bucketing, pg_collection: as megatron-core's DDP takes them.
        zero_level, offload: of the stage.
        host: takes the offloaded shares of all chunks of the rank.
        sums_gradients: whether replicas sum gradients instead of averaging them.
        wire_of: process group -> its wire; one for each group, so that the tags of its all-to-alls are unique.
    Attributes:
        stores: in the order of the model, dense parameters before experts.
        zero_level, offload, host: the stage's level, the shares in host memory, and that memory.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        zero_level: int,
        offload: Offload,
        host: HostMemory,
        sums_gradients: bool,
        wire_of: Callable[[dist.ProcessGroup], AllToAll],
    ) -> None:
        super().__init__(config=config, module=module)
        assert pg_collection is not None
        self.ddp_config, self.zero_level, self.offload, self.host = ddp_config, zero_level, offload, host
        scale = 1.0 if sums_gradients or config.calculate_per_token_loss else 1.0 / pg_collection.dp_cp.size()
        self.stores: list[ParameterStore] = []
        for (part, is_dense, *_), parameters in _kinds(module).items():
            group = pg_collection.dp_cp if is_dense else pg_collection.expt_dp
            self.stores.append(ParameterStore(part, parameters, zero_level, wire_of(group), scale, offload, host))
        self._parameters_with_gradients = [p for p in module.parameters() if p.requires_grad]
        for parameter in self._parameters_with_gradients:
            self._hook(parameter)

    def zero_grad_buffer(self) -> None:
        """Begin a step: no product has added to a sum. `Stores` clears the sums."""
        for parameter in self._parameters_with_gradients:
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def _hook(self, parameter: Any) -> None:
        """Add a parameter's gradient to the sum when it is known: after its backward pass, or when its module says so."""

        def add(*_: Any) -> None:
            # Fused products have added it, and leave a gradient without meaning.
            added = parameter.grad_added_to_main_grad and not getattr(parameter, "zero_out_wgrad", False)
            if parameter.grad is not None and not added:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        parameter.grad_added_to_main_grad = False
        if self.ddp_config.delay_wgrad_compute and getattr(parameter, "skip_backward_post_hook", False):
            for module in self.module.modules():
                if hasattr(module, "register_wgrad_accumulation_and_reduce_hooks") and any(
                    parameter is of_module for of_module in module.parameters()
                ):
                    module.register_wgrad_accumulation_and_reduce_hooks(add)
                    return
        parameter.register_post_accumulate_grad_hook(add)


def _kinds(module: torch.nn.Module) -> dict[tuple[Any, ...], list[torch.nn.Parameter]]:
    """(parameter group, whether it is dense, type, whether two stages share it) -> parameters of one store."""
    kinds: dict[tuple[Any, ...], list[torch.nn.Parameter]] = {}
    for part, parameter in named_parts([module]):
        if parameter.requires_grad:
            # A tied embedding is alone in its store: rows of both ends of the pipeline then hold the same elements.
            is_dense, is_shared = getattr(parameter, "allreduce", True), getattr(parameter, "shared_embedding", False)
            kinds.setdefault((part, is_dense, parameter.dtype, is_shared), []).append(parameter)
    return kinds


class Stores:
    """All parameter stores of one rank, by parameter group, as instruction lists use them.

    Args:
        chunks: this rank's model chunks.
        groups: this rank's groups.
        is_decoupled: whether the updates of a step are those of the next list.
    Attributes:
        activations: those that wait on the host.
    """

    def __init__(self, chunks: Sequence[StoredChunk], groups: StageGroups, is_decoupled: bool) -> None:
        self._chunks, self._groups, self._is_decoupled = chunks, groups, is_decoupled
        self._by_group: dict[str, list[ParameterStore]] = {}
        for store in self:
            self._by_group.setdefault(store.group, []).append(store)
        self.activations = SavedActivations(
            chunks[0].offload.activations,
            chunks[0].host,
            lambda group: [store.weights for store in self._by_group[group]],
        )

    def __iter__(self) -> Iterator[ParameterStore]:
        for chunk in self._chunks:
            yield from chunk.stores

    @property
    def groups(self) -> frozenset[str]:
        """The parameter groups."""
        return frozenset(self._by_group)

    def start_gather(self, group: str) -> Wait:
        """Start to gather the weights of a parameter group; the returned function waits until this rank has all of them."""
        return _together([store.start_gather() for store in self._by_group[group]])

    def close_weights(self, group: str) -> None:
        """Free the weights of a group that are kept in shards, behind their use."""
        for store in self._by_group[group]:
            store.close_weights()

    def open_sums(self, group: str) -> None:
        """Make room for the gradient of a micro-batch in a group whose gradients are kept in shards."""
        for store in self._by_group[group]:
            store.open_sums()

    def start_reduction(self, group: str) -> Wait:
        """Start to scatter the gradient of a micro-batch (ZeRO 2, 3) or to reduce that of the step; the result waits for it."""
        name, scatters = f"gradients.{group}", self._chunks[0].zero_level >= 2
        # Of a group that scatters, a kind without replicas is complete at the end of the step.
        reduced = [store for store in self._by_group[group] if store.zero_level >= 2 or not scatters]
        return _together([store.start_reduction(name) for store in reduced])

    def copy(self, i: Instruction) -> None:
        """Run a copy of a list: of a group's weights or states, or of the activations of a micro-batch."""
        group, what = i.operator.group, i.operator.copied
        assert what is not None
        fetches = i.operator.kind is OperatorKind.PREFETCH
        if what is Copied.ACTIVATIONS:
            assert i.micro_batch is not None
            (self.activations.fetch if fetches else self.activations.store)(group, i.micro_batch)
            return
        for store in self._by_group[group]:
            (store.fetch if fetches else store.store)(what)

    def fetch(self, group: str, what: Copied) -> None:
        """Bring the offloaded share of a group's weights or states back."""
        for store in self._by_group[group]:
            store.fetch(what)

    def release(self, group: str, what: Copied) -> None:
        """Free the moving share of a group's weights or states behind their last use, which may be a gather."""
        for store in self._by_group[group]:
            if what is not Copied.WEIGHTS or not store.is_read_while_gathered:
                store.release(what)

    @torch.no_grad()
    def publish(self, group: str) -> None:
        """Copy the master weights of a parameter group to its stored weights."""
        for store in self._by_group.get(group, ()):
            if store.main is not store.stored:
                store.open_weights()
                store.stored.copy_(store.main)

    def gather_all(self) -> None:
        """Gather all weights. Collective over the replicas."""
        for store in self:
            store.fetch(Copied.WEIGHTS)
        for wait in [store.start_gather() for store in self]:
            wait()

    def close_all(self) -> None:
        """Store the rows of weights written from outside, and free what is kept in shards or on the host."""
        for store in self:
            store.replace_weights()

    def begin_step(self) -> None:
        """Clear the sums, unless updates still need them."""
        for store in self if not self._is_decoupled else ():
            store.clear()

    def clear(self, group: str) -> None:
        """Clear the sums of a parameter group behind its update."""
        for store in self._by_group[group]:
            store.clear()

    @torch.no_grad()
    def complete(self) -> None:
        """Complete the sums of the step. Collective over all groups that share a parameter.

        1. Sums that the list has not reduced are reduced over the replicas.
        2. Parameters that tensor ranks share: the sum over them, or the mean where megatron-core takes it.
        3. A tied embedding at both ends of the pipeline: the sum of both.
        """
        for store in self:
            if not store.is_reduced:
                # One after the other: a reduction sends a copy.
                store.start_reduction("gradients")()
        self._share_over_tensor_ranks()
        collection = self._groups.collection
        if self._groups.ends:
            self._share_between_unlike_ends()
        elif collection.embd is not None and collection.embd.size() > 1:
            self._share_between_ends(collection.embd)

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a factor."""
        for store in self:
            store.total *= factor

    def _share_over_tensor_ranks(self) -> None:
        """Step 2."""
        group = self._groups.collection.tp
        if group.size() == 1:
            return
        names = {id(parameter): name for chunk in self._chunks for name, parameter in chunk.named_parameters()}
        summed: list[Tensor] = []
        averaged: list[Tensor] = []
        for store in self:
            for shard in store.shards:
                name, config = names[id(shard.parameter)], self._chunks[0].config
                normed = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
                if getattr(shard.parameter, "average_gradients_across_tp_domain", False):
                    averaged.append(shard.gradient)
                elif normed or (config.sequence_parallel and getattr(shard.parameter, "sequence_parallel", False)):
                    summed.append(shard.gradient)
        for gradients, divisor in ((summed, 1), (averaged, group.size())):
            if gradients:
                joined = torch.cat(gradients)
                dist.all_reduce(joined, group=group)
                sums = (joined / divisor).split([gradient.numel() for gradient in gradients])
                for gradient, total in zip(gradients, sums, strict=True):
                    gradient.copy_(total)

    def _tied(self) -> tuple[ParameterStore, torch.nn.Parameter] | None:
        """The tied weight at this end of the pipeline, and its store."""
        chunk = self._chunks[0 if self._groups.stage == 0 else -1]
        model: Any = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        weight = _get_shared_word_embedding_weight(model, chunk.config)
        if weight is None:
            return None
        return next((store, weight) for store in self if any(weight is parameter for parameter in store.parameters))

    def _share_between_ends(self, ends: dist.ProcessGroup) -> None:
        """Step 3 where stages are alike: rank i of one end and rank i of the other hold the same rows."""
        tied = self._tied()
        if tied is None:
            return
        store, weight = tied
        _, row = store.own_row(weight)
        dist.all_reduce(row, group=ends)
        if store.zero_level == 0:
            store.share_sums()

    def _share_between_unlike_ends(self) -> None:
        """Step 3 where stages are unlike: every replica brings its row, and keeps its share of the sum."""
        tied = self._tied()
        if tied is None:
            return
        store, weight = tied
        total = torch.zeros(weight.numel(), dtype=torch.float32, device=store.total.device)
        first, row = store.own_row(weight)
        total[first : first + row.numel()] = row
        for rows in self._groups.ends:
            dist.all_reduce(total.view(weight.shape).chunk(rows.blocks)[rows.block], group=rows.group)
        for shard in store.shards:
            if shard.parameter is weight:
                shard.gradient.copy_(total[shard.first : shard.last])


def _together(waits: Sequence[Wait]) -> Wait:
    def wait() -> None:
        for finish in waits:
            finish()

    return wait
