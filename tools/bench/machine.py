"""A bed as a cluster of measured machines, one node per rank: its operators and links in a database that is kept.

`MeasuredBed` fills the database. `measure_host_time` measures the host's overhead per step on a CPU. An operator is timed
alone, again and again; in a step its operands are colder, and Python, autograd and the runtime come between it and the next
one. So the real runtime executes two jobs without all-to-alls: one of tiny operators, which the host dominates, and one of larger
ones. For both holds

    seconds of computation in a step = in_step · seconds of its operators alone + call_seconds · number of operators,

two equations with two unknowns. Steps and operators are timed in turn, round by round, because a shared machine is faster in one
minute than in the next. Predictions are then made for jobs of other shapes.

`predicted_spans` predicts the step of a plan on a bed: its lists at the prices of the cost model, or of a profile over timer
compute. `recorded` writes a simulated step as the runtime's recorder would, so that the two can be laid over each other: the
executor goes through its list in order. The span of a communication begins where the executor starts it, though the link may
still carry another one, and ends where the executor has waited for it, which may be later than the arrival. Computation is
recorded as it runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_overlap.api import features_of, job_operators, read_job, simulated
from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.plan.instructions import COMPUTE, EXPERT, OPTIMIZER, Instruction, Span
from moe_overlap.plan.lowering.layers import COUNT_CHANNEL
from moe_overlap.plan.operators import is_state_key
from moe_overlap.report.trace import Trace, read_trace
from moe_overlap.tuner.capture.cache import cpu_graphs
from moe_overlap.tuner.capture.graph import Op
from moe_overlap.tuner.cost.hardware import measured_constants
from moe_overlap.tuner.cost.interference import COUNTS, NO_INTERFERENCE, QUEUED_COUNTS, STARTS, costs_of, start_seconds
from moe_overlap.tuner.cost.machine import machine_of
from moe_overlap.tuner.cost.operators import Lookup, Provenance
from moe_overlap.tuner.cost.simulate.engine import Simulation, simulate
from moe_overlap.tuner.cost.simulate.step import SimulatedStep, simulate_step
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.profile.cluster_file import FittedLinks, fit_links, measured_cluster, this_device
from moe_overlap.tuner.profile.database import Database, LinkKey, OperatorKey, can_be_measured, distinct, key_of
from moe_overlap.tuner.profile.lookup import CALL_SECONDS, IN_STEP, MeasuredOperators
from tools.bench.bed import CpuGroup
from tools.bench.launch import ENVIRONMENT, LaunchedRanks, Tell
from tools.bench.profile import (
    ORDER_COUNTS,
    ORDER_LINKS,
    ORDER_SLOWDOWN,
    TRANSFERS,
    apply_profile,
    computation_of,
    order_of,
)
from tools.bench.variants import IRREGULAR, JOB, TOP_2, Variant, job_flags
from tools.bench.worker import ORDER_STEP, command_of

ROOT = Path(__file__).resolve().parents[2]
ROUNDS, STEPS = 3, 5
SECONDS_EACH_JOB = 0.01
"""Seconds for which each operator is timed in a round."""
SHAPES = {
    "small": "--hidden-size 32 --num-attention-heads 2 --moe-ffn-hidden-size 32 --seq-length 16 --micro-batch-size 2",
    "large": "--hidden-size 384 --num-attention-heads 6 --moe-ffn-hidden-size 640 --seq-length 192 --micro-batch-size 6",
}
LEAST_CALL_SECONDS = 1e-9
"""A database keeps nothing below this. A disturbed measurement may leave less for the host."""


@dataclasses.dataclass(frozen=True, slots=True)
class Calibration:
    """One job, measured in steps and operator by operator.

    Attributes:
        step_seconds: all computation of a step's passes.
        alone_seconds: its operators, each timed alone.
        calls: the number of these operators.
    """

    step_seconds: float
    alone_seconds: float
    calls: float


def calibrating(ranks: int) -> list[Variant]:
    """The two jobs as variants for workers: every rank has all experts."""
    gate = (*IRREGULAR, *TOP_2, "--moe-gate", "topk", "--expert-model-parallel-size", "1")
    jobs = []
    for name, shape in SHAPES.items():
        flags = shape.split()
        batch = ranks * int(flags[-1])
        jobs.append(Variant(f"calibration {name}", (*gate, *flags, "--global-batch-size", str(batch))))
    return jobs


def flags_of(variant: Variant, ranks: int) -> list[str]:
    """Flags of one of the two jobs, for capture."""
    return [*JOB, *job_flags(ranks, 1, 2), *variant.flags]


def measure_host_time(database: Database, cluster: Cluster, tell: Tell) -> None:
    """Execute the two jobs and keep `in_step` and `call_seconds`: medians of the rounds.

    Args:
        cluster: has the ranks that `tell` reaches.
        tell: reaches workers that have `calibrating`.
    """
    rounds = [_round(database, cluster, tell) for _ in range(ROUNDS)]
    database.add_rate(IN_STEP, statistics.median(in_step for in_step, _ in rounds))
    database.add_rate(CALL_SECONDS, statistics.median(call for _, call in rounds))


def measure_host_time_here(database: Database, cluster: Cluster) -> None:
    """Call `measure_host_time` with ranks that this program starts on this machine."""
    chosen = calibrating(cluster.gpus)
    job = [*JOB, *job_flags(cluster.gpus, 1, 2)]
    command = command_of(job, chosen, timer=False, emulator=False, profiled=chosen[0])
    with CpuGroup() as priority, LaunchedRanks(command, cluster.gpus, None, priority, folder=ROOT) as ranks:
        ranks.answers()
        measure_host_time(database, cluster, ranks.tell)


def host_time(small: Calibration, large: Calibration) -> tuple[float, float]:
    """Solve the two equations for `in_step` and `call_seconds`."""
    determinant = small.alone_seconds * large.calls - large.alone_seconds * small.calls
    call = (small.alone_seconds * large.step_seconds - large.alone_seconds * small.step_seconds) / determinant
    call = max(call, LEAST_CALL_SECONDS)
    return (large.step_seconds - call * large.calls) / large.alone_seconds, call


def computing(trace: Trace) -> float:
    """Seconds of computation in the passes of a step."""
    kinds = trace.seconds.items()
    return sum(seconds for (kind, channel), seconds in kinds if channel == COMPUTE and not is_state_key(kind))


def _round(database: Database, cluster: Cluster, tell: Tell) -> tuple[float, float]:
    """Time the operators of both jobs, then steps of both."""
    variants = calibrating(cluster.gpus)
    every = [key for variant in variants for key in job_operators(flags_of(variant, cluster.gpus), cluster.gpus, "cpu")]
    with tempfile.TemporaryDirectory() as folder:
        fresh = Database.open(Path(folder, "operators.jsonl"), database.device)
        for name, value in database.rates.items():
            fresh.add_rate(name, value)
        tell(**order_of(fresh, [key for key in distinct(every) if can_be_measured(key)], SECONDS_EACH_JOB))
        fresh = Database.load(fresh.path)
        small, large = (_calibration(variant, fresh, cluster, tell, Path(folder, "trace.json")) for variant in variants)
    return host_time(small, large)


def _calibration(variant: Variant, database: Database, cluster: Cluster, tell: Tell, trace: Path) -> Calibration:
    tell(do=ORDER_STEP, variant=variant.name, scale=1.0)
    steps = []
    for _ in range(STEPS):
        tell(do=ORDER_STEP, variant=variant.name, scale=1.0, trace=str(trace))
        steps.append(computing(read_trace(trace)))
    flags, measured = flags_of(variant, cluster.gpus), MeasuredOperators(database)

    def measured_seconds(op: Op, shape: tuple[float, ...], moved_bytes: float) -> tuple[float, Provenance] | None:
        key = key_of(op, shape, moved_bytes)
        return None if key is None else measured.seconds(key)

    def counted(op: Op, shape: tuple[float, ...], moved_bytes: float) -> tuple[float, Provenance] | None:
        return None if key_of(op, shape, moved_bytes) is None else (1.0, "measured")

    return Calibration(
        statistics.median(steps), *(_passes_seconds(flags, cluster, lookup) for lookup in (measured_seconds, counted))
    )


def _passes_seconds(flags: Sequence[str], cluster: Cluster, lookup: Lookup) -> float:
    """Seconds of computation in the passes of a step whose operators take the seconds that a lookup gives."""
    assert cluster.measured is not None
    job = read_job(flags, cluster.gpus, host_runs_ahead=cluster.queues)
    graphs = cpu_graphs(job.config, job.model, job.plan, job.flags)
    constants = measured_constants(cluster.measured, cluster.group_of(0).gpu.name)
    machine, _ = machine_of(cluster, constants, lookup=lookup)
    features = features_of(job.config, job.plan.precision, job.flags)
    problem = Problem(model=job.model, plan=job.plan, graphs=graphs, features=features, machine=machine)
    ran = simulate_step(job.plan, problem).simulation.ran
    return sum(
        task.end - task.start
        for task in ran
        if task.instruction.channel == COMPUTE and not task.instruction.operator.is_update
    )


EXCHANGE_BYTES = tuple(1 << power for power in range(20, 24))
GATHER_BYTES = (1 << 23, 1 << 24)
"""Sizes like the gradients of the job. gloo's larger gathers are half duplex, its smaller ones only sometimes."""
MEASURED_LINKS = {"all_to_all": EXCHANGE_BYTES, "all_gather": GATHER_BYTES, "reduce_scatter": GATHER_BYTES}
SLOWDOWN_BYTES = QUEUE_BYTES = 1 << 22
SECONDS_EACH = 0.02

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class BedLinks:
    """Seconds of a bed's links that do not follow from their rates.

    Attributes:
        starting: processor seconds to start an all-to-all, by sent bytes.
        transfers: seconds of a transfer to the next stage, by its bytes; None with a single stage.
        count_seconds: seconds of an all-to-all of counts.
        queue_seconds: its additional seconds if rows are queued before it.
    """

    starting: FittedLinks
    transfers: FittedLinks | None
    count_seconds: float
    queue_seconds: float


class MeasuredBed:
    """The database of a bed, filled by its ranks.

    Args:
        path: file of the cluster description; the database is in the same folder.
        ranks: number of ranks of the bed.
        stages: number of its pipeline stages, whose ranks share the experts of their layers.
        tell: reaches the ranks.
    Raises:
        ConfigError: the database cannot be written.
    """

    def __init__(self, path: Path, ranks: int, stages: int, tell: Tell, say: Say) -> None:
        self._path, self._ranks, self._stages, self._tell, self._say = path, ranks, stages, tell, say
        device = dataclasses.replace(this_device("cpu"), threads=int(ENVIRONMENT["OMP_NUM_THREADS"]))
        self.database = Database.open(path.with_suffix(".measured.jsonl"), device)

    def measure_operators(self, keys: Sequence[OperatorKey]) -> None:
        """Measure the operators that the database lacks."""
        missing = [key for key in keys if key not in self.database.operators and can_be_measured(key)]
        if not missing and "kernel_seconds" in self.database.rates:
            return
        self._say(f"measuring {len(missing)} operators")
        self._tell(**order_of(self.database, missing, SECONDS_EACH))
        self.database = Database.load(self.database.path)

    def measure_links(self, links: Mapping[str, Sequence[int]] = MEASURED_LINKS) -> None:
        """Measure all-to-alls and their starts, collectives of the update, transfers between stages, counts, and how much
        all-to-alls slow down products beside them.

        Args:
            links: kind of collective -> sizes, in bytes that a rank holds.
        """
        kinds = {**links, **({TRANSFERS: EXCHANGE_BYTES} if self._stages > 1 else {})}
        for kind, sizes in kinds.items():
            for size in sizes:
                key = LinkKey(kind, "network", self._size_of(kind), size)
                if key in self.database.links:
                    continue
                self._say(f"measuring {kind} of {size / (1 << 20):g} MiB")
                answers = self._tell(do=ORDER_LINKS, kind=kind, held_bytes=size)
                self.database.add_link(key, max(seconds for seconds, _ in answers))
                if kind == "all_to_all":
                    started = statistics.fmean(start for _, start in answers)
                    self.database.add_link(dataclasses.replace(key, kind=STARTS), started)
        counts, queued = (
            LinkKey(kind, "network", self._size_of(kind), QUEUE_BYTES) for kind in (COUNTS, QUEUED_COUNTS)
        )
        if queued not in self.database.links:
            self._say("measuring counts")
            answers = self._tell(do=ORDER_COUNTS, held_bytes=QUEUE_BYTES)
            for key, seconds in zip((counts, queued), zip(*answers, strict=True), strict=True):
                self.database.add_link(key, max(seconds))
        if "overlap_slowdown" not in self.database.rates:
            lost = statistics.fmean(self._tell(do=ORDER_SLOWDOWN, held_bytes=SLOWDOWN_BYTES))
            self.database.add_rate("overlap_slowdown", max(lost, 1e-6))

    def measure_host_time(self) -> None:
        """Measure the host's overhead per step; the ranks must have the jobs of `calibrating`."""
        if IN_STEP not in self.database.rates or CALL_SECONDS not in self.database.rates:
            self._say("measuring the host's time")
            measure_host_time(self.database, self.cluster(), self._tell)

    def cluster(self) -> Cluster:
        """Write the description to its file and return it."""
        content = measured_cluster(self.database, self._path.stem, nodes=self._ranks, ranks_per_node=1)
        self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return load_cluster(self._path)

    def links(self) -> BedLinks:
        """The measured links."""
        costs = costs_of(self.database.links)
        assert costs is not None, "measure_links has measured all kinds"
        transfers = fit_links(self.database.links, (TRANSFERS,), "network")
        return BedLinks(costs.starting, transfers, costs.count_seconds, costs.queue_seconds)

    def _size_of(self, kind: str) -> int:
        """Ranks of the group that a kind of communication joins."""
        if kind in MEASURED_LINKS and kind != "all_to_all":
            return self._ranks
        return 2 if kind == TRANSFERS else self._ranks // self._stages


def recorded(instructions: Sequence[Instruction], simulation: Simulation, rank: int) -> list[Span]:
    """Spans of one rank, in order of their starts.

    Args:
        instructions: the rank's list.
    """
    ran = {task.instruction.id: task for task in simulation.ran if task.rank == rank}
    spans: list[Span] = []
    under_way: dict[int, tuple[Instruction, float]] = {}
    now = 0.0

    def wait(number: int) -> None:
        nonlocal now
        if number not in under_way:
            return
        channel = under_way[number][0].channel
        for earlier in [n for n, (other, _) in under_way.items() if n <= number and other.channel == channel]:
            other, start = under_way.pop(earlier)
            now = max(now, ran[earlier].end)
            spans.append(_span(other, start, now))

    for i in instructions:
        for number in i.after:
            wait(number)
        if i.channel in (COMPUTE, OPTIMIZER):
            spans.append(_span(i, ran[i.id].start, ran[i.id].end))
            now = ran[i.id].end
        else:
            under_way[i.id] = (i, now)
    for number in list(under_way):
        wait(number)
    return sorted(spans, key=lambda span: (span.start, span.end))


def _span(i: Instruction, start: float, end: float) -> Span:
    return Span(i.name, i.channel_group, i.chunk or 0, i.micro_batch or 0, start, end, i.partition)


def predicted_spans(
    flags: Sequence[str], cluster: Cluster, links: BedLinks, profile: Mapping[str, float] | None
) -> dict[int, list[Span]]:
    """A step of the first rank of every stage, as its recorder would write it.

    Args:
        flags: of the job and the plan.
        links: the thread that computes starts all-to-alls; counts and transfers take the measured seconds.
        profile: seconds of operators that sleep, whose steps have no update; None: real computation.
    """
    step = simulated(flags, cluster)
    lists = {
        rank: [i for i in prices.instructions if profile is None or not i.operator.is_update]
        for rank, prices in step.prices.items()
    }
    starts = {rank: start_seconds(instructions, links.starting) for rank, instructions in lists.items()}
    slept = (
        {rank: apply_profile(profile, instructions) for rank, instructions in lists.items()}
        if profile is not None
        else None
    )

    def seconds(rank: int, i: Instruction) -> float:
        if i.channel == COUNT_CHANNEL:
            return links.count_seconds
        if i.kind == "point-to-point" and links.transfers is not None:
            return links.transfers.latency_seconds + i.bytes / links.transfers.bytes_per_second
        computes = i.kind in ("compute", "weight-gradient")
        if slept is None or not computes:
            return step.prices[rank].seconds(i)
        return slept[rank].of(i) + starts[rank].get(i.id, 0.0)

    slowed = {rank: prices.slowed if profile is None else NO_INTERFERENCE for rank, prices in step.prices.items()}
    simulation = simulate(lists, seconds, slowed, links.queue_seconds)
    return {rank: recorded(instructions, simulation, rank) for rank, instructions in lists.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class PricedList:
    """The passes of a list at the tuner's prices, for operators that sleep just as long.

    Attributes:
        sleeps: name and seconds of every operator, in the list's order.
        sent_bytes: of its all-to-alls, that leave the rank.
        seconds: the passes, as the tuner simulates them.
    """

    sleeps: list[tuple[str, float]]
    sent_bytes: int
    seconds: float

    @property
    def computation(self) -> float:
        """Seconds of all operators."""
        return sum(seconds for _, seconds in self.sleeps)


def priced_list(step: SimulatedStep) -> PricedList:
    """The list of a simulated step of one stage, priced. The start of all-to-alls is left to the run."""
    ((rank, prices),) = step.prices.items()
    instructions = [i for i in prices.instructions if not i.operator.is_update]
    simulation = simulate(
        {rank: instructions}, lambda _, i: prices.seconds(i), prices.slowed, prices.machine.queue_seconds
    )
    sent = sum(i.bytes for i in instructions if i.channel_group == EXPERT)
    sleeps = [(i.name, prices.seconds(i) - prices.starts.get(i.id, 0.0)) for i in computation_of(instructions)]
    return PricedList(sleeps, sent, simulation.step_seconds)
