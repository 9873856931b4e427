"""Features that upstream's flags ask of megatron-core, on the CPU: each against a run without it or against its formula."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.training.cli.arguments import parse
from megatron.training.cli.flags.without_effect import idle_flags
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.runtime.groups import stage_rank_sets
from tests.unit.runtime.one_process import MOE, SEQUENCE, SHARED, SIZES, loss_of, small

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


def test_gates_and_linear_halves_are_clamped_and_shifted() -> None:
    """One row through an MLP with biases by the formula of GPT-OSS."""
    words = "--quick-geglu --activation-func-clamp-value 0.02 --glu-linear-offset 1.0"
    mlp = small(f"{SIZES} {words}").stock().decoder.layers[0].mlp
    with torch.no_grad():
        mlp.linear_fc1.bias.normal_(std=0.05)
    x = torch.randn(5, 1, 32)
    gate, up = (x @ mlp.linear_fc1.weight.t() + mlp.linear_fc1.bias).chunk(2, -1)
    gate, up = (
        torch.minimum(gate, torch.tensor(0.02)),
        torch.minimum(torch.maximum(up, torch.tensor(-0.02)), torch.tensor(0.02)),
    )
    expected = (gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)) @ mlp.linear_fc2.weight.t()
    output, bias = mlp(x)
    torch.testing.assert_close(output, expected)
    assert bias is not None and mlp.linear_fc1.weight.shape[0] == 2 * 4 * 32


def test_a_clamped_swiglu_is_not_the_unclamped_one() -> None:
    plain, clamped, shifted = (
        loss_of(small(f"{MOE} {words}").stock())
        for words in ("", "--activation-func-clamp-value 0.01", "--glu-linear-offset 1.0")
    )
    assert plain != clamped and plain != shifted


def test_yarn_without_extension_is_plain_rotation() -> None:
    rotary, yarn = MOE, MOE.replace("type rope", "type yarn")
    assert torch.equal(loss_of(small(f"{yarn} --rotary-scaling-factor 1").stock()), loss_of(small(rotary).stock()))


def test_yarn_extends_as_its_paper_says() -> None:
    """Section 3.4 of the paper (Peng et al. 2023): frequencies by how often they rotate, scores by 0.1 ln s + 1."""
    settings = (
        "--rotary-scaling-factor 8 --yarn-original-max-position-embeddings 64 --rotary-base 1000 --kv-channels 16"
    )
    flags = f"{MOE.replace('type rope', 'type yarn')} {settings} --yarn-beta-fast 8 --yarn-beta-slow 2"
    model = small(f"{flags} --no-yarn-correction-range-round-to-int").stock()
    angles, scale = model.rotary_pos_emb(SEQUENCE)
    assert scale == pytest.approx(0.1 * math.log(8) + 1)
    # megatron-core ramps over the index of the dimension, between those that rotate 8 times and twice.
    low, high = (16 * math.log(64 / (rotations * 2 * math.pi)) / (2 * math.log(1000)) for rotations in (8, 2))
    for dimension in range(8):
        kept = 1 - min(max((dimension - low) / (high - low), 0), 1)
        frequency = 1000 ** (-2 * dimension / 16)
        expected = torch.arange(SEQUENCE) * frequency * (kept + (1 - kept) / 8)
        torch.testing.assert_close(angles[:, 0, 0, dimension], expected, rtol=1e-5, atol=1e-6)
    assert 0 < low < high < 8


def test_low_frequencies_are_scaled_as_llama_does() -> None:
    plain, scaled = (small(f"{MOE} --rotary-base 500000 {words}").stock() for words in ("", "--use-rope-scaling"))
    before, after = plain.rotary_pos_emb.inv_freq, scaled.rotary_pos_emb.inv_freq
    assert torch.equal(before[:1], after[:1])
    torch.testing.assert_close(before[-1], after[-1] * 8)


def test_experts_in_a_latent_space_as_wide_as_the_model() -> None:
    """With the identity as both projections they are the plain experts."""
    plain = small(f"{MOE} {SHARED}").stock()
    latent = small(f"{MOE} {SHARED} --moe-latent-size 32").stock()
    named = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in latent.named_parameters():
            weight.copy_(torch.eye(32) if "latent_proj" in name else named[name])
    for model in (plain, latent):
        loss_of(model).backward()
    assert torch.allclose(loss_of(plain), loss_of(latent), rtol=1e-6)
    compared = 0
    for name, weight in latent.named_parameters():
        if "latent_proj" in name:
            assert weight.grad.abs().max() > 0
        else:
            compared += 1
            assert (weight.grad - named[name].grad).abs().max() <= 1e-5 * named[name].grad.abs().max()
    assert compared == len(named) > 20


def test_settings_without_what_they_are_settings_of_are_said() -> None:
    words = (
        "--yarn-beta-fast 8 --no-yarn-correction-range-round-to-int --mscale 2 --glu-linear-offset 1 "
        "--window-attn-skip-freq 2 --use-rope-scaling --moe-latent-size 8"
    )
    said = dict(idle_flags(parse([*SIZES.split(), *words.split()])))
    assert said["--yarn-beta-fast"] == "counts with --position-embedding-type yarn only"
    assert said["--mscale"] == "counts with --position-embedding-type yarn or --multi-latent-attention only"
    assert set(said) == {word for word in words.split() if word.startswith("--")}
    yarn = "--position-embedding-type yarn --swiglu --window-size 4,0 --num-experts 2"
    assert dict(idle_flags(parse([*SIZES.split(), *words.split(), *yarn.split()]))).keys() == {"--use-rope-scaling"}


def test_settings_of_what_is_off_are_said() -> None:
    words = (
        "--moe-overlap-range after --max-deferred-bytes 9 --sgd-momentum 0.5 --profile-step-start 3 --profile-step-end 4 "
        "--timing-log-option all"
    ).split()
    said = dict(idle_flags(parse([*SIZES.split(), *words])))
    assert said["--profile-step-end"] == "counts with --profile only"
    assert said["--moe-overlap-range"] == "counts with --moe-overlap-partitions 2 or more only"
    assert set(said) == {word for word in words if word.startswith("--")}
    on = "--moe-overlap-partitions 2 --defer-weight-gradients --optimizer sgd --timing-log-level 1 --profile"
    on = f"{on} --use-pytorch-profiler"
    assert idle_flags(parse([*SIZES.split(), *words, *on.split()])) == []


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
    less = plan.with_global_batch(8)
    assert (plan.stages[0].gradient_accumulation_steps, less.stages[0].gradient_accumulation_steps) == (4, 2)
    assert less.with_global_batch(16) == plan
