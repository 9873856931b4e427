"""Multi-token prediction in one process, against its definition written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moe_overlap.describe.model import training_flops_per_token
from moe_overlap.runtime.routing.meter import RouterMeters
from moe_overlap.runtime.spans import SpanRecorder
from moe_overlap.runtime.state.optimizer import named_parts
from tests.unit.runtime.one_process import MOE, SEQUENCE, SHARED, SIZES, VOCABULARY, batch, small

FACTOR = 0.3
AHEAD = f"--mtp-num-layers 2 --mtp-loss-scaling-factor {FACTOR}"
PREDICTION = f"{MOE} {SHARED} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 {AHEAD}"
DENSE = (
    f"{SIZES} --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
    f"--attention-dropout 0 --hidden-dropout 0 {AHEAD}"
)
NO_Z_LOSS = PREDICTION.replace("--moe-z-loss-coeff 1e-3", "")


def masked() -> Tensor:
    """[2, SEQUENCE] loss mask with holes."""
    mask = torch.ones(2, SEQUENCE)
    mask[0, 3] = mask[1, 9] = 0
    return mask


def gradients_of(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def slow_prediction_losses(model: Any) -> list[Tensor]:
    """Mean loss of every prediction layer, position by position as DeepSeek-V3's equations 21 to 24 have it."""
    tokens, positions, labels = batch()
    mask, weight = masked(), model.shared_embedding_or_output_weight()
    weight = weight if model.share_embeddings_and_output_weights else model.output_layer.weight
    rotary = model.rotary_pos_emb(SEQUENCE)
    before = model.decoder(hidden_states=model.embedding(tokens, positions), attention_mask=None, rotary_pos_emb=rotary)
    losses = []
    for depth, layer in enumerate(model.mtp.layers, 1):
        # A token beyond the end is number 0; what is predicted from it does not count.
        later = torch.cat([tokens[:, depth:], torch.zeros(2, depth, dtype=torch.long)], dim=1)
        pairs = [layer.enorm(model.embedding(later, positions)), layer.hnorm(before)]
        joined = torch.cat(pairs, dim=2) @ layer.eh_proj.weight.T
        before = layer.final_layernorm(layer.transformer_layer(joined, attention_mask=None, rotary_pos_emb=rotary)[0])
        logits_BSV = (before @ weight.T).transpose(0, 1)
        counted = [
            F.cross_entropy(logits_BSV[sample, place], labels[sample, place + depth])
            for sample in range(2)
            for place in range(SEQUENCE - depth)
            if mask[sample, place + depth]
        ]
        losses.append(torch.stack(counted).mean())
    return losses


@pytest.mark.parametrize("form", ["", "tied", "one-norm", "two-norms"])
def test_losses_and_gradients_are_those_of_the_definition(form: str) -> None:
    words = NO_Z_LOSS.replace("--untie-embeddings-and-output-weights", "") if form == "tied" else NO_Z_LOSS
    if "norm" in form:
        words = DENSE.replace("--mtp-num-layers", f"--parallel-attention-mlp {form} --mtp-num-layers")
    model: Any = small(words).stock()
    MTPLossAutoScaler.set_loss_scale(torch.ones(1))
    tokens, positions, labels = batch()
    main = model(tokens, positions, None, labels=labels, loss_mask=masked()).mean()
    report = model.prediction_report.view(2, 2)
    found = gradients_of(model, main)

    plain: Any = small(words.partition("--mtp")[0]).stock()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("mtp.")})
    alone = plain(tokens, positions, None, labels=labels).mean()
    assert torch.equal(main, alone)  # the predictions do not show in the loss

    slow = slow_prediction_losses(model)
    for (total, count), loss in zip(report.tolist(), slow, strict=True):
        assert total / count == pytest.approx(loss.item(), rel=1e-6)
    assert report[:, 1].tolist() == [2 * (SEQUENCE - 1) - 2, 2 * (SEQUENCE - 2) - 2]
    by_definition = gradients_of(model, sum(slow, torch.zeros(())) * FACTOR / 2)
    from_main = gradients_of(plain, alone)
    assert found.keys() == by_definition.keys() | from_main.keys()
    for name, gradient in found.items():
        expected = sum(part[name] for part in (by_definition, from_main) if name in part)
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_layers_are_parts_of_their_own_and_count_on_behind_the_decoder() -> None:
    model: Any = small(PREDICTION).adapted(SpanRecorder())
    parts = {part for part, _ in named_parts([model])}
    assert parts == {"embedding", "L0", "L1", "mtp0", "mtp1", "head"}
    assert [layer.transformer_layer.operator for layer in model.mtp.layers] == ["mtp0", "mtp1"]
    assert [layer.transformer_layer.layer_number for layer in model.mtp.layers] == [3, 4]
    meters = RouterMeters([model], 4, 4, torch.device("cpu"))
    tokens, positions, labels = batch()
    model(tokens, positions, None, labels=labels, loss_mask=masked()).mean()
    loads = meters.collect(1, 1)
    assert [(load.layer, load.tokens, sum(load.load)) for load in loads] == [
        (n, 2 * SEQUENCE, 4 * SEQUENCE) for n in range(4)
    ]


def test_operations_of_prediction_layers() -> None:
    """Products counted in the built model; the formula adds attention, which is not counted, and takes norms for products."""
    for words, layers, norms in ((PREDICTION.partition("--mtp")[0], 2, 5), (PREDICTION, 4, 15)):
        built = small(words)
        tokens, positions, labels = batch()
        model = built.stock()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, positions, None, labels=labels, loss_mask=masked())
        attention, normed = layers * 6 * SEQUENCE / 2 * (2 * 32), norms * 6 * 32
        computed = training_flops_per_token(built.model, SEQUENCE)
        assert built.model.vocab_size == VOCABULARY
        assert 3 * counter.get_total_flops() / tokens.numel() == computed - attention - normed
