"""Simulated steps against the closed form of the search, on graphs written by hand, and the trace that is written of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import moe_overlap.api as api
import moe_overlap.tuner.cost.analytic as cost_predict
from moe_overlap.api import predict, simulated
from moe_overlap.commands import predict as predict_tool
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan.instructions import INSIDE, Instruction, communication_seconds, operator_spans
from moe_overlap.plan.operators import kind_of
from moe_overlap.plan.serialize import save_plan
from moe_overlap.report.trace import read_trace
from moe_overlap.tuner.cost.interference import partly_concurrent, slowed_down
from moe_overlap.tuner.cost.layer import weight_of
from moe_overlap.tuner.cost.simulate.step import SimulatedStep
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand
from tests.validation.golden_graphs import golden_graphs

CLUSTER = shipped_cluster("H100", 32)
STAGES = "--pipeline-model-parallel-size"
CHUNKS = "--num-layers-per-virtual-pipeline-stage"
RECOMPUTED = "--recompute-granularity full --recompute-method"
LAYOUTS = {
    "1 stage": f"{STAGES} 1",
    "1F1B over 2": "",
    "1F1B over 4": f"{STAGES} 4",
    "few micro-batches": "--global-batch-size 32",
    "interleaved over 2": f"{STAGES} 2 {CHUNKS} 4",
    "interleaved over 4": f"{STAGES} 4 {CHUNKS} 2",
    "recomputed": f"{RECOMPUTED} uniform --recompute-num-layers 1",
    "recomputed in part": f"{RECOMPUTED} block --recompute-num-layers 3",
    "tensor parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "exchanges hidden": "--overlap-moe-expert-parallel-comm",
}


def both(words: str) -> tuple[float, float]:
    """Closed form and simulation."""
    closed = predict([*JOB, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    return closed.predicted.step_seconds, step_of(words).simulation.step_seconds


def step_of(words: str) -> SimulatedStep:
    return simulated([*JOB, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)


@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_without_transfers_simulation_and_closed_form_agree(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one in two thousand: interleaved pipelines of unequal stages fill a little less evenly than the closed form says."""
    monkeypatch.setattr(cost_predict, "point_to_point_seconds", lambda *_: np.zeros(()))
    closed, simulated_seconds = both(words)
    assert simulated_seconds == pytest.approx(closed, rel=1e-9 if CHUNKS not in words else 5e-4)


@pytest.mark.parametrize(
    ("name", "share", "batch"),
    [
        ("1F1B over 2", 0.1, 256),
        ("1F1B over 4", 0.1, 128),
        ("interleaved over 2", 0.05, 256),
        ("interleaved over 4", 0.05, 128),
    ],
)
def test_with_transfers_they_agree_within_a_hundredth(
    name: str, share: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages wait for transfers, or have them beside their passes, as in megatron-core's two pipelines.

    A transfer takes this share of a chunk's forward pass.
    """
    words = f"{LAYOUTS[name]} --global-batch-size {batch}"
    monkeypatch.setattr(cost_predict, "point_to_point_seconds", lambda *_: np.zeros(()))
    bare = step_of(words)
    prices = bare.prices[0]
    chunks = len(prices.stage.chunks)
    forward = (
        float(np.array([p.forward.seconds for p in prices.priced.parts]) @ prices.priced.family.counts[:, 0]) / chunks
    )
    monkeypatch.setattr(cost_predict, "point_to_point_seconds", lambda *_: np.array(share * forward))
    closed, simulated_seconds = both(words)
    assert simulated_seconds == pytest.approx(closed, rel=0.01)
    assert min(closed, simulated_seconds) > bare.simulation.step_seconds


def test_opposite_transfers_do_not_share_a_link() -> None:
    """1F1B over two stages: behind a forward pass its output leaves while a gradient comes; the last meets a reduction."""
    step = step_of("")
    taken = [one.end - one.start for one in step.simulation.spans(0) if one.channel == "pp"][:-1]
    assert taken == pytest.approx([step.prices[0].transfer_seconds()] * len(taken))


def test_operators_add_up_to_what_a_stage_computes() -> None:
    """Whatever the list has no instruction for is part of another one."""
    step = step_of(f"{RECOMPUTED} block --recompute-num-layers 3")
    for rank, prices in step.prices.items():
        of_one = [i for i in prices.instructions if i.micro_batch == 0 and i.kind in ("compute", "collective")]
        priced = prices.priced
        stable = np.array([one.seconds for one in priced.parts]) @ priced.family.counts[:, prices.column]
        assert sum(map(prices.seconds, of_one)) == pytest.approx(stable)
        assert step.simulation.spans(rank)


def test_kept_bytes_peak_where_the_closed_form_says() -> None:
    """States and activations; what an operator holds while it runs is not among them."""
    step = step_of(f"{STAGES} 4")
    stages = predict([*JOB, STAGES, "4"], CLUSTER, graphs=by_hand, constants=CONSTANTS).predicted.stages
    for rank, stage in zip(step.prices, stages, strict=True):
        peaks = stage.peak_bytes_by_category
        kept = peaks.parameters + peaks.gradients + peaks.optimizer + peaks.activations
        # Graphs written by hand have no temporaries but what the head keeps, which stands there: it is held while it works.
        kept += peaks.temporaries
        assert max(size for _, size in step.kept_bytes(rank)) == pytest.approx(kept, rel=1e-6)


@pytest.mark.parametrize("sharded", ["optim_grads", "optim_grads_params"])
def test_sharded_states_are_simulated(sharded: str) -> None:
    """Parts that step by themselves: nothing computes before its weights are there, so the step is no shorter than its passes."""
    words = f"{STAGES} 1 --expert-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy {sharded}"
    step = step_of(words)
    (rank,) = step.prices
    spans = step.simulation.spans(rank)
    compute = sum(one.end - one.start for one in spans if one.channel == "compute")
    assert compute < step.simulation.step_seconds < sum(one.end - one.start for one in spans)
    closed, simulated_seconds = both(words)
    assert simulated_seconds == pytest.approx(closed, rel=0.15)


OVERLAPPED = [word for word in JOB if word not in ("--overlap-param-gather", "--overlap-grad-reduce")]
OVERLAPPED += f"""{STAGES} 1 --micro-batch-size 4 --expert-model-parallel-size 16 --moe-router-topk 4 --moe-gate topk
    --moe-token-dispatcher-type irregular --moe-overlap-range around""".split()


def overlapped(words: str) -> SimulatedStep:
    return simulated([*OVERLAPPED, *words.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)


def test_overlap_by_hand_is_simulated() -> None:
    """Parts hide exchanges and cost kernels; deferral alone hides a little; nothing hides more than there is."""
    whole, parts, deferred, chunks = (
        overlapped(words)
        for words in (
            "",
            "--moe-overlap-partitions 2",
            "--defer-weight-gradients",
            "--moe-overlap-capacity-chunks 2 --moe-expert-capacity-factor 1.0",
        )
    )
    seconds = whole.simulation.step_seconds
    exposed = whole.simulation.exposed_seconds(0)
    for step in (parts, deferred, chunks):
        assert seconds - exposed < step.simulation.step_seconds < seconds
        assert step.simulation.exposed_seconds(0) < exposed
    assert parts.simulation.step_seconds < 0.8 * seconds
    cut = [i for i in parts.prices[0].instructions if i.name == "L0.moe.experts"]
    (uncut,) = [i for i in whole.prices[0].instructions if i.name == "L0.moe.experts"]
    assert len(cut) == 2
    together = sum(map(parts.prices[0].seconds, cut))
    assert whole.prices[0].seconds(uncut) < together < 1.2 * whole.prices[0].seconds(uncut)


def test_deferral_moves_seconds_and_makes_none() -> None:
    """What the backward operators lose, their weight gradients take."""
    sums = []
    for words in ("", "--defer-weight-gradients"):
        prices = overlapped(words).prices[0]
        sums.append(sum(prices.seconds(i) for i in prices.instructions if i.kind in ("compute", "weight-gradient")))
    assert sums[1] == pytest.approx(sums[0])


def test_the_weight_of_a_gradient_is_known_by_its_module() -> None:
    """What torch's own products write has no name; nor has the module, sometimes."""
    part = step_of(f"{STAGES} 1").prices[0].graph.part("moe")
    op = next(op for op in part.ops if op.is_weight_gradient and op.operator == "moe.experts")
    for module, weight in (
        ("mlp.experts.local_experts.3.linear_fc2", "fc2"),
        ("mlp.experts.linear_fc1", "fc1"),
        ("", ""),
    ):
        assert weight_of(part, dataclasses.replace(op, module=module)) == weight


def test_two_streams_are_slowed_down_as_the_closed_form_says() -> None:
    alone = [np.array([seconds]) for seconds in (3.0, 2.0, 0.5, 0.0)]
    for slowdown in (0.0, 0.15, 1.0):
        assert slowed_down(slowdown).seconds(*alone) == pytest.approx(partly_concurrent(slowdown)(*alone))


def test_the_trace_has_a_process_per_stage_and_the_names_of_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    (tmp_path / "job.args").write_text(" ".join(JOB))
    job = ["--megatron-args", str(tmp_path / "job.args"), "--gpu", "H100", "--num-gpus", "32"]
    trace = tmp_path / "made" / "trace.json"
    assert predict_tool.main([*job, "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 16}
    kept = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(kept) > kept[0] > 0
    read = read_trace(trace)
    simulation = simulated([f"@{tmp_path / 'job.args'}"], CLUSTER)
    assert read.step_seconds == pytest.approx(simulation.simulation.step_seconds)
    made: list[Instruction] = [i for prices in simulation.prices.values() for i in prices.instructions]
    assert {name for name, _ in read.seconds} == {kind_of(i.name) for i in made}
    assert {channel for _, channel in read.seconds} == {"compute", "ep", "dp", "pp"}


def test_collectives_inside_operators_are_communication_in_a_trace() -> None:
    """What tensor and context ranks wait for stands on lanes of their own, as in a run's trace, and the operators stay whole."""
    layout = (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 1"
    )
    step = simulated([*JOB, *layout.split()], CLUSTER, graphs=golden_graphs, constants=CONSTANTS)
    spans, whole = step.spans(0), step.simulation.spans(0)
    inside = [span for span in spans if span.channel in INSIDE]
    assert {span.channel for span in inside} == {"tp", "cp"}
    assert [(s.place, s.start, s.end) for s in operator_spans(spans)] == [(s.place, s.start, s.end) for s in whole]
    breakdown = predict([*JOB, *layout.split()], CLUSTER, graphs=golden_graphs, constants=CONSTANTS).breakdown
    for channel, term in (("tp", "exposed_tensor_seconds"), ("cp", "exposed_context_seconds")):
        taken = sum(span.end - span.start for span in inside if span.channel == channel)
        assert taken == pytest.approx(breakdown[term], rel=1e-6)
    exposed = communication_seconds(spans)[1] - communication_seconds(whole)[1]
    assert exposed == pytest.approx(sum(span.end - span.start for span in inside))


def test_what_cannot_be_written_or_lowered_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    (tmp_path / "job.args").write_text(" ".join(JOB))
    job = ["--megatron-args", str(tmp_path / "job.args"), "--gpu", "H100", "--num-gpus", "32"]
    plan = api.read_job(JOB, 32).plan
    unknown = dataclasses.replace(plan.stages[0].overlap, micro_batches_in_flight=3)
    stages = tuple(dataclasses.replace(stage, overlap=unknown) for stage in plan.stages)
    save_plan(dataclasses.replace(plan, stages=stages), tmp_path / "plan.json")
    for words, message in (
        (["--trace", str(tmp_path)], f"--trace {tmp_path}: cannot be written"),
        (["--plan", str(tmp_path / "plan.json"), "--trace", "t"], "micro_batches_in_flight 3: "),
    ):
        assert predict_tool.main([*job, *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and said.count("\n") == 1
        assert message in said
