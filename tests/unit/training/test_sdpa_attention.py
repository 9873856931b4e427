"""Attention without Transformer Engine against an obvious one and megatron-core's own: windows, sinks, documents, dropout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.training.model.layers import attention as layers
from megatron.training.model.layers.attention import SdpaAttention, masks_groups
from tests.unit.runtime.one_process import MOE, batch, loss_of, small

S, B = 7, 2
SINKS = ("vanilla", "off-by-one", "learnable")


def attention(
    scale: float | None = None,
    dropout: float = 0.0,
    sequence_parallel: bool = False,
    window: int | None = None,
    sinks: str = "vanilla",
) -> SdpaAttention:
    config = SimpleNamespace(
        attention_dropout=dropout,
        sequence_parallel=sequence_parallel,
        context_parallel_size=1,
        window_size=None if window is None else (window, 0),
        window_attn_skip_freq=None,
        softmax_type=sinks,
        num_attention_heads=4,
        params_dtype=torch.float64,
        init_method=torch.nn.init.normal_,
    )
    if sinks == "learnable":
        small(MOE).stock()  # the sinks are drawn from the tracked generator
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    return SdpaAttention(config, 1, None, "self", softmax_scale=scale, pg_collection=groups)


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """One sample, head and position after the other. `forbidden`: [B, S, S]; `sinks`: a logit per head, without a value."""
    heads, groups = query.shape[2], key.shape[2]
    out = torch.zeros(query.shape[0], query.shape[1], heads, value.shape[3], dtype=query.dtype)
    for sample in range(query.shape[1]):
        for head in range(heads):
            group = head // (heads // groups)
            for place in range(query.shape[0]):
                allowed = [other for other in range(key.shape[0]) if not forbidden[sample, place, other]]
                scores = [query[place, sample, head] @ key[other, sample, group] * scale for other in allowed]
                weights = torch.softmax(torch.stack(scores if sinks is None else [*scores, sinks[head]]), 0)
                out[place, sample, head] = sum(
                    weight * value[other, sample, group]
                    for weight, other in zip(weights[: len(allowed)], allowed, strict=True)
                )
    return out.flatten(2)


def forbidden_to(window: int | None, documents: bool) -> Tensor:
    """[B, S, S], true where a query may not look."""
    forbidden = torch.ones(B, S, S).bool()
    for query in range(S):
        first = 0 if window is None else max(0, query - window)
        forbidden[:, query, first : query + 1] = False
    if documents:
        forbidden[1, 4:, :4] = True  # a document ends inside the second sample
    return forbidden


def assert_equal_to_the_slow_one(
    module: SdpaAttention, groups: int, value_width: int, scale: float | None, documents: bool
) -> None:
    torch.manual_seed(groups + value_width)
    query, key = torch.randn(S, B, 4, 6).double(), torch.randn(S, B, groups, 6).double()
    value = torch.randn(S, B, groups, value_width).double()
    mask = forbidden_to(None, documents).unsqueeze(1) if documents else None
    fast = [x.clone().requires_grad_() for x in (query, key, value)]
    slow = [x.clone().requires_grad_() for x in (query, key, value)]
    sinks = module.softmax_offset
    slow_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    out = module(*fast, mask)
    forbidden = forbidden_to(module.window, documents)
    expected = slow_attention(*slow, forbidden, 6**-0.5 if scale is None else scale, slow_sinks)
    assert out.shape == (S, B, 4 * value_width)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for mine, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    if isinstance(sinks, torch.nn.Parameter):
        assert slow_sinks is not None and slow_sinks.grad is not None and slow_sinks.grad.abs().min() > 1e-6
        torch.testing.assert_close(sinks.grad, slow_sinks.grad)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("value_width", [6, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_equals_the_slow_one(groups: int, value_width: int, scale: float | None, documents: bool) -> None:
    assert_equal_to_the_slow_one(attention(scale), groups, value_width, scale, documents)


@pytest.mark.parametrize("window", [None, 0, 2, 9])
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("groups, value_width, scale", [(2, 4, None), (4, 6, 0.3)])
@pytest.mark.parametrize("documents", [False, True])
def test_windows_and_sinks_equal_the_slow_ones(
    window: int | None, sinks: str, groups: int, value_width: int, scale: float | None, documents: bool
) -> None:
    module = attention(scale, window=window, sinks=sinks)
    assert isinstance(module.softmax_offset, torch.nn.Parameter) == (sinks == "learnable")
    assert_equal_to_the_slow_one(module, groups, value_width, scale, documents)


@pytest.mark.parametrize("window, sinks", [(None, "vanilla"), (2, "vanilla"), (2, "learnable")])
@pytest.mark.parametrize("documents", [False, True])
def test_on_a_gpu_grouped_queries_meet_no_mask(
    window: int | None, sinks: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would keep the scores of all heads there: its fused kernels take one of the two."""
    seen, fused = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        seen.append((arguments["attn_mask"] is not None, arguments["enable_gqa"]))
        return fused(query, key, value, **arguments)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(layers, "masks_groups", lambda device: False)
    assert not masks_groups(torch.device("cuda", 0)) and masks_groups(torch.device("cpu"))
    assert_equal_to_the_slow_one(attention(window=window, sinks=sinks), 2, 4, None, documents)
    is_masked = documents or window is not None
    assert seen == [(is_masked, not is_masked)]


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("layer", [1, 2])
def test_windows_and_sinks_mean_what_megatron_core_means(sinks: str, layer: int) -> None:
    """Layer 1 has a window, layer 2 is skipped."""
    groups = small(MOE).groups.collection
    seed = small(MOE).stock  # seeds the tracked generator
    config = TransformerConfig(
        num_layers=2,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        window_size=(2, 0),
        window_attn_skip_freq=2,
        softmax_type=sinks,
        masked_softmax_fusion=False,
        params_dtype=torch.float32,
    )
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    seed()
    theirs = DotProductAttention(config, layer, AttnMaskType.causal, "self", pg_collection=groups)
    ours = SdpaAttention(config, layer, AttnMaskType.causal, "self", pg_collection=groups)
    assert ours.window == (2 if layer == 1 else None)
    if sinks == "learnable":
        with torch.no_grad():
            ours.softmax_offset.copy_(theirs.softmax_offset.normal_())
    x = [torch.randn(S, B, heads, 6) for heads in (4, 2, 2)]
    expected = theirs(*x, torch.ones(S, S).triu(1).bool().view(1, 1, S, S))
    torch.testing.assert_close(ours(*x, None), expected)


@pytest.mark.parametrize(
    "skipped",
    [
        "",
        "--window-attn-skip-freq 2",
        "--window-attn-skip-freq [0,1]",
        "--window-attn-skip-freq 2 --mtp-num-layers 2",
        "--window-attn-skip-freq [0,1,0,1] --mtp-num-layers 2",
    ],
)
def test_layers_have_the_windows_of_the_description(skipped: str) -> None:
    made = small(f"{MOE} --window-size 2,0 {skipped}")
    model: Any = made.stock()
    layers = list(model.decoder.layers)
    layers += [layer.transformer_layer for layer in model.mtp.layers] if "--mtp" in skipped else []
    built = [layer.self_attention.core_attention.window for layer in layers]
    assert built == [None if keys is None else keys - 1 for keys in made.model.windows]


def test_a_model_of_windows_and_sinks_looks_no_further() -> None:
    """A token outside every window changes no later loss; sinks are learnt."""
    model = small(f"{MOE} --window-size 2,0 --softmax-type learnable").stock()
    tokens, positions, labels = batch()
    before = model(tokens, positions, None, labels=labels)
    tokens[:, 0] = (tokens[:, 0] + 1) % 64
    changed = (model(tokens, positions, None, labels=labels) - before).abs().amax(0) > 0
    assert changed[:5].all() and not changed[5:].any()  # two layers look back two tokens each
    loss_of(model).backward()
    sinks = [weight for name, weight in model.named_parameters() if name.endswith("softmax_offset")]
    assert [tuple(weight.shape) for weight in sinks] == [(4,)] * 2
    assert all(weight.grad.abs().max() > 0 and weight.tensor_model_parallel for weight in sinks)


def uses(random: Any) -> tuple[bool, bool]:
    """Whether running this moves the tracked generator state, and whether it moves the default one."""
    tracker = get_cuda_rng_tracker()
    tracked, default = tracker.get_states()["model-parallel-rng"].clone(), torch.get_rng_state()
    random()
    moved = tracker.get_states()["model-parallel-rng"]
    return not torch.equal(tracked, moved), not torch.equal(default, torch.get_rng_state())


def test_dropout_draws_from_the_tracked_generator() -> None:
    small(MOE).stock()
    q = torch.randn(S, B, 4, 6)
    module = attention(dropout=0.5)
    assert uses(lambda: module(q, q, q, None)) == (True, False)
    with_sequence_parallel = attention(dropout=0.5, sequence_parallel=True)
    # There the layer's caller has forked the tracker already: a second fork would draw the same mask again.
    assert uses(lambda: with_sequence_parallel(q, q, q, None)) == (False, True)
    assert not torch.equal(module(q, q, q, None), module(q, q, q, None))
    module.eval()
    assert uses(lambda: module(q, q, q, None)) == (False, False)
    assert torch.equal(module(q, q, q, None), attention()(q, q, q, None))
