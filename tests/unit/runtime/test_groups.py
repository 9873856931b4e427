"""The rank sets of a stage: disjoint, covering, and those of megatron-core's RankGenerator."""

from __future__ import annotations

import itertools
from math import lcm
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.training.cli.arguments import parse
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.plan.plan import Devices, Offload, Recompute, StagePlan
from moe_overlap.runtime import groups as groups_module
from moe_overlap.runtime.groups import build_groups, stage_rank_sets, transfer_pairs
from tests.unit.plan import plan_samples
from tests.unit.plan.test_plan_tiles import unlike
from tests.unit.runtime.one_process import MOE, VOCABULARY

SIZES = [
    (tp, cp, dp, ep, etp, pp)
    for tp, cp, dp, pp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 6), (1, 2, 3))
    for ep, etp in itertools.product((1, 2, 3, 4, 8), (1, 2, 4))
    if (tp * cp * dp) % (ep * etp) == 0
]
DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "tp_cp": "tp-cp", "dp_cp": "dp-cp", "tp_dp_cp": "tp-dp-cp"}
EXPERT = {"expt_tp": "tp", "ep": "ep", "expt_dp": "dp", "tp_ep": "tp-ep"}


def stage(ranks: tuple[int, ...], tp: int, cp: int, dp: int, ep: int, etp: int) -> StagePlan:
    return StagePlan(
        chunks=((0, 1),),
        devices=Devices(mesh=(1, len(ranks)), ranks=ranks),
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        tensor=tp,
        context=cp,
        data=dp,
        expert=ep,
        expert_tensor=etp,
        zero_level=1,
        recompute=Recompute(),
        offload=Offload(),
    )


def test_equal_to_megatron_core() -> None:
    assert len(SIZES) > 300
    for tp, cp, dp, ep, etp, pp in SIZES:
        size = tp * cp * dp
        dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        expert = RankGenerator(tp=etp, ep=ep, dp=size // ep // etp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
        stages = [stage(tuple(range(s * size, (s + 1) * size)), tp, cp, dp, ep, etp) for s in range(pp)]
        mine = [stage_rank_sets(one) for one in stages]
        assert set(mine[0]) == {*DENSE, *EXPERT}
        for kind in mine[0]:
            generator, token = (dense, DENSE[kind]) if kind in DENSE else (expert, EXPERT[kind])
            expected = {tuple(ranks) for ranks in generator.get_ranks(token)}
            got = [ranks for sets in mine for ranks in sets[kind]]
            assert set(got) == expected and len(got) == len(expected), (kind, tp, cp, dp, ep, etp, pp)
            assert sorted(rank for ranks in got for rank in ranks) == list(range(size * pp)), kind


def test_any_ranks_in_any_order() -> None:
    sets = stage_rank_sets(stage((9, 4, 7, 2), tp=2, cp=1, dp=2, ep=4, etp=1))
    assert sets["tp"] == [(9, 4), (7, 2)] and sets["dp"] == [(9, 7), (4, 2)]
    assert sets["ep"] == [(9, 4, 7, 2)] and sets["expt_dp"] == [(9,), (4,), (7,), (2,)]


def test_built_groups_are_the_sets() -> None:
    """Every rank of a pretended world of eight: TP2 × DP2 × PP2 with EP2, ETP2."""
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
    config = parse(f"{MOE} {flags} --sequence-parallel".split()).config
    plan = plan_from_flags(config, describe_model(config, VOCABULARY), 8)
    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        for rank in range(8):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
            groups = build_groups(plan)
            collection, first = groups.collection, 4 * (rank // 4)
            ranks = {
                kind: tuple(dist.get_process_group_ranks(getattr(collection, kind)))
                for kind in ("tp", "dp", "ep", "expt_dp", "pp", "embd", "mp", "tp_ep_pp", "tp_dp_cp", "intra_dist_opt")
            }
            pair, column = first + rank % 4 // 2 * 2, rank % 4
            assert ranks["tp"] == (pair, pair + 1)
            assert ranks["dp"] == (first + rank % 2, first + rank % 2 + 2)
            assert ranks["ep"] == ranks["dp"] and ranks["expt_dp"] == (rank,)
            assert ranks["pp"] == ranks["embd"] == (column, column + 4)
            assert ranks["mp"] == tuple(sorted((pair % 4, pair % 4 + 1, pair % 4 + 4, pair % 4 + 5)))
            assert ranks["tp_ep_pp"] == ranks["intra_dist_opt"] == tuple(range(8))
            assert ranks["tp_dp_cp"] == tuple(range(first, first + 4))
            assert (groups.stage, groups.data_rank, groups.data_size) == (rank // 4, rank % 4 // 2, 2)
            assert (collection.pos_embd is None) == (rank >= 4)
            with pytest.raises(AttributeError):
                _ = collection.hcp  # was not built
            assert not parallel_state.is_initialized()
            dist.destroy_process_group()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 1), (2, 2), (2, 3), (4, 2)])
def test_every_row_of_a_tied_embedding_is_shared_once(first: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows one by one: those with tensor rank i of one end meet those that hold the same rows at the other, data ranks too."""
    ends = [stage(tuple(range(2 * first)), first, 1, 2, 1, 1), stage(tuple(range(10, 10 + last)), last, 1, 1, 1, 1)]
    pretended: Any = SimpleNamespace(stages=ends, loss_stage=1, tied_blocks=lcm(first, last))
    monkeypatch.setattr(
        groups_module,
        "_own_group",
        lambda sets, *_: next((each for each in sets if dist.get_rank() in each), None),
    )
    monkeypatch.setattr(groups_module, "_options", lambda *_: None)
    rows = 12
    for each in ends:
        for place, rank in enumerate(each.devices.ranks):
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            met: dict[int, set[int]] = {}
            for shared in groups_module._shared_rows(pretended, None, None):
                size = rows // each.tensor // shared.blocks
                begin = place % each.tensor * (rows // each.tensor) + shared.block * size
                for row in range(begin, begin + size):
                    assert row not in met, "a row is exchanged once"
                    met[row] = {*shared.group}  # type: ignore[misc]
            share = rows // each.tensor
            own = range(place % each.tensor * share, (place % each.tensor + 1) * share)
            assert met == {
                row: {
                    other
                    for end in ends
                    for at, other in enumerate(end.devices.ranks)
                    if row // (rows // end.tensor) == at % end.tensor
                }
                for row in own
            }


def test_over_nccl_every_kind_of_group_is_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for NCCL, whose world has its communicator; 64 ranks of which most kinds of groups have one each."""
    config = parse(f"{MOE} --pipeline-model-parallel-size 2 --expert-model-parallel-size 2".split()).config
    plan = plan_from_flags(config, describe_model(config, VOCABULARY), 64)
    splits: list[tuple[str, list[list[int]]]] = []
    alone = dist.new_group

    def split(split_ranks: list[list[int]], group_desc: str, **_: object) -> dist.ProcessGroup | None:
        splits.append((group_desc, split_ranks))
        own = [ranks for ranks in split_ranks if dist.get_rank() in ranks]
        return alone(own[0]) if own else None

    def one_by_one(*_: object, **__: object) -> None:
        raise AssertionError("a split of the world for one set of ranks")

    if dist.is_initialized():
        dist.destroy_process_group()
    try:
        made = []
        for over_nccl in (False, True):
            dist.init_process_group("fake", store=FakeStore(), rank=40, world_size=64)
            if over_nccl:
                dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
                monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
                monkeypatch.setattr(groups_module, "_options", lambda *_: None)
                monkeypatch.setattr(dist, "split_group", split)
                monkeypatch.setattr(dist, "new_group", one_by_one)
            collection = build_groups(plan).collection
            made.append(
                {
                    kind: group and dist.get_process_group_ranks(group)
                    for kind, group in vars(collection).items()
                    if group is None or isinstance(group, dist.ProcessGroup)
                }
            )
            dist.destroy_process_group()
        assert made[0] == made[1] and made[1]["ep"] == [40, 41] and made[1]["pos_embd"] is None
        assert len(splits) == len({name for name, _ in splits}) == 15
        for name, sets in splits:
            ranks = [rank for of_set in sets for rank in of_set]
            assert len(ranks) == len(set(ranks)), name
    finally:
        monkeypatch.undo()
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_last_stage_sends_to_the_first_where_stages_have_chunks() -> None:
    whole, chunks = (transfer_pairs(plan_samples.plan(8, 2, count)) for count in (1, 2))
    assert [pairs for _, pairs in whole] == [[(0, 1)]] * 2
    assert [pairs for _, pairs in chunks] == [[(0, 1)]] * 2 + [[(1, 0)]] * 2


@pytest.mark.parametrize(
    ("shapes", "batch", "rounds"),
    [
        (((1, 1, 1), (1, 3, 1)), 6, 3),
        (((2, 1, 2), (2, 1, 1)), 4, 2),
        # A thousand ranks: as many splits of the world as a rank has peers, for each direction.
        (((1, 512, 1), (2, 256, 2)), 1024, 2),
    ],
)
def test_ranks_of_unlike_stages_meet_in_few_rounds(shapes: Any, batch: int, rounds: int) -> None:
    plan, _ = unlike(shapes, batch=batch)
    made = transfer_pairs(plan)
    assert len(made) == 2 * rounds
    for _, pairs in made:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    joined = sorted((tile.source, tile.target) for tile in plan.transfers[0].tiles)
    for backward in (False, True):
        of_direction = [pair for channel, pairs in made for pair in pairs if channel.endswith("backward") == backward]
        assert sorted(of_direction) == sorted(set(joined))
