"""Predicted steps of plans that overlap by lists: against the whole step simulated, instruction by instruction; memory."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moe_overlap.tuner.cost.analytic as cost_predict
import moe_overlap.tuner.cost.instruction_seconds as instruction_seconds
import moe_overlap.tuner.cost.simulate.step as listed_step
from moe_overlap.api import predict, read_job, simulated
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.lowering.pipeline_order import most_in_flight, pipeline_blocks
from moe_overlap.plan.plan import Tile, Transfer
from moe_overlap.plan.serialize import save_plan
from moe_overlap.tuner.capture.graph import CapturedModel
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.layer import held_bytes
from moe_overlap.tuner.cost.simulate.memory import flights, highest
from moe_overlap.tuner.cost.simulate.step import GROUPS, step_of_many
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand
from tests.unit.tuner.cost.test_cost_simulate_step import CHUNKS, CLUSTER, STAGES

BASE = [word for word in JOB if word not in ("--overlap-param-gather", "--overlap-grad-reduce")]
BASE += """--micro-batch-size 4 --moe-router-topk 4 --moe-gate topk --moe-token-dispatcher-type irregular
    --moe-overlap-range around --max-deferred-bytes 100000000000""".split()
PARTS, DEFERRED, PAIRED = "--moe-overlap-partitions 2", "--defer-weight-gradients", "--moe-overlap-micro-batches 2"
BATCH = "--global-batch-size"
GAPS = "--overlap-grad-reduce --ddp-bucket-size 1000000"
GATHERED = f"{GAPS} --overlap-param-gather"
AT_ONCE = f"{GAPS} --moe-overlap-grad-reduce at-once"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
JOBS = {
    "one micro-batch": (f"{STAGES} 1 {PARTS}", 1e-6),
    "deferral": (f"{STAGES} 1 {DEFERRED} {BATCH} 512", 1e-6),
    "chunks of capacity": (f"{STAGES} 1 --moe-overlap-capacity-chunks 2 --moe-expert-capacity-factor 1.0", 1e-6),
    "2 stages": (f"{STAGES} 2 {PARTS} {BATCH} 640", 2e-3),
    # 0.25 % in the order of a GPU, whose transfers run beside computation; the order of a CPU has its own test below.
    "4 stages": (f"{STAGES} 4 {PARTS} {DEFERRED} {BATCH} 320", 3e-3),
    "pairs": (f"{STAGES} 2 {PAIRED} {DEFERRED} {BATCH} 768", 2e-3),
    "pairs over 4 stages": (f"{STAGES} 4 {PARTS} {PAIRED} {BATCH} 320", 2e-3),
    "pairs of chunks": (f"{STAGES} 4 {CHUNKS} 2 {PAIRED} {DEFERRED} {BATCH} 512", 1e-2),
    "gradient pieces": (f"{STAGES} 2 {PARTS} {GAPS} {BATCH} 256", 2e-3),
    "gradient pieces at once": (f"{STAGES} 2 {PARTS} {AT_ONCE} {BATCH} 256", 2e-3),
    "pieces at once of chunks": (f"{STAGES} 4 {CHUNKS} 2 {PAIRED} {DEFERRED} {AT_ONCE} {BATCH} 512", 1e-2),
    "weights under passes": (f"{STAGES} 1 {PARTS} {GATHERED} {BATCH} 512", 2e-3),
    "weights under passes, 4 stages": (f"{STAGES} 4 {DEFERRED} {GATHERED} {BATCH} 320", 2e-3),
    "weights under passes of chunks": (f"{STAGES} 4 {CHUNKS} 2 {PAIRED} {DEFERRED} {GATHERED} {BATCH} 512", 2e-3),
    "interleaved": (f"{STAGES} 4 {CHUNKS} 2 {PARTS} {DEFERRED} {BATCH} 512", 1e-2),
    "recomputed": (f"{STAGES} 2 {PARTS} {RECOMPUTED} {BATCH} 256", 2e-3),
}
"""Words, and how far the folded lists may be from the whole ones: what shares a link with transfers is lost."""


def predicted(words: str, plan: Path | None = None) -> Prediction:
    given = {} if plan is None else {"plan": str(plan)}
    return predict([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", JOBS)
def test_the_step_is_that_of_the_whole_lists(name: str) -> None:
    words, tolerance = JOBS[name]
    found = predicted(words)
    whole = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS).simulation
    assert found.predicted.step_seconds == pytest.approx(whole.step_seconds, rel=tolerance)
    assert sum(found.breakdown.values()) == pytest.approx(found.predicted.step_seconds)
    assert all(seconds >= -1e-9 for seconds in found.breakdown.values())
    tokens = found.predicted.tokens_per_second_per_gpu * found.predicted.step_seconds * CLUSTER.gpus
    assert tokens == pytest.approx(read_job([*BASE, *words.split()], 32).plan.global_batch_size * 4096)


def test_a_search_simulates_a_step_once_and_exposed_seconds_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[float, float]] = []
    step_of_lists = listed_step._Lists.step

    def counted(lists: Any, ones: Any, transfers: float = 1.0, gathers: float = 1.0) -> float:
        calls.append((transfers, gathers))
        return step_of_lists(lists, ones, transfers, gathers)

    monkeypatch.setattr(listed_step._Lists, "step", counted)
    found = predicted(JOBS["weights under passes, 4 stages"][0])
    # Launches are predicted, too: another step of the same lists.
    assert found.breakdown["compute_seconds"] > 0.0 and set(calls) == {(1.0, 1.0)}
    assert sum(found.breakdown.values()) == pytest.approx(found.predicted.step_seconds)
    assert found.breakdown["exposed_transfer_seconds"] > 0.0
    assert [ways for ways in calls if ways != (1.0, 1.0)] == [(0.0, 1.0), (1.0, 0.0)]
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


def test_weights_that_arrive_under_passes_cost_what_passes_do_not_hide() -> None:
    """One stage waits for its first weights; of four the first one alone does, the others have their bubble."""
    alone, spread = (JOBS[name][0] for name in ("weights under passes", "weights under passes, 4 stages"))
    found, behind = predicted(alone), predicted(alone.replace(" --overlap-param-gather", ""))
    gained = behind.predicted.step_seconds - found.predicted.step_seconds
    assert gained > 0.2 * behind.breakdown["exposed_data_seconds"]
    exposed = [each.breakdown["exposed_data_seconds"] for each in (found, behind)]
    assert 0.0 < exposed[0] == pytest.approx(exposed[1] - gained, rel=1e-3)
    # The first micro-batch of a stage takes longer by what is not hidden; else weights come behind the update.
    first, late = (each.predicted.stages[0] for each in (found, behind))
    assert first.first_seconds > first.stable_seconds == late.stable_seconds == late.first_seconds
    waited = predicted(spread).breakdown["exposed_data_seconds"]
    assert waited < 0.9 * predicted(spread.replace(" --overlap-param-gather", "")).breakdown["exposed_data_seconds"]


@pytest.mark.parametrize(
    "name", ["weights under passes", "weights under passes, 4 stages", "weights under passes of chunks"]
)
def test_slow_gathers_are_waited_for_as_in_the_whole_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer waits for its own weights in the first micro-batch, however early or late that comes."""
    words, _ = JOBS[name]
    fast, one = predicted(words).predicted.step_seconds, instruction_seconds.state_seconds
    monkeypatch.setattr(instruction_seconds, "state_seconds", lambda *sizes: 30.0 * one(*sizes))
    whole = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS).simulation
    slow = predicted(words)
    assert slow.predicted.step_seconds == pytest.approx(whole.step_seconds, rel=1e-2)
    assert slow.predicted.step_seconds > 1.02 * fast


@pytest.mark.parametrize(("name", "tolerance"), [("2 stages", 1e-6), ("4 stages", 2e-3)])
def test_the_step_in_the_order_of_a_cpu(name: str, tolerance: float, tmp_path: Path) -> None:
    words = [*BASE, *JOBS[name][0].split()]
    save_plan(read_job(words, 32).plan, tmp_path / "plan.json")
    given = {"graphs": by_hand, "constants": CONSTANTS, "plan": str(tmp_path / "plan.json")}
    whole = simulated(words, CLUSTER, **given).simulation  # type: ignore[arg-type]
    found = predict(words, CLUSTER, **given).predicted  # type: ignore[arg-type]
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=tolerance)


@pytest.mark.parametrize("name", ["2 stages", "pairs over 4 stages"])
def test_slow_transfers_are_waited_for_as_in_the_whole_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive is posted where it stands in the list: behind the block before, whatever the link could have carried by then."""
    words, _ = JOBS[name]
    fast = predicted(words).predicted.step_seconds
    monkeypatch.setattr(cost_predict, "point_to_point_seconds", lambda *_: np.array(0.02))
    whole = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS).simulation
    slow = predicted(words)
    assert slow.predicted.step_seconds == pytest.approx(whole.step_seconds, rel=1e-2)
    assert slow.predicted.step_seconds > 1.05 * fast


@pytest.mark.parametrize("is_alike", [True, False], ids=["alike", "one defers nothing"])
@pytest.mark.parametrize("name", ["4 stages", "pairs over 4 stages", "interleaved"])
def test_stages_that_are_alike_are_looked_at_once(
    name: str, is_alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"{JOBS[name][0]} {DEFERRED}"
    plan = read_job([*BASE, *words.split()], 32).plan
    if not is_alike:
        layers = tuple(dataclasses.replace(one, weight_gradient_slots={}) for one in plan.stages[2].overlap.layers)
        overlap = dataclasses.replace(plan.stages[2].overlap, layers=layers, max_deferred_bytes=0)
        changed = dataclasses.replace(plan.stages[2], overlap=overlap)
        plan = dataclasses.replace(plan, stages=(*plan.stages[:2], changed, plan.stages[3]))
    save_plan(plan, tmp_path / "plan.json")
    looked_at: list[int] = []

    def count(listed: listed_step._Lists, index: int, here: StagePrices) -> listed_step._StageRun:
        looked_at.append(index)
        return one_alone(listed, index, here)

    def of_one_graph(*asked: Any) -> Mapping[int, CapturedModel]:
        graphs = by_hand(*asked)
        return dict.fromkeys(graphs, graphs[0])

    def answer() -> Prediction:
        given = {"plan": str(tmp_path / "plan.json"), "graphs": of_one_graph, "constants": CONSTANTS}
        return predict([*BASE, *words.split()], CLUSTER, **given)  # type: ignore[arg-type]

    one_alone = listed_step._simulated_stage
    monkeypatch.setattr(listed_step, "_simulated_stage", count)
    once = answer()
    # The step is predicted again on a host that launches for nothing, and with graphs: each time they are looked at once.
    expected = [0, 1, 3] if is_alike else [0, 1, 2, 3]
    times, rest = divmod(len(looked_at), len(expected))
    assert 1 <= times <= 3 and not rest and looked_at == expected * times
    monkeypatch.setattr(listed_step, "equivalence_key", lambda _plan, index, *_: index)
    before = len(looked_at)
    assert answer() == once and len(looked_at) == before + 4 * times


def test_overlap_is_in_the_predicted_step() -> None:
    """Each kind of overlap is faster than none, hides some of its exchanges, and is not said to be left out."""
    bare = predicted(f"{STAGES} 1 --expert-model-parallel-size 16")
    for words in (PARTS, DEFERRED, f"{PARTS} {DEFERRED}", f"{PAIRED} {BATCH} 256"):
        found = predicted(f"{STAGES} 1 --expert-model-parallel-size 16 {words}")
        count = 2 if BATCH in words else 1
        assert found.predicted.step_seconds < 0.99 * count * bare.predicted.step_seconds
        assert found.breakdown["exposed_expert_seconds"] < 0.95 * count * bare.breakdown["exposed_expert_seconds"]
        assert found.not_modelled == ()
        (stage,), (other,) = found.predicted.stages, bare.predicted.stages
        assert stage.exposed_communication_seconds < other.exposed_communication_seconds
        assert stage.stable_seconds < other.stable_seconds


@pytest.mark.parametrize("words", [f"{STAGES} 4 {PARTS}", f"{STAGES} 2 {CHUNKS} 4 {DEFERRED}", f"{STAGES} 2 {PAIRED}"])
def test_many_micro_batches_are_told_from_few(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = predicted(f"{words} {BATCH} 2048").predicted.step_seconds
    monkeypatch.setattr("moe_overlap.tuner.cost.simulate.step.GROUPS", 1000)
    assert few == pytest.approx(predicted(f"{words} {BATCH} 2048").predicted.step_seconds, rel=1e-5)


def test_few_micro_batches_are_simulated_and_no_more() -> None:
    asked: list[int] = []

    def simulate(count: int) -> float:
        asked.append(count)
        return 7.0 + 3.0 * count + max(0, 9 - count)

    assert step_of_many(simulate, 1001, 4) == 7.0 + 3.0 * 1001
    assert max(asked) <= GROUPS * 4
    assert step_of_many(simulate, 3, 4) == 7.0 + 9.0 + 6


def test_a_part_is_priced_at_its_own_size() -> None:
    """An exchange: latency, and its share of the bytes. Experts: every part reads their weights and starts their kernels."""
    seconds: dict[int, tuple[float, float]] = {}
    for parts in (1, 2, 4):
        words = f"{STAGES} 1 --expert-model-parallel-size 16 --moe-overlap-partitions {parts}"
        (prices,) = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS).prices.values()
        names = ("L0.moe.dispatch", "L0.moe.experts")
        found = (next(prices.seconds(i) for i in prices.instructions if i.name == name) for name in names)
        seconds[parts] = next(found), next(found)
    (whole, experts), (half, half_experts), (quarter, quarter_experts) = seconds.values()
    assert whole - half == pytest.approx(2 * (half - quarter))
    latency = 2 * half - whole
    assert 1e-6 < latency < 0.2 * whole
    weights = 3 * 4096 * 2048 * 2 / (3350e9 * CONSTANTS.gpus["H100"].memory)
    kernels = 3 * CONSTANTS.gpus["H100"].kernel_seconds
    assert 2 * half_experts - experts == pytest.approx(weights + kernels, rel=0.01)
    assert 4 * quarter_experts - experts == pytest.approx(3 * (weights + kernels), rel=0.01)


def test_deferral_holds_operands_and_keeps_its_bound() -> None:
    """One layer's worth at least: an expert's rows in and out, of every product; a bound of a MiB lets no more stay."""
    words = f"{STAGES} 1 {DEFERRED}"
    (bare,), (held,) = (predicted(w).predicted.stages for w in (f"{STAGES} 1", words))
    (bound,) = (found := predicted(f"{words} --max-deferred-bytes 1048576")).predicted.stages
    extra = held.peak_bytes_by_category.temporaries - bare.peak_bytes_by_category.temporaries
    rows = 4 * 4096 * 4
    one = rows * 2 * ((2 * 4096 + 2048) + (2048 + 4096))
    assert 0.5 * one < extra < 3 * one
    assert bound.peak_bytes_by_category.temporaries - bare.peak_bytes_by_category.temporaries <= 1 << 20
    assert found.not_modelled == () and len(found.computed_early) == 1
    assert held.peak_bytes == sum(dataclasses.asdict(held.peak_bytes_by_category).values())


def test_operands_of_experts_are_those_of_the_busiest_rank() -> None:
    step = simulated([*BASE, *STAGES.split(), "1"], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    (family,) = {id(prices.priced.family): prices.priced.family for prices in step.prices.values()}.values()
    table = next(table for table in family.tables if table.part.kind == "moe")
    even, busy = (held_bytes(table, 2, load) for load in (1.0, 1.5))
    grown = {key[0]: busy[key] / even[key] for key in even}
    assert grown.pop("moe.experts") == 1.5 and set(grown.values()) == {1.0}


def test_of_a_pair_one_micro_batch_is_held_and_the_layers_at_work() -> None:
    """The first of two stages runs further ahead than 1F1B; the second holds no more micro-batches than without pairs."""
    words = f"{STAGES} 2 {BATCH} 512 {PAIRED}"
    bare, paired = (predicted(each).predicted.stages for each in (f"{STAGES} 2 {BATCH} 512", words))
    ratios = [
        two.peak_bytes_by_category.activations / one.peak_bytes_by_category.activations
        for one, two in zip(bare, paired, strict=True)
    ]
    assert ratios == pytest.approx([1.5, 1.0])
    whole = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    for rank, stage in zip(whole.prices, paired, strict=True):
        one_layer = whole.prices[rank].saved_bytes("L0" if rank == 0 else "L8")
        peaks = stage.peak_bytes_by_category
        closed = stage.peak_bytes - peaks.fragmentation
        listed = max(size for _, size in whole.kept_bytes(rank))
        # What is beyond whole micro-batches: a layer that is done forward before the one beside it has given back its own.
        assert peaks.temporaries >= one_layer
        assert listed <= closed * (1.0 + 1e-9) and closed - listed < 0.2 * one_layer


def test_pairs_of_chunks_hold_what_an_interleaved_pipeline_holds_and_the_layers_at_work() -> None:
    words = f"{STAGES} 2 {CHUNKS} 2 {BATCH} 512"
    bare, paired = (predicted(each).predicted.stages for each in (words, f"{words} {PAIRED}"))
    whole = simulated([*BASE, *words.split(), *PAIRED.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    for rank, one, two in zip(whole.prices, bare, paired, strict=True):
        assert two.peak_bytes_by_category.activations == one.peak_bytes_by_category.activations
        closed = two.peak_bytes - two.peak_bytes_by_category.fragmentation
        listed = max(size for _, size in whole.kept_bytes(rank))
        prices = whole.prices[rank]
        one_layer = prices.saved_bytes(f"L{prices.stage.layers[0]}")
        assert listed <= closed * (1.0 + 1e-9) and closed - listed < one_layer


@pytest.mark.parametrize("chunks", [1, 2])
def test_flights_of_a_list_hold_as_many_layers_as_its_order_says(chunks: int) -> None:
    """A forward pass is under way from the end of the backward pass beside it, which may be of another chunk."""
    words = f"{STAGES} 2 {BATCH} 512 {PAIRED}" + (f" {CHUNKS} {chunks}" if chunks > 1 else "")
    whole = simulated([*BASE, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    plan = read_job([*BASE, *words.split()], 32).plan
    for index, rank in enumerate(whole.prices):
        layers = [end - first for first, end in plan.stages[index].chunks]
        held = [(name, start, end, 1.0) for name, start, end in flights(whole.ran(rank)) if ".L" in name]
        assert highest(held) == most_in_flight(pipeline_blocks(plan, index), layers) * sum(layers)


def test_a_plan_file_says_the_same_as_flags(tmp_path: Path) -> None:
    words = f"{STAGES} 2 {PARTS} {BATCH} 256"
    save_plan(read_job([*BASE, *words.split()], 32, host_runs_ahead=True).plan, tmp_path / "plan.json")
    from_file, from_flags = predicted(f"{STAGES} 2 {BATCH} 256", tmp_path / "plan.json"), predicted(words)
    assert from_file.predicted == from_flags.predicted and from_file.breakdown == from_flags.breakdown


def test_sharded_states_beside_overlap_are_simulated_whole(tmp_path: Path) -> None:
    """No folding where parts step by themselves."""
    plan = read_job([*BASE, *f"{STAGES} 1 {PARTS} {BATCH} 512".split()], 32).plan
    stages = tuple(dataclasses.replace(stage, zero_level=3) for stage in plan.stages)
    save_plan(dataclasses.replace(plan, stages=stages), tmp_path / "plan.json")
    given = {"graphs": by_hand, "constants": CONSTANTS, "plan": str(tmp_path / "plan.json")}
    words = [*BASE, *f"{STAGES} 1 {BATCH} 512".split()]
    whole = simulated(words, CLUSTER, **given).simulation.step_seconds  # type: ignore[arg-type]
    found = predict(words, CLUSTER, **given)  # type: ignore[arg-type]
    assert found.predicted.step_seconds == pytest.approx(whole)
    assert sum(found.breakdown.values()) == pytest.approx(whole)


def test_stages_of_unlike_shape_are_simulated_whole(tmp_path: Path) -> None:
    """The second stage takes two samples at a time, half as often: its step is a little shorter, as its products are larger."""
    words = [*BASE, *f"{STAGES} 2 --micro-batch-size 1 --expert-model-parallel-size 4 {BATCH} 64".split()]
    cluster = shipped_cluster("H100", 8)
    plan = read_job(words, 8).plan
    second = dataclasses.replace(plan.stages[1], micro_batch_size=2, gradient_accumulation_steps=8)
    tiles = [
        Tile(source=sample % 4, target=4 + sample // 2, batch=(sample, sample + 1), sequence=(0, 4096))
        for sample in range(8)
    ]
    transfer = Transfer(from_stage=0, to_stage=1, tiles=tuple(tiles))
    save_plan(dataclasses.replace(plan, stages=(plan.stages[0], second), transfers=(transfer,)), tmp_path / "plan.json")
    bare = predict(words, cluster, graphs=by_hand, constants=CONSTANTS)
    found = predict(words, cluster, graphs=by_hand, constants=CONSTANTS, plan=str(tmp_path / "plan.json"))
    assert 0.8 * bare.predicted.step_seconds < found.predicted.step_seconds < 1.1 * bare.predicted.step_seconds
    assert sum(found.breakdown.values()) == pytest.approx(found.predicted.step_seconds)
    mine, like = found.predicted.stages[1].stable_seconds, bare.predicted.stages[1].stable_seconds
    assert 1.8 * like < mine < 2.0 * like
    assert found.breakdown["bubble_seconds"] > 0
