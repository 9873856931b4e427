"""The executor's rotation of queries and keys against megatron-core's: the same bits, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_overlap.runtime.executor.bindings import rotary_angles
from moe_overlap.runtime.executor.rotary import rotary_table, rotate_projection
from tests.unit.runtime.one_process import MOE, SEQUENCE, small

YARN = (
    MOE.replace("type rope", "type yarn")
    + " --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 16 --rotary-base 1000 --kv-channels 16"
)
MODELS = {
    "grouped queries": MOE,
    "a query group for each head": MOE.replace("--num-query-groups 2", "--num-query-groups 4"),
    "one query group": MOE.replace("--num-query-groups 2", "--num-query-groups 1"),
    "half of a head": f"{MOE} --rotary-percent 0.5",
    "a scale of its own": YARN,
    "biases": f"{MOE} --add-qkv-bias",
    "bf16": f"{MOE} --bf16",
}
OTHERS = {
    "pairs side by side": f"{MOE} --rotary-interleaved",
    "norms before the rotation": f"{MOE} --qk-layernorm",
}


def attention_of(flags: str) -> tuple[Any, Tensor]:
    """An attention, and the angles that its model hands it."""
    model: Any = small(flags).stock()
    model = getattr(model, "module", model)
    angles = rotary_angles(model, SEQUENCE)
    assert angles is not None
    # Unlike in the two halves of a head, as no model's are: the backward pass must take each from its own half.
    noise = torch.rand(angles.shape, generator=torch.Generator().manual_seed(2))
    return model.decoder.layers[0].self_attention, angles + noise


def passed(attention: Any, angles: Tensor | None) -> list[Tensor]:
    """The output of a pass, and the gradients of its input and its projection."""
    generator = torch.Generator().manual_seed(1)
    weight = attention.linear_qkv.weight
    x, gradient = (torch.randn(SEQUENCE, 3, 32, generator=generator).to(weight.dtype) for _ in range(2))
    weight.grad = None
    output = attention(x.requires_grad_(), None, rotary_pos_emb=angles)[0]
    output.backward(gradient)
    assert x.grad is not None
    return [output.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS)
def test_the_rotation_is_bitwise_megatron_cores(flags: str) -> None:
    attention, angles = attention_of(flags)
    expected, unrotated = passed(attention, angles), passed(attention, None)
    assert rotate_projection(attention, rotary_table(angles, attention.config))
    found = passed(attention, None)
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(unrotated[0], expected[0]), "the angles change nothing: the test shows nothing"


@pytest.mark.parametrize("flags", OTHERS.values(), ids=OTHERS)
def test_another_rotation_stays_megatron_cores(flags: str) -> None:
    attention, angles = attention_of(flags)
    expected = passed(attention, angles)
    assert not rotate_projection(attention, rotary_table(angles, attention.config))
    assert all(map(torch.equal, passed(attention, angles), expected))


def test_another_executor_of_the_same_model_rotates_once() -> None:
    attention, angles = attention_of(MOE)
    expected = passed(attention, angles)
    for _ in range(2):
        assert rotate_projection(attention, rotary_table(angles, attention.config))
    assert all(map(torch.equal, passed(attention, None), expected))


def test_layers_without_positions_stay_without() -> None:
    attention, angles = attention_of(MOE)
    attention.config.no_rope_freq = [1, 0]
    assert not rotate_projection(attention, rotary_table(angles, attention.config))


def test_ranks_that_share_a_query_group_keep_megatron_cores_rotation() -> None:
    attention, angles = attention_of(MOE)
    attention.world_size = attention.config.num_query_groups + 1
    assert not rotate_projection(attention, rotary_table(angles, attention.config))


def test_nobody_rotates_twice() -> None:
    attention, angles = attention_of(MOE)
    rotate_projection(attention, rotary_table(angles, attention.config))
    with pytest.raises(AssertionError, match="a second rotation"):
        passed(attention, angles)
