"""Simulated steps: the instruction lists of a plan, executed at the prices of the cost model.

Which lists. One rank represents every stage; if stages of unlike shape send tiles to each other, all ranks are simulated. A list
contains all waits of the runner that executes it (plan/lowering/dependencies.py), so the simulator adds none. Instructions that
run at the same time slow each other down as in the closed form (`machine.concurrency`); without overlap a simulated step equals
the closed form (pipeline.py).

For stages with overlap by instruction lists (`StageOverlap.is_listed`), or of unlike shape:
1. The simulation replaces the closed form: it gives the seconds of the step and of a micro-batch, the exposed communication, and
   the bytes that overlap adds.
2. Long steps are shortened. Lists are compressed (compress.py), and micro-batches are simulated only until each further group of
   them adds the same; the rest is extrapolated linearly.
3. For unlike stages the lists of all ranks are simulated; waiting for tiles counts as bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from moe_overlap.plan.instructions import Instruction, Span
from moe_overlap.plan.lowering.deferral import early_gradients
from moe_overlap.plan.lowering.lower import lower_rank, lower_stage
from moe_overlap.plan.lowering.pipeline_order import pipeline_blocks
from moe_overlap.plan.lowering.rendezvous import check_rendezvous
from moe_overlap.plan.overlap import NO_OVERLAP
from moe_overlap.plan.plan import Plan, PredictedStage
from moe_overlap.plan.sizes import ROUTED_LOAD_BOUND
from moe_overlap.tuner.cost.analytic import Prediction, Priced, prepare, price_family
from moe_overlap.tuner.cost.captured_launches import kept_bytes
from moe_overlap.tuner.cost.fused_kernels import UNMEASURED, refuse_unpriced
from moe_overlap.tuner.cost.instruction_seconds import StagePrices
from moe_overlap.tuner.cost.interference import Interference
from moe_overlap.tuner.cost.layer import KINDS
from moe_overlap.tuner.cost.simulate.compress import (
    Block,
    Compressed,
    blocks_of,
    compress,
    compressed_list,
    equivalence_key,
    renamed,
    renames,
    run_alone,
    sample_blocks,
)
from moe_overlap.tuner.cost.simulate.engine import Ran, Simulation, simulate
from moe_overlap.tuner.cost.simulate.memory import ListedBytes, listed_bytes, live_bytes
from moe_overlap.tuner.problem import Problem


@dataclass(frozen=True)
class SimulatedStep:
    """The simulated instructions of a step.

    Attributes:
        prices: first rank of every stage -> its prices.
    """

    simulation: Simulation
    prices: dict[int, StagePrices]

    def kept_bytes(self, rank: int) -> list[tuple[float, float]]:
        """(seconds, bytes): when the states and saved activations of a rank change, and their bytes from then on."""
        return live_bytes(self.ran(rank), self.prices[rank].buffer_bytes)

    def spans(self, rank: int) -> list[Span]:
        """Spans of one rank as the runtime records them: an operator with collectives inside is split around them.

        All of them are drawn in its middle, because the simulator does not place the parts of an operator.
        """
        prices, spans = self.prices[rank], []
        for event in sorted(self.ran(rank), key=lambda event: (event.start, event.end)):
            shares = prices.inside_shares(event.instruction)
            if not shares:
                spans.append(event.span)
                continue
            channel, seconds = event.instruction.channel_group, event.end - event.start
            begun = event.start + seconds * (1.0 - sum(shares.values())) / 2.0
            spans.append(event.stretch(channel, event.start, begun))
            for inner_channel, share in shares.items():
                spans.append(event.stretch(inner_channel, begun, begun + seconds * share))
                begun += seconds * share
            spans.append(event.stretch(channel, begun, event.end))
        return spans

    def ran(self, rank: int) -> list[Ran]:
        """The simulated instructions of a rank, sorted by end."""
        return self._by_rank.get(rank, [])

    @cached_property
    def _by_rank(self) -> dict[int, list[Ran]]:
        by_rank: dict[int, list[Ran]] = {}
        for event in self.simulation.ran:
            by_rank.setdefault(event.rank, []).append(event)
        return by_rank


def simulate_step(plan: Plan, problem: Problem) -> SimulatedStep:
    """Lower, price and simulate a plan.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    of_stage = price_stages(plan, problem)
    lists: dict[int, Sequence[Instruction]] = {}
    for stage, stage_prices in zip(plan.stages, of_stage, strict=True):
        saved = {f"L{layer}": stage_prices.saved_bytes(f"L{layer}") for layer in stage.layers}
        # Ranks of one stage execute the same list, so one represents all; tiles between unlike stages differ by rank.
        first = stage.devices.ranks[0]
        if plan.transfers:
            lists |= lower_stage(plan, problem.model, plan.stage_of(first), saved)
        else:
            lists[first] = lower_rank(plan, problem.model, first, saved)
        stage_prices.read(lists[first])
    check_rendezvous(lists)
    slowed = {rank: of_stage[plan.stage_of(rank)].slowed for rank in lists}
    simulation = simulate(
        lists,
        lambda _, i: of_stage[i.stage].seconds(i),
        slowed,
        problem.machine.queue_seconds,
        lambda _, i: of_stage[i.stage].link_use(i),
    )
    return SimulatedStep(simulation, {prices.stage.devices.ranks[0]: prices for prices in of_stage})


def price_stages(plan: Plan, problem: Problem) -> list[StagePrices]:
    """Prices of the instructions of every stage; no list has been read in.

    Raises:
        ConfigError: a fused layer leaves no block for computation, or the number of blocks of its GPU is unknown.
    """
    problem = problem.run_by(plan)
    model, graphs, machine = problem.model, problem.graphs, problem.machine
    refuse_unpriced(plan, machine.cluster)
    place: dict[int, tuple[Priced, int]] = {}
    for family in prepare(plan, model, graphs, problem.features, machine.load):
        priced = price_family(plan, model, family, machine, problem.features)
        place.update({index: (priced, column) for column, index in enumerate(family.stages)})
    return [
        StagePrices(plan, model, stage, graphs[index], *place[index], machine)
        for index, stage in enumerate(plan.stages)
    ]


SHOWN = 4
"""Most weight gradients that a message names."""
GROUPS = 4
"""Groups of micro-batches (one micro-batch per stage each) after which every further group takes as long as the last."""


def with_lists(closed_form: Prediction, plan: Plan, problem: Problem) -> Prediction:
    """A prediction with step, stages and breakdown replaced by those of simulated lists.

    Args:
        closed_form: the prediction without overlap inside a stage; states, and bytes that overlap does not change, are kept.
    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    listed = _Lists(plan, problem)
    # 1. Seconds of the step. Micro-batches of unlike stages do not correspond, so such steps are not extrapolated.
    runs = listed.runs()
    if plan.transfers:
        step_seconds = simulate_step(plan, problem).simulation.step_seconds
    else:
        step_seconds = listed.step(runs)
    # 2. The stages. Unlike stages have different numbers of micro-batches, so the slowest is that with the longest step.
    slowest = max(runs, key=lambda run: run.stable * plan.stages[run.compressed.stage].gradient_accumulation_steps)
    stages = tuple(_stage(run, before) for run, before in zip(runs, closed_form.predicted.stages, strict=True))
    # 3. Rates scale with the step; the breakdown refers to the slowest stage.
    light = [run.without_bytes() for run in runs]
    scale = closed_form.predicted.step_seconds / step_seconds
    predicted = replace(
        closed_form.predicted,
        step_seconds=step_seconds,
        tokens_per_second_per_gpu=closed_form.predicted.tokens_per_second_per_gpu * scale,
        model_tflops_per_gpu=closed_form.predicted.model_tflops_per_gpu * scale,
        stages=stages,
    )
    fused = any(stage.overlap.fused_layers for stage in plan.stages)
    early_notes = tuple(
        f"stage {run.compressed.stage}: --max-deferred-bytes {plan.stages[run.compressed.stage].overlap.max_deferred_bytes} does "
        f"not let {len(run.early)} of {run.deferred} weight gradients wait, at {ROUTED_LOAD_BOUND:g} times the balanced rows "
        f"({', '.join(run.early[:SHOWN])}{', …' * (len(run.early) > SHOWN)})"
        for run in runs
        if run.early
    )
    return replace(
        closed_form,
        predicted=predicted,
        breakdown=_breakdown(slowest, listed, light, step_seconds),
        mfu=closed_form.mfu * scale,
        extrapolating=(*closed_form.extrapolating, *([UNMEASURED] if fused else [])),
        computed_early=early_notes,
    )


def listed_seconds(plan: Plan, problem: Problem) -> float:
    """Seconds of the simulated step, as in `with_lists`, without computing anything else; for stages of equal shape.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    assert not plan.transfers
    listed = _Lists(plan, problem)
    return listed.step(listed.runs())


def step_of_many(simulate: Callable[[int], float], micro_batches: int, stages: int) -> float:
    """Seconds of a step of any number of micro-batches, extrapolated from simulations of few.

    Args:
        simulate: number of micro-batches -> simulated seconds of a step; each group of `stages` more adds as much as the last.
    """
    few = simulated_micro_batches(micro_batches, stages)
    beyond, seconds = (micro_batches - few) // stages, simulate(few)
    return seconds if not beyond else seconds + beyond * (seconds - simulate(few - stages))


def simulated_micro_batches(micro_batches: int, stages: int) -> int:
    """The most micro-batches that `step_of_many` simulates."""
    # Only complete groups are left out: the remainder decides how an interleaved pipeline fills and drains.
    return micro_batches - stages * max(0, -(-(micro_batches - GROUPS * stages) // stages))


@dataclass(frozen=True, slots=True)
class _Lists:
    """The lists of a plan, and their simulation."""

    plan: Plan
    problem: Problem

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.plan.stages[0].gradient_accumulation_steps

    def runs(self) -> list[_StageRun]:
        """The simulation of each stage by itself; equivalent stages share one."""
        prices = price_stages(self.plan, self.problem)
        by_key: dict[Hashable, _StageRun] = {}
        runs = []
        for index, stage_prices in enumerate(prices):
            key = equivalence_key(self.plan, index, self.problem.model, stage_prices)
            if key not in by_key:
                by_key[key] = _simulated_stage(self, index, stage_prices)
            # Equivalent stages have equal seconds, but different numbers of micro-batches in flight.
            graph_bytes = partial(_kept_by_graphs, self, index, stage_prices)
            runs.append(replace(_as_stage(by_key[key], self.plan, index), kept_by_graphs=graph_bytes))
        return runs

    def step(self, runs: Sequence[_StageRun], transfers: float = 1.0, gathers: float = 1.0) -> float:
        """Seconds of the step of all micro-batches; arguments as `seconds` takes them."""
        return step_of_many(
            lambda count: self.seconds(runs, count, transfers, gathers), self.micro_batches, len(self.plan.stages)
        )

    def written(
        self, runs: Sequence[_StageRun], micro_batches: int
    ) -> dict[int, tuple[list[Instruction], dict[int, float]]]:
        """Rank of each stage -> its compressed list for a number of micro-batches, and the seconds by instruction id."""
        return {
            run.compressed.rank: compressed_list(run.compressed, self.plan.with_micro_batches(micro_batches))
            for run in runs
        }

    def seconds(
        self,
        runs: Sequence[_StageRun],
        micro_batches: int,
        transfers: float = 1.0,
        gathers: float = 1.0,
    ) -> float:
        """Seconds of a step.

        Args:
            transfers, gathers: factor on the seconds of transfers between stages, and of gathers of weights before the passes.
        """
        plan = self.plan.with_micro_batches(micro_batches)
        # Parameter groups with separate optimizer steps move states across blocks, so their lists cannot be compressed.
        if any(stage.is_decoupled for stage in plan.stages):
            return simulate_step(plan, self.problem).simulation.step_seconds
        written = self.written(runs, micro_batches)
        sent = {run.compressed.rank: run.transfer * transfers for run in runs}
        slowed = {run.compressed.rank: run.slowed for run in runs}
        # The gathers are the first instructions of a list.
        gathered = {run.compressed.rank: len(run.compressed.gathers) for run in runs}

        def seconds(rank: int, i: Instruction) -> float:
            # Slices and collectives have their own seconds; all others are transfers.
            price = written[rank][1].get(i.id, sent[rank])
            return price * gathers if i.id < gathered[rank] else price

        lists = {rank: instructions for rank, (instructions, _) in written.items()}
        return simulate(lists, seconds, slowed).step_seconds


@dataclass(frozen=True, slots=True)
class _StageRun:
    """The simulation of one stage that waits for no other.

    Attributes:
        blocks: the blocks of a complete step.
        stable, first, last: seconds of a micro-batch in steady state, of the first and of the last one.
        exposed: seconds of a stable micro-batch with communication and without computation.
        inside: the part of `exposed` that is inside operators of computation, by KINDS.
        transfer: seconds of one transfer to a neighbour.
        slowed: interference between instructions that run at the same time.
        early: names of deferred weight gradients that are computed early because held bytes reach their limit.
        deferred: number of deferred weight gradients.
        bytes: computes the bytes that overlap adds; a search that only ranks by seconds never calls it.
        kept_by_graphs: computes the bytes that captured graphs hold in addition.
    """

    compressed: Compressed
    blocks: list[Block]
    stable: float
    first: float
    last: float
    exposed: float
    inside: dict[str, float]
    transfer: float
    slowed: Interference
    bytes: Callable[[], ListedBytes]
    fragmentation: float
    early: tuple[str, ...]
    deferred: int
    kept_by_graphs: Callable[[], float] = lambda: 0.0

    def without_bytes(self) -> _StageRun:
        """A copy for seconds only, which frees the lists and the simulation that `bytes` refers to."""
        return replace(self, bytes=lambda: ListedBytes(0.0, 0.0), kept_by_graphs=lambda: 0.0)


def _simulated_stage(listed: _Lists, index: int, prices: StagePrices) -> _StageRun:
    plan, model = listed.plan, listed.problem.model
    # 1. Simulate a few passes. Gathers of weights take no time here: their seconds are handed to `compress`, because a step
    # may hide them differently.
    stage, blocks = plan.stages[index], sample_blocks(plan, index)
    rank, slowed = stage.devices.ranks[0], prices.slowed
    saved = {f"L{layer}": prices.saved_bytes(f"L{layer}") for layer in stage.layers}
    prices.read(lower_rank(plan, model, rank, saved, blocks=blocks))
    ahead = {}
    if stage.overlap.overlap_param_gather:
        ahead = {i.id: prices.seconds(i) for i in prices.instructions if i.operator.is_part_gather}

    def seconds_alone(i: Instruction) -> float:
        return 0.0 if i.id in ahead else prices.seconds(i)

    simulation = run_alone(
        prices.instructions, rank, seconds_alone, slowed, prices.machine.queue_seconds, prices.link_use
    )
    compressed = compress(index, blocks, prices.instructions, simulation, ahead)
    # 2. Seconds of a micro-batch. The sample has few micro-batches, but every kind of block of the complete step.
    step_blocks = blocks_of(compressed, plan)
    stable = _micro_batch(compressed, plan, is_last=False)
    seconds, last = (sum(b.seconds for b in some) for some in (stable, _micro_batch(compressed, plan, is_last=True)))
    inside = {kind: float(prices.priced.exposed(kind)[prices.column]) for kind in KINDS if kind != "expert"}
    inside["expert"] = prices.exposed_inside()
    # 3. Bytes. The closed form has those of a stage without overlap, so only the difference to such a stage is added.
    bare = replace(stage, overlap=NO_OVERLAP)
    without = replace(plan, stages=(*plan.stages[:index], bare, *plan.stages[index + 1 :]))

    @cache  # shared by equivalent stages
    def added_bytes() -> ListedBytes:
        without_overlap = lower_rank(without, model, rank, saved, blocks=sample_blocks(without, index))
        return listed_bytes(prices, model, simulation, without_overlap, slowed)

    return _StageRun(
        compressed=compressed,
        blocks=step_blocks,
        stable=seconds,
        first=seconds + float(prices.priced.costs.first_extra_seconds[0, prices.column]),
        last=last + compressed.before_norm,
        exposed=seconds - sum(block.busy for block in stable) + sum(inside.values()),
        inside=inside,
        transfer=prices.transfer_seconds(),
        slowed=slowed,
        bytes=added_bytes,
        fragmentation=listed.problem.machine.fragmentation,
        early=tuple(dict.fromkeys(i.name for i in early_gradients(prices.instructions))),
        deferred=len({i.name for i in prices.instructions if i.kind == "weight-gradient"}),
    )


UNDER_WAY = 3
"""Rounds of a pipeline's stages after which the number of micro-batches in flight of a chunk is at its maximum."""


def _kept_by_graphs(listed: _Lists, index: int, prices: StagePrices) -> float:
    """Bytes that captured graphs of a stage hold (captured_launches.py); 0 if nothing is captured."""
    if not prices.priced.setting.replays.captured:
        return 0.0
    count = min(listed.micro_batches, max(GROUPS, UNDER_WAY * len(listed.plan.stages)))
    plan, stage = listed.plan.with_micro_batches(count), listed.plan.stages[index]
    instructions = lower_rank(plan, listed.problem.model, stage.devices.ranks[0])
    family, rows = prices.priced.family, {prices.row(f"L{layer}") for layer in stage.layers}
    working = max(family.sizes[row].working for row in rows)
    in_flight = float(family.in_flight[prices.column])
    saved: Callable[[str], float] = prices.saved_bytes
    return kept_bytes(instructions, prices.replayed(instructions), saved, working, in_flight)


def _as_stage(run: _StageRun, plan: Plan, index: int) -> _StageRun:
    """The run of an equivalent stage, with the names of the stage `index`."""
    if index == run.compressed.stage:
        return run
    of_other = renames(plan, run.compressed.stage, index)
    return replace(run, compressed=renamed(run.compressed, plan, index), early=tuple(map(of_other, run.early)))


def _micro_batch(compressed: Compressed, plan: Plan, is_last: bool) -> list[Block]:
    """The blocks whose seconds one micro-batch takes.

    If all passes run in pairs there is one pair per micro-batch and chunk, which counts for both of its passes: the first pair of
    the step that has the chunk's backward pass.
    """
    pairs: dict[int, Block] = {}
    for steps in pipeline_blocks(plan, compressed.stage) if not is_last else ():
        if len(steps) > 1 and steps[0].chunk not in pairs:
            backward_chunk, forward_chunk = (step.chunk for step in steps)
            pairs[backward_chunk] = compressed.blocks[
                ("backward", backward_chunk, False), ("forward", forward_chunk, False)
            ]
    if len(pairs) == len(plan.stages[compressed.stage].chunks):
        return list(pairs.values())
    blocks = []
    for chunk in range(len(plan.stages[compressed.stage].chunks)):
        blocks.append(compressed.blocks[(("forward", chunk, False),)])
        backward = compressed.blocks.get((("backward", chunk, is_last),))
        blocks.append(backward or compressed.blocks[(("backward", chunk, True),)])
    return blocks


def _stage(run: _StageRun, closed_form: PredictedStage) -> PredictedStage:
    peaks = closed_form.peak_bytes_by_category
    added = run.bytes().extra + run.kept_by_graphs()
    extra = round(added)
    reserved = round(run.fragmentation * added)
    peaks = replace(peaks, temporaries=peaks.temporaries + extra, fragmentation=peaks.fragmentation + reserved)
    return replace(
        closed_form,
        stable_seconds=run.stable,
        first_seconds=run.first,
        last_seconds=run.last,
        exposed_communication_seconds=run.exposed,
        peak_bytes=closed_form.peak_bytes + extra + reserved,
        peak_bytes_by_category=peaks,
    )


class _Breakdown(Mapping[str, float]):
    """Seconds of a step by cause. Some causes need further simulations, which run when one of them is first read.

    Args:
        seconds: cause -> seconds, for causes that need no simulation.
        simulate: computes the seconds of the other causes.
        order: all causes.
    """

    def __init__(
        self, seconds: dict[str, float], simulate: Callable[[], dict[str, float]], order: Sequence[str]
    ) -> None:
        self._seconds, self._simulate, self._order = seconds, simulate, order

    def __getitem__(self, name: str) -> float:
        return self._seconds[name] if name in self._seconds else self._simulated[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __reduce__(self) -> tuple[type, tuple[dict[str, float]]]:
        """Copies and pickles are plain dictionaries."""
        return dict, (dict(self),)

    @cached_property
    def _simulated(self) -> dict[str, float]:
        return self._simulate()


def _breakdown(
    slowest: _StageRun, listed: _Lists, runs: Sequence[_StageRun], step_seconds: float
) -> Mapping[str, float]:
    """Seconds of the slowest stage by cause.

    Args:
        step_seconds: of the complete step.
    """
    plan, compressed = listed.plan, slowest.compressed
    count = plan.stages[compressed.stage].gradient_accumulation_steps
    inside = {kind: count * seconds for kind, seconds in slowest.inside.items()}
    busy = sum(block.busy for block in slowest.blocks)
    # A stage simulated by itself waits for its own all-to-alls only: idle time inside a block is their exposed time.
    expert = sum(block.seconds for block in slowest.blocks) - busy
    causes = {
        "compute_seconds": busy - sum(inside.values()),
        **{f"exposed_{kind}_seconds": inside[kind] + (expert if kind == "expert" else 0.0) for kind in KINDS},
        "optimizer_seconds": compressed.optimizer + compressed.norm,
    }

    def simulate_others() -> dict[str, float]:
        # Exposed seconds of transfers, and of gathers, are the difference to a step in which they take no time; both steps are
        # extrapolated the same way. For unlike stages there is no such step: their waits for tiles count as bubble.
        without_transfers = step_seconds if plan.transfers else listed.step(runs, transfers=0.0)
        has_gathers = any(run.compressed.gathers for run in runs) and not plan.transfers
        complete = listed.step(runs, gathers=0.0) if has_gathers else step_seconds
        data = compressed.before_norm + compressed.after_norm - compressed.optimizer + step_seconds - complete
        simulated = {"exposed_data_seconds": data, "exposed_transfer_seconds": step_seconds - without_transfers}
        # The bubble is the remainder, so that the causes add up to the step.
        all_causes = causes | simulated
        return simulated | {
            "bubble_seconds": step_seconds - sum(all_causes[name] for name in order if name in all_causes)
        }

    exposed = (f"exposed_{kind}_seconds" for kind in KINDS)
    ends = ("exposed_data_seconds", "exposed_transfer_seconds", "optimizer_seconds")
    order = ("compute_seconds", "bubble_seconds", *exposed, *ends)
    return _Breakdown(causes, simulate_others, order)
