"""The backward pass of matrix products in two: the input's gradient at once, the weights' gradient as a closure in a queue.

`defer_weight_gradients` converts a built model chunk before DDP wraps it. DDP must then be made with
`DistributedDataParallelConfig(delay_wgrad_compute=True)`: it leaves the accumulation of the marked parameters alone and passes
hooks, which are called when the gradient is complete.

Three steps: a `Product` states the two gradients of one kind of matrix product as separate functions; `_Split` runs it under
autograd and puts the weights' gradient into the queue; the functions at the end find the products of a chunk and replace them.
Each product repeats megatron-core's operations in the same order on the same shapes, so that both gradients equal those of the
undivided backward pass bit for bit (tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication,
transformer/moe/moe_utils.py RouterGatingLinearFunction).

Not split, because it would gain nothing: the word embedding (nobody asks for the gradient of its input, and no backward operator
follows it), norms, biases that megatron-core adds outside the product, the shared expert's gate ([1, hidden]), the projections
around experts in a latent space.

S sequence (X: this rank's part of it), B batch, I input width, O output width, T rows, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import (
    ATTENTION,
    EXPERTS,
    GATE,
    HEAD_LOSS,
    MLP,
    SHARED,
    WEIGHT_GRADIENT,
    OperatorId,
    OperatorKind,
    weight_gradient,
)
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.runtime.routing.gate import Gate
from moe_overlap.runtime.weight_grad.delayed_linear import (
    can_delay,
    compute_at_once,
    delayed_parameters,
    drive_by_queue,
)
from moe_overlap.runtime.weight_grad.queue import DeferralError, WeightGradQueue


class Product(Protocol):
    """A product of an input with the parameters of one or several modules; its two gradients are separate functions."""

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The product."""

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Gradient of x, in its shape, with the communication that belongs to it."""

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the parameters, in their order; None for one that was added to the main gradient here."""


@dataclass(frozen=True, slots=True)
class LinearProduct:
    """y = x · Wᵀ + b of a column- or row-parallel linear; parameters: W[O, I], then b[O] if the product adds one.

    Attributes:
        group: tensor-parallel group; only the next two attributes use it.
        reduces_input_gradient: the input is the same on all ranks of the group, its gradient is a sum over them.
        gathers_input: the input is a part of the sequence (x[X, B, I]). Only this rank's part is stored for the weight gradient:
            the rest is gathered a second time.
        into_main_gradient: the product itself adds W's gradient to its main gradient (APEX's kernel).
    """

    group: Any = None
    reduces_input_gradient: bool = False
    gathers_input: bool = False
    into_main_gradient: bool = False

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, I] -> […, O]; the result has the whole sequence."""
        y = torch.matmul(self._whole_sequence(x), parameters[0].t())
        return y + parameters[1] if len(parameters) > 1 else y

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, O] -> […, I]."""
        dx = gradient.matmul(parameters[0])
        if self.gathers_input:
            # Waits at once: megatron-core hides it under the weight gradient's product, which now runs elsewhere.
            part = dx.new_empty((dx.shape[0] // self.group.size(), *dx.shape[1:]))
            dist.reduce_scatter_tensor(part, dx, group=self.group)
            return part
        if self.reduces_input_gradient:
            dist.all_reduce(dx, group=self.group)
        return dx

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """[O, I], and [O] where there is a bias."""
        x_TI = self._whole_sequence(x).contiguous().view(-1, x.shape[-1])
        dy_TO = gradient.contiguous().view(-1, gradient.shape[-1])
        gradients: list[Tensor | None] = [self._weight_gradient(x_TI, dy_TO, parameters[0])]
        return gradients if len(parameters) == 1 else [*gradients, dy_TO.sum(dim=0)]

    def _weight_gradient(self, x_TI: Tensor, dy_TO: Tensor, weight: Any) -> Tensor | None:
        if not self.into_main_gradient:
            return dy_TO.t().matmul(x_TI)
        kernel, in_fp32 = layers.fused_weight_gradient_mlp_cuda, weight.main_grad.dtype == torch.float32
        add = kernel.wgrad_gemm_accum_fp32 if in_fp32 else kernel.wgrad_gemm_accum_fp16
        add(x_TI, dy_TO, weight.main_grad)
        return None

    def _whole_sequence(self, x: Tensor) -> Tensor:
        if not self.gathers_input:
            return x
        # Not megatron-core's process-wide buffer: another layer gathers into that before a deferred product has read it.
        sequence = x.new_empty((x.shape[0] * self.group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(sequence, x.contiguous(), group=self.group)
        return sequence


@dataclass(frozen=True, slots=True)
class GatingProduct:
    """Logits of a gate in the router's precision; parameters: W[E, I], then b[E] where there is one."""

    router_dtype: torch.dtype
    input_dtype: torch.dtype

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, I] -> […, E]."""
        weight_EI, *bias = (parameter.to(self.router_dtype) for parameter in parameters)
        x_TI = x.reshape(-1, x.shape[-1]).to(self.router_dtype)
        logits = torch.addmm(bias[0], x_TI, weight_EI.t()) if bias else torch.mm(x_TI, weight_EI.t())
        return logits.view(*x.shape[:-1], -1)

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[…, E] -> […, I]."""
        dx_TI = torch.mm(gradient.reshape(-1, gradient.shape[-1]), parameters[0].to(self.router_dtype))
        return dx_TI.to(self.input_dtype).view(*gradient.shape[:-1], -1)

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """[E, I], and [E] where there is a bias."""
        dtype = parameters[0].dtype
        dy_TE = gradient.reshape(-1, gradient.shape[-1])
        dw_EI = torch.mm(dy_TE.t(), x.reshape(-1, x.shape[-1]).to(self.router_dtype)).to(dtype)
        return [dw_EI] if len(parameters) == 1 else [dw_EI, dy_TE.sum(dim=0).to(dtype)]


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """The products of all experts of a rank as one; parameters: E matrices [O, I].

    Attributes:
        ends_E: int32, end of the rows of each expert.
        joined: from the E matrices to one tensor [E, O, I], without a copy if they are contiguous in memory.
        gradients: from [T, O], [T, I] and `ends_E` to [E, O, I].
    """

    ends_E: Tensor
    joined: Callable[[Sequence[Tensor]], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor], Tensor]

    def output(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[T, I] -> [T, O]."""
        return F.grouped_mm(x, self.joined(parameters).transpose(1, 2), offs=self.ends_E)

    def input_gradient(self, gradient: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """[T, O] -> [T, I]."""
        return F.grouped_mm(gradient, self.joined(parameters), offs=self.ends_E)

    def weight_gradients(self, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """[O, I] for each expert."""
        return list(self.gradients(gradient, x, self.ends_E).unbind())


Naming = Callable[[torch.nn.Module], Iterable[tuple[str, torch.nn.Module]]]

ATTENTION_LINEARS = {
    "linear_qkv": "qkv",
    "linear_q_proj": "q",
    "linear_q_down_proj": "q_down",
    "linear_q_up_proj": "q_up",
    "linear_kv_down_proj": "kv_down",
    "linear_kv_up_proj": "kv_up",
    "linear_proj": "proj",
}
MLP_LINEARS = {"linear_fc1": "fc1", "linear_fc2": "fc2"}


class SplitModule:
    """The weights of one leaf module whose gradients are deferred.

    Args:
        module: owns the parameters; it gets the method through which DDP passes its hooks. DDP searches modules recursively, so
            only a leaf may have that method.
        parameters: the product's parameters; they are marked for DDP.
    """

    def __init__(self, name: str, module: Any, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.name, self.parameters = name, list(parameters)
        self._hooks: list[Callable[[], None]] = []
        assert next(module.children(), None) is None, f"{name}: not a leaf module"
        module.register_wgrad_accumulation_and_reduce_hooks = self._hooks.append
        for parameter in self.parameters:
            parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def add(self, gradients: Iterable[Tensor | None]) -> None:
        """Add gradients to DDP's, or else autograd's, sums; None: added already."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.add_(gradient)
            elif parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    def announce(self) -> None:
        """Tell DDP that the gradients are complete; it may start to reduce their buckets."""
        wrapped: list[Any] = [parameter for parameter in self.parameters if hasattr(parameter, "main_grad")]
        if len(self._hooks) != len(wrapped):
            raise DeferralError(f"{self.name}: DDP was made without delay_wgrad_compute and would lose its gradient")
        before = [parameter.grad_added_to_main_grad for parameter in wrapped]
        for parameter in wrapped:
            # DDP asserts that a gradient exists before it counts the parameter as ready; the real one is in the sum already.
            # An expanded scalar takes no memory.
            parameter.grad = parameter.new_empty(()).expand_as(parameter)
            parameter.grad_added_to_main_grad = True
        for hook in self._hooks:
            hook()
        for parameter, was_added in zip(wrapped, before, strict=True):
            parameter.grad_added_to_main_grad = was_added


class _Split(torch.autograd.Function):
    """A product whose backward pass returns the input's gradient and puts the weights' gradients into the queue."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Product,
        owners: list[SplitModule],
        queue: WeightGradQueue,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.product, ctx.owners, ctx.queue = product, owners, queue
        ctx.save_for_backward(x, *parameters)
        return product.output(x, parameters)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        dx = ctx.product.input_gradient(gradient, parameters)
        _defer(ctx.queue, ctx.product, ctx.owners, x.detach(), gradient.detach(), parameters)
        return (None, None, None, dx, *(None for _ in parameters))


def _defer(
    queue: WeightGradQueue,
    product: Product,
    owners: list[SplitModule],
    x: Tensor,
    gradient: Tensor,
    parameters: list[Tensor],
) -> None:
    """Put the weight gradients of one product into the queue.

    The closure keeps `x` and `gradient` alive until it runs. Overwriting them in place before that would change the weight
    gradient, so their versions are compared.
    """
    name = owners[0].name
    seen = (x._version, gradient._version)

    def compute() -> None:
        if seen != (x._version, gradient._version):
            raise DeferralError(f"{name}: its input or output gradient was overwritten before it was computed")
        gradients = iter(product.weight_gradients(x, gradient, parameters))
        for owner in owners:
            owner.add([next(gradients) for _ in owner.parameters])

    def announce() -> None:
        for owner in owners:
            owner.announce()

    queue.put(name, compute, (x, gradient), announce=announce)


def defer_weight_gradients(
    chunk: torch.nn.Module, queue: WeightGradQueue, naming: Naming | None = None
) -> tuple[str, ...]:
    """Split the backward pass of a chunk's products, in place.

    Args:
        chunk: a built model chunk, not yet wrapped in DDP.
        queue: receives the closures of every later backward pass.
        naming: chunk -> (operator name, module) of the products to split; default `products_of`.
    Returns:
        The names that the queue will receive, in forward order, each once. Not among them: a gate with its own computation of
            logits, and the head of a stage with the tied embedding; their gradients are not deferred.
    Raises:
        ConfigError: a module computes both gradients at once and cannot be split.
    """
    names: dict[str, None] = {}
    owners: dict[int, SplitModule] = {}
    for name, module in (naming or products_of)(chunk):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            owner = _split_linear(name, module, queue)
        elif isinstance(module, Router):
            owner = _split_gate(name, module, queue)
        elif can_delay(module):
            owner = SplitModule(name, module, delayed_parameters(module))
            drive_by_queue(name, module, queue, owner.add, owner.announce)
        else:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            rule = f"{name} is a {kind}, whose backward pass cannot be split"
            raise ConfigError("--defer-weight-gradients", "", rule, "leave the flag out")
        if owner is not None:
            owners[id(module)] = owner
            names[name] = None
    for module in chunk.modules():
        if hasattr(module, "grouped_product"):
            _split_grouped(module, owners, queue)
    compute_at_once(chunk, set(owners))
    return tuple(names)


def defer_planned(chunks: Iterable[torch.nn.Module], overlap: StageOverlap, queue: WeightGradQueue) -> bool:
    """Split the products whose weight gradients the plan computes under an all-to-all, and no others.

    Args:
        chunks: this rank's built model chunks, not yet wrapped in DDP.
    Returns:
        Whether any was split.
    """
    planned = {name for layer in overlap.layers for names in layer.weight_gradient_slots.values() for name in names}

    def naming(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((name, module) for name, module in products_of(chunk) if name in planned)

    # All or nothing: a planned gradient that is not split would leave its slot in the list without work.
    split = {name for chunk in chunks for name in defer_weight_gradients(chunk, queue, naming)} if planned else set()
    assert split == planned, f"planned but not in this stage's model: {sorted(planned - split)}"
    return bool(planned)


def products_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every product of a chunk that can be split, with its name, in forward order; a layer's experts share one name."""
    model: Any = chunk
    while not hasattr(model, "decoder"):
        model = model.module
    assert not getattr(model, "mtp_process", False), "multi-token prediction uses the head more than once"
    for layer in model.decoder.layers:
        number = layer.layer_number - 1
        yield from _linears(number, ATTENTION, layer.self_attention, ATTENTION_LINEARS)
        if not hasattr(layer.mlp, "router"):
            yield from _linears(number, MLP, layer.mlp, MLP_LINEARS)
            continue
        yield weight_gradient(number, GATE, "router"), layer.mlp.router
        if layer.mlp.shared_experts is not None:
            yield from _linears(number, SHARED, layer.mlp.shared_experts, MLP_LINEARS)
        for expert in getattr(layer.mlp.experts, "local_experts", [layer.mlp.experts]):
            yield from _linears(number, EXPERTS, expert, MLP_LINEARS)
    if model.post_process and model.output_layer.weight is not None:
        yield str(OperatorId(HEAD_LOSS, weight="output", phase=WEIGHT_GRADIENT)), model.output_layer


def _linears(
    layer: int, operator: OperatorKind, parent: torch.nn.Module, weights: dict[str, str]
) -> Iterator[tuple[str, torch.nn.Module]]:
    for attribute, weight in weights.items():
        module = getattr(parent, attribute, None)
        if module is not None:
            yield weight_gradient(layer, operator, weight), module


def _split_linear(name: str, module: Any, queue: WeightGradQueue) -> SplitModule | None:
    """Replace the function that `forward` of a column- or row-parallel linear calls for its product."""
    if not module.weight.requires_grad:
        return None
    # A row-parallel linear adds its bias after the reduction; with skip_bias_add the caller adds it.
    adds_bias = isinstance(module, ColumnParallelLinear) and not module.skip_bias_add and module.bias is not None
    owner = SplitModule(name, module, (module.weight, module.bias) if adds_bias else (module.weight,))

    def product(
        *,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **embedding_only: Any,
    ) -> Tensor:
        assert weight is module.weight and (bias is not None) == adds_bias, f"{name}: called with other weights"
        linear = LinearProduct(tp_group, allreduce_dgrad, sequence_parallel, gradient_accumulation_fusion)
        return _Split.apply(linear, [owner], queue, input, *owner.parameters)

    # Replaced on the instance: megatron-core's `forward` around the product stays as it is.
    module._forward_impl = product
    return owner


def _split_gate(name: str, module: Any, queue: WeightGradQueue) -> SplitModule | None:
    """Replace the product of a gate, unless its own class computes the logits or there is no weight to train."""
    if type(module).gating not in (Router.gating, Gate.gating) or not module.weight.requires_grad:
        return None
    owner = SplitModule(name, module, (module.weight,) if module.bias is None else (module.weight, module.bias))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        assert weight is module.weight and bias is module.bias, f"{name}: called with other weights"
        return _Split.apply(GatingProduct(dtype, x.dtype), [owner], queue, x, *owner.parameters)

    if isinstance(module, Gate):
        module.linear = linear
        return owner
    precision = {"fp32": torch.float32, "fp64": torch.float64}.get(module.config.moe_router_dtype)
    module.gating = lambda x: linear(x, module.weight, module.bias, precision or x.dtype)
    return owner


def _split_grouped(module: Any, owners: dict[int, SplitModule], queue: WeightGradQueue) -> None:
    """Replace the grouped products of a rank's experts (`grouped_product(rows, linears, ends)`)."""

    def product(rows_TI: Tensor, linears: list[torch.nn.Module], ends_E: Tensor) -> Tensor:
        expert_owners = [owners[id(linear)] for linear in linears]
        # One closure for all experts of the rank: the grouped product computes their gradients together.
        weights = [owner.parameters[0] for owner in expert_owners]
        return _Split.apply(
            GroupedProduct(ends_E, module.joined, module.weight_gradients), expert_owners, queue, rows_TI, *weights
        )

    module.grouped_product = product
