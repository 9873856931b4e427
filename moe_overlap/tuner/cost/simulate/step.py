"""Simulated steps: the instruction lists of a plan at the prices of the cost model.

Which lists. One rank stands for every stage; where stages of unlike shape send tiles to each other, all ranks are simulated. A
list names the waits of the runner that will follow it (plan/lowering/dependencies.py), so the simulator adds none. Work that
runs at the same time is slowed down as the analytic cost says (`machine.concurrency`); where nothing overlaps, a simulated
step and the analytic one (pipeline.py) agree.

Steps of stages that overlap by their own lists (`StageOverlap.is_listed`) or are of unlike shape:
1. The step is that of the simulated lists, in place of the analytic one; the seconds of a micro-batch, what it exposes, and the
   bytes that overlap adds are read off them, too.
2. Long steps are not simulated whole. Lists are compressed (compress.py), and only so many micro-batches are simulated that each
   further group of them adds the same; the rest is extrapolated linearly.
3. Of unlike stages the lists of all ranks are simulated; waiting for tiles counts as bubble.
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
    """When everything runs.

    Attributes:
        prices: by rank, the first of every stage.
    """

    simulation: Simulation
    prices: dict[int, StagePrices]

    def kept_bytes(self, rank: int) -> list[tuple[float, float]]:
        """When what a rank keeps changes, and the bytes from then on: states, and activations for backward passes."""
        return live_bytes(self.ran(rank), self.prices[rank].buffer_bytes)

    def spans(self, rank: int) -> list[Span]:
        """Spans of one rank as the runtime records them: an operator is split where it waits for its own collectives.

        All of those stand in its middle: the simulator places operators, not what they consist of.
        """
        prices, spans = self.prices[rank], []
        for event in sorted(self.ran(rank), key=lambda event: (event.start, event.end)):
            shares = prices.inside_shares(event.instruction)
            if not shares:
                spans.append(event.span)
                continue
            own, seconds = event.instruction.channel_group, event.end - event.start
            begun = event.start + seconds * (1.0 - sum(shares.values())) / 2.0
            spans.append(event.stretch(own, event.start, begun))
            for channel, share in shares.items():
                spans.append(event.stretch(channel, begun, begun + seconds * share))
                begun += seconds * share
            spans.append(event.stretch(own, begun, event.end))
        return spans

    def ran(self, rank: int) -> list[Ran]:
        """The instructions of a rank, in time."""
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
    for stage, here in zip(plan.stages, of_stage, strict=True):
        saved = {f"L{layer}": here.saved_bytes(f"L{layer}") for layer in stage.layers}
        # Ranks of one stage run the same list, so one stands for all; tiles between unlike stages differ by rank.
        first = stage.devices.ranks[0]
        if plan.transfers:
            lists |= lower_stage(plan, problem.model, plan.stage_of(first), saved)
        else:
            lists[first] = lower_rank(plan, problem.model, first, saved)
        here.read(lists[first])
    check_rendezvous(lists)
    slowed = {rank: of_stage[plan.stage_of(rank)].slowed for rank in lists}
    simulation = simulate(
        lists,
        lambda _, i: of_stage[i.stage].seconds(i),
        slowed,
        problem.machine.queue_seconds,
        lambda _, i: of_stage[i.stage].link_use(i),
    )
    return SimulatedStep(simulation, {here.stage.devices.ranks[0]: here for here in of_stage})


def price_stages(plan: Plan, problem: Problem) -> list[StagePrices]:
    """Prices of the instructions of every stage, whose lists they have not read yet.

    Raises:
        ConfigError: a fused layer has no block left to compute, or its GPU's number of blocks is not known.
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
"""Weight gradients that are named."""
GROUPS = 4
"""Groups of micro-batches, as many as stages in each, behind which every further one takes as long as the one before."""


def with_lists(closed: Prediction, plan: Plan, problem: Problem) -> Prediction:
    """A prediction with the step, the stages and the breakdown of simulated lists.

    Args:
        closed: the analytic one, without overlap inside a stage; states and bytes that overlap leaves alone stay.
    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    listed = _Lists(plan, problem)
    ones = listed.alone()
    if plan.transfers:  # micro-batches of unlike stages do not correspond: nothing is told from fewer of them
        played = simulate_step(plan, problem).simulation.step_seconds
    else:
        played = listed.step(ones)
    # Unlike stages cut the step into different numbers of micro-batches: whole steps are compared.
    slowest = max(ones, key=lambda one: one.stable * plan.stages[one.compressed.stage].gradient_accumulation_steps)
    stages = tuple(_stage(one, before) for one, before in zip(ones, closed.predicted.stages, strict=True))
    light = [one.without_bytes() for one in ones]
    scale = closed.predicted.step_seconds / played
    predicted = replace(
        closed.predicted,
        step_seconds=played,
        tokens_per_second_per_gpu=closed.predicted.tokens_per_second_per_gpu * scale,
        model_tflops_per_gpu=closed.predicted.model_tflops_per_gpu * scale,
        stages=stages,
    )
    fused = any(stage.overlap.fused_layers for stage in plan.stages)
    early = tuple(
        f"stage {one.compressed.stage}: --max-deferred-bytes {plan.stages[one.compressed.stage].overlap.max_deferred_bytes} does "
        f"not let {len(one.early)} of {one.deferred} weight gradients wait, at {ROUTED_LOAD_BOUND:g} times the balanced rows "
        f"({', '.join(one.early[:SHOWN])}{', …' * (len(one.early) > SHOWN)})"
        for one in ones
        if one.early
    )
    return replace(
        closed,
        predicted=predicted,
        breakdown=_breakdown(slowest, listed, light, played),
        mfu=closed.mfu * scale,
        extrapolating=(*closed.extrapolating, *([UNMEASURED] if fused else [])),
        computed_early=early,
    )


def listed_seconds(plan: Plan, problem: Problem) -> float:
    """Seconds of a step of simulated lists, as `with_lists` says; of equal stages, for which nothing else is looked at.

    Raises:
        ConfigError: the plan uses a field that is not lowered yet.
    """
    assert not plan.transfers
    listed = _Lists(plan, problem)
    return listed.step(listed.alone())


def step_of_many(play: Callable[[int], float], micro_batches: int, stages: int) -> float:
    """Seconds of a step of any number of micro-batches.

    Args:
        play: seconds of a step of so many; called for few of them, beyond which a group takes as long as the last one.
    """
    few = played_micro_batches(micro_batches, stages)
    beyond, seconds = (micro_batches - few) // stages, play(few)
    return seconds if not beyond else seconds + beyond * (seconds - play(few - stages))


def played_micro_batches(micro_batches: int, stages: int) -> int:
    """The most micro-batches that `step_of_many` plays."""
    # Whole groups are left out: the remainder decides how an interleaved pipeline fills and drains, so it must stay.
    return micro_batches - stages * max(0, -(-(micro_batches - GROUPS * stages) // stages))


@dataclass(frozen=True, slots=True)
class _Lists:
    """Everything that lists of a plan are made and priced from."""

    plan: Plan
    problem: Problem

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.plan.stages[0].gradient_accumulation_steps

    def alone(self) -> list[_Alone]:
        """The stages, each by itself; of equivalent stages one is simulated."""
        prices = price_stages(self.plan, self.problem)
        known: dict[Hashable, _Alone] = {}
        found = []
        for index, here in enumerate(prices):
            key = equivalence_key(self.plan, index, self.problem.model, here)
            if key not in known:
                known[key] = _stage_alone(self, index, here)
            # Equivalent stages take equally long, but have unlike numbers of micro-batches under way.
            kept = partial(_kept_by_graphs, self, index, here)
            found.append(replace(_as_stage(known[key], self.plan, index), kept_by_graphs=kept))
        return found

    def step(self, ones: Sequence[_Alone], transfers: float = 1.0, gathers: float = 1.0) -> float:
        """Seconds of the step of all micro-batches; arguments as `seconds` takes them."""
        return step_of_many(
            lambda count: self.seconds(ones, count, transfers, gathers), self.micro_batches, len(self.plan.stages)
        )

    def written(
        self, ones: Sequence[_Alone], micro_batches: int
    ) -> dict[int, tuple[list[Instruction], dict[int, float]]]:
        """Rank of each stage -> its list of so many micro-batches, compressed to contacts, and their seconds."""
        return {
            one.compressed.rank: compressed_list(one.compressed, self.plan.with_micro_batches(micro_batches))
            for one in ones
        }

    def seconds(
        self,
        ones: Sequence[_Alone],
        micro_batches: int,
        transfers: float = 1.0,
        gathers: float = 1.0,
    ) -> float:
        """Seconds of a step; of each transfer between stages, and each gather of weights in front of the passes, this share."""
        plan = self.plan.with_micro_batches(micro_batches)
        # Parameter groups that step by themselves move states across the blocks, so these lists are not compressed.
        if any(stage.is_decoupled for stage in plan.stages):
            return simulate_step(plan, self.problem).simulation.step_seconds
        written = self.written(ones, micro_batches)
        sent = {one.compressed.rank: one.transfer * transfers for one in ones}
        slowed = {one.compressed.rank: one.slowed for one in ones}
        # A list begins with its gathers.
        gathered = {one.compressed.rank: len(one.compressed.gathers) for one in ones}

        def seconds(rank: int, i: Instruction) -> float:
            # Slices have seconds of their own; what has none is a transfer.
            whole = written[rank][1].get(i.id, sent[rank])
            return whole * gathers if i.id < gathered[rank] else whole

        lists = {rank: made for rank, (made, _) in written.items()}
        return simulate(lists, seconds, slowed).step_seconds


@dataclass(frozen=True, slots=True)
class _Alone:
    """One stage by itself, when it waits for no other.

    Attributes:
        whole: the blocks of the whole step.
        stable, first, last: seconds of such a micro-batch.
        exposed: seconds of a stable one in which it communicates and computes nothing.
        inside: of them those of KINDS that instructions of computation hold, for they run inside their operators.
        transfer: seconds of one transfer to a neighbour.
        slowed: how what runs at the same time slows down.
        early: names of deferred weight gradients that are computed early because the bound on held bytes is reached.
        deferred: how many are deferred.
        bytes: the bytes that overlap adds, computed when they are asked for: the order of plans needs seconds alone.
        kept_by_graphs: bytes that captured graphs keep beside them, computed alike.
    """

    compressed: Compressed
    whole: list[Block]
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

    def without_bytes(self) -> _Alone:
        """The same to ask seconds of: the lists and the simulation that bytes are computed from are let go."""
        return replace(self, bytes=lambda: ListedBytes(0.0, 0.0), kept_by_graphs=lambda: 0.0)


def _stage_alone(listed: _Lists, index: int, here: StagePrices) -> _Alone:
    plan, model = listed.plan, listed.problem.model
    stage, blocks = plan.stages[index], sample_blocks(plan, index)
    rank, slowed = stage.devices.ranks[0], here.slowed
    saved = {f"L{layer}": here.saved_bytes(f"L{layer}") for layer in stage.layers}
    here.read(lower_rank(plan, model, rank, saved, blocks=blocks))
    ahead = {}
    if stage.overlap.overlap_param_gather:
        ahead = {i.id: here.seconds(i) for i in here.made if i.operator.is_part_gather}

    def seconds_alone(i: Instruction) -> float:
        return 0.0 if i.id in ahead else here.seconds(i)

    alone = run_alone(here.made, rank, seconds_alone, slowed, here.machine.queue_seconds, here.link_use)
    compressed = compress(index, blocks, here.made, alone, ahead)
    # The sample has few micro-batches, the plan all of them; the blocks are of the same kinds.
    whole = blocks_of(compressed, plan)
    stable = _micro_batch(compressed, plan, is_last=False)
    seconds, last = (sum(b.seconds for b in some) for some in (stable, _micro_batch(compressed, plan, is_last=True)))
    inside = {kind: float(here.priced.exposed(kind)[here.column]) for kind in KINDS if kind != "expert"}
    inside["expert"] = here.exposed_inside()
    # The analytic cost counts the bytes of a stage without overlap: only what this list adds to those may be added.
    bare = replace(stage, overlap=NO_OVERLAP)
    without = replace(plan, stages=(*plan.stages[:index], bare, *plan.stages[index + 1 :]))

    @cache  # of all stages that are alike
    def added_bytes() -> ListedBytes:
        plain = lower_rank(without, model, rank, saved, blocks=sample_blocks(without, index))
        return listed_bytes(here, model, alone, plain, slowed)

    return _Alone(
        compressed=compressed,
        whole=whole,
        stable=seconds,
        first=seconds + float(here.priced.costs.first_extra_seconds[0, here.column]),
        last=last + compressed.before_norm,
        exposed=seconds - sum(block.busy for block in stable) + sum(inside.values()),
        inside=inside,
        transfer=here.transfer_seconds(),
        slowed=slowed,
        bytes=added_bytes,
        fragmentation=listed.problem.machine.fragmentation,
        early=tuple(dict.fromkeys(i.name for i in early_gradients(here.made))),
        deferred=len({i.name for i in here.made if i.kind == "weight-gradient"}),
    )


UNDER_WAY = 3
"""Rounds of a pipeline's stages in which as many micro-batches of a chunk are under way as ever are."""


def _kept_by_graphs(listed: _Lists, index: int, here: StagePrices) -> float:
    """Bytes that captured graphs of a stage keep (captured_launches.py); 0 where nothing is captured."""
    if not here.priced.setting.replays.captured:
        return 0.0
    count = min(listed.micro_batches, max(GROUPS, UNDER_WAY * len(listed.plan.stages)))
    plan, stage = listed.plan.with_micro_batches(count), listed.plan.stages[index]
    made = lower_rank(plan, listed.problem.model, stage.devices.ranks[0])
    family, rows = here.priced.family, {here.row(f"L{layer}") for layer in stage.layers}
    working = max(family.sizes[row].working for row in rows)
    in_flight = float(family.in_flight[here.column])
    saved: Callable[[str], float] = here.saved_bytes
    return kept_bytes(made, here.replayed(made), saved, working, in_flight)


def _as_stage(one: _Alone, plan: Plan, index: int) -> _Alone:
    """The same as another stage of the pipeline, which is equivalent to it."""
    if index == one.compressed.stage:
        return one
    of_other = renames(plan, one.compressed.stage, index)
    return replace(one, compressed=renamed(one.compressed, plan, index), early=tuple(map(of_other, one.early)))


def _micro_batch(compressed: Compressed, plan: Plan, is_last: bool) -> list[Block]:
    """The blocks that one micro-batch passes.

    A pair counts for both of its passes, as there is one for every micro-batch and chunk: that with the partner that the chunk's
    backward pass has first.
    """
    pairs: dict[int, Block] = {}
    for steps in pipeline_blocks(plan, compressed.stage) if not is_last else ():
        if len(steps) > 1 and steps[0].chunk not in pairs:
            given, taken = (step.chunk for step in steps)
            pairs[given] = compressed.blocks[("backward", given, False), ("forward", taken, False)]
    if len(pairs) == len(plan.stages[compressed.stage].chunks):
        return list(pairs.values())
    found = []
    for chunk in range(len(plan.stages[compressed.stage].chunks)):
        found.append(compressed.blocks[(("forward", chunk, False),)])
        backward = compressed.blocks.get((("backward", chunk, is_last),))
        found.append(backward or compressed.blocks[(("backward", chunk, True),)])
    return found


def _stage(one: _Alone, closed: PredictedStage) -> PredictedStage:
    peaks = closed.peak_bytes_by_category
    added = one.bytes().extra + one.kept_by_graphs()
    extra = round(added)
    reserved = round(one.fragmentation * added)
    peaks = replace(peaks, temporaries=peaks.temporaries + extra, fragmentation=peaks.fragmentation + reserved)
    return replace(
        closed,
        stable_seconds=one.stable,
        first_seconds=one.first,
        last_seconds=one.last,
        exposed_communication_seconds=one.exposed,
        peak_bytes=closed.peak_bytes + extra + reserved,
        peak_bytes_by_category=peaks,
    )


class _Breakdown(Mapping[str, float]):
    """Seconds of a step by cause. Two causes need further simulations, which run when a reader first asks for one of them.

    Args:
        known: seconds of the causes that need none.
        simulate: the seconds of the remaining causes.
        order: all causes.
    """

    def __init__(self, known: dict[str, float], simulate: Callable[[], dict[str, float]], order: Sequence[str]) -> None:
        self._known, self._simulate, self._order = known, simulate, order

    def __getitem__(self, name: str) -> float:
        return self._known[name] if name in self._known else self._simulated[name]

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


def _breakdown(slowest: _Alone, listed: _Lists, ones: Sequence[_Alone], played: float) -> Mapping[str, float]:
    """Seconds of the slowest stage by what they are spent on.

    Args:
        played: the step.
    """
    plan, compressed = listed.plan, slowest.compressed
    count = plan.stages[compressed.stage].gradient_accumulation_steps
    inside = {kind: count * seconds for kind, seconds in slowest.inside.items()}
    busy = sum(block.busy for block in slowest.whole)
    # A stage by itself waits for nothing but its own all-to-alls: where a block does not compute, they are exposed.
    expert = sum(block.seconds for block in slowest.whole) - busy
    known = {
        "compute_seconds": busy - sum(inside.values()),
        **{f"exposed_{kind}_seconds": inside[kind] + (expert if kind == "expert" else 0.0) for kind in KINDS},
        "optimizer_seconds": compressed.optimizer + compressed.norm,
    }

    def simulate_others() -> dict[str, float]:
        # All steps are extrapolated alike, so their differences are the exposed seconds of the transfers, and of the gathers.
        # Unlike stages have no such steps to compare: their waits for tiles count as bubble.
        still = played if plan.transfers else listed.step(ones, transfers=0.0)
        has_gathers = any(one.compressed.gathers for one in ones) and not plan.transfers
        complete = listed.step(ones, gathers=0.0) if has_gathers else played
        data = compressed.before_norm + compressed.after_norm - compressed.optimizer + played - complete
        simulated = {"exposed_data_seconds": data, "exposed_transfer_seconds": played - still}
        # The remainder, so that the breakdown adds up to the step.
        causes = known | simulated
        return simulated | {"bubble_seconds": played - sum(causes[name] for name in order if name in causes)}

    exposed = (f"exposed_{kind}_seconds" for kind in KINDS)
    ends = ("exposed_data_seconds", "exposed_transfer_seconds", "optimizer_seconds")
    order = ("compute_seconds", "bubble_seconds", *exposed, *ends)
    return _Breakdown(known, simulate_others, order)
