"""Seconds of every instruction of a plan without interference, from the prices of its stages: the simulator's input.

- Operators of a pass have the seconds of `layer.py`. Operators without an instruction of their own count for another operator of
  the same part: weight gradients that are not deferred, and recomputation, for the backward operator.
- An operator in partitions is priced at the size of a partition; its deferred weight gradient is one product of that size per
  partition.
- Cutting and joining partitions counts for the instruction that copies (copied_bytes.py), and so do copies into captured graphs
  (captured_launches.py).
- Communication that flags hide and the list does not contain (gradients and parameters during passes) has its exposed seconds.
- Factors measured for the job (`hardware.Refined`) apply to all prices except those of transfers and copies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import (
    CONTEXT,
    EXPERT_TENSOR,
    TENSOR,
    BufferRole,
    Home,
    Instruction,
    parse_buffer,
)
from moe_overlap.plan.lowering.deferral import backward_of
from moe_overlap.plan.lowering.optimizer_state import NORM_STATE
from moe_overlap.plan.operators import (
    BACKWARD,
    COMBINE,
    COUNT,
    DISPATCH,
    FUSED_KERNELS,
    NORM,
    RECOMPUTE,
    STATE_KINDS,
    WEIGHT_GRADIENT,
    GroupKind,
    OperatorId,
    OperatorKind,
    kind_of,
    parse_group,
    parse_operator,
)
from moe_overlap.plan.overlap import KernelBlocks
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.plan.sizes import ACTIVATION_BYTES, deferred_bytes, sent_rows, tokens_of_rank
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Priced, cost_of, one_way_seconds, pair_seconds
from moe_overlap.tuner.cost.captured_launches import Replayed, more_launches_by_row, replayed_in
from moe_overlap.tuner.cost.copied_bytes import HIDDEN, Place, copied_bytes, place_in_list
from moe_overlap.tuner.cost.fused_kernels import FusedSeconds, fused_seconds, kernel_of
from moe_overlap.tuner.cost.interference import Interference, start_seconds
from moe_overlap.tuner.cost.layer import Key, PartCost, collective_seconds_inside, held_bytes, operator_seconds
from moe_overlap.tuner.cost.links import (
    LinkUse,
    axis_group,
    boundary_group,
    collective_seconds,
    host_seconds,
    mixed_use,
    pair_group,
    point_to_point_use,
)
from moe_overlap.tuner.cost.listed_operators import as_listed, quantizing_seconds
from moe_overlap.tuner.cost.machine import Machine, concurrency
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from moe_overlap.tuner.cost.stage import state_seconds
from moe_overlap.tuner.cost.stage_parts import layer_variant, prediction_variant

KEPT = (
    *(BufferRole.PARAMETERS, BufferRole.WEIGHTS, BufferRole.GRADIENT, BufferRole.D_WEIGHTS),
    *(BufferRole.STATE, BufferRole.ACTIVATIONS),
)
"""Roles of the buffers of a parameter group that outlive an operator; tensors between operators are among the activations."""
CHANNELS_INSIDE = {"tp": TENSOR, "tp_cp": TENSOR, "tp_dp_cp": TENSOR, "cp": CONTEXT, "etp": EXPERT_TENSOR}
"""Axis of a collective inside an operator -> the channel of its spans, as the runtime records them."""


@dataclass(slots=True)
class StagePrices:
    """Prices of the instructions of one stage.

    Attributes:
        column: index of the stage in its family.
        instructions: the stage's list, after `read`.
        starts: instruction id -> additional seconds of computation for starting all-to-alls.
    """

    plan: Plan
    model: ModelDescription
    stage: StagePlan
    graph: CapturedModel
    priced: Priced
    column: int
    machine: Machine
    instructions: Sequence[Instruction] = ()
    starts: Mapping[int, float] = field(default_factory=dict)
    _copied: dict[Place, float] = field(default_factory=dict)
    _pieces: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    _named: dict[str, dict[Key, None]] = field(default_factory=lambda: defaultdict(dict))
    _by_size: dict[tuple[int, int], dict[Key, float]] = field(default_factory=dict)
    _fused: dict[tuple[int, int, KernelBlocks | None], FusedSeconds] = field(default_factory=dict)
    _summed: dict[tuple[str, int], dict[Key, float]] = field(default_factory=dict)
    _held: dict[str, dict[Key, float]] = field(default_factory=dict)
    _uses: dict[tuple[str, str], LinkUse] = field(default_factory=dict)
    _inside: dict[tuple[str, int], dict[Key, dict[str, float]]] = field(default_factory=dict)
    _into_graphs: dict[Place, float] = field(default_factory=dict)
    _more_launches: Mapping[int, Mapping[tuple[OperatorKind, bool], float]] = field(default_factory=dict)

    @property
    def _rows_per_token(self) -> float:
        """Rows that a rank sends per token, with the empty places of a static capacity."""
        return sent_rows(self.plan, self.stage, self.model) / tokens_of_rank(self.plan, self.stage)

    @property
    def slowed(self) -> Interference:
        """The interference of instructions that run at the same time on a rank."""
        return concurrency(self.machine, self.priced.setting.groups["dp_cp"])[1]

    def read(self, instructions: Sequence[Instruction]) -> None:
        """Read the list whose instructions are priced: its names, and the number of partitions of each operator."""
        self.instructions = instructions
        if self.machine.exchanges is not None:
            self.starts = start_seconds(instructions, self.machine.exchanges.starting)
        self._pieces.update((i.name, i.micro_batch) for i in instructions)
        for name in dict.fromkeys(i.name for i in instructions):
            operator = parse_operator(name)
            if place := place_of(operator):
                self._named[place][_key(operator)] = None
        hidden = self.priced.family.boundary_bytes
        self._copied = copied_bytes(instructions, hidden, hidden * self._rows_per_token)
        if self.priced.setting.replays.captured:
            replayed = self.replayed(instructions)
            self._more_launches = more_launches_by_row(instructions, replayed, self.row)
            for i in instructions:
                if i.id in replayed:
                    seconds = sum(self._copy_seconds(size) for size in replayed[i.id].copies)
                    self._into_graphs[place_in_list(i)] = seconds

    def replayed(self, instructions: Sequence[Instruction]) -> dict[int, Replayed]:
        """Instruction id -> launches, copies and memory of its captured graph, for a list of this stage."""
        pieces = Counter((i.name, i.micro_batch) for i in instructions)
        hidden = self.priced.family.boundary_bytes
        routed = hidden * self._rows_per_token

        def size(i: Instruction, role: BufferRole, parts: int) -> float:
            cut = pieces[i.name, i.micro_batch]
            return (hidden if role in HIDDEN else routed) * (1.0 if parts > 1 else 1.0 / cut)

        return replayed_in(instructions, self.plan.static_capacity_factor is not None, size)

    def seconds(self, i: Instruction) -> float:
        """Seconds of one instruction without interference."""
        if i.kind == "point-to-point":
            return self._point_to_point(i)
        if i.kind == "copy":
            return float(
                host_seconds(i.bytes, self.priced.setting.groups["dp"].links, self.machine.constants.link_rates)
            )
        operator, pieces = parse_operator(i.name), self._pieces[i.name, i.micro_batch]
        if operator.kind == COUNT and self.machine.exchanges is not None:
            predicted = self.machine.exchanges.count_seconds
            return self.machine.refined.seconds(kind_of(i.name), self.is_cut(i), predicted)
        if operator.kind is OperatorKind.GATHER:
            return self._gather(operator)
        if operator.kind in STATE_KINDS or operator.kind is NORM:
            predicted = self.machine.constants.step_seconds if operator.kind is NORM else self._state(i)
            return self.machine.refined.seconds(kind_of(i.name), self.is_cut(i), predicted)
        place = place_in_list(i)
        added = self.starts.get(i.id, 0.0) + self._copy_seconds(self._copied.get(place, 0.0))
        added += self._into_graphs.get(place, 0.0)
        if i.kind == "weight-gradient":
            # A gradient in partitions may be several instructions, each of which computes its own partitions.
            products = self._products(i.name)
            return added + (len(i.partition) or 1) * self.piece_seconds(i.name, products)
        return added + self.piece_seconds(i.name, pieces)

    def _point_to_point(self, i: Instruction) -> float:
        """Seconds of a send or a receive; uncut hidden states have one size at every boundary, tiles differ."""
        if not self.plan.transfers:
            return self.transfer_seconds()
        sent = i.bytes if i.partition else self.priced.family.boundary_bytes
        # A stage is inside one node or has complete nodes, so the distance to a peer is the same from any of its ranks.
        return pair_seconds(self.plan, self.stage.devices.ranks[0], i.peers[0], sent, self.machine)

    def link_use(self, i: Instruction) -> LinkUse:
        """The links that an instruction between devices uses."""
        key = i.kind, i.name
        if key not in self._uses:
            self._uses[key] = self._link_use(i)
        return self._uses[key]

    def _link_use(self, i: Instruction) -> LinkUse:
        if i.kind == "point-to-point":
            cluster, world = self.machine.cluster, self.plan.world_size
            if self.plan.transfers:
                pair = pair_group(self.stage.devices.ranks[0], i.peers[0], world, cluster.group_of(0))
                return point_to_point_use(pair)
            return point_to_point_use(boundary_group(self.plan, cluster))
        operator, rates = parse_operator(i.name), self.priced.rates
        if operator.kind in (DISPATCH, COMBINE, COUNT):
            return rates.token_use
        if operator.kind not in STATE_KINDS or self._is_copy(operator.group):
            return LinkUse()
        rows = [self.row(operator.group)] if operator.group else range(len(self.priced.family.sizes))
        sizes = [self.priced.family.sizes[row] for row in rows]
        dense = sum(size.dense_parameters for size in sizes) * rates.dense_scatter[:1]
        experts = sum(size.expert_parameters for size in sizes) * rates.expert_scatter[:1]
        return mixed_use(rates.dense_use, rates.expert_use, dense, experts)

    def is_cut(self, i: Instruction) -> bool:
        """Whether an instruction is one of several partitions of its operator."""
        return self._pieces[i.name, i.micro_batch] > 1

    def piece_seconds(self, name: str, pieces: int) -> float:
        """Seconds of one partition of an operator of the list, if it is cut into `pieces`."""
        operator = parse_operator(name)
        return self._operators(place_of(operator), pieces)[_key(operator)]

    def inside_shares(self, i: Instruction) -> dict[str, float]:
        """Channel -> share of an instruction's seconds in exposed collectives of tensor, context and expert-tensor ranks.

        Empty for a fused layer, whose kernels are not divided.
        """
        place = place_of(i.operator) if i.kind == "compute" else ""
        if not place or place in self._splits():
            return {}
        pieces = self._pieces[i.name, i.micro_batch]
        if (place, pieces) not in self._inside:
            self._inside[place, pieces] = self._shares_inside(place, pieces)
        return self._inside[place, pieces].get(_key(i.operator), {})

    def _shares_inside(self, place: str, pieces: int) -> dict[Key, dict[str, float]]:
        """`inside_shares` of all operators of a place that contain collectives."""
        row, named = self.row(place), self._named[place]
        table, cost = self._sized(row, pieces)
        total: dict[Key, float] = defaultdict(float)
        for key, seconds in self._priced(row, pieces).items():
            total[_listed_key(key, named)] += seconds
        shares: dict[Key, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for key, by_axis in collective_seconds_inside(table, self.priced.setting, cost).items():
            listed_key = _listed_key(key, named)
            for axis, seconds in by_axis.items():
                shares[listed_key][CHANNELS_INSIDE[axis]] += seconds / total[listed_key]
        return {listed_key: dict(by_channel) for listed_key, by_channel in shares.items()}

    def exposed_inside(self) -> float:
        """Seconds of the fused kernels of a micro-batch minus those of their products."""
        kernels = (parse_operator(i.name) for i in self.instructions if i.micro_batch == 0 and i.kind == "compute")
        return sum(
            self._fused_seconds(place_of(kernel), 1).exposed[_key(kernel)]
            for kernel in kernels
            if kernel.kind in FUSED_KERNELS
        )

    def transfer_seconds(self) -> float:
        """Seconds of one transfer to a neighbouring stage."""
        return one_way_seconds(self.plan, self.priced.family.boundary_bytes, self.machine)

    def buffer_bytes(self, name: str) -> float:
        """Bytes of a buffer: states, gathered weights, gradients of a micro-batch, saved activations; else 0.

        Tensors between operators count with the activations that one of them saves; operands of deferred weight gradients are
        separate buffers.
        """
        buffer = parse_buffer(name)
        if buffer.role is BufferRole.SAVED:
            gradient = str(buffer.gradient)
            return self.deferred_bytes(gradient) / self._products(gradient)
        role, part, moves = buffer.role, buffer.subject, buffer.home is Home.MOVED
        if (
            role not in KEPT
            or buffer.home not in (Home.DEVICE, Home.MOVED)
            or name == NORM_STATE
            or self._is_copy(part)
        ):
            return 0.0
        stage, rates, size = self.stage, self.priced.rates, self.priced.family.sizes[self.row(part)]
        total = size.dense_parameters + size.expert_parameters
        shard = size.dense_parameters / (stage.data * stage.context) + size.expert_parameters / stage.expert_data
        if role is BufferRole.D_WEIGHTS:
            return rates.gradient_bytes * total
        if role is BufferRole.WEIGHTS and not moves:
            return rates.weight_bytes * total
        stored, offloaded = {
            BufferRole.PARAMETERS: (
                rates.weight_bytes * (shard if stage.zero_level >= 3 else total),
                stage.offload.weights,
            ),
            BufferRole.GRADIENT: (
                rates.gradient_bytes * (shard if stage.zero_level >= 2 else total),
                stage.offload.gradients,
            ),
            BufferRole.STATE: (
                rates.optimizer_bytes * (shard if stage.zero_level >= 1 else total),
                stage.offload.optimizer,
            ),
            BufferRole.ACTIVATIONS: (size.saved, stage.offload.activations),
        }[BufferRole.PARAMETERS if role is BufferRole.WEIGHTS else role]
        return stored * (offloaded if moves else 1.0 - offloaded)

    def deferred_bytes(self, name: str) -> float:
        """Bytes of the operands that a deferred weight gradient of one micro-batch holds until it is computed."""
        operator = parse_operator(name)
        place = place_of(operator)
        if place not in self._held:
            named, summed = self._named[place], dict.fromkeys(self._named[place], 0.0)
            table, element = self.priced.family.tables[self.row(place)], ACTIVATION_BYTES[self.plan.precision]
            for key, size in held_bytes(table, element, self.machine.load).items():
                summed[_listed_key(key, named)] += size
            self._held[place] = summed
        return self._held[place][_key(operator)]

    def bounded_bytes(self, name: str) -> int:
        """Bytes that lowering counts for a deferred weight gradient against the plan's limit: those of the busiest rank."""
        return deferred_bytes(parse_operator(name), self.plan, self.stage, self.model)

    def saved_bytes(self, part: str) -> int:
        """Bytes that the forward pass of a micro-batch through a part of the model saves."""
        return round(self.priced.family.sizes[self.row(part)].saved)

    def row(self, part: str) -> int:
        """Index of `L3`, `mtp0`, `embedding` or `head` in the family's tables."""
        group = parse_group(part)
        if group.number is None:
            kind_and_variant = (part, "none")
        elif group.kind is GroupKind.PREDICTION:
            kind_and_variant = (self.graph.mtp_kinds[group.number], prediction_variant(self.stage))
        else:
            layer = group.number
            first = next(first for first, last in self.stage.chunks if first <= layer < last)
            kind_and_variant = (self.graph.layer_kinds[layer], layer_variant(self.stage, layer - first))
        parts = [table.part for table in self.priced.family.tables]
        return next(
            row for row, candidate in enumerate(parts) if (candidate.kind, candidate.variant) == kind_and_variant
        )

    def _is_copy(self, part: str) -> bool:
        """Whether a part is the copy of the word embedding that prediction layers read on another stage; it counts with them."""
        return (
            part == GroupKind.EMBEDDING and self.plan.stage_of(self.stage.devices.ranks[0]) != self.plan.embedding_stage
        )

    def _products(self, gradient: str) -> int:
        """Products of a deferred weight gradient: one per partition of its operator; one if it is fused."""
        return max(1, self._pieces[backward_of(gradient), 0])

    def _copy_seconds(self, size: float) -> float:
        """Seconds of a copy on the device, which reads and writes the bytes once."""
        if not size:
            return 0.0
        setting = self.priced.setting
        rate = setting.gpu.memory_gb_per_s * 1e9 * setting.constants.memory
        return 2.0 * size / rate + setting.constants.kernel_seconds

    def _state(self, i: Instruction) -> float:
        """Seconds of gradients, parameters or the optimizer: of a stage, of a parameter group, or of a bucket."""
        operator = i.operator
        kind, part = operator.kind, operator.group
        # Without a group and without bytes it only completes buckets, or a reduction over a single replica.
        if not part and not i.bytes:
            return 0.0
        costs, terms, rates = self.priced.costs, self.priced.terms, self.priced.rates
        if not part:
            # This instruction has all exposed seconds of the gather, whether before the passes or after the update.
            gathered = costs.first_extra_seconds[0] + self.priced.gathered
            total = costs.tail_seconds[0] if kind is OperatorKind.GRADIENTS else gathered
            return float(total[self.column])
        if self._is_copy(part):
            return 0.0
        row = self.row(part)
        if kind is OperatorKind.OPTIMIZER:
            return float(terms.optimizer_seconds[row, 0])
        size = self.priced.family.sizes[row]
        element_bytes = rates.gradient_bytes if kind is OperatorKind.GRADIENTS else rates.gathered_bytes
        dense, experts = np.array([size.dense_parameters]), np.array([size.expert_parameters])
        once = state_seconds(dense, experts, element_bytes, rates)
        # Without sharding gradients are reduced by an all-reduce: a reduce-scatter and an all-gather.
        factor = 1.0
        if kind is OperatorKind.GRADIENTS:
            factor = 2.0 if self.stage.zero_level == 0 else rates.reduce_scatter
        return factor * float(once[0]) / max(1, self._pieces[str(operator), None])

    def _gather(self, operator: OperatorId) -> float:
        """Seconds of the all-gather by which ranks complete a received tensor."""
        (transfer,) = (t for t in self.plan.transfers if (t.from_stage, t.to_stage) == operator.stages)
        assert transfer.all_gather is not None
        # The stage continues when all groups have ended, and the largest is the slowest.
        ranks, links = max(transfer.all_gather.groups, key=len), self.priced.setting.groups["dp"].links
        group = axis_group(len(ranks), ranks[1] - ranks[0], self.plan.world_size, links)
        boundary, rates = self.priced.family.boundary_bytes, self.machine.constants.link_rates
        return float(collective_seconds("all_gather", boundary, group, rates))

    def _operators(self, place: str, pieces: int) -> Mapping[Key, float]:
        """Seconds of one partition of each operator of a part, under the names of the list."""
        if (place, pieces) not in self._summed:
            named, summed = self._named[place], dict.fromkeys(self._named[place], 0.0)
            fused = place in self._splits()
            priced = self._fused_seconds(place, pieces).total if fused else self._priced(self.row(place), pieces)
            for key, seconds in priced.items():
                part, _, suffix = key
                kind = f"{part}.{suffix}" if suffix else part
                summed[_listed_key(key, named)] += self.machine.refined.seconds(kind, pieces > 1, seconds)
            self._summed[place, pieces] = summed
        return self._summed[place, pieces]

    def _priced(self, row: int, pieces: int) -> dict[Key, float]:
        if (row, pieces) not in self._by_size:
            table, cost = self._sized(row, pieces)
            setting = self.priced.setting
            again = quantizing_seconds(table, setting) if pieces > 1 else 0.0
            self._by_size[row, pieces] = operator_seconds(table, setting, cost, self.stage.overlap.is_listed, again)
        return self._by_size[row, pieces]

    def _sized(self, row: int, pieces: int) -> tuple[OpTable, PartCost]:
        """The operators and the cost of a part of the model at the size of one partition."""
        table, cost = self.priced.family.tables[row], self.priced.parts[row]
        samples, length = self.stage.micro_batch_size, self.plan.sequence_length
        # If one stage overlaps, the executor runs all stages.
        is_listed = self.plan.is_listed
        part = as_listed(table.part) if is_listed else table.part
        setting, extra_launches = self.priced.setting, self._more_launches.get(row)
        if extra_launches:
            setting = replace(setting, replays=replace(setting.replays, more_launches=extra_launches))
        # Priced at its size, not as a share of the uncut part: small products are less efficient, the price of partitioning.
        if pieces > 1 or part is not table.part:
            divided = samples % pieces == 0
            sizes = (samples // pieces, length) if divided else (samples, length // pieces)
            table = tabulate(part, *sizes)
            cost = cost_of(table, setting)
        elif extra_launches:
            cost = cost_of(table, setting)
        return table, cost

    def _fused_seconds(self, place: str, pieces: int) -> FusedSeconds:
        """Seconds of the operators of a fused layer, each at the size of one partition."""
        row, split = self.row(place), self._splits()[place]
        if (row, pieces, split) not in self._fused:
            table, cost = self._sized(row, pieces)
            self._fused[row, pieces, split] = fused_seconds(table, self.priced.setting, cost, split)
        return self._fused[row, pieces, split]

    def _splits(self) -> dict[str, KernelBlocks | None]:
        """Fused layer -> the split of its kernels' blocks."""
        return {
            f"L{entry.layer}": entry.kernel_blocks for entry in self.stage.overlap.layers if entry.mechanism == "fused"
        }


def place_of(operator: OperatorId) -> str:
    """`L3`, `mtp0`, `embedding` or `head`; empty if it is not an operator of the model."""
    return operator.group if operator.is_of_model else ""


def _key(operator: OperatorId) -> Key:
    return operator.kind, operator.weight, operator.phase


def _listed_key(key: Key, named: Mapping[Key, None]) -> Key:
    """The operator of a list that includes the work of a captured operator."""
    part, weight, suffix = key
    if key in named:
        return key
    if suffix == WEIGHT_GRADIENT:
        deferred = [other for other in named if other[0] == part and other[2] == suffix and not (weight and other[1])]
        # One instruction for all weights of the operator, or a weight that the capture does not name.
        if deferred:
            return deferred[0]
    for operator in (part, kernel_of(key)):
        if suffix in (WEIGHT_GRADIENT, RECOMPUTE) and (operator, "", BACKWARD) in named:
            return operator, "", BACKWARD
    # No second of a part may be lost: the rest counts for any operator of the same pass.
    backward = suffix != ""
    return next(other for other in named if (other[2] != "") == backward)
