"""Small models, their requests, and their parts recorded at single batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model, expert_tensor_size
from moe_overlap.tuner.capture.build import World, pretended_world
from moe_overlap.tuner.capture.capture import instrumented
from moe_overlap.tuner.capture.graph import CapturedPart, Implementation, Layout
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request
from moe_overlap.tuner.capture.without_gradients import marked

DENSE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 512 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --make-vocab-size-divisible-by 64 "
    "--attention-dropout 0 --hidden-dropout 0"
)
MOE = (
    f"{DENSE} --group-query-attention --num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 96 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
)
GATED = (
    f"{MOE.replace('--swiglu --disable-bias-linear', '--quick-geglu')} --activation-func-clamp-value 7.0 "
    "--glu-linear-offset 1.0 --window-size 31,0 --softmax-type learnable"
)
"""Gates, biases, windows and sinks as GPT-OSS has them."""
SHARED = "--moe-shared-expert-intermediate-size 48"
LATENT = (
    f"{MOE} --moe-layer-freq [0]+[1] --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 24 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP2_EP2 = f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
CP2 = "--context-parallel-size 2"
AHEAD = "--mtp-num-layers 2"
COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


def request(
    flags: str, implementation: Implementation = "torch", variant: str = NO_RECOMPUTATION, vocabulary: int = 192
) -> Request:
    """The capture request of flags, under the layout in them."""
    config = parse(flags.split()).config
    parallel = config.parallel
    layout = Layout(
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=expert_tensor_size(config),
        sequence_parallel=parallel.sequence_parallel,
        precision="bf16" if config.optimizer.bf16 else "fp32",
    )
    model = describe_model(config, vocabulary)
    return Request(config=config, model=model, layout=layout, implementation=implementation, variant=variant)


@contextmanager
def running(asked: Request, really: bool = False) -> Iterator[tuple[Any, World]]:
    """The instrumented model; really: on values, in a world of one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    with (
        pretended_world(asked.layout) as world,
        instrumented(asked, world, not really) as runner,
        ExitStack() as stack,
    ):
        for name in COLLECTIVES if really else ():
            stack.enter_context(mock.patch.object(dist, name, of_one_rank(getattr(dist, name))))
        yield runner, world


def of_one_rank(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that moves nothing, and then what one rank receives: from itself.

    A real backend's thread may hold a tensor a little longer than the model does, and lifetimes are compared.
    """

    @functools.wraps(collective)
    def run(*words: Any, **named: Any) -> Any:
        result = collective(*words, **named)
        tensors = [word for word in (*words, *named.values()) if isinstance(word, torch.Tensor)]
        with _disable_current_modes(), torch.no_grad():
            for output, given in zip(tensors, tensors[1:], strict=False):
                output.view_as(given).copy_(given)
        return result

    return run


def recorded(asked: Request, points: Sequence[tuple[int, int]], really: bool = False) -> dict[str, list[CapturedPart]]:
    """Kind -> the part at each point, with constant numbers."""
    with running(asked, really) as (runner, _):
        return {
            kind: [runner.record(piece, *point) for point in points] for kind, piece in runner.runnable_parts.items()
        }


def marked_parts(asked: Request, point: tuple[int, int], has_ends: bool = False) -> dict[str, CapturedPart]:
    """The layers of a request at a batch, with the marks of their passes without gradients.

    Args:
        has_ends: embedding and head, too, which have no such marks.
    """
    with running(asked) as (runner, _):
        return {
            kind: marked(runner.record(piece, *point), *runner.record_without_gradients(piece, *point))
            if piece.is_layer
            else runner.record(piece, *point)
            for kind, piece in runner.runnable_parts.items()
            if piece.is_layer or has_ends
        }
