"""The process groups of one rank, built from its stage's plan. `parallel_state` of megatron-core is never initialised.

Every part of the runtime is handed its groups. Rank order inside a stage, fastest first: tensor, context, data (dense layers);
expert-tensor, expert, expert-data (experts). Tensor ranks, which communicate most, are thus neighbours on one host.

Creating a group is a collective over all ranks, members or not: every rank creates every group of the plan, in one order, or the
others would wait for it. Over NCCL one split of the world makes all groups of a kind, so that the number of splits does not grow
with the number of ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from moe_overlap.plan.instructions import boundary_channel
from moe_overlap.plan.lowering.residency import BlockLimits
from moe_overlap.plan.operators import OperatorKind, boundary_operator, parse_operator
from moe_overlap.plan.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage's place in the pipeline, for megatron-core; with stages of different shape it stands in for a process group."""

    stage: int
    stages: int

    def rank(self) -> int:
        """Index of the stage."""
        return self.stage

    def size(self) -> int:
        """Number of stages."""
        return self.stages


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a tied embedding that a rank shares with ranks of both ends of a pipeline.

    Attributes:
        group: all ranks that hold these rows; the first belongs to the first stage.
        block: number of these rows' block, if the rank's rows are cut into `blocks` equal ones.
    """

    group: dist.ProcessGroup
    block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StageGroups:
    """This rank's place in the plan, and its process groups.

    Attributes:
        stage: index of this rank's stage in the plan.
        collection: megatron-core's collection; a field that was not built raises AttributeError when read.
        world: every rank of the run.
        transfers: a communicator for every channel of a stage boundary that ends at this rank, by channel and peer. One for each
            direction: NCCL matches the operations of a communicator by their order alone, and on a shared one two stages that
            both wait to send would block each other for good (plan/lowering/rendezvous.py). Empty where megatron-core's own
            schedules run, which transfer over `collection.pp`.
        ends: with stages of different shape, the blocks of rows of a tied embedding that this rank holds on the first stage or
            on that of the loss; empty on other stages.
    """

    stage: int
    collection: ProcessGroupCollection
    world: dist.ProcessGroup
    transfers: Mapping[tuple[str, int], dist.ProcessGroup] = field(default_factory=dict)
    ends: tuple[SharedRows, ...] = ()

    @property
    def data_rank(self) -> int:
        """This rank's place among the replicas of the dense layers."""
        return self.collection.dp.rank()

    @property
    def data_size(self) -> int:
        """Number of replicas of the dense layers."""
        return self.collection.dp.size()

    def close(self) -> None:
        """Destroy the groups; the default group stays."""
        seen = set()
        ends = (rows.group for rows in self.ends)
        for value in (*vars(self.collection).values(), *self.transfers.values(), *ends):
            if isinstance(value, dist.ProcessGroup) and value is not dist.group.WORLD and id(value) not in seen:
                seen.add(id(value))
                dist.destroy_process_group(value)


def stage_rank_sets(stage: StagePlan) -> dict[str, list[tuple[int, ...]]]:
    """Rank sets of every kind of group inside one stage.

    Returns:
        kind -> disjoint rank tuples that cover the stage.
    """
    ranks = stage.devices.ranks
    dense = (stage.tensor, stage.context, stage.data)
    expert_data = len(ranks) // (stage.expert_tensor * stage.expert)
    experts = (stage.expert_tensor, stage.expert, expert_data)
    return {
        "tp": _slices(ranks, dense, (0,)),
        "cp": _slices(ranks, dense, (1,)),
        "dp": _slices(ranks, dense, (2,)),
        "tp_cp": _slices(ranks, dense, (0, 1)),
        "dp_cp": _slices(ranks, dense, (1, 2)),
        "tp_dp_cp": _slices(ranks, dense, (0, 1, 2)),
        "expt_tp": _slices(ranks, experts, (0,)),
        "ep": _slices(ranks, experts, (1,)),
        "expt_dp": _slices(ranks, experts, (2,)),
        "tp_ep": _slices(ranks, experts, (0, 1)),
    }


def _slices(ranks: tuple[int, ...], sizes: tuple[int, int, int], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Sets of ranks that differ only along `axes` of the mesh `sizes` (fastest axis first)."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, rank in enumerate(ranks):
        place = (index % sizes[0], index // sizes[0] % sizes[1], index // (sizes[0] * sizes[1]))
        groups.setdefault(tuple(place[a] for a in range(3) if a not in axes), []).append(rank)
    return [tuple(group) for group in groups.values()]


def build_groups(
    plan: Plan, timeout: datetime.timedelta | None = None, limits: BlockLimits | None = None
) -> StageGroups:
    """Create this rank's groups. Collective: every rank of the run creates all groups in the same order.

    1. Groups inside each stage, kind by kind.
    2. Groups across stages. The pipeline group joins ranks of equal place in their stages; the group of the tied embedding joins
       the first and the last of them.
    3. Groups that span the tensor ranks of all stages, for norms and checks of a whole model replica.
    Stages of different shape have none of 2 and 3: `pp` is a place, and norms are taken over the world.

    Args:
        timeout: timeout of every operation of the groups; None: torch's own default, not that of the process group.
        limits: largest number of thread blocks of NCCL kernels that run concurrently with others; None: NCCL's default.
    """
    rank = dist.get_rank()
    stage_index = next(index for index, stage in enumerate(plan.stages) if rank in stage.devices.ranks)
    fields: dict[str, dist.ProcessGroup | None] = {}
    rows = [stage_rank_sets(stage) for stage in plan.stages]  # 1
    for kind in rows[0]:
        _create(kind, [ranks for row in rows for ranks in row[kind]], fields, timeout, limits)
    if plan.transfers:
        place: Any = StagePlace(stage_index, len(plan.stages))
        fields |= {"pp": place, "mp": None, "tp_ep_pp": None}
    else:
        columns = list(zip(*(stage.devices.ranks for stage in plan.stages), strict=True))  # 2
        _create("pp", columns, fields, timeout, limits)
        _create("embd", [tuple(dict.fromkeys((column[0], column[-1]))) for column in columns], fields, timeout, limits)
        _create("pos_embd", [(column[0],) for column in columns], fields, timeout, limits)
        for kind, source in (("mp", "tp_cp"), ("tp_ep_pp", "tp_ep")):  # 3
            joined = zip(*(row[source] for row in rows), strict=True)
            _create(
                kind, [tuple(rank for ranks in stages for rank in ranks) for stages in joined], fields, timeout, limits
            )
    # Inner stages hold neither embedding: megatron-core asks for the fields all the same.
    fields.setdefault("embd", None)
    fields.setdefault("pos_embd", None)
    # The norm of the gradients and the NaN check cover every shard of the model once: the whole world.
    fields["intra_dist_opt"] = dist.group.WORLD
    fields["intra_dp_cp"] = fields["dp_cp"]
    fields["intra_expt_dp"] = fields["expt_dp"]
    fields["inter_dist_opt"] = None
    collection = ProcessGroupCollection(**fields)
    transfers = _transfer_groups(plan, timeout, limits) if plan.runs_lists else {}
    return StageGroups(
        stage=stage_index,
        collection=collection,
        world=dist.group.WORLD,
        transfers=transfers,
        ends=_shared_rows(plan, timeout, limits) if plan.transfers else (),
    )


def ranks_of_tied_blocks(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks of the first stage and of that of the loss that hold each block of a tied embedding's rows."""
    ends, blocks = (plan.stages[0], plan.stages[plan.loss_stage]), plan.tied_blocks
    # Tensor ranks are numbered fastest, and a stage has whole rounds of them.
    return [
        tuple(rank for stage in ends for rank in stage.devices.ranks[block * stage.tensor // blocks :: stage.tensor])
        for block in range(blocks)
    ]


def _shared_rows(plan: Plan, timeout: datetime.timedelta | None, limits: BlockLimits | None) -> tuple[SharedRows, ...]:
    me, holders = dist.get_rank(), ranks_of_tied_blocks(plan)
    held = [block for block, ranks in enumerate(holders) if me in ranks]
    rows = []
    for blocks in _disjoint(holders):
        group = _own_group([holders[block] for block in blocks], "ends", _options("ends", timeout, limits), timeout)
        if group is not None:
            block = next(block for block in blocks if block in held)
            rows.append(SharedRows(group, held.index(block), len(held)))
    return tuple(rows)


Pair = tuple[int, int]


def transfer_pairs(plan: Plan) -> list[tuple[str, list[Pair]]]:
    """Channels of stage boundaries, each with disjoint pairs of ranks that need a communicator, in the order of their creation.

    Between equal stages every rank has one peer, and a channel has one entry. Between stages of different shape a rank has
    several peers: the pairs that share tiles are dealt to rounds, since one split of the world makes the communicators of
    disjoint pairs only.
    """
    stages = len(plan.stages)
    wraps = any(len(stage.chunks) > 1 for stage in plan.stages)
    tiles = {(transfer.from_stage, transfer.to_stage): transfer.tiles for transfer in plan.transfers}
    rounds: list[tuple[str, list[Pair]]] = []
    for first in range(stages if wraps else stages - 1):
        second = (first + 1) % stages
        for backward in (False, True) if stages > 1 else ():
            send = parse_operator(boundary_operator(OperatorKind.SEND, first, second, backward), "groups")
            if (first, second) in tiles:
                joined = sorted({(tile.source, tile.target) for tile in tiles[first, second]})
            else:
                joined = list(zip(plan.stages[first].devices.ranks, plan.stages[second].devices.ranks, strict=True))
            rounds += [(boundary_channel(send), [joined[place] for place in places]) for places in _disjoint(joined)]
    return rounds


def _disjoint(sets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the sets, in rounds of disjoint sets: each in the first round that has none of its ranks."""
    rounds: list[tuple[list[int], set[int]]] = []
    for place, ranks in enumerate(sets):
        free = next((entry for entry in rounds if not entry[1] & set(ranks)), None)
        if free is None:
            free = ([], set())
            rounds.append(free)
        free[0].append(place)
        free[1].update(ranks)
    return [places for places, _ in rounds]


def _transfer_groups(
    plan: Plan, timeout: datetime.timedelta | None, limits: BlockLimits | None
) -> dict[tuple[str, int], Any]:
    me = dist.get_rank()
    groups: dict[tuple[str, int], Any] = {}
    for channel, pairs in transfer_pairs(plan):
        group = _own_group(pairs, channel, _options("pp", timeout, limits), timeout)
        if group is not None:
            (peer,) = (rank for pair in pairs if me in pair for rank in pair if rank != me)
            groups[channel, peer] = group
    return groups


def _create(
    kind: str,
    rank_sets: list[tuple[int, ...]],
    fields: dict[str, dist.ProcessGroup | None],
    timeout: datetime.timedelta | None,
    limits: BlockLimits | None,
) -> None:
    """Create a group for every rank set, and keep the one that holds this rank."""
    group = _own_group(rank_sets, kind, _options(kind, timeout, limits), timeout)
    if group is not None:
        fields[kind] = group


def _own_group(
    rank_sets: Sequence[tuple[int, ...]], name: str, options: Any, timeout: datetime.timedelta | None
) -> dist.ProcessGroup | None:
    """Create the groups of disjoint rank sets; returns the one with this rank, None if there is none.

    Over NCCL `new_group` splits the world once per set, even for a set of one rank: hundreds of ranks would make thousands of
    splits before the first step, each of them a collective. Here one split has a colour for every set. Not yet run on hardware.
    """
    if dist.get_backend() == "nccl" and dist.group.WORLD.bound_device_id is not None:
        sets = [list(ranks) for ranks in rank_sets]
        return dist.split_group(split_ranks=sets, timeout=timeout, pg_options=options, group_desc=name)
    this_rank, member_group = dist.get_rank(), None
    for ranks in rank_sets:
        group = dist.new_group(list(ranks), timeout=timeout, group_desc=f"{name} {ranks}", pg_options=options)
        member_group = group if this_rank in ranks else member_group
    return member_group


_URGENT = frozenset({"ep", "tp_ep", "expt_tp", "pp"})
"""Kinds of groups whose sends and all-to-alls block computation on other ranks."""
_REDUCED = frozenset({"dp_cp", "expt_dp", "ends"})
"""Kinds of groups that reduce gradients and gather weights: of dense layers, of experts and of a tied embedding."""


def _options(kind: str, timeout: datetime.timedelta | None, limits: BlockLimits | None = None) -> Any:
    """Options of a group over NCCL; None elsewhere. Not yet run on hardware.

    Kernels that block computation run on a stream of high priority. Kernels that run concurrently with others use so few thread
    blocks that all of them are resident on the device at a time (plan/lowering/residency.py).

    Args:
        limits: largest number of thread blocks of such a kernel; None: NCCL's default, where nothing runs concurrently.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=kind in _URGENT)
    if limits is not None and (kind in _URGENT or kind in _REDUCED):
        options.config.max_ctas = limits.point_to_point if kind in _URGENT else limits.collective
    if timeout is not None:
        options._timeout = timeout
    return options
