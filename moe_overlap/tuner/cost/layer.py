"""Seconds of one part of a model on one rank: of its forward and backward pass, and of its operators, alone.

Seconds are those of one micro-batch. A pass takes at least as long as the host needs to launch it, unless CUDA graphs do; the
host launches on while the device waits for a collective. A collective is exposed, with these exceptions: in the backward pass a
tensor-parallel collective runs beside the operators between it and its first reader; rings of keys and values run beside
attention; flags put further ones beside computation (`Features`).

`operator_seconds` gives the seconds of instructions, operator by operator of the plan's vocabulary. They add up to the part's
cost: where the host sets the pace of a pass all its operators are stretched by one factor, and collectives of a kind that run
beside computation count with the share that is exposed. Where a list hides all-to-alls, nothing of them is time for the host.
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
from moe_overlap.tuner.capture.graph import Collective, Op, Part
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
from moe_overlap.tuner.cost.router import reached_places

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
    """Seconds of concurrent computation and communication."""
    topk: int = 1
    experts: int = 1
    """Experts of a layer, on all ranks."""
    load: float = 1.0
    """Rows of the busiest rank over the mean."""
    lookup: Lookup | None = None
    replays: Replays = UNLISTED
    """Operators that the executor of lists replays as CUDA graphs, if it runs the part."""
    two_at_work: bool = False
    """The forward pass of a micro-batch runs beside the backward pass of another, layer by layer."""
    alone: float = 0.0
    """Share of the passes that have no pass of another micro-batch beside them, where others have."""

    def reached_places(self, places: int) -> float:
        """Expected number of so many ranks or nodes that a token's experts stand in."""
        return reached_places(self.experts, self.topk, self.features.router_groups, places)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSeconds:
    """Seconds of what megatron-core tells apart of a pass when it runs two micro-batches at a time."""

    dispatch: float = 0.0
    """All-to-alls of tokens and counts on their way to the experts; those back are the rest of `exchange_seconds`."""
    experts: float = 0.0
    """Routed experts, their weight gradients included; attention, gate and shared experts are the rest of `device_seconds`."""
    expert_gradients: float = 0.0
    """Weight gradients of routed experts."""
    other_gradients: float = 0.0
    """All other weight gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCost:
    """One direction of one micro-batch through a part."""

    device_seconds: float
    """All kernels but collectives, one after the other."""
    host_seconds: float
    """To launch the pass."""
    drained_seconds: float = 0.0
    """From start to end, exposed collectives included, where the host waits for the device in every layer; else 0."""
    exposed: dict[str, float] = field(default_factory=dict)
    """By KINDS: seconds in which nothing computes."""
    hidden_seconds: float = 0.0
    """Communication under computation."""
    exchange_seconds: float = 0.0
    """All all-to-alls of tokens, exposed or not: another micro-batch may hide them."""
    nodes: NodeSeconds = NodeSeconds()
    """Zero where a part has no all-to-alls."""
    is_overlapped: bool = False
    """All-to-alls run beside another micro-batch, which the host launches meanwhile: it never waits for an empty queue."""

    @property
    def idle_seconds(self) -> float:
        """In which nothing runs, as the host waited for the device and has launched nothing yet."""
        return max(0.0, self.drained_seconds - self.device_seconds - sum(self.exposed.values()))

    @property
    def compute_seconds(self) -> float:
        """Computation, and what the host makes the device wait for beside collectives."""
        if self.is_overlapped:
            return max(self.device_seconds, self.host_seconds - self.others_seconds)
        return max(self.device_seconds + self.idle_seconds, self.host_seconds - sum(self.exposed.values()))

    @property
    def others_seconds(self) -> float:
        """Exposed collectives, all-to-alls of tokens apart."""
        return sum(seconds for kind, seconds in self.exposed.items() if kind != "expert")

    @property
    def paced_seconds(self) -> float:
        """Computation at the pace of a host that gets no time from collectives, as they are hidden."""
        return max(self.device_seconds + self.idle_seconds, self.host_seconds)

    @property
    def seconds(self) -> float:
        """From start to end: the host launches ahead of the device, so the slower of the two sets the pace."""
        return self.compute_seconds + sum(self.exposed.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCost:
    """Both directions, and where their seconds come from."""

    forward: PassCost
    backward: PassCost
    provenance: dict[str, float]
    """Seconds by origin: measured, interpolated, roofline."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward.seconds + self.backward.seconds


def kernel_seconds(table: OpTable, setting: Setting) -> tuple[Floats, list[Provenance]]:
    """Seconds of a part's operators on the device, collectives apart, and where each comes from."""
    seconds, origins = device_seconds(
        table, setting.gpu, setting.features, setting.constants, setting.common, setting.lookup
    )
    return seconds * np.where(table.loaded, setting.load, 1.0), origins


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePart:
    """A part on the device, whatever its host takes to launch it.

    Attributes:
        cost: of the part with a host that takes no time.
        busy: [N] seconds of every operator, and of collectives those that are exposed.
    """

    cost: PartCost
    busy: Floats


def part_cost(table: OpTable, setting: Setting) -> PartCost:
    """Seconds of a part."""
    return launched(device_part(table, setting), table, setting)


def device_part(table: OpTable, setting: Setting) -> DevicePart:
    """Seconds of a part on the device, which do not depend on whether two micro-batches run at a time or a list is replayed."""
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
    """A part with what its host takes to launch it.

    Args:
        part: of the same table, in a setting that differs in the work of the host alone.
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
"""Collectives of a part: the place of each among the operators, one of KINDS, and its seconds alone."""


def _sent(table: OpTable, setting: Setting) -> Sent:
    """All collectives of a part; those of one kind and group that differ in their payloads are priced together."""
    alike: dict[object, list[int]] = {}
    for place, (index, collective, _) in enumerate(table.collectives):
        key = collective.kind, collective.axis, table.ops[index].operator in (DISPATCH, COMBINE), table.loaded[index]
        alike.setdefault(key, []).append(place)
    seconds = np.zeros(len(table.collectives))
    for places in alike.values():
        index, collective, _ = table.collectives[places[0]]
        payloads = np.array([table.collectives[place][2] for place in places])
        seconds[places] = _alone(table, setting, index, collective, payloads)
    return [
        (index, kind_of(collective), alone)
        for (index, collective, _), alone in zip(table.collectives, seconds.tolist(), strict=True)
    ]


def _device_pass(
    table: OpTable, setting: Setting, seconds: Floats, of_both: Sent, busy: Floats, is_backward: bool
) -> PassCost:
    """A pass that is launched in no time.

    Args:
        of_both: collectives of both passes.
        busy: [N] seconds of the operators, to which this adds what is exposed of the pass's collectives.
    """
    in_pass = table.backward == is_backward
    concurrent, features = setting.concurrent, setting.features
    totals = dict.fromkeys(KINDS, 0.0)
    exposed = dict.fromkeys(KINDS, 0.0)
    sent = [each for each in of_both if in_pass[each[0]]]
    for index, kind, alone in sent:
        totals[kind] += alone
        beside = 0.0
        if kind == "tensor":
            if is_backward:
                # megatron-core starts it asynchronously, ahead of the weight gradient's product; in the forward pass
                # the next product waits for it at once.
                beside = _until_read(table, seconds, index)
            if features.overlap_tensor:
                beside = max(beside, _products_beside(table, seconds, index))
        exposed[kind] += _exposed(alone, beside, concurrent)
    # A ring passes keys and values on while attention computes those it has; the other kinds precede attention.
    if features.context_exchange == "p2p" and totals["context"]:
        attention = float(seconds[in_pass & (table.operators == ATTENTION) & (table.classes == FUSED_ATTENTION)].sum())
        exposed["context"] = _exposed(totals["context"], attention, concurrent)
    if features.overlap_shared_expert:
        exposed["expert"] = _exposed(
            exposed["expert"], float(seconds[in_pass & (table.operators == SHARED)].sum()), concurrent
        )
    for index, kind, alone in sent:
        busy[index] += alone * exposed[kind] / totals[kind] if totals[kind] else 0.0
    nodes = NodeSeconds()
    if totals["expert"]:
        experts = in_pass & (table.operators == EXPERTS)
        gradients = in_pass & table.weight_gradient
        nodes = NodeSeconds(
            dispatch=sum(
                alone for index, kind, alone in sent if kind == "expert" and table.operators[index] != COMBINE
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


def _exposed(alone: float, beside: float, concurrent: Concurrent) -> float:
    """Exposed seconds of communication beside computation: by how much both together take longer than computation."""
    # Nothing slows down what runs by itself, and most collectives do.
    if not beside or not alone:
        return alone
    together = concurrent(np.array(beside), np.array(alone), np.zeros(()), np.zeros(()))
    return float(together) - beside


def kind_of(collective: Collective) -> str:
    """One of KINDS."""
    if collective.axis in EXCHANGE_AXES:
        return "expert"
    return "context" if collective.axis == "cp" else "tensor"


def alone_seconds(table: OpTable, setting: Setting, index: int, collective: Collective, payload: float) -> float:
    """Seconds of one of a part's collectives beside which nothing runs."""
    return float(_alone(table, setting, index, collective, np.asarray(payload)))


def _alone(table: OpTable, setting: Setting, index: int, collective: Collective, payload: Floats) -> Floats:
    """The same for any payloads of a collective like that one."""
    group, rates = setting.groups[collective.axis], setting.constants.link_rates
    scale = setting.load if table.loaded[index] else 1.0
    if collective.kind != "all_to_all":
        return scale * collective_seconds(collective.kind, payload, group, rates)
    share = 1.0
    if table.ops[index].operator in (DISPATCH, COMBINE) and setting.features.dispatcher in ("deepep", "hybridep"):
        # A token is sent once to every rank it goes to, but crosses the network once for every block of ranks.
        ranks, blocks = (setting.reached_places(places) for places in (group.size, group.blocks))
        # The capture counts the copies of a router that chooses among all experts.
        payload, share = payload * ranks / expected_places(setting.topk, group.size), blocks / ranks
    return scale * all_to_all_seconds(payload, group, rates, share)


def token_use(setting: Setting) -> LinkUse:
    """The links that tokens travel on."""
    group = setting.groups["ep" if setting.groups["etp"].size == 1 else "tp_ep"]
    share = 1.0
    if setting.features.dispatcher in ("deepep", "hybridep"):
        share = setting.reached_places(group.blocks) / setting.reached_places(group.size)
    kind = "all_gather" if setting.features.dispatcher == "allgather" else "all_to_all"
    return link_use(kind, group, setting.constants.link_rates, share)


def _until_read(table: OpTable, seconds: Floats, index: int) -> float:
    """Seconds of the operators issued between a collective and the first operator that waits for it."""
    total = 0.0
    for later in table.ops[index + 1 :]:
        if index in later.after:
            break
        total += float(seconds[later.id])
    return total


def _products_beside(table: OpTable, seconds: Floats, index: int) -> float:
    """Seconds of the product that feeds a collective or reads it."""
    around = (index - 1, index + 1)
    return max(
        (float(seconds[i]) for i in around if 0 <= i < len(table.ops) and table.classes[i] == GEMM),
        default=0.0,
    )


def hide_all_to_alls(cost: PartCost, concurrent: Concurrent, alone: float = 0.0) -> PartCost:
    """The part with its all-to-alls under another micro-batch's computation and collectives, as far as they are shorter.

    One micro-batch's forward pass runs with another's backward pass, so the all-to-alls of both directions hide under the
    computation of both, in whatever order.

    Args:
        alone: share of the passes that have no other beside them.
    """
    forward, backward = cost.forward, cost.backward
    sent = forward.exchange_seconds + backward.exchange_seconds
    beside = sum(max(each.device_seconds + each.others_seconds, each.host_seconds) for each in (forward, backward))
    return _with_exposed(cost, _exposed(sent, beside, concurrent), alone) if sent else cost


def hide_in_nodes(cost: PartCost, concurrent: Concurrent, delays: bool, alone: float = 0.0) -> PartCost:
    """The part with its all-to-alls hidden in the order of megatron-core's --overlap-moe-expert-parallel-comm.

    Each all-to-all has a computation of its own beside it.

    Of a layer forward (f) and one backward (b), as `TransformerLayerSchedulePlan.run` of megatron-core 0.16.1 says:

        communication: combine b | dispatch f, dispatch b | combine f
        computation:   attention f | experts b, experts f | attention b

    Args:
        delays: weight gradients come behind the rest of their backward pass (--delay-wgrad-compute), beside the next all-to-all.
        alone: share of the passes that have no other beside them.
    """
    forward, backward = cost.forward, cost.backward
    if not forward.exchange_seconds + backward.exchange_seconds:
        return cost
    # The host launches all of a pass at its own pace.
    f, b = (max(1.0, each.host_seconds / (each.device_seconds + each.others_seconds)) for each in (forward, backward))
    rest = [
        pace * (each.device_seconds + each.others_seconds - each.nodes.experts)
        for pace, each in ((f, forward), (b, backward))
    ]
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
    left = 0.0
    for first, beside_first, second, beside_second, between in slots:
        # What runs between both is beside the one or the other.
        each = (_exposed(first, beside_first, concurrent), _exposed(second, between + beside_second, concurrent))
        both = _exposed(first + second, beside_first + beside_second, concurrent)
        left += max(*each, both) if between else sum(each)
    return _with_exposed(cost, left, alone)


def cost_of(table: OpTable, setting: Setting) -> PartCost:
    """Seconds of a part, its all-to-alls under another micro-batch where the run does that."""
    cost = part_cost(table, setting)
    return overlapped(cost, setting) if setting.features.overlap_experts else cost


def overlapped(cost: PartCost, setting: Setting) -> PartCost:
    """A part of `part_cost` with its all-to-alls under another micro-batch, as the run does it."""
    return hide_in_nodes(cost, setting.concurrent, setting.features.delay_weight_gradients, setting.alone)


def _combine(cost: PassCost) -> float:
    """Seconds of the all-to-alls back from the experts."""
    return cost.exchange_seconds - cost.nodes.dispatch


def _with_exposed(cost: PartCost, left: float, alone: float) -> PartCost:
    """The part with so many seconds of its all-to-alls exposed, shared out by theirs; the others run beneath computation.

    Args:
        alone: share of the passes that take as long as they do without another beside them.
    """
    forward, backward = cost.forward, cost.backward
    share = left / (forward.exchange_seconds + backward.exchange_seconds)

    def hidden(cost: PassCost) -> PassCost:
        # Alone a pass waits for no more of its all-to-alls than a slow host leaves to wait for.
        waited = cost.seconds - max(cost.device_seconds + cost.others_seconds, cost.host_seconds)
        expert = (1.0 - alone) * cost.exchange_seconds * share + alone * waited
        exposed = {**cost.exposed, "expert": expert}
        beneath = cost.hidden_seconds + (1.0 - alone) * cost.exchange_seconds * (1 - share)
        return replace(cost, exposed=exposed, hidden_seconds=beneath, is_overlapped=True)

    return replace(cost, forward=hidden(forward), backward=hidden(backward))


Key = tuple[str, str, str]
"""Operator, weight and suffix, as in `OperatorId` (plan/operators.py)."""


def operator_seconds(
    table: OpTable, setting: Setting, cost: PartCost, hides_exchanges: bool = False, more: Floats | float = 0.0
) -> dict[Key, float]:
    """Seconds of every operator of a part.

    Args:
        cost: of the part in this setting.
        hides_exchanges: whether a list puts its all-to-alls beside computation.
        more: [ops] seconds that the part's cost does not have.
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
    """Seconds of the collectives inside operators that nothing hides, by operator and axis (tp, cp, etp).

    Those of an all-to-all between experts are left out: it is an instruction of its own.
    """
    inside: dict[Key, dict[str, float]] = {}
    for op, collective, exposed in _exposed_collectives(table, setting, cost):
        if exposed and op.operator not in EXCHANGE_PARTS:
            by_axis = inside.setdefault(_key(table.part, op), {})
            by_axis[collective.axis] = by_axis.get(collective.axis, 0.0) + exposed
    return inside


def _exposed_collectives(table: OpTable, setting: Setting, cost: PartCost) -> Iterator[tuple[Op, Collective, float]]:
    """Every collective of a part, with the seconds of it that nothing hides."""
    for is_backward, of_pass in ((False, cost.forward), (True, cost.backward)):
        in_pass = table.backward == is_backward
        sent = [
            (table.ops[index], collective, alone_seconds(table, setting, index, collective, payload))
            for index, collective, payload in table.collectives
            if in_pass[index]
        ]
        for op, collective, alone in sent:
            kind = kind_of(collective)
            yield op, collective, alone * _exposed_share(of_pass, kind, (a for _, c, a in sent if kind_of(c) == kind))


def computing_seconds(table: OpTable, setting: Setting, cost: PartCost, hides_exchanges: bool = False) -> Floats:
    """[ops] seconds of a part's computation, stretched to the pace of the host; 0 for collectives."""
    seconds, _ = kernel_seconds(table, setting)
    for is_backward, of_pass in ((False, cost.forward), (True, cost.backward)):
        in_pass = table.backward == is_backward
        on_device = float(seconds[in_pass].sum())
        taken = of_pass.paced_seconds if hides_exchanges else of_pass.compute_seconds
        # All operators alike, so that the instructions of a pass add up to its analytic cost.
        seconds = np.where(in_pass, seconds * (taken / on_device if on_device else 0.0), seconds)
    return seconds


def held_bytes(table: OpTable, element_bytes: int, load: float) -> dict[Key, float]:
    """Operand bytes of a part's weight gradients: the inputs of their products, and the gradients of the outputs.

    Args:
        element_bytes: of an activation.
        load: rows of the busiest rank of an expert group over the mean.
    """
    held: dict[Key, float] = defaultdict(float)
    for op, shape in zip(table.ops, table.shapes, strict=True):
        if op.is_weight_gradient:
            rows, widths = (shape[1], shape[2:]) if op.cost_class == "grouped_gemm" else (shape[2], shape[:2])
            held[_key(table.part, op)] += rows * sum(widths) * element_bytes * (load if op.scales_with_load else 1.0)
    return dict(held)


def _exposed_share(cost: PassCost, kind: str, alone: Iterable[float]) -> float:
    total = sum(alone)
    return cost.exposed.get(kind, 0.0) / total if total else 0.0


def _key(part: Part, op: Op) -> Key:
    operator = BESIDE.get(op.operator, op.operator)
    if op.is_weight_gradient:
        return operator, weight_of(part, op), WEIGHT_GRADIENT
    return operator, "", suffix_of(op)


def suffix_of(op: Op) -> str:
    """The pass that an operator runs in, as instructions name it."""
    if op.phase == "forward":
        return ""
    return RECOMPUTE if op.is_recomputed else BACKWARD


def weight_of(part: Part, op: Op) -> str:
    """The weight whose gradient an operator makes, as plans name it; empty where the capture does not tell.

    A fused kernel writes to the gradient itself; elsewhere the product's result is unnamed, but its module is known.
    """
    if op.operator == GATE:
        return "router"
    paths = [op.module, *(part.storages[index].name for index in op.writes)]
    names = [word for path in paths for word in path.split(".")]
    words = {word.removeprefix("linear_").removesuffix("_proj") for word in names}
    words |= {"output"} if "output_layer" in words else set()
    return next((weight for weight in WEIGHTS.get(op.operator, ()) if weight in words), "")
