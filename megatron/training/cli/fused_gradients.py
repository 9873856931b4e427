"""Whether the matrix products of a run accumulate weight gradients themselves, and with whose kernels. No torch.

The kernel multiplies and adds to the parameter's sum over micro-batches in fp32 (`main_grad`): the product is neither rounded to
the weights' type nor written, read and added separately. Transformer Engine's modules have a kernel of their own;
megatron-core's linears call NVIDIA apex's, `fused_weight_gradient_mlp_cuda`.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from megatron.training.cli.config import Config
from megatron.training.cli.start import StartMachine
from moe_overlap.plan.capabilities import NARROW
from moe_overlap.plan.plan import Plan

OFF = "--no-gradient-accumulation-fusion"
KERNEL = "fused_weight_gradient_mlp_cuda"
"""The module of apex's kernel; apex is also built without it."""


@dataclass(frozen=True, slots=True)
class GradientFusion:
    """The modules whose products add their weight gradients to the sum themselves.

    Attributes:
        by_transformer_engine: Transformer Engine's modules do.
        by_apex: megatron-core's linears do.
        why_not: the reason if neither does.
    """

    by_transformer_engine: bool = False
    by_apex: bool = False
    why_not: str | None = None


def gradient_fusion(config: Config, plan: Plan, machine: StartMachine) -> GradientFusion:
    """The choice for a run: on if there is a kernel, as in upstream, unless a flag or the machine forbids it."""
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

    A plan of fp8 or fp4 gives the type of the products; the type of the weights is then a setting of training.
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


def kernels_line(config: Config, plan: Plan, machine: StartMachine) -> str:
    """`Transformer Engine 2.9, no apex; weight gradients are accumulated inside the products of …`."""
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
    fused = f"inside the products of {' and '.join(owners)}" if owners else f"by a separate addition ({fusion.why_not})"
    return f"{engine}, {apex}; weight gradients are accumulated {fused}"


def _version() -> str:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
