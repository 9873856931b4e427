"""Whether a run adds weight gradients up inside the products that make them, and by whose kernels. No torch.

The kernel multiplies and adds to the parameter's sum over micro-batches in fp32 (`main_grad`): the product is neither rounded to
the weights' type nor written, read and added once more. Transformer Engine's modules have one of their own; megatron-core's
linears call NVIDIA apex's, `fused_weight_gradient_mlp_cuda`.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from megatron.training.cli.config import Config
from megatron.training.cli.start import Machine
from moe_overlap.plan.capabilities import NARROW
from moe_overlap.plan.plan import Plan

OFF = "--no-gradient-accumulation-fusion"
KERNEL = "fused_weight_gradient_mlp_cuda"
"""The module of apex's kernel; apex is also built without it."""


@dataclass(frozen=True, slots=True)
class GradientFusion:
    """Whose products add their weight gradients to the sum themselves.

    Attributes:
        by_transformer_engine: those of Transformer Engine's modules.
        by_apex: those of megatron-core's linears.
        why_not: the reason where neither do.
    """

    by_transformer_engine: bool = False
    by_apex: bool = False
    why_not: str | None = None


def gradient_fusion(config: Config, plan: Plan, machine: Machine) -> GradientFusion:
    """The choice for a run: on where a kernel is there, as upstream's, unless a flag or the machine says otherwise."""
    engine, apex = "transformer_engine" in machine.packages, KERNEL in machine.packages
    why_not = None
    if not config.optimizer.gradient_accumulation_fusion:
        why_not = OFF
    elif not machine.cuda:
        why_not = "no GPU"
    elif not (engine or apex):
        why_not = "no kernel is installed"
    elif not sums_in_fp32(config, plan):
        why_not = f"the sums are in {weight_kind(config, plan)}"
    return GradientFusion(why_not=why_not) if why_not else GradientFusion(engine, apex)


def weight_kind(config: Config, plan: Plan) -> str:
    """The type of weights and activations, `fp32`, `bf16` or `fp16`; master weights are fp32.

    A plan of fp8 or fp4 names the type of the products; which type the weights have then is a setting of training.
    """
    if plan.precision in NARROW:
        return "fp16" if config.precision.fp16 else "bf16" if config.optimizer.bf16 else "fp32"
    return plan.precision


def sums_in_fp32(config: Config, plan: Plan) -> bool:
    """Whether gradients are summed and reduced in fp32."""
    kind, optimizer = weight_kind(config, plan), config.optimizer
    return optimizer.accumulate_allreduce_grads_in_fp32 or (
        kind == "fp32" or (kind == "bf16" and not optimizer.grad_reduce_in_bf16)
    )


def kernels_line(config: Config, plan: Plan, machine: Machine) -> str:
    """`Transformer Engine 2.9, no apex; weight gradients are added up in the products of Transformer Engine's modules`."""
    engine = f"Transformer Engine {_version()}" if "transformer_engine" in machine.packages else "no Transformer Engine"
    apex = "apex" if KERNEL in machine.packages else "no apex"
    if "apex" in machine.packages and apex == "no apex":
        apex = f"apex without {KERNEL}"
    fusion = gradient_fusion(config, plan, machine)
    owners = [
        owner
        for owner, on in (
            ("Transformer Engine's modules", fusion.by_transformer_engine),
            ("megatron-core's linears", fusion.by_apex),
        )
        if on
    ]
    fused = f"in the products of {' and '.join(owners)}" if owners else f"behind the products ({fusion.why_not})"
    return f"{engine}, {apex}; weight gradients are added up {fused}"


def _version() -> str:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
