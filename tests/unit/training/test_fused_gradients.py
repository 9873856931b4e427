"""Weight gradients that products add to DDP's sums themselves: when, by whose kernel, and each gradient exactly once.

apex's kernel is a stand-in (tests/stand_ins), a GPU is claimed. torch fills memory that nobody wrote with nan, so that a gradient
which means nothing cannot pass for zeros.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.tensor_parallel import layers

from megatron.training import optimizer
from megatron.training.cli.arguments import parse
from megatron.training.cli.dry_run import dry_run
from megatron.training.cli.fused_gradients import KERNEL, GradientFusion, gradient_fusion, kernels_line
from megatron.training.cli.packages import is_installed
from megatron.training.cli.start import StartMachine, this_machine
from megatron.training.model.fused_gradients import fuse_weight_gradients
from megatron.training.model.layers.local_modules import GroupedExperts
from moe_overlap.describe.errors import ConfigError
from moe_overlap.runtime.megatron_core.moe_layer import adapt_layer
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.weight_grad.queue import WeightGradQueue
from moe_overlap.runtime.weight_grad.split_linear import defer_weight_gradients
from tests.stand_ins.claim import claim_kernel
from tests.unit.runtime.one_process import MOE, SHARED, Small, loss_of, small

OFF = "--no-gradient-accumulation-fusion"
TIED = MOE.replace("--untie-embeddings-and-output-weights", "")
APEX, BOTH = frozenset({"apex", KERNEL}), frozenset({"transformer_engine", "apex", KERNEL})
CASES = {
    "experts one by one, shared expert": f"{MOE} {SHARED}",
    "tied embedding": TIED,
    "biases": MOE.replace("--disable-bias-linear", ""),
    "full recompute": f"{MOE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "bf16": f"{MOE} --bf16",
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A machine with a GPU and apex's kernel; one entry for every product that the kernel adds."""
    done = claim_kernel(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield done
    torch.use_deterministic_algorithms(False)
    sys.modules.pop(KERNEL, None)


def sums_of(made: Small, model: torch.nn.Module, deferred: bool, passes: int = 2) -> dict[str, torch.Tensor]:
    """DDP's sums over some micro-batches of a model wrapped as a run wraps it."""
    queue = WeightGradQueue()
    if deferred:
        defer_weight_gradients(model, queue)
    (ddp,) = optimizer.wrap_chunks(
        made.config, made.plan, [model], made.groups.collection, weight_gradients_come_later=deferred
    )
    ddp.zero_grad_buffer()
    for micro_batch in range(passes):
        loss_of(ddp, micro_batch).backward()
        queue.run_all()
    return {name: parameter.main_grad.clone() for name, parameter in ddp.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, sum_of in expected.items():
        difference = (found[name] - sum_of).abs().max().item()
        assert difference <= relative * sum_of.abs().max().item(), name  # nan fails, too


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("case", CASES)
def test_sums_are_those_without_fusion(case: str, deferred: bool, calls: list[int]) -> None:
    plain = small(f"{CASES[case]} {OFF}")
    expected = sums_of(plain, plain.adapted(SpanRecorder()), deferred)
    assert not calls
    made = small(CASES[case])
    found = sums_of(made, made.adapted(SpanRecorder()), deferred)
    # 2 micro-batches of the head, and in 2 layers of 2 products of attention, 2 of 4 experts each, 2 of a shared one.
    assert len(calls) == 2 * (1 + 2 * (2 + 8 + (2 if SHARED in CASES[case] else 0)))
    # In bf16 the kernel leaves a rounding of every product out.
    assert_close(found, expected, 2e-2 if case == "bf16" else 1e-6)


def test_a_tied_head_on_a_stage_where_megatron_core_sets_no_mark(calls: list[int]) -> None:
    """So it is on the last stage of a pipeline with prediction layers, whose copy of the embedding is looked up, too."""
    plain, made = small(f"{TIED} {OFF}"), small(TIED)
    expected = sums_of(plain, plain.adapted(SpanRecorder()), deferred=False)
    model: Any = made.adapted(SpanRecorder())
    del model.embedding.word_embeddings.weight.zero_out_wgrad
    assert_close(sums_of(made, model, deferred=False), expected, 1e-6)
    assert calls


def grouped(made: Small) -> torch.nn.Module:
    """Experts as grouped products, as on a GPU without Transformer Engine."""
    adapt = adapt_layer(SpanRecorder(), made.groups.collection)

    def adapted(spec: Any) -> Any:
        spec.submodules.mlp.submodules.experts.module = GroupedExperts
        return adapt(spec)

    return made.adapted(SpanRecorder(), adapted)


@pytest.mark.parametrize("deferred", [False, True], ids=["at once", "deferred"])
def test_grouped_experts_are_left_to_ddp(deferred: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch without rows takes the other path, through linears; what the next one finds must still be added."""
    forward, turns = GroupedExperts.forward, []

    def without_rows_first(self: Any, rows_TH: Any, tokens_per_expert: Any, probs_T: Any) -> Any:
        turns.append(self)
        if turns.count(self) > 1:
            return forward(self, rows_TH, tokens_per_expert, probs_T)
        output_TH, bias = forward(self, rows_TH[:0], torch.zeros_like(tokens_per_expert), probs_T[:0])
        return rows_TH + output_TH.sum(), bias

    monkeypatch.setattr(GroupedExperts, "forward", without_rows_first)
    plain, made = small(f"{MOE} {OFF}"), small(MOE)
    expected = sums_of(plain, grouped(plain), deferred)
    assert_close(sums_of(made, grouped(made), deferred), expected, 1e-6)
    experts = [sum_of for name, sum_of in expected.items() if ".experts." in name]
    assert all(sum_of.abs().max() > 0 for sum_of in experts)
    assert len(calls) == 2 * (1 + 2 * 2)


def chosen(flags: str, packages: frozenset[str], cuda: bool = True) -> GradientFusion:
    made = small(f"{MOE} {flags}")
    return gradient_fusion(made.config, made.plan, StartMachine(cuda, packages))


def test_who_adds_and_why_not() -> None:
    assert chosen("", APEX) == GradientFusion(by_apex=True)
    assert chosen("--bf16", BOTH) == GradientFusion(by_transformer_engine=True, by_apex=True)
    assert chosen("--bf16", frozenset({"transformer_engine"})) == GradientFusion(by_transformer_engine=True)
    assert chosen(OFF, BOTH) == GradientFusion(why_not=OFF)
    assert chosen("", BOTH, cuda=False) == GradientFusion(why_not="no GPU")
    assert chosen("", frozenset({"apex"})) == GradientFusion(why_not="no kernel is installed")
    assert chosen("--bf16 --grad-reduce-in-bf16", BOTH) == GradientFusion(why_not="the sums are in bf16")
    assert chosen("--fp16", BOTH) == GradientFusion(why_not="the sums are in fp16")
    assert chosen("--fp16 --accumulate-allreduce-grads-in-fp32", APEX) == GradientFusion(by_apex=True)


def test_each_kernel_gets_the_modules_that_call_it() -> None:
    made = small(MOE)
    model: Any = made.adapted(SpanRecorder())
    engine = model.decoder.layers[0].self_attention.engine = torch.nn.Identity()
    engine.fuse_wgrad_accumulation = False  # as Transformer Engine's linears name it
    assert fuse_weight_gradients([model], GradientFusion(by_transformer_engine=True)) == 1
    assert engine.fuse_wgrad_accumulation and not model.output_layer.gradient_accumulation_fusion


def test_a_kernel_that_cannot_be_imported_is_named() -> None:
    assert not hasattr(layers, KERNEL) and not is_installed(KERNEL)
    with pytest.raises(ConfigError, match=f"^{KERNEL}: is installed and cannot be imported; .* add {OFF}"):
        fuse_weight_gradients([], GradientFusion(by_apex=True))


def test_a_dry_run_says_what_it_found() -> None:
    made, out = small(MOE), io.StringIO()
    dry_run(parse(MOE.split()), 1, out)
    own = kernels_line(made.config, made.plan, this_machine())
    assert f"\nkernels       {own}\n" in out.getvalue()

    def line(packages: frozenset[str]) -> str:
        return kernels_line(made.config, made.plan, StartMachine(True, packages))

    none = "no Transformer Engine, no apex; weight gradients are accumulated by a separate addition (no kernel is installed)"
    assert line(frozenset()) == none
    linears = "inside the products of megatron-core's linears"
    assert line(APEX) == f"no Transformer Engine, apex; weight gradients are accumulated {linears}"
    assert f"apex without {KERNEL}; " in line(frozenset({"apex"}))
    both = "inside the products of Transformer Engine's modules and megatron-core's linears"
    assert line(BOTH).startswith("Transformer Engine ") and line(BOTH).endswith(both)


def test_sgd_is_the_fused_one_where_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class FusedSGD(torch.optim.SGD):
        """apex's and Transformer Engine's take torch's arguments, and name the momentum in their state as torch does."""

    def inner() -> set[type]:
        sharded = small(f"{MOE} --optimizer sgd").wrapped()[1].chained_optimizers
        return {type(each.optimizer) for each in sharded if not each.is_stub_optimizer}

    monkeypatch.setattr(megatron_optimizer, "SGD", FusedSGD)
    assert inner() == {torch.optim.SGD}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert optimizer.sgd_class() is FusedSGD
    monkeypatch.setattr(optimizer, "sgd_class", lambda: FusedSGD)
    assert inner() == {FusedSGD}
