"""The optimizer of parameter stores: torch's or a library's, over each rank's shares of the parameters.

A parameter store (moe_overlap/runtime/state/store.py) gives every rank a flat share of its fp32 weights, gradients and moments.
`row_optimizer` sorts the shards of parameters in these shares into megatron-core's parameter groups of rate and decay and builds
megatron-core's Adam over them. Norms, clipping and zero counts are megatron-core's, which read attributes of the shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    _get_megatron_optimizer_based_on_param_groups,
    _get_param_groups,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes


class RowOptimizer(FP32Optimizer):
    """Steps this rank's shards of one kind of parameters, dense ones or experts.

    Args:
        optimizer: torch's, over `main` of the shards.
        stores: (store, shard), in the order of the parameter groups and of the model.
        places: parameter -> its parameter group in the optimizer and its place there.
    """

    grad_scaler = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        stores: Sequence[tuple[Any, Any]],
        places: dict[torch.nn.Parameter, tuple[int, int]],
    ) -> None:
        super().__init__(optimizer, config, lambda *_: None)
        self.stores, self.model_param_group_index_map = tuple(stores), places

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take the master weights from the model's, while this rank has all rows of them."""
        for store, shard in self.stores:
            store.write_state(shard.main, shard.parameter.detach().view(-1)[shard.first : shard.last])


def row_optimizer(config: OptimizerConfig, chunks: Sequence[Any], groups: ProcessGroupCollection) -> ChainedOptimizer:
    """The optimizers of dense parameters and experts over the shards of stores. Collective over all ranks.

    Args:
        chunks: this rank's `StoredChunk`s.
    """
    # The shards are fp32 weights, whatever type the model has.
    single = dataclasses.replace(config, use_distributed_optimizer=False, bf16=False, params_dtype=torch.float32)
    by_parameter: dict[torch.nn.Parameter, tuple[Any, Any]] = {}
    for store in (store for chunk in chunks for store in chunk.stores):
        by_parameter |= {shard.parameter: (store, shard) for shard in store.shards}
    all_groups = _get_param_groups(list(chunks), single, get_standard_config_overrides(single))
    optimizers = []
    for is_expert, norm_group in ((False, groups.tp), (True, groups.expt_tp)):
        parameter_groups = [group for group in all_groups if group["is_expert_parallel"] == is_expert]
        if not parameter_groups:
            continue
        stores: list[tuple[Any, Any]] = []
        places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        for index, group in enumerate(parameter_groups):
            members = [by_parameter[parameter] for parameter in group["params"] if parameter in by_parameter]
            places |= {shard.parameter: (index, place) for place, (_, shard) in enumerate(members)}
            group["params"] = [_stepped(store, shard) for store, shard in members]
            stores += members
        inner: Any = _get_megatron_optimizer_based_on_param_groups(
            single, list(chunks), parameter_groups, model_parallel_group=groups.intra_dist_opt, pg_collection=groups
        )
        optimizer = RowOptimizer(inner.optimizer, single, stores, places)
        # The norm covers every shard of the model once, over all ranks.
        optimizer.grad_stats_parallel_group, optimizer.tp_group = groups.intra_dist_opt, norm_group
        optimizers.append(optimizer)
    return ChainedOptimizer(optimizers)


def _stepped(store: Any, shard: Any) -> torch.Tensor:
    """The fp32 weights that the optimizer steps, with the attributes that megatron-core's norm reads."""
    main: Any = shard.main
    copy_tensor_model_parallel_attributes(main, shard.parameter)
    main.main_grad = shard.gradient
    # Every replica has all of what ZeRO 0 keeps: the first one counts it.
    if hasattr(shard.parameter, "shared") or (store.zero_level == 0 and store.replicas.rank > 0):
        main.shared = True
    result: torch.Tensor = main
    return result


def allocate_moments(chunks: Sequence[Any], optimizers: Sequence[RowOptimizer]) -> None:
    """Give Adam its moments in the flat storages of the stores, instead of two tensors for every parameter at its first step.

    The fused Adams of Transformer Engine and apex also take states that are there; they count steps by parameter group.
    """
    moments: dict[int, Any] = {}
    for store in (store for chunk in chunks for store in chunk.stores):
        moments |= {id(shard): of_shard for shard, of_shard in zip(store.shards, store.make_moments(2), strict=True)}
    for optimizer in optimizers:
        for _, shard in optimizer.stores:
            first, second = moments[id(shard)]
            state = {"exp_avg": first, "exp_avg_sq": second}
            if isinstance(optimizer.optimizer, torch.optim.Adam):
                group = optimizer.optimizer.param_groups[optimizer.model_param_group_index_map[shard.parameter][0]]
                # torch counts steps on the device where its kernel reads the count.
                device = shard.main.device if group.get("fused") or group.get("capturable") else "cpu"
                state["step"] = torch.tensor(0.0, device=device)
            optimizer.optimizer.state[shard.main] = state
