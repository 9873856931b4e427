"""ZeRO 2 and 3 and offloading: every list is sound, whole runs finish, and what moves arrives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction, format_list
from moe_overlap.plan.lowering.dependencies import check_races
from moe_overlap.plan.lowering.lower import lower, lower_rank
from moe_overlap.plan.operators import COPY_KINDS, parse_operator
from moe_overlap.plan.overlap import StageOverlap
from moe_overlap.plan.plan import Offload, Plan, Recompute
from moe_overlap.plan.sizes import part_size
from moe_overlap.plan.uniform_overlap import OverlapWords
from tests.unit.plan import plan_samples
from tests.unit.plan.list_twins import cuts, has_race, rejects, run_together
from tests.unit.plan.test_plan_partitions import with_words

ALL = Offload(weights=0.5, gradients=0.25, optimizer=1.0, activations=0.75)
OFFLOADS = (
    Offload(),
    Offload(weights=1.0),
    Offload(gradients=1.0),
    Offload(optimizer=1.0),
    Offload(activations=1.0),
    ALL,
)
FULL = Recompute(layers=1, granularity="full")
List = Sequence[Instruction]


def samples() -> list[tuple[Plan, ModelDescription]]:
    """Every level with every kind of offloading: pipelines, experts, prediction layers, partitions, interleaving."""
    made = []
    shapes: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (1, 1, {"data": 2, "expert": 2}),
        (2, 1, {"data": 2}),
        (2, 2, {"data": 2, "expert": 2, "recompute": FULL}),
        (4, 1, {}),
    )
    for level, offload, (stages, chunks, stage) in itertools.product(range(4), OFFLOADS, shapes):
        if level < 2 and offload == Offload():
            continue
        stage = {**stage, "zero_level": level, "offload": offload}
        plan = plan_samples.plan(4, stages, chunks, 4, stage)
        made.append((plan, plan_samples.model("mdmm", tied_embeddings=len(made) % 2 == 0)))
    for stages, level, offload in ((1, 3, ALL), (2, 2, ALL), (2, 3, Offload()), (2, 1, Offload(gradients=0.5))):
        stage = {"data": 2, "expert": 2, "zero_level": level, "offload": offload}
        plan = plan_samples.plan(2, stages, 1, 3, stage, mtp_stage=stages - 1)
        made.append((plan, plan_samples.model("dm", mtp_layers=2, tied_embeddings=level != 2)))
    words = OverlapWords(
        gate="topk", partitions=2, range_word="around", defer=True, max_deferred_bytes=1 << 40, micro_batches=2
    )
    for stages, level in ((1, 3), (2, 2)):
        stage = {"data": 2, "expert": 2, "micro_batch_size": 2, "zero_level": level, "offload": ALL}
        made.append(with_words(words, "mmdm", 64, stages=stages, micro_batches=3, stage=stage))
    return made


SAMPLES = samples()


def test_every_list_is_sound_and_finishes() -> None:
    for plan, model in SAMPLES:
        lists = {rank: lower_rank(plan, model, rank) for rank in range(plan.world_size)}
        for made in lists.values():
            check_races(made)
            assert [i.id for i in made] == list(range(len(made)))
            for i in made:
                operator = parse_operator(i.name)
                assert (operator.kind in COPY_KINDS) == (i.kind == "copy") == (i.channel in ("h2d", "d2h"))
                assert operator.is_collective == (i.kind == "collective") or plan.world_size == 1
                assert (i.channel == "optimizer") == (i.kind == "optimizer")
            follow(made)
        assert run_together({rank: list(made) for rank, made in lists.items()})


def follow(made: List) -> None:
    """Run a list in issue order on buffers that say what they hold, and see that everything is there when it is used.

    Weights are `old` until their part has stepped; a gradient holds the instructions that added to it, activations those that
    saved them. What one step leaves on the host the next one begins with.
    """
    holds: dict[str, Any] = {}

    def held(name: str) -> Any:
        kind = name.removeprefix("host.").removeprefix("moved.").partition(".")[0]
        return holds.get(name, "old" if kind in ("weights", "parameters", "state") else frozenset({"old"}))

    stepped: set[str] = set()
    for i in made:
        if i.kind == "copy":
            holds[i.writes[0]] = held(i.reads[0])
            if i.name.endswith((".optimizer", ".activations")) and i.channel == "d2h":
                holds[i.reads[0]] = frozenset({"gone"})
        elif i.kind == "optimizer":
            part = i.name.removeprefix("optimizer.")
            assert part not in stepped
            stepped.add(part)
            assert {held(name) for name in i.reads if "gradient" in name} == {frozenset({"old"})}
            assert {held(name) for name in i.reads if f"state.{part}" in name} == {"old"}
            holds.update(dict.fromkeys(i.writes, "new"))
            holds[f"gradient.{part}"] = holds[f"moved.gradient.{part}"] = frozenset()
        elif i.name.startswith("parameters."):
            assert {held(name) for name in i.reads} == {"new"}
            holds.update(dict.fromkeys(i.writes, "new"))
        elif i.name == "gradients":
            # It completes sums to which every pass has added.
            assert all(held(name) == expected_gradient(made, name) for name in i.reads)
        elif i.name.startswith("gradients."):
            added = frozenset().union(*(held(name) for name in i.reads if name.startswith("dweights.")))
            holds.update({name: added | (held(name) if name in i.reads else frozenset()) for name in i.writes})
        else:
            compute(i, holds, held)
    moving = any(i.name.endswith(".activations") for i in made)
    for i in made:
        if i.name.startswith("L") and i.name.endswith(".backward") and i.kind == "compute":
            assert any(name.startswith("moved.activations.") for name in i.reads) == moving
    for name, content in holds.items():
        if name.startswith("gradient."):
            assert content == expected_gradient(made, name) == holds.get(f"host.{name}", content)
        if name.startswith(("host.weights", "host.state")):
            assert content == "new"


def compute(i: Instruction, holds: dict[str, Any], held: Any) -> None:
    """A computation of a pass, or a transfer."""
    me = (i.name, i.micro_batch, i.partition)
    for name in i.reads:
        if name.startswith(("weights.", "parameters.", "moved.weights.")):
            assert held(name) == "new", i
        if name.startswith("moved.activations") and name not in i.writes:
            part = name.split(".")[2]
            assert held(name) and all(other[0].startswith(part) for other in held(name)), i
    for name in i.writes:
        if name.startswith(("gradient.", "dweights.", "moved.gradient.", "moved.activations.")):
            before = held(name) if name in i.reads else frozenset()
            holds[name] = before | {me}


def expected_gradient(made: List, name: str) -> frozenset[Any]:
    """Everything of the step that adds to a part's gradient."""
    part = name.removeprefix("gradient.")
    endings = (f"gradient.{part}", f"dweights.{part}.m")
    return frozenset(
        (i.name, i.micro_batch, i.partition)
        for i in made
        if i.kind in ("compute", "weight-gradient")
        and any(w == endings[0] or w.startswith(endings[1]) for w in i.writes)
        and i.micro_batch is not None
    )


def test_the_race_check_knows_what_is_needed() -> None:
    plan = plan_samples.plan(2, 1, 1, 2, {"data": 2, "zero_level": 3, "offload": ALL})
    made = lower(plan, plan_samples.model("dm"), 0)
    assert not has_race(made)
    needed = 0
    for cut in cuts(made):
        assert rejects(cut) == has_race(cut)
        needed += has_race(cut)
    assert needed > 60


def test_golden_list() -> None:
    """Written by this test's own expression, format_list(...), when the format changes."""
    plan = plan_samples.plan(2, 2, 1, 2, {"data": 2, "zero_level": 3, "offload": ALL})
    made = lower_rank(plan, plan_samples.model("dd"), 2, {"L0": 4000, "L1": 8000})
    assert format_list(made) == (plan_samples.GOLDEN / "zero3_offload_rank2.txt").read_text()


def names(made: List, channel: str) -> list[str]:
    return [f"{i.name} {'-' if i.micro_batch is None else i.micro_batch}" for i in made if i.channel == channel]


def test_collectives_follow_the_level() -> None:
    """Gathers in front of the first forward pass (level 2) or of every use (3); reduce-scatters of every micro-batch."""
    expected = {
        2: [
            "parameters.embedding -", "parameters.L0 -", "parameters.head -",
            "gradients.head 0", "gradients.L0 0", "gradients.embedding 0",
            "gradients.head 1", "gradients.L0 1", "gradients.embedding 1", "gradients -", "optimizer.norm -",
        ],
        3: [
            "parameters.embedding 0", "parameters.L0 0", "parameters.head 0", "parameters.L0 0",
            "gradients.head 0", "gradients.L0 0", "parameters.embedding 1", "gradients.embedding 0",
            "parameters.L0 1", "parameters.head 1", "parameters.L0 1",
            "gradients.head 1", "gradients.L0 1", "gradients.embedding 1", "gradients -", "optimizer.norm -",
        ],
    }  # fmt: skip
    for level, collectives in expected.items():
        plan = plan_samples.plan(1, micro_batches=2, stage={"data": 2, "zero_level": level})
        assert names(lower(plan, plan_samples.model("d"), 0), "dp") == collectives
    shared = plan_samples.plan(
        1, micro_batches=2, stage={"data": 2, "zero_level": 1, "offload": Offload(optimizer=1.0)}
    )
    assert names(lower(shared, plan_samples.model("d"), 0), "dp") == [
        "parameters.embedding -", "parameters.L0 -", "parameters.head -",
        "gradients.head 1", "gradients.L0 1", "gradients.embedding 1", "gradients -", "optimizer.norm -",
    ]  # fmt: skip


def test_copies_follow_the_shares() -> None:
    """Gradient sums are fetched from the second micro-batch on; weights wherever the use before has not loaded them."""
    plan = plan_samples.plan(1, micro_batches=2, stage={"offload": dataclasses.replace(ALL, weights=0.0)})
    made = lower_rank(plan, plan_samples.model("d"), 0, {"L0": 1000})
    states = [
        f"prefetch.{part}.{what} -" for part in ("embedding", "L0", "head") for what in ("optimizer", "gradients")
    ]
    fetched = ["prefetch.L0.activations 0", "prefetch.L0.activations 1", "prefetch.head.gradients 1"]
    assert names(made, "h2d")[:6] == states
    assert sorted(names(made, "h2d")[6:]) == sorted(
        [*fetched, "prefetch.L0.gradients 1", "prefetch.embedding.gradients 1"]
    )
    size = part_size("L0", plan, plan.stages[0], plan_samples.model("d"))
    by_name = {i.name: i.bytes for i in made}
    assert by_name["prefetch.L0.optimizer"] == size.dense * 8
    assert by_name["offload.L0.gradients"] == size.dense * 4 // 4
    assert by_name["offload.L0.activations"] == 750
    weights = plan_samples.plan(1, micro_batches=2, stage={"offload": Offload(weights=1.0)})
    copies = names(lower(weights, plan_samples.model("d"), 0), "h2d")
    assert copies == [f"prefetch.{place}" for place in (
        "L0.weights 0", "embedding.weights 1", "L0.weights 1", "head.weights 1", "L0.weights 1",
    )]  # fmt: skip
    half = plan_samples.plan(1, stage={"data": 2, "zero_level": 3, "offload": ALL}, precision="bf16")
    by_name = {i.name: i.bytes for i in lower(half, plan_samples.model("d"), 0)}
    assert by_name["prefetch.L0.optimizer"] == size.dense // 2 * 12
    assert by_name["prefetch.L0.weights"] == size.dense // 2 * 2 // 2
    assert by_name["parameters.L0"] == size.dense // 2 * 2


def test_prediction_layers_fetch_what_they_add_to() -> None:
    """They use and add to the embedding, a copy on their stage, and the head."""
    stage = {"data": 2, "zero_level": 3, "offload": Offload(gradients=1.0)}
    plan = plan_samples.plan(2, 2, 1, 2, stage, mtp_stage=1)
    made = lower(plan, plan_samples.model("dd", mtp_layers=1), 2)
    fetched = [name for name in names(made, "h2d") if not name.endswith("-")]
    assert sorted(fetched) == [f"prefetch.{part}.gradients 1" for part in ("L1", "embedding", "head", "mtp0")]
    weights = {"weights.mtp0", "weights.embedding", "weights.head"}
    assert all(weights <= {*i.reads} for i in made if i.name.startswith("mtp0"))


def waits_for(made: List, later: Instruction, earlier: Instruction) -> bool:
    """Whether a path of dependencies and channels leads from one to the other."""
    reached = {earlier.id}
    channels = {earlier.channel}
    for i in made[earlier.id + 1 :]:
        if i.channel in channels or reached & {*i.after}:
            reached.add(i.id)
            channels.add(i.channel)
    return later.id in reached


def test_a_gradient_comes_back_when_all_but_the_last_that_left_are_off_the_device() -> None:
    stage = {"offload": Offload(gradients=1.0)}
    made = lower(plan_samples.plan(4, stage=stage), plan_samples.model("dddd"), 0)
    gone: list[Instruction] = []
    seen = 0
    for i in made:
        if i.name.startswith("offload.") and i.name.endswith(".gradients"):
            gone.append(i)
        elif i.name.startswith("prefetch.") and i.micro_batch is not None and len(gone) > 1:
            assert waits_for(made, i, gone[-2]), i
            seen += 1
    assert seen > 4


def test_what_needs_no_earlier_stage_does_not_wait_for_it() -> None:
    """All updates with their collectives; with ZeRO 3 the first two gathers, with offloaded weights the first two parts."""
    for level, offload, free in ((2, ALL, 2), (3, Offload(), 3), (1, Offload(optimizer=0.5), 3), (2, Offload(), 3)):
        stage = {"data": 2, "zero_level": level, "offload": offload}
        plan, model = plan_samples.plan(4, 2, 1, 2, stage), plan_samples.model("dddd")
        made = lower(plan, model, 2)
        first = next(i for i in made if i.name.startswith("receive"))
        updates = [i for i in made if i.kind == "optimizer"]
        assert [waits_for(made, i, first) for i in updates] == [n >= free for n in range(3)]


def test_pieces_of_gradients_and_parts_that_step_by_themselves_are_refused_together() -> None:
    plan = plan_samples.plan(stage={"data": 2, "zero_level": 2, "overlap": StageOverlap(gradient_chunk_bytes=64)})
    with pytest.raises(ConfigError) as caught:
        lower(plan, plan_samples.model(), 0)
    assert str(caught.value) == (
        "plan.json stages[0].overlap.gradient_chunk_bytes 64: with ZeRO 2 and 3 and with offloading gradients are reduced "
        "part by part; write 0"
    )
