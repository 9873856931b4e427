"""Builds the model for a capture: one layer of every kind, embedding and head, on rank 0 of a pretended world.

The builder of training runs makes the model (`megatron/training/model/build.py`). The world's process groups only name their
peers, so one process without a GPU can build any layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec

import megatron.training.model.build as model_builder
from megatron.training.cli.config import Config, OverlapConfig
from megatron.training.model.build import AdaptLayer, build_model, unwrap
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.describe.model import ModelDescription
from moe_overlap.tuner.capture.graph import Layout, world_size
from moe_overlap.tuner.capture.request import FULL, NO_RECOMPUTATION, layer_kinds, prediction_kinds
from moe_overlap.tuner.capture.stand_ins import replaced

AXES = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "tp_cp": "tp_cp",
    "dp_cp": "dp_cp",
    "tp_dp_cp": "tp_dp_cp",
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "tp_ep",
}
"""Field of megatron-core's collection of process groups -> axis in a captured graph."""


@dataclass(frozen=True, slots=True)
class World:
    """The process groups of rank 0 in a pretended world.

    Attributes:
        axis_of: name of a process group -> axis.
    """

    groups: ProcessGroupCollection
    axis_of: dict[str, str]
    size: int


@contextlib.contextmanager
def pretended_world(layout: Layout) -> Iterator[World]:
    """Rank 0 of the smallest world that holds a layout; only its own groups are created, the peers exist in name."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = world_size(layout)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        groups, axis_of = ProcessGroupCollection(), {}
        for kind, ranks in _ranks_of_groups(layout, size).items():
            group = dist.new_group(list(ranks), group_desc=kind)
            setattr(groups, kind, group)
            if kind in AXES:
                axis_of[group.group_name] = AXES[kind]
        groups.embd = groups.pos_embd = None
        yield World(groups, axis_of, size)
    finally:
        dist.destroy_process_group()


def _ranks_of_groups(layout: Layout, size: int) -> dict[str, range]:
    """The groups of rank 0, in the rank order of `runtime/groups.py`."""
    dense = layout.tensor * layout.context
    experts = layout.expert_tensor * layout.expert
    return {
        "tp": range(layout.tensor),
        "cp": range(0, dense, layout.tensor),
        "dp": range(0, size, dense),
        "tp_cp": range(dense),
        "dp_cp": range(0, size, layout.tensor),
        "tp_dp_cp": range(size),
        "expt_tp": range(layout.expert_tensor),
        "ep": range(0, experts, layout.expert_tensor),
        "expt_dp": range(0, size, experts),
        "tp_ep": range(experts),
        "pp": range(1),
        "mp": range(dense),
        "tp_ep_pp": range(experts),
    }


def config_for(config: Config, layout: Layout, variant: str) -> Config:
    """The flags of a run with one stage under a layout.

    Args:
        variant: the recomputed modules; the caller wraps `full` around the layer, as megatron-core's block does.
    """
    selective = variant not in (NO_RECOMPUTATION, FULL)
    modules: Any = tuple(variant.split("+")) if selective else None
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=1,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
        microbatch_group_size_per_vp_stage=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        recompute_granularity="selective" if selective else None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=modules,
    )
    data = world_size(layout) // (layout.tensor * layout.context)
    return replace(
        config,
        parallel=parallel,
        training=replace(config.training, micro_batch_size=1, global_batch_size=data, rampup_batch_size=None),
        optimizer=replace(config.optimizer, bf16=layout.precision != "fp32"),
        # The other half-precision formats have the same sizes.
        precision=replace(config.precision, fp16=False, fp8=None, fp4=None),
        overlap=OverlapConfig(),
        # Attention is priced as one causal kernel; predicted_flags.py warns that a mask of documents costs more.
        data=replace(config.data, reset_attention_mask=False),
    )


def build_one_of_each(
    config: Config, model: ModelDescription, world: World, adapt_layer: AdaptLayer | None = None
) -> tuple[Any, tuple[str, ...]]:
    """A model with one layer of every kind.

    Returns:
        megatron-core's GPTModel, and the kinds of its layers in order, prediction layers after the decoder's.
    """
    of_layers, of_predictions = layer_kinds(model), prediction_kinds(model)
    # The last layer stays last: prediction layers are of its kind.
    kinds = (*(kind for kind in dict.fromkeys(of_layers) if kind != of_layers[-1]), of_layers[-1])
    ahead = tuple(dict.fromkeys(of_predictions))
    firsts = [of_layers.index(kind) for kind in kinds]
    prediction_layers = [model.num_layers + of_predictions.index(kind) for kind in ahead]
    windows = tuple(model.windows[layer] for layer in (*firsts, *prediction_layers))
    small = replace(
        model,
        num_layers=len(kinds),
        moe_layers=tuple(model.moe_layers[layer] for layer in firsts),
        windows=windows,
        mtp_layers=len(ahead),
    )
    config = replace(
        config,
        model=replace(config.model, num_layers=len(kinds), mtp_num_layers=len(ahead) or None),
        attention=replace(config.attention, window_attn_skip_freq=tuple(int(window is not None) for window in windows)),
    )
    plan = plan_from_flags(config, small, world.size)
    with replaced([(model_builder, "Float16Module", _in_half_precision)]):
        module = build_model(config, small, plan, world.groups, 0, adapt_layer)[0]
    return unwrap(module), (*kinds, *ahead)


def _in_half_precision(tc: Any, module: torch.nn.Module) -> torch.nn.Module:
    """Convert the parameters as megatron-core's Float16Module does; torch cannot convert fake parameters in place."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.dtype != tc.params_dtype:
                converted = torch.nn.Parameter(parameter.detach().to(tc.params_dtype))
                vars(converted).update(vars(parameter))
                setattr(owner, name, converted)
    return module


def stock_layer(spec: ModuleSpec) -> ModuleSpec:
    """megatron-core's own layer; the layer passes the groups to its MoE layer."""
    mlp = spec.submodules.mlp
    if isinstance(mlp, ModuleSpec) and mlp.params:
        mlp.params.pop("pg_collection", None)
    return spec
