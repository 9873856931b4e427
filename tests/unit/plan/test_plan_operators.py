"""The vocabulary: construction and parsing are inverse, nothing else is a name."""

from __future__ import annotations

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.operators import (
    BACKWARD,
    COPY_KINDS,
    Copied,
    OperatorId,
    Phase,
    backward_parts,
    boundary_operator,
    layer_operator,
    layer_parts,
    parse_operator,
    weight_gradient,
)
from moe_overlap.plan.operators import OperatorKind as K

NAMES = {
    "embedding": OperatorId(K.EMBEDDING),
    "embedding.backward": OperatorId(K.EMBEDDING, phase=Phase.BACKWARD),
    "embedding.word.dW": OperatorId(K.EMBEDDING, weight="word", phase=Phase.WEIGHT_GRADIENT),
    "L3.attention": OperatorId(K.ATTENTION, layer=3),
    "L3.attention.qkv.dW": OperatorId(K.ATTENTION, layer=3, weight="qkv", phase=Phase.WEIGHT_GRADIENT),
    "L3.attention.dW": OperatorId(K.ATTENTION, layer=3, phase=Phase.WEIGHT_GRADIENT),
    "L12.mlp.recompute": OperatorId(K.MLP, layer=12, phase=Phase.RECOMPUTE),
    "L0.moe.dispatch.backward": OperatorId(K.DISPATCH, layer=0, phase=Phase.BACKWARD),
    "L0.moe.count.recompute": OperatorId(K.COUNT, layer=0, phase=Phase.RECOMPUTE),
    "L0.moe.experts.fc2.dW": OperatorId(K.EXPERTS, layer=0, weight="fc2", phase=Phase.WEIGHT_GRADIENT),
    "mtp0.attention": OperatorId(K.ATTENTION, mtp=0),
    "mtp0.moe.combine.backward": OperatorId(K.COMBINE, mtp=0, phase=Phase.BACKWARD),
    "mtp1.loss": OperatorId(K.LOSS, mtp=1),
    "head.norm": OperatorId(K.HEAD_NORM),
    "head.loss.backward": OperatorId(K.HEAD_LOSS, phase=Phase.BACKWARD),
    "send.S0>S1": OperatorId(K.SEND, stages=(0, 1)),
    "receive.S3>S0.backward": OperatorId(K.RECEIVE, stages=(3, 0), phase=Phase.BACKWARD),
    "gradients": OperatorId(K.GRADIENTS),
    "gradients.L3": OperatorId(K.GRADIENTS, layer=3),
    "gradients.embedding": OperatorId(K.GRADIENTS, end="embedding"),
    "parameters.L3": OperatorId(K.PARAMETERS, layer=3),
    "optimizer.norm": OperatorId(K.NORM),
    "optimizer.L3": OperatorId(K.OPTIMIZER, layer=3),
    "optimizer.mtp0": OperatorId(K.OPTIMIZER, mtp=0),
    "optimizer.head": OperatorId(K.OPTIMIZER, end="head"),
    "offload.L3.activations": OperatorId(K.OFFLOAD, layer=3, copied=Copied.ACTIVATIONS),
    "prefetch.embedding.weights": OperatorId(K.PREFETCH, end="embedding", copied=Copied.WEIGHTS),
}

WRONG = [
    "", "L3", "L3.", "attention", "L03.attention", "L-1.attention", "L3.moe", "L3.moe.count.backward",
    "L3.moe.dispatch.dW", "L3.attention.fc1.dW", "L3.attention.qkv", "L3.attention.qkv.backward",
    "L3.attention.backward.backward", "l3.attention",
    "L3.attention ", "L3.loss", "mtp0.embedding", "head", "optimizer", "optimizer.L3.backward", "send.S0",
    "send.S0>S1.dW",
    "offload.L3", "offload.L3.biases", "gradients.norm", "mtp0", "send.S00>S1",
    # Python reads no number of thousands of digits.
    *(name.format("9" * 5000) for name in (
        "L{}.attention", "mtp{}.attention", "gradients.L{}", "offload.L{}.weights", "send.S0>S{}", "receive.S{}>S0",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operator"), NAMES.items())
def test_parse_and_print(name: str, operator: OperatorId) -> None:
    assert parse_operator(name) == operator
    assert str(operator) == name


@pytest.mark.parametrize("name", WRONG)
def test_not_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--range.*: not an operator name; use a name such as L0\.attention"):
        parse_operator(name, "--range")


def test_constructors() -> None:
    assert layer_operator(3, K.DISPATCH) == "L3.moe.dispatch"
    assert layer_operator(3, K.DISPATCH, BACKWARD) == "L3.moe.dispatch.backward"
    assert weight_gradient(3, K.EXPERTS, "fc2") == "L3.moe.experts.fc2.dW"
    assert boundary_operator(K.RECEIVE, 0, 1, backward=True) == "receive.S0>S1.backward"


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


def test_no_operator_moves_data_in_two_ways() -> None:
    for name, operator in NAMES.items():
        assert sum((operator.is_collective, operator.is_point_to_point, operator.kind in COPY_KINDS)) <= 1, name
    collective = {name for name, operator in NAMES.items() if operator.is_collective}
    assert collective == {
        "L0.moe.dispatch.backward", "L0.moe.count.recompute", "mtp0.moe.combine.backward", "gradients", "gradients.L3",
        "gradients.embedding", "parameters.L3", "optimizer.norm",
    }  # fmt: skip
