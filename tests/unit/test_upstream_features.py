"""Features that upstream's flags ask of megatron-core, on the CPU: each against a run without it or against its formula."""

from __future__ import annotations

import pytest
import torch
from one_process import MOE, SHARED, SIZES, loss_of, small

from megatron.training.arguments import parse
from megatron.training.describe import describe_model
from megatron.training.plan_from_flags import plan_from_flags, with_global_batch
from moe_overlap.runtime.groups import stage_rank_sets

LATENT = (
    f"{MOE.replace('--group-query-attention --num-query-groups 2 ', '')} {SHARED} --multi-latent-attention --q-lora-rank 16 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --qk-layernorm"
)


def gradients(flags: str) -> list[torch.Tensor]:
    """Loss and the gradients of all weights."""
    model = small(flags).stock()
    loss = loss_of(model)
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("modules", ["layernorm", "shared_experts", "mla_up_proj", "layernorm mla_up_proj moe mlp"])
def test_recomputed_modules_change_nothing_but_the_order_of_sums(modules: str) -> None:
    """A recomputed norm's gradient joins the others at another moment; a stale or freed tensor would differ by far more."""
    plain = gradients(LATENT)
    again = gradients(f"{LATENT} --recompute-granularity selective --recompute-modules {modules}")
    assert len(plain) == len(again) > 20
    for one, other in zip(plain, again, strict=True):
        assert (one - other).abs().max() <= 1e-6 * one.abs().max()


def test_queries_of_latent_attention_can_be_projected_directly() -> None:
    """Through a latent as wide as the hidden size, with the identity before it, they are the same."""
    direct = small(LATENT.replace("--q-lora-rank 16", "").replace("--qk-layernorm", "")).stock()
    loss_of(direct).backward()
    weights = [weight for name, weight in direct.named_parameters() if "linear_q_proj" in name]
    assert [tuple(weight.shape) for weight in weights] == [(4 * 12, 32)] * 2
    through = small(LATENT.replace("rank 16 --kv", "rank 32 --kv").replace("--qk-layernorm", "")).stock()
    named = dict(direct.named_parameters())
    with torch.no_grad():
        for name, weight in through.named_parameters():
            if "linear_q_down_proj" in name:
                weight.copy_(torch.eye(32))
            else:
                weight.copy_(named[name.replace("linear_q_up_proj", "linear_q_proj")])
    assert torch.allclose(loss_of(through), loss_of(direct), rtol=1e-6)
    loss_of(through).backward()
    again = [weight for name, weight in through.named_parameters() if "linear_q_up_proj" in name]
    for one, other in zip(weights, again, strict=True):
        assert (one.grad - other.grad).abs().max() <= 1e-5 * one.grad.abs().max() > 0


def test_embeddings_have_a_learning_rate_of_their_own() -> None:
    module, optimizer = small(f"{MOE} --decoupled-lr 5e-2 --decoupled-min-lr 1e-2 --min-lr 1e-4").wrapped()
    rates = {(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups}
    assert rates == {(1e-3, 1e-4), (5e-2, 1e-2)}
    apart = [g for optimizer in optimizer.chained_optimizers for g in optimizer.param_groups if g["max_lr"] == 5e-2]
    words = [p for n, p in module.named_parameters() if "word_embeddings" in n or "output_layer" in n]
    assert sum(weight.numel() for group in apart for weight in group["params"]) == sum(
        weight.numel() for weight in words
    )


def test_squared_relu_is_the_square_of_relu() -> None:
    model = small(f"{SIZES} --squared-relu").stock()
    x = torch.linspace(-2, 2, 9)
    assert torch.equal(model.config.activation_func(x), torch.relu(x) ** 2)
    assert model.decoder.layers[0].mlp.linear_fc1.weight.shape[0] == 4 * 32


def test_openai_gelu_is_the_approximation_by_tanh() -> None:
    """Hendrycks and Gimpel, "Gaussian error linear units", section 2; 5e-4 apart from the exact form at most."""
    x = torch.linspace(-3, 3, 25)
    approximate = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    computed = small(f"{SIZES} --openai-gelu").stock().config.activation_func(x)
    assert torch.allclose(computed, approximate, atol=1e-6)
    assert (computed - torch.nn.functional.gelu(x)).abs().max() > 1e-4


def test_stages_of_a_replica_can_be_neighbours() -> None:
    sizes = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    config = parse(f"{SIZES} {sizes}".split()).config
    plan = plan_from_flags(config, describe_model(config, 64), 8)
    assert [stage.devices.ranks for stage in plan.stages] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert stage_rank_sets(plan.stages[1])["tp"] == [(2, 3), (6, 7)]
    assert stage_rank_sets(plan.stages[1])["dp"] == [(2, 6), (3, 7)]


def test_a_plan_for_another_batch() -> None:
    config = parse(f"{SIZES} --global-batch-size 16".split()).config
    plan = plan_from_flags(config, describe_model(config, 64), 2)
    less = with_global_batch(plan, 8)
    assert (plan.stages[0].gradient_accumulation_steps, less.stages[0].gradient_accumulation_steps) == (4, 2)
    assert with_global_batch(less, 16) == plan
