"""Prices of lists whose operators are replayed as CUDA graphs: launches, copies, waits and memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache

import numpy as np
import pytest

from moe_overlap.api import problem_of
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.job import OWN_MODULES, read_job
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.captured import captured_kinds, captured_list
from moe_overlap.plan.lowering.lower import lower_rank
from moe_overlap.plan.operators import COMBINE, DISPATCH
from moe_overlap.plan.sizes import static_rows, tokens_of_rank
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.captured_launches import Replayed
from moe_overlap.tuner.cost.hardware import CommonConstants, Features
from moe_overlap.tuner.cost.host import Replays, host_work
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.operators import OpTable, tabulate
from moe_overlap.tuner.cost.prediction import predict_plan
from moe_overlap.tuner.cost.simulate.step import price_stages, simulate_step
from moe_overlap.tuner.problem import Problem
from tests.validation.golden_graphs import golden_graphs
from tests.validation.golden_prices import EIGHT, LISTED, MOE, SHARDED

GRAPHS = "--moe-overlap-cuda-graphs"
STATIC = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
LISTS = (
    "--defer-weight-gradients",
    "--moe-overlap-partitions 2",
    "--moe-overlap-partitions 2 --moe-shared-expert-intermediate-size 1024",
    f"{STATIC} --moe-overlap-micro-batches 2",
    f"{STATIC} --defer-weight-gradients",
)
LAYERS = 2
COMMON = CommonConstants(transformer_engine=10.0, fused=4.0, low_precision=3.0, extra_kernel=0.5)


@cache
def problem(flags: str, host_seconds: float | None = None, micro_batches: int = 4) -> Problem:
    """A job at another pace of the host."""
    gpus = 16 if "--pipeline" in flags else 8
    words = f"{MOE} {SHARDED} {EIGHT} {LISTED} --num-layers {LAYERS} --global-batch-size {16 * micro_batches} {flags}"
    read = problem_of(words.split(), shipped_cluster("H100", gpus), {"graphs": golden_graphs})
    constants = read.machine.constants
    if host_seconds is not None:
        constants = dataclasses.replace(constants, host_seconds=host_seconds)
    return dataclasses.replace(read, machine=dataclasses.replace(read.machine, constants=constants))


def predicted(flags: str, host_seconds: float | None = None, micro_batches: int = 4) -> Prediction:
    read = problem(flags, host_seconds, micro_batches)
    return predict_plan(read.plan, read)


def seconds(flags: str, host_seconds: float) -> float:
    return predicted(flags, host_seconds).predicted.step_seconds


def stage_of(flags: str) -> tuple[StagePrices, tuple[Instruction, ...]]:
    """Prices of the only stage, and its list."""
    read = problem(flags)
    (stage,) = price_stages(read.plan, read)
    made = tuple(lower_rank(read.plan, read.model, 0))
    stage.read(made)
    return stage, made


@pytest.mark.parametrize("flags", LISTS)
def test_graphs_help_a_slow_host_and_cost_a_fast_one_their_copies(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, instant = 1e-3, 0.0
    # Without a static capacity experts and merges stay the host's.
    assert seconds(f"{flags} {GRAPHS}", slow) < (0.75 if STATIC in flags else 0.85) * seconds(flags, slow)
    assert seconds(flags, instant) < seconds(f"{flags} {GRAPHS}", instant)
    of_graphs = StagePrices.replayed

    def without_copies(stage: StagePrices, made: tuple[Instruction, ...]) -> dict[int, Replayed]:
        return {i: dataclasses.replace(each, copies=[]) for i, each in of_graphs(stage, made).items()}

    monkeypatch.setattr(StagePrices, "replayed", without_copies)
    assert seconds(f"{flags} {GRAPHS}", instant) == seconds(flags, instant)


def test_what_copies_take_is_what_they_move() -> None:
    """Hidden states of 2 · 4096 · 2048 and four rows of each token, in two bytes, are read and written."""
    flags, gpu = f"{STATIC} --defer-weight-gradients", shipped_cluster("H100", 8).group_of(0).gpu
    plain, graphed = problem(flags, 0.0), problem(f"{flags} {GRAPHS}", 0.0)
    constants = plain.machine.constants
    before, after = (
        {
            (event.instruction.name, event.instruction.micro_batch): event.end - event.start
            for event in simulate_step(read.plan, read).ran(0)
            if event.instruction.kind == "compute"
        }
        for read in (plain, graphed)
    )
    hidden = 2 * 4096 * 2048 * 2
    copied = [hidden, 0, 4 * hidden, 4 * hidden, 0, 4 * hidden, 4 * hidden, hidden]
    names = ["attention", "moe.gate", "moe.experts", "moe.merge"]
    names += [f"{name}.backward" for name in ("moe.merge", "moe.experts", "moe.gate", "attention")]
    for name, size in zip(names, copied, strict=True):
        taken = after[f"L0.{name}", 1] - before[f"L0.{name}", 1]
        rate = gpu.memory_gb_per_s * 1e9 * constants.memory
        assert taken == pytest.approx(2 * size / rate + constants.kernel_seconds if size else 0.0, abs=1e-12), name
    # Behind layer 0 hidden states lie where merge's graph has left them; the gradient of the last comes from the head.
    assert after["L1.attention", 1] == pytest.approx(before["L1.attention", 1])
    assert after["L1.moe.merge.backward", 1] > before["L1.moe.merge.backward", 1]


def test_all_to_alls_are_launched_as_ever_and_waited_for_where_they_are_counted() -> None:
    table = table_of_layer()
    exchanges = [number for number, op in enumerate(table.ops) if op.cost_class == "collective"]
    assert {table.ops[number].operator for number in exchanges} == {DISPATCH, COMBINE}
    plain = host_work(table, Features(), COMMON, 1.0)
    for is_static in (False, True):
        replays = Replays(captured_kinds(is_static), counts_rows=not is_static)
        work = host_work(table, Features(), COMMON, 1.0, replays)
        sent = [float(work.seconds[number]) for number in exchanges]
        assert sum(sent) == sum(float(plain.seconds[number]) for number in exchanges) - (4.0 if is_static else 0.0)
        assert list(work.waits) == (list(plain.waits & False) if is_static else list(plain.waits))
        rest = float(work.seconds.sum()) - sum(sent)
        experts = ("moe.experts", "moe.merge", COMBINE)
        uncaptured = [i for i, op in enumerate(table.ops) if op.operator in experts and i not in exchanges]
        left = 0.0 if is_static else sum(float(plain.seconds[number]) for number in uncaptured)
        # One launch each way of attention and gate; of experts and merge, too, where their shapes are static.
        assert rest == left + 2 * (4 if is_static else 2)


def table_of_layer() -> OpTable:
    read = problem("--defer-weight-gradients")
    part = next(part for part in read.graphs[0].parts if part.kind == "moe")
    return tabulate(part, 2, 4096)


def test_a_deferred_gradient_is_a_graph_for_each_partition() -> None:
    for cut in (1, 2):
        stage, made = stage_of(f"--moe-overlap-partitions {cut} --defer-weight-gradients {GRAPHS}")
        replayed = stage.replayed(made)
        launches = Counter(replayed[i.id].launches for i in made if i.kind == "weight-gradient" and i.id in replayed)
        assert set(launches) == {cut} and launches[cut] >= LAYERS
        assert not any(i.id in replayed for i in made if i.kind == "weight-gradient" and "experts" in i.name)


def test_captured_is_what_the_executor_captures() -> None:
    flags = "--defer-weight-gradients"
    assert not stage_of(flags)[0].priced.setting.replays.captured
    for more, is_static in (("", False), (f"{STATIC} ", True)):
        stage, made = stage_of(f"{more}{flags} {GRAPHS}")
        replays = stage.priced.setting.replays
        assert replays.captured == captured_kinds(is_static) and replays.counts_rows != is_static
        assert {i.id for i in made if i.id in stage.replayed(made) and i.kind == "compute"} == set(
            captured_list(made, is_static).slots
        )


def test_deferred_gradients_among_graphs_take_megatron_cores_own_modules() -> None:
    words = f"{MOE} {SHARDED} {EIGHT} {LISTED} {GRAPHS}".split()
    for flags, is_assumed in (
        ("--defer-weight-gradients", True),
        ("--defer-weight-gradients --transformer-impl local", False),
        ("--moe-overlap-partitions 2", False),
    ):
        assert (OWN_MODULES in read_job([*words, *flags.split()], 8).assumed) == is_assumed, flags


@pytest.mark.parametrize(("flags", "slots"), [("--defer-weight-gradients", 1), ("--moe-overlap-micro-batches 2", 2)])
def test_what_graphs_leave_is_kept_for_every_slot(flags: str, slots: int) -> None:
    """Of each layer eight times its rows and four times its hidden states; at the ends two hidden states more.

    Without graphs one micro-batch gives back what the other takes; each slot keeps what it has taken.
    """
    flags = f"{STATIC} {flags}"
    (plain,), (graphed,) = (predicted(each).predicted.stages for each in (flags, f"{flags} {GRAPHS}"))
    read = problem(f"{flags} {GRAPHS}")
    rows, tokens = (
        static_rows(read.plan, read.plan.stages[0], read.model),
        tokens_of_rank(read.plan, read.plan.stages[0]),
    )
    assert rows == 4 * tokens
    stage, _ = stage_of(f"{flags} {GRAPHS}")
    size = stage.priced.family.sizes[stage.row("L0")]
    hidden = 2 * 2048 * tokens
    kept = slots * (LAYERS * (8 * 4 + 4) * hidden + 2 * hidden + size.working) + (slots - 1) * LAYERS * size.saved
    assert graphed.peak_bytes_by_category.temporaries - plain.peak_bytes_by_category.temporaries == pytest.approx(kept)


@pytest.mark.parametrize(("flags", "buffers"), [(STATIC, 4), ("", 0)])
def test_rows_that_the_host_allocates_ahead_are_counted(flags: str, buffers: int) -> None:
    """Of two backward passes through a layer the rows at four places; where counts travel the host is not ahead of a layer."""
    read = problem(f"{flags} --defer-weight-gradients")
    assert read.plan.host_runs_ahead
    ahead, beside = (
        predict_plan(dataclasses.replace(read.plan, host_runs_ahead=is_ahead), read).predicted.stages[0]
        for is_ahead in (True, False)
    )
    rows_bytes = 2 * 2048 * 4 * tokens_of_rank(read.plan, read.plan.stages[0])
    added = ahead.peak_bytes_by_category.temporaries - beside.peak_bytes_by_category.temporaries
    assert added == pytest.approx(2 * buffers * rows_bytes)


def test_slots_beyond_the_micro_batches_in_flight_hold_activations() -> None:
    """With 1F1B the first stage has as many micro-batches under way as there are stages, the last one."""
    flags = f"{STATIC} --defer-weight-gradients --pipeline-model-parallel-size 2"
    first, last = (
        after.peak_bytes_by_category.temporaries - before.peak_bytes_by_category.temporaries
        for before, after in zip(
            predicted(flags).predicted.stages, predicted(f"{flags} {GRAPHS}").predicted.stages, strict=True
        )
    )
    assert 1.7 * last < first < 2.3 * last


def test_predictions_of_graphs_say_that_nothing_measured_is_like_them() -> None:
    flags = "--defer-weight-gradients"
    plain, graphed = predicted(flags), predicted(f"{flags} {GRAPHS}")
    (reason,) = set(graphed.extrapolating) - set(plain.extrapolating)
    assert "instruction lists are replayed as CUDA graphs" in reason
    assert "--moe-overlap-cuda-graphs" not in problem(f"{flags} {GRAPHS}").features.not_modelled


def test_without_lists_nothing_is_replayed() -> None:
    """The search prices layouts without overlap by features that have the flag."""
    read = problem("--defer-weight-gradients")
    bare = dataclasses.replace(
        read.plan,
        stages=tuple(
            dataclasses.replace(stage, overlap=dataclasses.replace(stage.overlap, layers=()))
            for stage in read.plan.stages
        ),
    )
    asked = dataclasses.replace(read, features=dataclasses.replace(read.features, listed_graphs=True))
    assert predict_plan(bare, asked) == predict_plan(bare, read)
    assert np.isfinite(predict_plan(bare, read).predicted.step_seconds)
