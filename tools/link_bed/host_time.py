"""What a step on a CPU takes beside its operators: measured on two jobs, kept with the operators.

An operator is timed alone, again and again. In a step its operands are colder, and Python, autograd and the runtime come between
it and the next one. Two jobs that exchange nothing are run by the real runtime: one of tiny operators, which the host dominates,
and one of larger ones. Seconds of computation in a step = `in_step` · seconds of its operators alone + `call_seconds` · their
number holds for both, which determines the two. Steps and operators are timed in turn, round by round, as machines that others
share are faster in one minute than in the next. Predictions are made for jobs of other shapes.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moe_overlap.describe.cluster import Cluster
from moe_overlap.plan.instructions import COMPUTE
from moe_overlap.predicting import cpu_graphs, job_operators, read_job
from moe_overlap.speed_flags import features_of
from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.cost.measured import constants_of
from moe_overlap.tuner.cost.operators import Lookup, Provenance
from moe_overlap.tuner.cost.predict import machine_of
from moe_overlap.tuner.cost.simulate_step import simulate_step
from moe_overlap.tuner.profile.database import Database
from moe_overlap.tuner.profile.keys import distinct, key_of
from moe_overlap.tuner.profile.lookup import CALL_SECONDS, IN_STEP, MeasuredOperators
from moe_overlap.tuner.profile.vocabulary import can_be_measured
from tools.compare_trace import Trace, read_trace
from tools.link_bed.cpu_group import CpuGroup
from tools.link_bed.launch import Ranks, Tell
from tools.link_bed.orders import order_of
from tools.link_bed.profile import is_update
from tools.link_bed.variants import IRREGULAR, JOB, TOP_2, Variant, job_flags
from tools.link_bed.worker import ORDER_STEP, command_of

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, STEPS = 3, 5
SECONDS_EACH = 0.01
"""Of an operator in a round."""
SHAPES = {
    "small": "--hidden-size 32 --num-attention-heads 2 --moe-ffn-hidden-size 32 --seq-length 16 --micro-batch-size 2",
    "large": "--hidden-size 384 --num-attention-heads 6 --moe-ffn-hidden-size 640 --seq-length 192 --micro-batch-size 6",
}
LEAST_CALL_SECONDS = 1e-9
"""A database keeps nothing below; where the measurement is disturbed, none may be left for the host."""


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """One job, measured in steps and operator by operator.

    Attributes:
        step_seconds: of all computation of a step's passes.
        alone_seconds: of its operators, each timed alone.
        calls: how many operators that is.
    """

    step_seconds: float
    alone_seconds: float
    calls: float


def calibrating(ranks: int) -> list[Variant]:
    """The two jobs, for workers: every rank has all experts."""
    gate = (*IRREGULAR, *TOP_2, "--moe-gate", "topk", "--expert-model-parallel-size", "1")
    found = []
    for name, shape in SHAPES.items():
        words = shape.split()
        batch = ranks * int(words[-1])
        found.append(Variant(f"calibration {name}", (*gate, *words, "--global-batch-size", str(batch))))
    return found


def words_of(variant: Variant, ranks: int) -> list[str]:
    """Flags of one of them, for capture."""
    return [*JOB, *job_flags(ranks, 1, 2), *variant.flags]


def measure_host_time(database: Database, cluster: Cluster, tell: Tell) -> None:
    """Run the two jobs and keep what their steps take beside their operators: medians of the rounds.

    Args:
        cluster: as many ranks as `tell` reaches.
        tell: reaches workers that have `calibrating`.
    """
    found = [_round(database, cluster, tell) for _ in range(ROUNDS)]
    database.add_rate(IN_STEP, statistics.median(in_step for in_step, _ in found))
    database.add_rate(CALL_SECONDS, statistics.median(call for _, call in found))


def measure_host_time_here(database: Database, cluster: Cluster) -> None:
    """The same on this machine, with ranks of its own."""
    chosen = calibrating(cluster.gpus)
    job = [*JOB, *job_flags(cluster.gpus, 1, 2)]
    command = command_of(job, chosen, timer=False, emulator=False, profiled=chosen[0])
    with CpuGroup() as priority, Ranks(command, cluster.gpus, None, priority, folder=ROOT) as ranks:
        ranks.answers()
        measure_host_time(database, cluster, ranks.tell)


def host_time(small: Calibration, large: Calibration) -> tuple[float, float]:
    """`in_step` and `call_seconds`: two equations."""
    determinant = small.alone_seconds * large.calls - large.alone_seconds * small.calls
    call = (small.alone_seconds * large.step_seconds - large.alone_seconds * small.step_seconds) / determinant
    call = max(call, LEAST_CALL_SECONDS)
    return (large.step_seconds - call * large.calls) / large.alone_seconds, call


def computing(trace: Trace) -> float:
    """Seconds of computation in the passes of a step."""
    kinds = trace.seconds.items()
    return sum(seconds for (kind, channel), seconds in kinds if channel == COMPUTE and not is_update(kind))


def _round(database: Database, cluster: Cluster, tell: Tell) -> tuple[float, float]:
    """The operators of both jobs, then steps of both."""
    variants = calibrating(cluster.gpus)
    every = [key for variant in variants for key in job_operators(words_of(variant, cluster.gpus), cluster.gpus, "cpu")]
    with tempfile.TemporaryDirectory() as folder:
        fresh = Database.open(Path(folder, "operators.jsonl"), database.device)
        for name, value in database.rates.items():
            fresh.add_rate(name, value)
        tell(**order_of(fresh, [key for key in distinct(every) if can_be_measured(key)], SECONDS_EACH))
        fresh = Database.load(fresh.path)
        small, large = (_calibration(variant, fresh, cluster, tell, Path(folder, "trace.json")) for variant in variants)
    return host_time(small, large)


def _calibration(variant: Variant, database: Database, cluster: Cluster, tell: Tell, trace: Path) -> Calibration:
    tell(do=ORDER_STEP, variant=variant.name, scale=1.0)
    steps = []
    for _ in range(STEPS):
        tell(do=ORDER_STEP, variant=variant.name, scale=1.0, trace=str(trace))
        steps.append(computing(read_trace(trace)))
    words, measured = words_of(variant, cluster.gpus), MeasuredOperators(database)

    def alone(op: Op, shape: tuple[float, ...], moved_bytes: float) -> tuple[float, Provenance] | None:
        key = key_of(op, shape, moved_bytes)
        return None if key is None else measured.seconds(key)

    def one(op: Op, shape: tuple[float, ...], moved_bytes: float) -> tuple[float, Provenance] | None:
        return None if key_of(op, shape, moved_bytes) is None else (1.0, "measured")

    return Calibration(statistics.median(steps), *(_passes_seconds(words, cluster, lookup) for lookup in (alone, one)))


def _passes_seconds(words: Sequence[str], cluster: Cluster, lookup: Lookup) -> float:
    """Of the computation in the passes of a step whose operators take what a lookup says."""
    assert cluster.measured is not None
    job = read_job(words, cluster.gpus)
    graphs = cpu_graphs(job.config, job.model, job.plan, job.flags)
    constants = constants_of(cluster.measured, cluster.group_of(0).gpu.name)
    machine, _ = machine_of(cluster, constants, lookup=lookup)
    features = features_of(job.config, job.plan.precision, job.flags)
    ran = simulate_step(job.plan, job.model, graphs, machine, features).simulation.ran
    return sum(
        one.end - one.start for one in ran if one.instruction.channel == COMPUTE and not is_update(one.instruction.name)
    )
