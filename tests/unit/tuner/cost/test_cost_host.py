"""What the host pays to launch a pass: calls by who implements them, and a device that runs dry behind every wait for counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.tuner.capture.expression import Expression
from moe_overlap.tuner.capture.graph import Layout, Op
from moe_overlap.tuner.cost.calls import CallCode, calls_of
from moe_overlap.tuner.cost.hardware import CommonConstants, Features
from moe_overlap.tuner.cost.host import WAITING_CALLS, HostWork, drained_seconds, host_work
from moe_overlap.tuner.cost.interference import partly_concurrent
from moe_overlap.tuner.cost.layer import (
    PartCost,
    PassCost,
    Setting,
    alone_seconds,
    hide_all_to_alls,
    kernel_seconds,
    part_cost,
)
from moe_overlap.tuner.cost.links import axis_group
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS
from tests.unit.tuner.hand_made import Pass

COMMON = CommonConstants(transformer_engine=10.0, fused=4.0, low_precision=3.0, extra_kernel=0.5)
TORCH, FUNCTION, MODULE, FURTHER = CallCode


def layer_ops() -> tuple[Op, ...]:
    """A module of two kernels, a function, operators of torch, an all-to-all, experts, and their gradients."""
    run = Pass(Layout(tensor=1, context=1, expert=2, expert_tensor=1))
    modules: list[str] = []

    def add(module: str) -> None:
        modules.append(module)

    for phase in ("forward", "backward"):
        run.phase = phase
        run.stream("te.norm" if phase == "forward" else "te.norm_backward", "attention", 100)
        run.gemm("attention", 10, 10, 10)
        run.stream("te.rotary", "attention", 100)
        run.stream("add", "attention", 100)
        for module in ("attention.qkv", "attention.qkv", "attention", "attention"):
            add(module)
        run.communicate("all_to_all", "ep", Expression.of(100), "moe.dispatch")
        run.op("te.grouped_gemm", "moe.experts", "grouped_gemm", (4, 100, 10, 10), 8000, 100)
        add("mlp")
        add("experts.fc1")
    return tuple(dataclasses.replace(op, module=module) for op, module in zip(run.ops, modules, strict=True))


def table_of(ops: tuple[Op, ...]) -> OpTable:
    part = dataclasses.replace(
        Pass(Layout(tensor=1, context=1, expert=1, expert_tensor=1)).part("moe", "none"), ops=ops
    )
    return tabulate(part, 1, 1)


def test_a_module_is_one_call_and_autograd_launches_torchs_gradients_without_python() -> None:
    codes = list(calls_of(layer_ops()).codes)
    assert codes[:6] == [MODULE, FURTHER, FUNCTION, TORCH, FUNCTION, MODULE]
    assert codes[6:] == [MODULE, FURTHER, FUNCTION, FURTHER, FUNCTION, MODULE]
    # What is computed again is called from Python again.
    again = [dataclasses.replace(op, is_recomputed=op.phase == "backward") for op in layer_ops()]
    assert list(calls_of(again).codes)[9] == TORCH


def test_products_outside_of_transformer_engine_are_calls_of_torch() -> None:
    ops = [op for op in layer_ops() if not op.name.startswith("te.")]
    assert set(calls_of(ops).codes[:2]) == {TORCH}


def test_a_part_has_the_host_of_each_pass_and_waits_behind_what_it_sends() -> None:
    table, links = table_of(layer_ops()), shipped_cluster("H100", 16).groups[0]
    constants = CONSTANTS.gpus["H100"]
    group = axis_group(16, 1, 16, links)
    setting = Setting(
        gpu=links.gpu, groups=dict.fromkeys(("ep", "etp"), group), features=Features(), constants=constants, common=COMMON,
        concurrent=partly_concurrent(0.15),
    )  # fmt: skip
    cost, work = part_cost(table, setting), host_work(table, Features(), COMMON, constants.host_seconds)
    kernels, _ = kernel_seconds(table, setting)
    busy = kernels.copy()
    for index, collective, size in table.collectives:
        busy[index] = alone_seconds(table, setting, index, collective, size)
    hosts = [float(work.seconds[table.backward == is_backward].sum()) for is_backward in (False, True)]
    assert [cost.forward.host_seconds, cost.backward.host_seconds] == pytest.approx(hosts) and hosts[0] > 1.1 * hosts[1]
    drained = drained_seconds(work, busy, ~table.backward)
    assert cost.forward.drained_seconds == pytest.approx(drained, rel=1e-12) and cost.backward.drained_seconds == 0.0
    assert drained > drained_seconds(work, kernels, ~table.backward)


def test_every_group_is_launched_and_quantized_unless_the_experts_are_one_kernel() -> None:
    table = table_of(layer_ops())

    def work(**features: object) -> np.ndarray:
        return host_work(table, Features(**features), COMMON, 1.0).seconds  # type: ignore[arg-type]

    assert work()[5] == 10.0 + 3 * 0.5
    assert work(precision="mxfp8")[5] == 10.0 + 3 * 0.5 + 4 * 3.0
    assert work(precision="mxfp8")[1] == 0.5 + 3.0
    assert work(precision="mxfp8", fused_experts=True)[5] == 10.0
    assert work(graphs="partial")[:4].sum() == 0 < work(graphs="partial")[5]
    assert work(graphs="full").sum() == 0
    # Where two micro-batches run at a time: a call for each node, attention, dispatch and experts, in either pass.
    nodes = work(overlap_experts=True) - work()
    assert [*np.flatnonzero(nodes)] == [0, 4, 5, 6, 10, 11] and {*nodes[nodes > 0]} == {10.0}


def test_partial_graphs_leave_what_depends_on_the_routing_to_the_host() -> None:
    for name in ("moe.dispatch", "moe.experts", "moe.combine", "moe.merge"):
        table = table_of(tuple(dataclasses.replace(op, operator=name) for op in layer_ops()[:4]))
        assert host_work(table, Features(graphs="partial"), COMMON, 1.0).seconds.sum() > 0, name


def test_partial_graphs_leave_what_their_flags_do_not_name_to_the_host() -> None:
    table = table_of(layer_ops())
    attention = np.array([op.operator == "attention" for op in table.ops])
    none = host_work(table, Features(), COMMON, 1.0).seconds
    scoped = host_work(table, Features(graphs="partial", outside_graphs=("attention",)), COMMON, 1.0).seconds
    both = host_work(table, Features(graphs="partial"), COMMON, 1.0).seconds
    assert both[attention].sum() == 0 < scoped[attention].sum() == none[attention].sum()
    assert (scoped[~attention] == both[~attention]).all()


def test_the_host_waits_for_counts_once_in_every_forward_pass() -> None:
    ops = layer_ops()
    assert list(np.flatnonzero(calls_of(ops).waits)) == [4]
    again = [*ops[:6], *(dataclasses.replace(op, phase="backward", is_recomputed=True) for op in ops[:6])]
    assert list(np.flatnonzero(calls_of(again).waits)) == [4, 10]
    # Without an exchange the products are the first that want to know.
    alone = [op for op in ops if op.cost_class != "collective"]
    assert list(np.flatnonzero(calls_of(alone).waits)) == [4]
    table = table_of(ops)
    assert host_work(table, Features(), COMMON, 1.0).seconds[4] == COMMON.fused + WAITING_CALLS


def test_what_is_launched_late_stays_late_until_the_next_wait() -> None:
    """Ahead of the wait at 1: launched after 4 + 3, so that the device, which could be done at 6, is idle for 2."""
    waits = np.array([False, True])
    work, device = HostWork(np.array([3.0, 4.0]), waits), np.array([1.0, 5.0])
    whole = np.ones(2, dtype=np.bool_)
    # The device begins the second at 4 and ends it at 9; the first, launched at 7, follows.
    assert drained_seconds(work, device, whole) == 10.0
    assert drained_seconds(work, np.array([1.0, 2.0]), whole) == 8.0
    assert drained_seconds(dataclasses.replace(work, waits=~whole), device, whole) == 0.0
    assert drained_seconds(work, device, np.array([True, False])) == 0.0


@pytest.mark.parametrize("host", [1.0, 4.0, 9.0])
def test_a_pass_that_waits_takes_at_least_host_and_device(host: float) -> None:
    exposed = {"expert": 2.0}
    cost = PassCost(device_seconds=3.0, host_seconds=host, drained_seconds=8.0, exposed=exposed)
    assert cost.seconds == max(3.0 + 2.0, host, 8.0)


def test_all_to_alls_hide_under_the_host_once() -> None:
    """A host of 6 s for 3 s of computation, 10 s of all-to-alls: what is left of them stands behind the host's 6 s, not in it."""
    passes = [
        PassCost(
            device_seconds=device, host_seconds=2 * device, exposed={"expert": 5.0, "tensor": 0.5}, exchange_seconds=5.0
        )
        for device in (1.0, 2.0)
    ]
    hidden = hide_all_to_alls(PartCost(forward=passes[0], backward=passes[1], provenance={}), partly_concurrent(0.0))
    assert hidden.seconds == pytest.approx(10.0)
    # With other collectives exposed as long as the host launches, nothing is added to it.
    assert hidden.forward.compute_seconds == 1.5
