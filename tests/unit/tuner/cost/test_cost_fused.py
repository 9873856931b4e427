"""Fused kernels priced: the formula against its steps written out, lists against it, what stays in memory, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import moe_overlap.api as api
from moe_overlap.api import predict, read_job, simulated
from moe_overlap.commands.predict import main
from moe_overlap.describe.cluster import Cluster, cluster_of, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import KernelBlocks, LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.serialize import load_plan, save_plan
from moe_overlap.tuner.capture.expression import B, S
from moe_overlap.tuner.capture.graph import CapturedPart, Collective, Layout
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.fused_kernels import UNMEASURED, Blocks, Joined, _grid, fused_seconds
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.layer import part_cost
from moe_overlap.tuner.cost.links import axis_group
from moe_overlap.tuner.cost.operators import tabulate
from moe_overlap.tuner.cost.simulate.memory import intervals
from moe_overlap.tuner.cost.simulate.step import SimulatedStep
from tests.unit.tuner.cost.test_cost_listed_step import BASE, BATCH, DEFERRED, RECOMPUTED
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, by_hand
from tests.unit.tuner.cost.test_cost_simulate_step import CLUSTER, STAGES
from tests.unit.tuner.hand_made import Pass

WORDS = f"{STAGES} 1 --expert-model-parallel-size 8"
SPLIT = KernelBlocks(dispatch=12, combine=32)
KERNELS = ("moe.dispatch_fc1", "moe.fc2_combine")


def fused_plan(plan: Plan, split: KernelBlocks | None, layers: Sequence[int] | None = None) -> Plan:
    """A plan with its layers, or some of them, fused; what is decided for the others stays."""

    def of(number: int, before: dict[int, LayerOverlap]) -> LayerOverlap:
        if layers is None or number in layers:
            return LayerOverlap(layer=number, mechanism="fused", kernel_blocks=split)
        return before.get(number, LayerOverlap(layer=number))

    stages = []
    for stage in plan.stages:
        before = {layer.layer: layer for layer in stage.overlap.layers}
        new = tuple(of(number, before) for number in stage.layers)
        stages.append(dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=new)))
    return dataclasses.replace(plan, stages=tuple(stages))


class Case:
    """A plan, and how it is priced and simulated."""

    def __init__(
        self, folder: Path, words: str, split: KernelBlocks | None, layers: Sequence[int] | None = None
    ) -> None:
        self.words = [*BASE, *words.split()]
        self.path = str(folder / "fused.json")
        save_plan(fused_plan(read_job(self.words, 32).plan, split, layers), self.path)

    def options(self) -> dict[str, Any]:
        return {"graphs": by_hand, "constants": CONSTANTS, "plan": self.path}

    def predicted(self, cluster: Cluster = CLUSTER) -> Prediction:
        return predict(self.words, cluster, **self.options())

    def simulated(self) -> SimulatedStep:
        return simulated(self.words, CLUSTER, **self.options())


def prices_of(step: SimulatedStep) -> StagePrices:
    return next(iter(step.prices.values()))


def seconds_of(step: SimulatedStep, name: str) -> float:
    prices = prices_of(step)
    return next(prices.seconds(i) for i in prices.instructions if i.name == name)


def pipelined_seconds(first: float, second: float, steps: float) -> float:
    """Two stages of a pipeline, step after step."""
    ready = done = 0.0
    for _ in range(round(steps)):
        ready += first / round(steps)
        done = max(done, ready) + second / round(steps)
    return done


def test_the_kernels_take_what_the_formula_says(tmp_path: Path) -> None:
    """65536 rows of a rank in tiles of 128; each of 132 blocks moves its share of 0.8 · 3350 GB/s, in and out."""
    fused = Case(tmp_path, WORDS, SPLIT).simulated()
    plain = simulated([*BASE, *WORDS.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    gpu, rows = CONSTANTS.gpus["H100"], 4 * 4096 * 4

    def product(n: int, k: int) -> float:
        moved = 2 * (rows * k + 2 * n * k + rows * n)
        computed = rows * 2 * n * k / (989e12 * gpu.grouped_gemm)  # the median release, whose loss is 1
        return computed + moved / (3350e9 * gpu.memory) + gpu.kernel_seconds

    def slow(blocks: int) -> float:
        return rows * 2048 * 2 / (blocks * 0.8 * 3350e9 / 132 / 2)

    wide, narrow = product(8192, 2048), product(2048, 4096)
    dispatch, combine = seconds_of(plain, "L0.moe.dispatch"), seconds_of(plain, "L0.moe.combine")
    assert slow(32) < combine < dispatch * 1.01 < slow(12), "12 blocks do not fill the links, 32 do"
    activation = seconds_of(plain, "L0.moe.experts") - wide - narrow
    assert 0 < activation < 0.2 * wide
    # 512 rows of 64 tiles, two and a quarter waves a step on 120 blocks; 16 columns of 512 tiles.
    first = pipelined_seconds(slow(12), wide * 132 / 120, 512 * 64 / 120)
    second = pipelined_seconds(narrow * 132 / 100, combine, 16)
    found = [seconds_of(fused, f"L0.{kernel}") for kernel in KERNELS]
    assert found == pytest.approx([first + activation, second], rel=1e-5)


def test_backward_kernels_hold_their_weight_gradients(tmp_path: Path) -> None:
    """Both exchanges and both input gradients, joined; what is left of the experts' backward is what it was."""
    fused = Case(tmp_path, WORDS, SPLIT).simulated()
    plain = simulated([*BASE, *WORDS.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    prices = prices_of(fused)
    both = sum(seconds_of(fused, f"L0.{kernel}.backward") for kernel in KERNELS)
    beside = prices._fused_seconds("L0", 1)
    exposed = sum(beside.exposed[kernel, "", "backward"] for kernel in KERNELS)
    assert both - exposed == pytest.approx(seconds_of(plain, "L0.moe.experts.backward"))
    names = [
        i.name
        for i in prices.instructions
        if i.micro_batch == 0 and i.name.startswith("L0.") and "moe.count" not in i.name
    ]
    same = ["attention", "moe.gate", "moe.merge"]
    for name in (f"L0.{part}{suffix}" for part in same for suffix in ("", ".backward")):
        assert name in names
        assert seconds_of(fused, name) == pytest.approx(seconds_of(plain, name))


def test_ranks_that_share_an_expert_exchange_inside_the_kernels() -> None:
    """As if what the capture counts to the experts were part of dispatch and combine."""
    plain = simulated([*BASE, *WORDS.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS)
    setting = prices_of(plain).priced.setting
    shared = {**setting.groups, "etp": axis_group(2, 1, 32, CLUSTER.groups[0])}
    setting = dataclasses.replace(setting, groups=shared)

    def part(before: str, behind: str) -> CapturedPart:
        run, rows = Pass(Layout(expert=8, expert_tensor=2)), B * S * 4
        for phase in ("forward", "backward"):
            run.phase, run.loaded = phase, True
            first, second = (before, behind) if phase == "forward" else (behind, before)
            gathered = (
                Collective(kind="all_gather", axis="etp", size=2, payload_bytes=rows * 2048 * 4),
                Collective(kind="reduce_scatter", axis="etp", size=2, payload_bytes=rows * 2048 * 4),
            )
            run.communicate("all_to_all", "ep", rows * 2048, "moe.dispatch" if phase == "forward" else "moe.combine")
            run.op("all_gather", first, "collective", collective=gathered[0])
            run.grouped(2, rows * 2, 4096, 2048)
            run.stream("activation", "moe.experts", rows * 2048 * 3)
            run.grouped(2, rows * 2, 2048, 2048)
            run.op("reduce_scatter", second, "collective", collective=gathered[1])
            run.communicate("all_to_all", "ep", rows * 2048, "moe.combine" if phase == "forward" else "moe.dispatch")
        return run.part("moe", "none")

    inside, moved = (
        fused_seconds(table, setting, part_cost(table, setting), SPLIT)
        for table in (
            tabulate(part(*names), 4, 4096) for names in (("moe.experts",) * 2, ("moe.dispatch", "moe.combine"))
        )
    )
    kernels = [(kernel, "", suffix) for kernel in KERNELS for suffix in ("", "backward")]
    for kernel in kernels:
        assert inside.total[kernel] == pytest.approx(moved.total[kernel])
        assert inside.exposed[kernel] == pytest.approx(moved.exposed[kernel])
        assert inside.exposed[kernel] > 0


def test_the_busiest_ranks_rows_are_as_many_more_tiles() -> None:
    run = Pass(Layout(expert=8))
    run.phase, run.loaded = "forward", True
    run.grouped(2, B * S * 4, 4096, 2048)
    table = tabulate(run.part("moe", "none"), 4, 4096)
    rows, columns = _grid(table, 0, 1.0)
    assert _grid(table, 0, 1.5) == (1.5 * rows, columns)


@pytest.mark.parametrize(("product", "exchange"), [(1e-3, 1e-4), (1e-3, 1e-3), (1e-4, 1e-3)])
def test_the_best_split_is_the_best(product: float, exchange: float) -> None:
    """And it grows with the exchange's share."""
    blocks = Blocks(132, 1e10)
    joined = Joined(product, exchange, exchange * 2e11, 64, 4096)
    tried = {count: float(joined.seconds(count, blocks)) for count in range(1, 132)}
    best = joined.best_split(blocks)
    assert tried[best] == min(tried.values())
    more = dataclasses.replace(joined, exchange_seconds=2 * exchange, moved_bytes=2 * joined.moved_bytes)
    assert more.best_split(blocks) >= best
    assert tried[best] > max(product, exchange)


def test_no_split_takes_the_best_of_each_kernel(tmp_path: Path) -> None:
    best = Case(tmp_path, WORDS, None).simulated()
    totals = {}
    for blocks in (2, 4, 8, 16, 32, 64):
        given = Case(tmp_path, WORDS, KernelBlocks(dispatch=blocks, combine=blocks)).simulated()
        totals[blocks] = given.simulation.step_seconds
        for kernel in KERNELS:
            for suffix in ("", ".backward"):
                assert seconds_of(best, f"L0.{kernel}{suffix}") <= seconds_of(given, f"L0.{kernel}{suffix}")
    assert best.simulation.step_seconds < min(totals.values())
    assert totals[64] > totals[16], "blocks beyond what the links take cost computation"


@pytest.mark.parametrize(
    ("words", "layers", "tolerance"),
    [
        (WORDS, None, 1e-6),
        (f"{STAGES} 2 {BATCH} 256", None, 2e-3),
        (f"{STAGES} 2 {RECOMPUTED} {BATCH} 256", None, 2e-3),
        (f"{WORDS} {DEFERRED} {BATCH} 256", (1, 3), 1e-6),
    ],
)
def test_predicted_from_folded_lists(
    tmp_path: Path, words: str, layers: Sequence[int] | None, tolerance: float
) -> None:
    """The whole lists say the same; what kernels wait for is exposed; it is said that nothing was measured."""
    case = Case(tmp_path, words, None, layers) if layers is None else mixed(tmp_path, words, layers)
    found = case.predicted()
    assert found.predicted.step_seconds == pytest.approx(case.simulated().simulation.step_seconds, rel=tolerance)
    assert sum(found.breakdown.values()) == pytest.approx(found.predicted.step_seconds)
    assert all(seconds >= -1e-9 for seconds in found.breakdown.values())
    assert found.extrapolating == (UNMEASURED,) and found.not_modelled == ()
    plain = predict(case.words, CLUSTER, graphs=by_hand, constants=CONSTANTS)
    assert found.breakdown["exposed_expert_seconds"] > 0
    if layers is None:
        assert plain.extrapolating == ()
        assert found.predicted.step_seconds < plain.predicted.step_seconds
        assert found.breakdown["exposed_expert_seconds"] < plain.breakdown["exposed_expert_seconds"]


def mixed(folder: Path, words: str, layers: Sequence[int]) -> Case:
    """Fused layers among others, under whose exchanges their weight gradients wait."""
    case = Case(folder, words, SPLIT, layers)
    plan = load_plan(case.path)
    (stage,) = plan.stages
    moved = {}
    for layer in layers:
        slot = f"L{layer - 1}.moe.combine.backward"
        moved[layer - 1] = {slot: (f"L{layer}.moe.experts.fc2.dW", f"L{layer}.moe.experts.fc1.dW")}
    new = tuple(
        dataclasses.replace(one, weight_gradient_slots=moved.get(one.layer, {})) for one in stage.overlap.layers
    )
    overlap = dataclasses.replace(stage.overlap, layers=new)
    save_plan(dataclasses.replace(plan, stages=(dataclasses.replace(stage, overlap=overlap),)), case.path)
    return case


def test_deferred_weight_gradients_leave_the_kernels(tmp_path: Path) -> None:
    case = mixed(tmp_path, f"{WORDS} {DEFERRED}", (1, 3))
    here, inside = case.simulated(), Case(tmp_path, WORDS, SPLIT, (1, 3)).simulated()
    for kernel, weight in zip(KERNELS, ("fc1", "fc2"), strict=True):
        shorter = seconds_of(inside, f"L1.{kernel}.backward") - seconds_of(here, f"L1.{kernel}.backward")
        assert shorter >= 0 and seconds_of(here, f"L1.moe.experts.{weight}.dW") >= 0
    total = sum(
        seconds_of(inside, f"L1.{kernel}.backward") - seconds_of(here, f"L1.{kernel}.backward") for kernel in KERNELS
    )
    waiting = sum(seconds_of(here, f"L1.moe.experts.{weight}.dW") for weight in ("fc1", "fc2"))
    assert total == pytest.approx(waiting) and waiting > 0
    held = [prices_of(here).buffer_bytes(f"saved.L1.moe.experts.{weight}.m0") for weight in ("fc1", "fc2")]
    assert sum(held) > 0


def test_rows_of_whole_exchanges_are_there_while_a_kernel_runs(tmp_path: Path) -> None:
    """Between kernels only the activated rows are, and what gate and merge hand over."""
    step = Case(tmp_path, WORDS, SPLIT).simulated()
    spans = {(one.instruction.name, one.instruction.micro_batch): one for one in step.simulation.ran}
    there = {name: (start, end) for name, start, end in intervals(step.simulation.ran)}
    for buffer, kernel in (
        ("received", "dispatch_fc1"),
        ("computed", "fc2_combine"),
        ("dcomputed", "fc2_combine.backward"),
        ("dreceived", "dispatch_fc1.backward"),
    ):
        one = spans[f"L0.moe.{kernel}", 0]
        assert there[f"{buffer}.L0.m0"] == (one.start, one.end)
    assert there["inner.L0.m0"] == (spans["L0.moe.dispatch_fc1", 0].start, spans["L0.moe.fc2_combine", 0].end)
    assert there["rows.L0.m0"][1] == spans["L0.moe.dispatch_fc1", 0].end
    assert there["returned.L0.m0"][0] == spans["L0.moe.fc2_combine", 0].start
    case, plain = (
        Case(tmp_path, WORDS, SPLIT).predicted(),
        predict([*BASE, *WORDS.split()], CLUSTER, graphs=by_hand, constants=CONSTANTS),
    )
    assert [stage.peak_bytes for stage in case.predicted.stages] == [
        stage.peak_bytes for stage in plain.predicted.stages
    ]


def test_what_cannot_be_priced_is_refused(tmp_path: Path) -> None:
    place = "plan.json stages[0].overlap.layers[0]"
    for split, field in (
        (KernelBlocks(dispatch=132, combine=8), "dispatch 132"),
        (KernelBlocks(dispatch=8, combine=200), "combine 200"),
    ):
        with pytest.raises(ConfigError) as caught:
            Case(tmp_path, WORDS, split).predicted()
        rule = "leaves none of the 132 blocks of H100 for computation; write at most 131, or null for the best split"
        assert str(caught.value) == f"{place}.kernel_blocks.{field}: {rule}"
    with pytest.raises(ConfigError, match=r"mechanism fused: the multiprocessors of B300, .* are not known; give"):
        Case(tmp_path, WORDS, None).predicted(shipped_cluster("B300", 32))


def test_a_cluster_file_may_say_how_many_multiprocessors_a_gpu_has() -> None:
    names = [field.name for field in dataclasses.fields(CLUSTER.groups[0].gpu)]
    gpu = {name: getattr(CLUSTER.groups[0].gpu, name) for name in names} | {"fp4_tflops": 1.0}
    links = (
        "nodes",
        "gpus_per_node",
        "domain_gpus",
        "domain_gb_per_s",
        "node_gb_per_s",
        "network_gb_per_s",
        "host_gb_per_s",
    )
    group = {name: getattr(CLUSTER.groups[0], name) for name in links}

    def read(**changes: Any) -> int | None:
        return cluster_of({"name": "c", "groups": [group | {"gpu": gpu | changes}]}, "f").groups[0].gpu.multiprocessors

    assert read(multiprocessors=148) == 148
    del gpu["multiprocessors"]
    assert read() is None
    with pytest.raises(ConfigError, match="f groups\\[0\\].gpu.multiprocessors 0: must be a positive whole number"):
        read(multiprocessors=0)


def test_predict_answers_for_mixtral(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "cached_graphs", by_hand)
    # Without gathers under passes, of which this plan has none: the difference is that of the kernels.
    text = (Path(__file__).resolve().parents[4] / "examples" / "mixtral-8x7b.args").read_text()
    assert "--overlap-param-gather\n" in text
    flags = str(tmp_path / "mixtral-8x7b.args")
    Path(flags).write_text(text.replace("--overlap-param-gather\n", ""))
    plan = read_job([f"@{flags}"], 64).plan
    save_plan(fused_plan(plan, None), tmp_path / "plan.json")
    given = ["--megatron-args", flags, "--gpu", "H100", "--num-gpus", "64"]
    assert main([*given, "--plan", str(tmp_path / "plan.json"), "--json"]) == 0
    fused = json.loads(capsys.readouterr().out)
    assert main([*given, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert fused["extrapolating"] and UNMEASURED in fused["extrapolating_because"]
    assert 0.8 * plain["step_seconds"] < fused["step_seconds"] < plain["step_seconds"]
    assert main([*given, "--plan", str(tmp_path / "plan.json")]) == 0
    assert f"beware      {UNMEASURED}; expect larger errors" in capsys.readouterr().out
