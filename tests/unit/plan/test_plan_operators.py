"""The vocabulary: construction and parsing are inverse, nothing else is a name."""

from __future__ import annotations

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import (
    BACKWARD,
    Operator,
    backward_parts,
    boundary_operator,
    layer_operator,
    layer_parts,
    parse_operator,
    weight_gradient,
)

NAMES = {
    "embedding": Operator("embedding"),
    "embedding.backward": Operator("embedding", suffix="backward"),
    "embedding.word.dW": Operator("embedding", weight="word", suffix="dW"),
    "L3.attention": Operator("attention", layer=3),
    "L3.attention.qkv.dW": Operator("attention", layer=3, weight="qkv", suffix="dW"),
    "L3.attention.dW": Operator("attention", layer=3, suffix="dW"),
    "L12.mlp.recompute": Operator("mlp", layer=12, suffix="recompute"),
    "L0.moe.dispatch.backward": Operator("moe.dispatch", layer=0, suffix="backward"),
    "L0.moe.count.recompute": Operator("moe.count", layer=0, suffix="recompute"),
    "L0.moe.experts.fc2.dW": Operator("moe.experts", layer=0, weight="fc2", suffix="dW"),
    "mtp0.attention": Operator("attention", mtp=0),
    "mtp0.moe.combine.backward": Operator("moe.combine", mtp=0, suffix="backward"),
    "mtp1.loss": Operator("loss", mtp=1),
    "head.norm": Operator("head.norm"),
    "head.loss.backward": Operator("head.loss", suffix="backward"),
    "send.S0>S1": Operator("send.S0>S1"),
    "receive.S3>S0.backward": Operator("receive.S3>S0", suffix="backward"),
    "gradients": Operator("gradients"),
    "gradients.L3": Operator("gradients", layer=3),
    "gradients.embedding": Operator("gradients.embedding"),
    "parameters.L3": Operator("parameters", layer=3),
    "optimizer.norm": Operator("optimizer.norm"),
    "optimizer.L3": Operator("optimizer", layer=3),
    "optimizer.mtp0": Operator("optimizer", mtp=0),
    "optimizer.head": Operator("optimizer.head"),
    "offload.L3.activations": Operator("offload.activations", layer=3),
    "prefetch.embedding.weights": Operator("prefetch.embedding.weights"),
}

WRONG = [
    "", "L3", "L3.", "attention", "L03.attention", "L-1.attention", "L3.moe", "L3.moe.count.backward",
    "L3.moe.dispatch.dW", "L3.attention.fc1.dW", "L3.attention.qkv", "L3.attention.qkv.backward",
    "L3.attention.backward.backward", "l3.attention",
    "L3.attention ", "L3.loss", "mtp0.embedding", "head", "optimizer", "optimizer.L3.backward", "send.S0",
    "send.S0>S1.dW",
    "offload.L3", "offload.L3.biases", "gradients.norm", "mtp0", "send.S00>S1",
]  # fmt: skip


@pytest.mark.parametrize(("name", "operator"), NAMES.items())
def test_parse_and_print(name: str, operator: Operator) -> None:
    assert parse_operator(name) == operator
    assert str(operator) == name


@pytest.mark.parametrize("name", WRONG)
def test_not_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--range.*: not an operator name; use a name such as L0\.attention"):
        parse_operator(name, "--range")


def test_constructors() -> None:
    assert layer_operator(3, "moe.dispatch") == "L3.moe.dispatch"
    assert layer_operator(3, "moe.dispatch", BACKWARD) == "L3.moe.dispatch.backward"
    assert weight_gradient(3, "moe.experts", "fc2") == "L3.moe.experts.fc2.dW"
    assert boundary_operator("receive", 0, 1, backward=True) == "receive.S0>S1.backward"


def test_orders_of_a_layer() -> None:
    assert layer_parts(moe=False, shared_expert=True, exchanges=True) == ("attention", "mlp")
    assert layer_parts(moe=True, shared_expert=True, exchanges=True) == (
        "attention", "moe.gate", "moe.count", "moe.dispatch", "moe.shared", "moe.experts", "moe.combine", "moe.merge",
    )  # fmt: skip
    assert layer_parts(moe=True, shared_expert=False, exchanges=False) == (
        "attention", "moe.gate", "moe.experts", "moe.merge",
    )  # fmt: skip
    assert backward_parts(moe=True, shared_expert=True, exchanges=True) == (
        "moe.merge", "moe.combine", "moe.experts", "moe.shared", "moe.dispatch", "moe.gate", "attention",
    )  # fmt: skip


def test_every_operator_has_one_kind() -> None:
    for name, operator in NAMES.items():
        kinds = (operator.is_compute, operator.is_collective, operator.is_point_to_point, operator.is_copy)
        assert sum(kinds) == 1, name
    collective = {name for name, operator in NAMES.items() if operator.is_collective}
    assert collective == {
        "L0.moe.dispatch.backward", "L0.moe.count.recompute", "mtp0.moe.combine.backward", "gradients", "gradients.L3",
        "gradients.embedding", "parameters.L3", "optimizer.norm",
    }  # fmt: skip
