"""Plans whose stages differ: each has its own layers, recomputation, ZeRO level and shares of states on the host.

Contract. All stages of a plan share the ranks, the micro-batch and the pipeline of a uniform layout. The answer for each layout
is the best of all such plans, with the bound that the solver proves. The objective is pipeline.py's, so a plan's seconds equal
those of `predict_plan`. Stages have one model chunk each, as in Mist; interleaved pipelines stay uniform.

Steps of `search_stages`, layout by layout until the deadline:
1. The candidates of each stage: numbers of layers × choices of recomputation × strategies about states, priced by the
   `StageEvaluator`. The number of layers grows until even the fastest stage is slower than the incumbent.
2. Candidates that do not fit, or that another with the same layers dominates in the objective, are pruned (`undominated`).
3. Mist's integer program over the rest (`choose_stages`). It starts from the best uniform plan of the layout, and the incumbent
   of earlier layouts prunes it.

Source: Mist, section 5.3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.cost.evaluate import StageCosts
from moe_overlap.tuner.cost.pipeline import StageTimes
from moe_overlap.tuner.search.pipeline.mist_milp import choose_stages
from moe_overlap.tuner.search.pipeline.stage_options import (
    Choice,
    PipelineProblem,
    StageOptions,
    options_of,
    undominated,
)
from moe_overlap.tuner.search.pipeline.sub_meshes import MeshPlan, MeshSearch
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import MemoryChoice, UniformLayout, recompute_of, uniform_plan
from moe_overlap.tuner.search.uniform import RankedLayout
from moe_overlap.tuner.search.uniform_cost import UniformCosts, needed_bytes, recompute_choices

Floats = NDArray[np.float64]
Chunks = tuple[tuple[int, int], ...]
LAYOUT_SECONDS = 20.0
"""Time limit of the integer program for one layout; an interrupt is noticed only when it returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedPlan:
    """A plan of a layout whose stages differ.

    Attributes:
        chunks, memories: of every stage.
        seconds: seconds of a step by the objective.
        needed_bytes: predicted bytes of the fullest stage.
    """

    layout: UniformLayout
    chunks: tuple[Chunks, ...]
    memories: tuple[MemoryChoice, ...]
    seconds: float
    needed_bytes: float

    @property
    def name(self) -> str:
        """Degrees, then the layers of the stages, and the memory choices of each run of stages with the same one."""
        layers = "+".join(str(sum(last - first for first, last in chunks)) for chunks in self.chunks)
        parts = [self.layout.name, f"layers {layers}"]
        for memory, places in groupby(range(len(self.memories)), key=lambda place: self.memories[place]):
            stages = list(places)
            shown = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
            if memory.name:
                parts.append(f"stage {shown}: {memory.name}")
        return "; ".join(parts)

    def plan(self, template: Plan, num_layers: int) -> Plan:
        """The plan as data.

        Args:
            template: its model, machines, batch and precision stay.
        """
        uniform = uniform_plan(template, num_layers, self.layout)
        stages = (
            replace(
                stage,
                chunks=chunks,
                zero_level=memory.zero_level,
                offload=memory.offload,
                recompute=recompute_of(memory, chunks),
            )
            for stage, chunks, memory in zip(uniform.stages, self.chunks, self.memories, strict=True)
        )
        return replace(uniform, stages=tuple(stages))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSearch:
    """The answer of a search over plans of different stages.

    Attributes:
        solution: the best plan of the searched layouts; its bound holds for these only.
        ranked: the best plan of each layout that improved the incumbent, fastest first.
        layouts: number of searched layouts.
        candidates: number of candidates that were priced, over all stages of these layouts.
        on_frontier: number of candidates that fit and are not dominated.
        programs: number of dynamic programs over cuts and sub-meshes (sub_meshes.py).
        mesh_stages: number of stages that were priced for them.
        is_interrupted: True if Ctrl-C ended the search.
    """

    solution: Solution[StagedPlan | MeshPlan]
    ranked: tuple[StagedPlan | MeshPlan, ...]
    layouts: int
    candidates: int
    on_frontier: int
    is_interrupted: bool = False
    programs: int = 0
    mesh_stages: int = 0


Progress = Callable[[int, int, StagedPlan | None], None]
"""Called with the number of finished layouts, the number of all layouts, and the incumbent."""


def search_stages(
    costs: UniformCosts,
    layouts: Sequence[UniformLayout],
    uniform: Sequence[RankedLayout] = (),
    deadline: float = math.inf,
    gap: float = 0.0,
    progress: Progress = lambda done, total, best: None,
) -> StageSearch:
    """Search the plans of some layouts.

    Args:
        costs: prices of a task, whose search space lists the free decisions.
        uniform: uniform plans that fit; the programs of their layouts start from them, and plans slower than the fastest of them
            are pruned.
        deadline: time by `time.monotonic`; after it the incumbent is the answer.
        gap: relative gap at which a program may stop.
    """
    begun = time.monotonic()
    of_layout = {plan.layout: plan for plan in uniform if plan.memory.modules in ((), *costs.task.modules)}
    fastest = min((plan.seconds for plan in uniform), default=math.inf)
    ranked: list[StagedPlan] = []
    bound, status, done, candidates, on_frontier = math.inf, Status.OPTIMAL, 0, 0, 0
    is_interrupted = False
    try:
        for layout in layouts:
            best = min(fastest, ranked[0].seconds if ranked else math.inf)
            if time.monotonic() > deadline:
                status = Status.TIME_LIMIT
                break
            if (least := costs.step_bound(layout)) >= best:
                bound, done = min(bound, least), done + 1
                continue
            free_layout = _FreeLayout(costs, layout, of_layout.get(layout), best)
            seconds = min(LAYOUT_SECONDS, deadline - time.monotonic())
            # The factor lets the uniform plan itself pass: the best choice is never slower than it.
            beat = math.inf if math.isinf(best) else best * (1.0 + 1e-12)
            solution = free_layout.solve(max(0.0, seconds), gap, beat)
            bound, done = min(bound, solution.bound), done + 1
            candidates, on_frontier = (
                candidates + free_layout.candidates,
                on_frontier + sum(map(len, free_layout.stages)),
            )
            if solution.status in (Status.TIME_LIMIT, Status.FEASIBLE) and status is Status.OPTIMAL:
                # Only the deadline makes it TIME_LIMIT, not LAYOUT_SECONDS.
                status = Status.TIME_LIMIT if time.monotonic() > deadline else Status.FEASIBLE
            if solution.value is not None and solution.objective <= best:
                ranked.insert(0, free_layout.staged(solution.value, solution.objective))
            progress(done, len(layouts), ranked[0] if ranked else None)
    except KeyboardInterrupt:
        status, is_interrupted = Status.TIME_LIMIT, True
    if done < len(layouts):
        # Unsearched layouts have no bound but that of any plan of theirs.
        bound = min([bound, *(costs.step_bound(layout) for layout in layouts[done:])])
    value = ranked[0] if ranked else None
    objective = math.inf if value is None else value.seconds
    if value is None and status is Status.OPTIMAL:
        status = Status.INFEASIBLE
    return StageSearch(
        solution=Solution(
            value=value,
            objective=objective,
            bound=min(bound, objective),
            status=status,
            seconds=time.monotonic() - begun,
        ),
        ranked=tuple(ranked),
        layouts=done,
        candidates=candidates,
        on_frontier=on_frontier,
        is_interrupted=is_interrupted,
    )


def with_meshes(staged: StageSearch | None, meshes: MeshSearch) -> StageSearch:
    """Both searches joined: the faster solution leads, and the smaller bound holds."""
    if staged is None:
        nothing: Solution[StagedPlan | MeshPlan] = Solution(
            value=None, objective=math.inf, bound=math.inf, status=Status.INFEASIBLE, seconds=0.0
        )
        staged = StageSearch(solution=nothing, ranked=(), layouts=0, candidates=0, on_frontier=0)
    stage_solution, mesh_solution = staged.solution, meshes.solution
    value = stage_solution.value if stage_solution.objective <= mesh_solution.objective else mesh_solution.value
    statuses = {stage_solution.status, mesh_solution.status} - {Status.INFEASIBLE}
    ranks = (Status.TIME_LIMIT, Status.FEASIBLE, Status.OPTIMAL)
    solution: Solution[StagedPlan | MeshPlan] = Solution(
        value=value,
        objective=min(stage_solution.objective, mesh_solution.objective),
        bound=min(stage_solution.bound, mesh_solution.bound),
        status=next((status for status in ranks if status in statuses), Status.INFEASIBLE),
        seconds=stage_solution.seconds + mesh_solution.seconds,
    )
    return replace(
        staged,
        solution=solution,
        ranked=tuple(sorted((*staged.ranked, *meshes.ranked), key=lambda plan: plan.seconds)),
        is_interrupted=staged.is_interrupted or meshes.is_interrupted,
        programs=meshes.programs,
        mesh_stages=meshes.priced,
    )


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The unpruned candidates of one stage: options of the integer program, with the chunks and memory choice of each."""

    options: StageOptions
    chunks: tuple[Chunks, ...]
    memories: tuple[MemoryChoice, ...]
    needed: Floats

    def __len__(self) -> int:
        return len(self.memories)


class _FreeLayout:
    """One layout whose stages are free.

    Args:
        uniform: the best uniform plan of the layout; None if none fits.
        best: incumbent step seconds; slower plans are pruned.
    """

    def __init__(self, costs: UniformCosts, layout: UniformLayout, uniform: RankedLayout | None, best: float) -> None:
        assert layout.virtual == 1, layout
        self._costs, self._layout, self._uniform, self._best = costs, layout, uniform, best
        template, model = costs.task.templates(layout.tensor)
        self._num_layers = model.num_layers
        self._plan = uniform_plan(template, model.num_layers, layout)
        self._kinds = costs.layer_kinds(layout, self._plan)
        self._keeps_layers = costs.task.space.equal_layers
        self._one_memory = _shared(uniform, self._plan) if costs.task.space.one_memory else None
        self._capacity = costs.task.machine.usable_bytes
        self._sent = costs.sent_seconds(layout, self._plan) if layout.pipeline > 1 else 0.0
        self._priced: dict[object, StageCosts] = {}
        self.candidates = 0

    @cached_property
    def stages(self) -> list[_Candidates]:
        """The candidates of every stage; empty if any stage has none."""
        lots = [self._candidates_of(index) for index in range(self._layout.pipeline)]
        return [_joined(of_stage) for of_stage in lots] if all(lots) else []

    def solve(self, seconds: float, gap: float, beat: float) -> Solution[Choice]:
        """Step 3."""
        if not self.stages:  # One stage fits with no number of layers.
            return Solution(value=None, objective=math.inf, bound=math.inf, status=Status.INFEASIBLE, seconds=0.0)
        problem = PipelineProblem(
            stages=tuple(stage.options for stage in self.stages),
            layers=self._num_layers,
            devices=(sum(len(stage.devices.ranks) for stage in self._plan.stages),),
            micro_batches=self._plan.stages[0].gradient_accumulation_steps,
            rules=self._costs.rules(self._layout),
        )
        return choose_stages(problem, self._start(), seconds, gap, beat)

    def staged(self, choice: Choice, seconds: float) -> StagedPlan:
        """The plan of a choice."""
        chunks = [stage.chunks[row] for stage, row in zip(self.stages, choice, strict=True)]
        sizes = [last - first for ((first, last),) in chunks]
        ends = np.cumsum(sizes).tolist()
        chunks = [((end - size, end),) for end, size in zip(ends, sizes, strict=True)]
        return StagedPlan(
            layout=self._layout,
            chunks=tuple(chunks),
            memories=tuple(stage.memories[row] for stage, row in zip(self.stages, choice, strict=True)),
            seconds=seconds,
            needed_bytes=max(float(stage.needed[row]) for stage, row in zip(self.stages, choice, strict=True)),
        )

    def _start(self) -> Choice | None:
        """The rows of the uniform plan; None if there is none, or it is not among the candidates."""
        rows = []
        for index, stage in enumerate(self.stages):
            memory = self._uniform_memory(index)
            if memory is None:
                return None
            uniform_candidate = self._uniform_chunks(index), memory
            row = next(
                (
                    row
                    for row, candidate in enumerate(zip(stage.chunks, stage.memories, strict=True))
                    if candidate == uniform_candidate
                ),
                None,
            )
            if row is None:
                return None  # A stage too slow for the incumbent was pruned.
            rows.append(row)
        return tuple(rows)

    def _uniform_chunks(self, index: int) -> Chunks:
        """The chunks of a stage in the uniform plan, in the form of its candidates."""
        chunks = self._plan.stages[index].chunks
        return chunks if self._keeps_layers else self._named(*chunks[0])

    def _uniform_memory(self, index: int) -> MemoryChoice | None:
        """The memory choice of a stage in the uniform plan; None if there is no such plan."""
        if self._uniform is None:
            return None
        if self._one_memory is not None:
            return self._one_memory
        memory = self._uniform.memory
        sizes = {last - first for first, last in self._plan.stages[index].chunks}
        if memory.every_layer and len(sizes) == 1:
            return replace(memory, layers=max(sizes), every_layer=False)
        return replace(memory, layers=min(memory.layers, max(sizes)))

    def _named(self, first: int, last: int) -> Chunks:
        """A range of layers; if all layers are equivalent, the range of the same size that begins at 0."""
        return ((first, last),) if self._differ else ((0, last - first),)

    @property
    def _differ(self) -> bool:
        """True if the model has several kinds of layers."""
        return len(set(self._kinds)) > 1

    def _candidates_of(self, index: int) -> list[_Candidates]:
        """Steps 1 and 2 for a stage: the unpruned candidates of each range of layers."""
        lots = (self._of_chunks(index, chunks) for chunks in self._chunks_of(index))
        return [lot for lot in lots if lot is not None]

    def _chunks_of(self, index: int) -> Iterator[Chunks]:
        """The ranges of layers that a stage may have, longer ones until one is too slow for the incumbent."""
        if self._keeps_layers:
            yield self._plan.stages[index].chunks
            return
        # Each other stage has at least one layer.
        later_stages = self._layout.pipeline - 1 - index
        for first in range(index, self._num_layers - later_stages) if self._differ and index else (0,):
            for last in range(
                first + 1, self._num_layers - (later_stages if self._differ else self._layout.pipeline - 1) + 1
            ):
                if self._differ and not later_stages and last < self._num_layers:
                    continue
                if self._one_memory is not None and last - first < self._one_memory.layers:
                    continue
                if self._is_too_slow(index, first, last):
                    break
                yield self._named(first, last)

    def _is_too_slow(self, index: int, first: int, last: int) -> bool:
        """True if no plan in which a stage has these layers is faster than the incumbent."""
        costs = self._costs_of(index, ((first, last),))
        micro_batches = self._plan.stages[index].gradient_accumulation_steps
        stable = costs.forward_seconds + costs.backward_seconds
        return bool((micro_batches - 1) * float(stable.min()) >= self._best)

    def _recomputes(self, index: int, chunks: Chunks) -> list[MemoryChoice]:
        if self._one_memory is not None:
            return [self._one_memory]
        stage = replace(self._plan.stages[index], chunks=chunks)
        choices = recompute_choices(self._costs.task, replace(self._plan, stages=(stage,)))
        # There are many sets of modules: stages may only use that of the uniform plan.
        modules = () if self._uniform is None else self._uniform.memory.modules
        return [*choices, MemoryChoice(modules=modules)] if modules else choices

    def _costs_of(self, index: int, chunks: Chunks) -> StageCosts:
        """[N, R] costs of a stage with some layers; equivalent ranges share them."""
        key = (index, self._runs_of(chunks), len(chunks))
        if key not in self._priced:
            plan, recomputes = self._with(index, chunks), self._recomputes(index, chunks)
            self._priced[key] = self._costs.stage_costs(self._layout, plan, index, recomputes)
        return self._priced[key]

    def _runs_of(self, chunks: Chunks) -> tuple[tuple[str, int], ...]:
        """Runs of neighbouring layers of one kind: kind and number of layers."""
        return tuple((kind, len(list(run))) for first, last in chunks for kind, run in groupby(self._kinds[first:last]))

    def _with(self, index: int, chunks: Chunks) -> Plan:
        """The plan of the layout with the given chunks in one stage."""
        stages = list(self._plan.stages)
        stages[index] = replace(stages[index], chunks=chunks)
        return replace(self._plan, stages=tuple(stages))

    def _of_chunks(self, index: int, chunks: Chunks) -> _Candidates | None:
        """The candidates of a stage with some layers: the frontier, and the uniform plan's; None if none fits."""
        costs, recomputes = self._costs_of(index, chunks), self._recomputes(index, chunks)
        needed = needed_bytes(costs)
        fits = needed <= self._capacity
        self.candidates += fits.size
        if not fits.any():
            return None
        stage = self._plan.stages[index]
        layers = sum(last - first for first, last in chunks)
        options = options_of(
            costs, np.full(len(recomputes), layers), (len(stage.devices.ranks),), sent=self._sent, fits=fits
        )
        options = replace(
            options,
            times=_flat(self._costs.times(costs, stage.gradient_accumulation_steps), fits.size),
            first_layer=np.full(fits.size, chunks[0][0]) if self._differ and not self._keeps_layers else None,
        )
        rows = undominated(options, index, self._layout.pipeline)
        uniform_memory = self._uniform_memory(index)
        if uniform_memory is not None and chunks == self._uniform_chunks(index):
            rows = np.union1d(rows, [self._row_of(uniform_memory, recomputes)])
        return _Candidates(
            options=_some(options, rows),
            chunks=(chunks,) * len(rows),
            memories=tuple(self._memory(row, recomputes) for row in rows.tolist()),
            needed=needed.ravel()[rows],
        )

    def _memory(self, row: int, recomputes: Sequence[MemoryChoice]) -> MemoryChoice:
        level, offload = self._costs.strategies[row // len(recomputes)]
        return replace(recomputes[row % len(recomputes)], zero_level=level, offload=offload)

    def _row_of(self, memory: MemoryChoice, recomputes: Sequence[MemoryChoice]) -> int:
        """The row of a memory choice."""
        strategy = self._costs.strategies.index((memory.zero_level, memory.offload))
        again = MemoryChoice(layers=memory.layers, every_layer=memory.every_layer, modules=memory.modules)
        return strategy * len(recomputes) + recomputes.index(again)


def _shared(uniform: RankedLayout | None, plan: Plan) -> MemoryChoice:
    """A uniform plan's memory choice in the form that stages of other sizes can share; the default without a plan."""
    if uniform is None:
        return MemoryChoice()
    sizes = {last - first for stage in plan.stages for first, last in stage.chunks}
    is_every = uniform.memory.every_layer or uniform.memory.layers >= max(sizes)
    return replace(uniform.memory, layers=0, every_layer=True) if is_every else uniform.memory


def _flat(times: StageTimes, size: int) -> StageTimes:
    """Times [N, R] as [N · R]."""
    return StageTimes(
        **{field.name: np.broadcast_to(np.ravel(getattr(times, field.name)), size) for field in fields(StageTimes)}
    )


def _some(options: StageOptions, rows: NDArray[np.intp]) -> StageOptions:
    return StageOptions(
        layers=options.layers[rows],
        devices=options.devices[rows],
        times=options.at(rows),
        optimizer=options.optimizer[rows],
        fits=options.fits[rows],
        sent=options.sent[rows],
        first_layer=None if options.first_layer is None else options.first_layer[rows],
    )


def _joined(lots: Sequence[_Candidates]) -> _Candidates:
    """The candidates of one stage, joined over its ranges of layers."""
    parts = [lot.options for lot in lots]
    firsts = [part.first_layer for part in parts if part.first_layer is not None]
    options = StageOptions(
        layers=np.concatenate([part.layers for part in parts]),
        devices=np.concatenate([part.devices for part in parts]),
        times=StageTimes(
            **{field.name: np.concatenate([part.column(field.name) for part in parts]) for field in fields(StageTimes)}
        ),
        optimizer=np.concatenate([part.optimizer for part in parts]),
        fits=np.concatenate([part.fits for part in parts]),
        sent=np.concatenate([part.sent for part in parts]),
        first_layer=np.concatenate(firsts) if firsts else None,
    )
    return _Candidates(
        options=options,
        chunks=tuple(chunks for lot in lots for chunks in lot.chunks),
        memories=tuple(memory for lot in lots for memory in lot.memories),
        needed=np.concatenate([lot.needed for lot in lots]),
    )
