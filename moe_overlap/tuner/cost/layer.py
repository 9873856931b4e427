"""Seconds of one part of a model on one rank: of its forward and backward pass, and of its operators.

Seconds are those of one micro-batch. A pass takes at least as long as the host needs to launch it; the host continues to launch
while the device waits for a collective. Collectives are exposed, with these exceptions: in the backward pass a tensor-parallel
collective overlaps with the operators between it and its first reader; rings of keys and values overlap with attention; flags let
others overlap with computation (`Features`).

`operator_seconds` gives the seconds of each operator of the plan's vocabulary, for instructions. They add up to the cost of the
part: if the host sets the pace of a pass, all its operators are stretched by one factor; collectives of a kind that overlaps with
computation count with their exposed share. If a list hides all-to-alls, the host cannot use their time to launch ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.cluster import Gpu
from moe_overlap.describe.model import expected_places
from moe_overlap.plan.operators import (
    ATTENTION,
    BACKWARD,
    COMBINE,
    DISPATCH,
    EXCHANGE_PARTS,
    EXPERTS,
    GATE,
    RECOMPUTE,
    SHARED,
    WEIGHT_GRADIENT,
    WEIGHTS,
)
from moe_overlap.tuner.capture.graph import CapturedPart, Collective, Op
from moe_overlap.tuner.cost.hardware import CommonConstants, Features, GpuConstants
from moe_overlap.tuner.cost.host import BESIDE, UNLISTED, Replays, drained_seconds, host_work
from moe_overlap.tuner.cost.interference import Concurrent
from moe_overlap.tuner.cost.links import Group, LinkUse, all_to_all_seconds, collective_seconds, link_use
from moe_overlap.tuner.cost.operators import (
    FUSED_ATTENTION,
    GEMM,
    Lookup,
    OpTable,
    Provenance,
    device_seconds,
)
from moe_overlap.tuner.cost.router import DISPATCH_LIBRARIES, library_sends

Floats = NDArray[np.float64]
EXCHANGE_AXES = ("ep", "tp_ep", "etp")
KINDS = ("tensor", "context", "expert")
"""Kinds of communication inside a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The hardware and the settings under which a part runs."""

    gpu: Gpu
    groups: Mapping[str, Group]
    features: Features
    constants: GpuConstants
    common: CommonConstants
    concurrent: Concurrent
    """Seconds of computation and communication that run at the same time."""
    topk: int = 1
    experts: int = 1
    """Experts of a layer, on all ranks."""
    load: float = 1.0
    """Rows of the busiest rank over the mean."""
    lookup: Lookup | None = None
    replays: Replays = UNLISTED
    """Operators that the executor of lists replays as CUDA graphs, if it executes the part."""
    two_at_work: bool = False
    """The forward pass of a micro-batch is paired with the backward pass of another, layer by layer."""
    unpaired_share: float = 0.0
    """Share of the passes that are unpaired although `two_at_work`."""

    def library_sends(self, group: Group) -> tuple[float, float]:
        """Sends of a token by a dispatch library, and the share of them that cross the network (router.py)."""
        return library_sends(self.experts, self.topk, self.features.router_groups, group)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSeconds:
    """Seconds of the nodes into which megatron-core cuts a pass when it pairs two micro-batches."""

    dispatch: float = 0.0
    """All-to-alls of tokens and counts to the experts; the rest of `exchange_seconds` is the combine."""
    experts: float = 0.0
    """Routed experts with their weight gradients; the rest of `device_seconds` is attention, gate and shared experts."""
    expert_gradients: float = 0.0
    """Weight gradients of routed experts."""
    other_gradients: float = 0.0
    """All other weight gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCost:
    """One direction of one micro-batch through a part."""

    device_seconds: float
    """Sum of all kernels except collectives."""
    host_seconds: float
    """Time of the host to launch the pass."""
    drained_seconds: float = 0.0
    """Duration of the pass, exposed collectives included, if the host waits for the device in every layer; else 0."""
    exposed: dict[str, float] = field(default_factory=dict)
    """By KINDS: seconds of communication without computation."""
    hidden_seconds: float = 0.0
    """Communication under computation."""
    exchange_seconds: float = 0.0
    """All all-to-alls of tokens, exposed or not; another micro-batch may hide them."""
    nodes: NodeSeconds = NodeSeconds()
    """Zero for a part without all-to-alls."""
    is_overlapped: bool = False
    """All-to-alls overlap with another micro-batch, which the host launches meanwhile, so the device's queue never runs empty."""

    @property
    def idle_seconds(self) -> float:
        """Idle time of the device after the host has waited for it and before the next launch."""
        return max(0.0, self.drained_seconds - self.device_seconds - sum(self.exposed.values()))

    @property
    def compute_seconds(self) -> float:
        """Computation, and waits of the device for the host outside of collectives."""
        if self.is_overlapped:
            return max(self.device_seconds, self.host_seconds - self.others_seconds)
        return max(self.device_seconds + self.idle_seconds, self.host_seconds - sum(self.exposed.values()))

    @property
    def others_seconds(self) -> float:
        """Exposed collectives except all-to-alls of tokens."""
        return sum(seconds for kind, seconds in self.exposed.items() if kind != "expert")

    @property
    def paced_seconds(self) -> float:
        """Computation at the pace of the host if collectives are hidden, so that they give it no time to catch up."""
        return max(self.device_seconds + self.idle_seconds, self.host_seconds)

    @property
    def seconds(self) -> float:
        """Duration of the pass: the host launches ahead of the device, so the slower of the two sets the pace."""
        return self.compute_seconds + sum(self.exposed.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCost:
    """The cost of both directions, and the origin of their seconds."""

    forward: PassCost
    backward: PassCost
    provenance: dict[str, float]
    """Seconds by origin: measured, interpolated, roofline."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward.seconds + self.backward.seconds


def kernel_seconds(table: OpTable, setting: Setting) -> tuple[Floats, list[Provenance]]:
    """[ops] seconds of a part's operators on the device, 0 for collectives, and the origin of each."""
    seconds, origins = device_seconds(
        table, setting.gpu, setting.features, setting.constants, setting.common, setting.lookup
    )
    return seconds * np.where(table.loaded, setting.load, 1.0), origins


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePart:
    """The cost of a part on the device, without the host.

    Attributes:
        cost: cost of the part with a host that launches in no time.
        busy: [N] seconds of every operator; for collectives the exposed seconds.
    """

    cost: PartCost
    busy: Floats


def part_cost(table: OpTable, setting: Setting) -> PartCost:
    """Seconds of a part."""
    return launched(device_part(table, setting), table, setting)


def device_part(table: OpTable, setting: Setting) -> DevicePart:
    """The cost of a part on the device; equal for paired and unpaired micro-batches, replayed or not."""
    seconds, origins = kernel_seconds(table, setting)
    provenance = {"measured": 0.0, "interpolated": 0.0, "roofline": 0.0}
    for origin in provenance if setting.lookup is not None else ():
        provenance[origin] = float(seconds[np.array([o == origin for o in origins], dtype=np.bool_)].sum())
    if setting.lookup is None:
        provenance["roofline"] = float(seconds.sum())
    sent, busy = _sent(table, setting), seconds.copy()
    forward, backward = (
        _device_pass(table, setting, seconds, sent, busy, is_backward) for is_backward in (False, True)
    )
    return DevicePart(cost=PartCost(forward=forward, backward=backward, provenance=provenance), busy=busy)


def launched(part: DevicePart, table: OpTable, setting: Setting) -> PartCost:
    """The cost of a part with the time of the host.

    Args:
        part: result of `device_part` for the same table, in a setting that may differ in the work of the host only.
    """
    work = host_work(table, setting.features, setting.common, setting.constants.host_seconds, setting.replays)

    def with_host(cost: PassCost, in_pass: NDArray[np.bool_]) -> PassCost:
        return replace(
            cost,
            host_seconds=float(work.seconds[in_pass].sum()),
            drained_seconds=drained_seconds(work, part.busy, in_pass),
        )

    forward, backward = with_host(part.cost.forward, ~table.backward), with_host(part.cost.backward, table.backward)
    return replace(part.cost, forward=forward, backward=backward)


Sent = list[tuple[int, str, float]]
"""Collectives of a part: index of the operator, one of KINDS, and seconds without interference."""


def _sent(table: OpTable, setting: Setting) -> Sent:
    """All collectives of a part; those that differ in their payloads only are priced in one call."""
    groups: dict[object, list[int]] = {}
    for place, (index, collective, _) in enumerate(table.collectives):
        key = collective.kind, collective.axis, table.ops[index].operator in (DISPATCH, COMBINE), table.loaded[index]
        groups.setdefault(key, []).append(place)
    seconds = np.zeros(len(table.collectives))
    for places in groups.values():
        index, collective, _ = table.collectives[places[0]]
        payloads = np.array([table.collectives[place][2] for place in places])
        seconds[places] = _seconds_of_payloads(table, setting, index, collective, payloads)
    return [
        (index, kind_of(collective), isolated)
        for (index, collective, _), isolated in zip(table.collectives, seconds.tolist(), strict=True)
    ]


def _device_pass(
    table: OpTable, setting: Setting, seconds: Floats, of_both: Sent, busy: Floats, is_backward: bool
) -> PassCost:
    """The cost of a pass with a host that launches in no time.

    Args:
        of_both: collectives of both passes.
        busy: [N] seconds of the operators; the exposed seconds of the pass's collectives are added in place.
    """
    in_pass = table.backward == is_backward
    concurrent, features = setting.concurrent, setting.features
    totals = dict.fromkeys(KINDS, 0.0)
    exposed = dict.fromkeys(KINDS, 0.0)
    # 1. Each tensor-parallel collective overlaps with the computation around it.
    sent = [collective for collective in of_both if in_pass[collective[0]]]
    for index, kind, isolated in sent:
        totals[kind] += isolated
        computation = 0.0
        if kind == "tensor":
            if is_backward:
                # megatron-core starts it asynchronously, before the weight gradient's product; in the forward pass the next
                # product needs it immediately.
                computation = _until_read(table, seconds, index)
            if features.overlap_tensor:
                computation = max(computation, _adjacent_product_seconds(table, seconds, index))
        exposed[kind] += _exposed(isolated, computation, concurrent)
    # 2. Rings and all-to-alls overlap as a kind, not one by one. A ring sends keys and values while attention computes on those
    # that have arrived; other exchanges of the context precede attention.
    if features.context_exchange == "p2p" and totals["context"]:
        attention = float(seconds[in_pass & (table.operators == ATTENTION) & (table.classes == FUSED_ATTENTION)].sum())
        exposed["context"] = _exposed(totals["context"], attention, concurrent)
    if features.overlap_shared_expert:
        exposed["expert"] = _exposed(
            exposed["expert"], float(seconds[in_pass & (table.operators == SHARED)].sum()), concurrent
        )
    # 3. The exposed seconds of a kind are divided among its collectives in proportion to their seconds.
    for index, kind, isolated in sent:
        busy[index] += isolated * exposed[kind] / totals[kind] if totals[kind] else 0.0
    nodes = NodeSeconds()
    if totals["expert"]:
        experts = in_pass & (table.operators == EXPERTS)
        gradients = in_pass & table.weight_gradient
        nodes = NodeSeconds(
            dispatch=sum(
                isolated for index, kind, isolated in sent if kind == "expert" and table.operators[index] != COMBINE
            ),
            experts=float(seconds[experts].sum()),
            expert_gradients=float(seconds[experts & gradients].sum()),
            other_gradients=float(seconds[gradients & ~experts].sum()),
        )
    return PassCost(
        device_seconds=float(seconds[in_pass].sum()),
        host_seconds=0.0,
        exposed=exposed,
        hidden_seconds=sum(totals.values()) - sum(exposed.values()),
        exchange_seconds=totals["expert"],
        nodes=nodes,
    )


def _exposed(communication: float, computation: float, concurrent: Concurrent) -> float:
    """Exposed seconds of communication that overlaps with computation: the time of both minus the time of computation."""
    # Most collectives have no computation to overlap with.
    if not computation or not communication:
        return communication
    together = concurrent(np.array(computation), np.array(communication), np.zeros(()), np.zeros(()))
    return float(together) - computation


def kind_of(collective: Collective) -> str:
    """One of KINDS."""
    if collective.axis in EXCHANGE_AXES:
        return "expert"
    return "context" if collective.axis == "cp" else "tensor"


def alone_seconds(table: OpTable, setting: Setting, index: int, collective: Collective, payload: float) -> float:
    """Seconds of one of a part's collectives without interference."""
    return float(_seconds_of_payloads(table, setting, index, collective, np.asarray(payload)))


def _seconds_of_payloads(
    table: OpTable, setting: Setting, index: int, collective: Collective, payload: Floats
) -> Floats:
    """`alone_seconds` for an array of payloads."""
    group, rates = setting.groups[collective.axis], setting.constants.link_rates
    scale = setting.load if table.loaded[index] else 1.0
    if collective.kind != "all_to_all":
        return scale * collective_seconds(collective.kind, payload, group, rates)
    share = 1.0
    if table.ops[index].operator in (DISPATCH, COMBINE) and setting.features.dispatcher in DISPATCH_LIBRARIES:
        ranks, share = setting.library_sends(group)
        # The captured payload has the copies of a router that chooses among all experts.
        payload = payload * ranks / expected_places(setting.topk, group.size)
    return scale * all_to_all_seconds(payload, group, rates, share)


def token_use(setting: Setting) -> LinkUse:
    """The links that all-to-alls of tokens use."""
    group = setting.groups["ep" if setting.groups["etp"].size == 1 else "tp_ep"]
    share = 1.0
    if setting.features.dispatcher in DISPATCH_LIBRARIES:
        _, share = setting.library_sends(group)
    kind = "all_gather" if setting.features.dispatcher == "allgather" else "all_to_all"
    return link_use(kind, group, setting.constants.link_rates, share)


def _until_read(table: OpTable, seconds: Floats, index: int) -> float:
    """Seconds of the operators between a collective and the first operator that waits for it."""
    total = 0.0
    for later in table.ops[index + 1 :]:
        if index in later.after:
            break
        total += float(seconds[later.id])
    return total


def _adjacent_product_seconds(table: OpTable, seconds: Floats, index: int) -> float:
    """Seconds of the longest product directly before or after a collective."""
    around = (index - 1, index + 1)
    return max(
        (float(seconds[i]) for i in around if 0 <= i < len(table.ops) and table.classes[i] == GEMM),
        default=0.0,
    )


def hide_all_to_alls(cost: PartCost, concurrent: Concurrent, unpaired: float = 0.0) -> PartCost:
    """The part with its all-to-alls hidden under the computation and other collectives of another micro-batch.

    The forward pass of one micro-batch is paired with the backward pass of another: the all-to-alls of both directions hide under
    the computation of both, in any order.

    Args:
        unpaired: share of the passes that are not paired.
    """
    forward, backward = cost.forward, cost.backward
    sent = forward.exchange_seconds + backward.exchange_seconds
    computation = sum(max(p.device_seconds + p.others_seconds, p.host_seconds) for p in (forward, backward))
    return _with_exposed(cost, _exposed(sent, computation, concurrent), unpaired) if sent else cost


def hide_in_nodes(cost: PartCost, concurrent: Concurrent, delays: bool, unpaired: float = 0.0) -> PartCost:
    """The part with its all-to-alls hidden in the order of megatron-core's --overlap-moe-expert-parallel-comm.

    Each all-to-all overlaps with a fixed computation. For a layer forward (f) and one backward (b),
    `TransformerLayerSchedulePlan.run` of megatron-core 0.16.1 has the order:

        communication: combine b | dispatch f, dispatch b | combine f
        computation:   attention f | experts b, experts f | attention b

    Args:
        delays: weight gradients follow the rest of their backward pass (--delay-wgrad-compute), under the next all-to-all.
        unpaired: share of the passes that are not paired.
    """
    forward, backward = cost.forward, cost.backward
    if not forward.exchange_seconds + backward.exchange_seconds:
        return cost
    # 1. If the host is slower than the device, it stretches all nodes of a pass by one factor.
    f, b = (max(1.0, p.host_seconds / (p.device_seconds + p.others_seconds)) for p in (forward, backward))
    rest = [pace * (p.device_seconds + p.others_seconds - p.nodes.experts) for pace, p in ((f, forward), (b, backward))]
    # 2. The two rounds of the order above: (all-to-all, its computation) twice, and the delayed weight gradients between them.
    late = delays * b * backward.nodes.expert_gradients, delays * b * backward.nodes.other_gradients
    slots = (
        (
            forward.nodes.dispatch,
            b * backward.nodes.experts,
            backward.nodes.dispatch,
            f * forward.nodes.experts,
            late[0],
        ),
        (_combine(forward), rest[1], _combine(backward), rest[0], late[1]),
    )
    exposed = 0.0
    for first, compute_first, second, compute_second, between in slots:
        # 3. Weight gradients between the two all-to-alls may overlap with either of them, so both bounds are taken.
        separate = (_exposed(first, compute_first, concurrent), _exposed(second, between + compute_second, concurrent))
        both = _exposed(first + second, compute_first + compute_second, concurrent)
        exposed += max(*separate, both) if between else sum(separate)
    return _with_exposed(cost, exposed, unpaired)


def cost_of(table: OpTable, setting: Setting) -> PartCost:
    """Cost of a part; with `overlap_experts` its all-to-alls are hidden under another micro-batch."""
    cost = part_cost(table, setting)
    return overlapped(cost, setting) if setting.features.overlap_experts else cost


def overlapped(cost: PartCost, setting: Setting) -> PartCost:
    """A result of `part_cost` with its all-to-alls hidden under another micro-batch, in megatron-core's order."""
    return hide_in_nodes(cost, setting.concurrent, setting.features.delay_weight_gradients, setting.unpaired_share)


def _combine(cost: PassCost) -> float:
    """Seconds of the combine."""
    return cost.exchange_seconds - cost.nodes.dispatch


def _with_exposed(cost: PartCost, exposed_seconds: float, unpaired: float) -> PartCost:
    """The part with the given exposed seconds of all-to-alls, divided between the passes in proportion to their all-to-alls.

    Args:
        unpaired: share of the passes that are not paired, with the exposed seconds of an unpaired pass.
    """
    forward, backward = cost.forward, cost.backward
    share = exposed_seconds / (forward.exchange_seconds + backward.exchange_seconds)

    def hidden(cost: PassCost) -> PassCost:
        # An unpaired pass is no longer than `cost.seconds`: a slow host hides part of its all-to-alls.
        waited = cost.seconds - max(cost.device_seconds + cost.others_seconds, cost.host_seconds)
        expert = (1.0 - unpaired) * cost.exchange_seconds * share + unpaired * waited
        exposed = {**cost.exposed, "expert": expert}
        beneath = cost.hidden_seconds + (1.0 - unpaired) * cost.exchange_seconds * (1 - share)
        return replace(cost, exposed=exposed, hidden_seconds=beneath, is_overlapped=True)

    return replace(cost, forward=hidden(forward), backward=hidden(backward))


Key = tuple[str, str, str]
"""Operator, weight and suffix, as in `OperatorId` (plan/operators.py)."""


def operator_seconds(
    table: OpTable, setting: Setting, cost: PartCost, hides_exchanges: bool = False, more: Floats | float = 0.0
) -> dict[Key, float]:
    """Seconds of every operator of a part.

    Args:
        cost: cost of the part in this setting.
        hides_exchanges: whether a list hides its all-to-alls under computation.
        more: [ops] seconds to add to those of the part's cost.
    """
    seconds = computing_seconds(table, setting, cost, hides_exchanges) + more
    total: dict[Key, float] = defaultdict(float)
    for op in table.ops:
        total[_key(table.part, op)] += float(seconds[op.id])
    for op, _, exposed in _exposed_collectives(table, setting, cost):
        key = (op.operator, "", suffix_of(op)) if op.operator in EXCHANGE_PARTS else _key(table.part, op)
        total[key] += exposed
    return dict(total)


def collective_seconds_inside(table: OpTable, setting: Setting, cost: PartCost) -> dict[Key, dict[str, float]]:
    """Exposed seconds of the collectives inside operators, by operator and axis (tp, cp, etp).

    All-to-alls of tokens are left out, because they are instructions of their own.
    """
    inside: dict[Key, dict[str, float]] = {}
    for op, collective, exposed in _exposed_collectives(table, setting, cost):
        if exposed and op.operator not in EXCHANGE_PARTS:
            by_axis = inside.setdefault(_key(table.part, op), {})
            by_axis[collective.axis] = by_axis.get(collective.axis, 0.0) + exposed
    return inside


def _exposed_collectives(table: OpTable, setting: Setting, cost: PartCost) -> Iterator[tuple[Op, Collective, float]]:
    """Every collective of a part, with its exposed seconds."""
    for is_backward, of_pass in ((False, cost.forward), (True, cost.backward)):
        in_pass = table.backward == is_backward
        sent = [
            (table.ops[index], collective, alone_seconds(table, setting, index, collective, payload))
            for index, collective, payload in table.collectives
            if in_pass[index]
        ]
        for op, collective, isolated in sent:
            kind = kind_of(collective)
            yield (
                op,
                collective,
                isolated * _exposed_share(of_pass, kind, (a for _, c, a in sent if kind_of(c) == kind)),
            )


def computing_seconds(table: OpTable, setting: Setting, cost: PartCost, hides_exchanges: bool = False) -> Floats:
    """[ops] seconds of a part's computation, stretched to the pace of the host; 0 for collectives."""
    seconds, _ = kernel_seconds(table, setting)
    for is_backward, of_pass in ((False, cost.forward), (True, cost.backward)):
        in_pass = table.backward == is_backward
        on_device = float(seconds[in_pass].sum())
        paced = of_pass.paced_seconds if hides_exchanges else of_pass.compute_seconds
        # All operators by the same factor, so that the instructions of a pass add up to its closed-form cost.
        seconds = np.where(in_pass, seconds * (paced / on_device if on_device else 0.0), seconds)
    return seconds


def held_bytes(table: OpTable, element_bytes: int, load: float) -> dict[Key, float]:
    """Operand bytes of a part's weight gradients: the inputs of their products, and the gradients of the outputs.

    Args:
        element_bytes: bytes of an element of an activation.
        load: rows of the busiest rank of an expert group over the mean.
    """
    held: dict[Key, float] = defaultdict(float)
    for op, shape in zip(table.ops, table.shapes, strict=True):
        if op.is_weight_gradient:
            rows, widths = (shape[1], shape[2:]) if op.cost_class == "grouped_gemm" else (shape[2], shape[:2])
            held[_key(table.part, op)] += rows * sum(widths) * element_bytes * (load if op.scales_with_load else 1.0)
    return dict(held)


def _exposed_share(cost: PassCost, kind: str, isolated: Iterable[float]) -> float:
    total = sum(isolated)
    return cost.exposed.get(kind, 0.0) / total if total else 0.0


def _key(part: CapturedPart, op: Op) -> Key:
    operator = BESIDE.get(op.operator, op.operator)
    if op.is_weight_gradient:
        return operator, weight_of(part, op), WEIGHT_GRADIENT
    return operator, "", suffix_of(op)


def suffix_of(op: Op) -> str:
    """The suffix of the pass of an operator, as in names of instructions."""
    if op.phase == "forward":
        return ""
    return RECOMPUTE if op.is_recomputed else BACKWARD


def weight_of(part: CapturedPart, op: Op) -> str:
    """The weight whose gradient an operator computes, as plans name it; empty if the capture does not tell.

    A fused kernel writes to the gradient's storage, which has the weight's name. Otherwise the product's result has no name, but
    its module has.
    """
    if op.operator == GATE:
        return "router"
    paths = [op.module, *(part.storages[index].name for index in op.writes)]
    names = [word for path in paths for word in path.split(".")]
    stems = {word.removeprefix("linear_").removesuffix("_proj") for word in names}
    stems |= {"output"} if "output_layer" in stems else set()
    return next((weight for weight in WEIGHTS.get(op.operator, ()) if weight in stems), "")
