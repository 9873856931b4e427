"""Plans whose stages run on sub-meshes of different size and shape: Alpa's inter-operator search with the prices of `predict`.

Contract. All stages share the M samples of a micro-batch, so all have G = B / M micro-batches. A stage has neighbouring layers, a
sub-mesh (placement.py), and on it a *way*: ranks of each kind, and recomputed layers. ZeRO has level 1, because levels 2 and 3
take ten times as long to price; nothing is offloaded, and stages have one model chunk. The values of `Restriction` are Alpa's
comparisons; `free` restricts nothing.

Steps of `search_meshes`, for each M:
1. Every way is priced for every range of units. A unit is a layer, or several neighbouring ones if the model has more than UNITS
   layers (operator_clusters.py). Peaks are priced at few numbers of micro-batches in flight and interpolated linearly: exact if
   parameter groups step together, else never too low.
2. The cost of a stage is its fastest way that fits with p later stages: [P, units, units, sub-meshes]. The seconds of the first
   and the last micro-batch and of the update are spread over the G micro-batches.
3. `cut_stages` chooses cuts and sub-meshes; its state includes transfers. Run without the seconds that step 2 spreads, and with
   fewer micro-batches, by the number that a pipeline may hide, its bound is below every plan of these ways.
4. Sub-meshes are placed, largest first, transfers between different stages are generated, and `price` prices the plan, as it does
   predictions. Answers are ranked by these seconds.

Source: Alpa, sections 5.2 and 8.3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.plan import Devices, Plan, StagePlan
from moe_overlap.plan.tiles import with_transfers
from moe_overlap.tuner.capture.expression import evaluate
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart
from moe_overlap.tuner.cost.analytic import Prediction, prepare, price
from moe_overlap.tuner.cost.evaluate import StageCosts
from moe_overlap.tuner.cost.links import axis_group, point_to_point_seconds
from moe_overlap.tuner.search.pipeline.operator_clusters import cluster
from moe_overlap.tuner.search.pipeline.placement import SubMesh, place, submeshes
from moe_overlap.tuner.search.pipeline.stage_cuts import CutProblem, CutStage, cut_stages
from moe_overlap.tuner.search.solution import Solution, Status
from moe_overlap.tuner.search.space import MemoryChoice, Restriction, Run, UniformLayout, recompute_of, uniform_layouts
from moe_overlap.tuner.search.uniform_cost import UniformCosts, UniformTask, needed_bytes

Floats = NDArray[np.float64]
Integers = NDArray[np.intp]
UNITS = 48
"""Most units; a model is cut between units only."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a stage's layers that are recomputed."""
DEPTHS = (1, 2, 3)
"""Micro-batches in flight at which peaks are priced, in addition to the largest possible number."""
SENT = 3
"""Most distinct seconds of a transfer in the state of the program; each one makes it slower."""
FAR = 1.25
"""Plans slower than the incumbent by this factor are pruned; no simulated step differs so much from its analytic one."""
CUT_SECONDS = 20.0
"""Time limit of one dynamic program; an interrupt is noticed only when it returns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshStage:
    """One stage of a plan: layers first..last-1; `layout` has its ranks and micro-batch on `mesh.devices` devices."""

    first: int
    last: int
    mesh: SubMesh
    layout: UniformLayout
    memory: MemoryChoice

    @property
    def data(self) -> int:
        """Data ranks."""
        return self.mesh.devices // (self.layout.tensor * self.layout.context)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPlan:
    """A plan of stages on sub-meshes.

    Attributes:
        width: tensor ranks; on all stages the vocabulary is padded to their multiple.
        nodes, per_node: nodes of the cluster, and devices per node.
        seconds: predicted seconds of a step.
        needed_bytes: predicted bytes of the fullest stage.
    """

    stages: tuple[MeshStage, ...]
    width: int
    nodes: int
    per_node: int
    seconds: float = math.inf
    needed_bytes: float = math.inf

    @property
    def layout(self) -> UniformLayout:
        """A layout with the padding of the vocabulary and the load of the expert ranks of all stages."""
        most = max(self.stages, key=lambda stage: stage.layout.expert)
        return replace(most.layout, tensor=self.width, pipeline=len(self.stages))

    @property
    def samples(self) -> int:
        """Samples of a micro-batch over all data ranks, the same at all stages."""
        return samples_on(self.stages[0].layout, self.stages[0].mesh)

    @property
    def name(self) -> str:
        """The stages in order; equal neighbours are listed once with their count."""
        shown: list[tuple[str, int]] = []
        for stage in self.stages:
            layers = stage.last - stage.first
            text = (
                f"{layers} layer{'s' * (layers > 1)} on {stage.mesh.nodes}×{stage.mesh.per_node}: {stage.layout.name}"
            )
            text += f", {stage.memory.name}" if stage.memory.name else ""
            shown = [*shown[:-1], (text, shown[-1][1] + 1)] if shown and shown[-1][0] == text else [*shown, (text, 1)]
        return "; ".join(f"{count} stages of {text}" if count > 1 else text for text, count in shown)

    def plan(self, template: Plan, num_layers: int) -> Plan:
        """The plan as data, placed, with its transfers (step 4).

        Args:
            template: its model, machines, batch and precision stay.
        """
        assert self.stages[-1].last == num_layers, self.stages
        last, stages = len(self.stages) - 1, []
        placed = place([stage.mesh for stage in self.stages], self.nodes, self.per_node)
        for stage, where in zip(self.stages, placed, strict=True):
            begin = where.first_node * self.per_node + where.first_device
            ranks = tuple(range(begin, begin + stage.mesh.devices))
            stages.append(
                _stage_plan(template, stage, Devices(mesh=(stage.mesh.nodes, stage.mesh.per_node), ranks=ranks))
            )
        plan = replace(
            template,
            pipeline_schedule="1f1b",
            embedding_stage=0,
            mtp_stage=None if template.mtp_stage is None else last,
            loss_stage=last,
            stages=tuple(stages),
            transfers=(),
            predicted=None,
        )
        return with_transfers(plan)


def _stage_plan(template: Plan, stage: MeshStage, devices: Devices) -> StagePlan:
    layout, chunks = stage.layout, ((stage.first, stage.last),)
    return StagePlan(
        chunks=chunks,
        devices=devices,
        micro_batch_size=layout.micro_batch,
        gradient_accumulation_steps=template.global_batch_size // (layout.micro_batch * stage.data),
        tensor=layout.tensor,
        context=layout.context,
        data=stage.data,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        zero_level=stage.memory.zero_level,
        recompute=recompute_of(stage.memory, chunks),
        offload=stage.memory.offload,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSearch:
    """The answer.

    Attributes:
        solution: the best plan; its bound holds for all plans of the searched restrictions.
        ranked: the plans of all programs, fastest first.
        programs: number of dynamic programs that were solved.
        priced: number of stages that were priced.
        cheapest: number of stages that cost the least of their layers, sub-mesh and later stages.
    """

    solution: Solution[MeshPlan]
    ranked: tuple[MeshPlan, ...]
    programs: int
    priced: int
    cheapest: int
    is_interrupted: bool = False


Progress = Callable[[int, int, MeshPlan | None], None]
"""Called with micro-batches done, micro-batches in all, and the best so far."""


def search_meshes(
    task: UniformTask,
    run: Run,
    restrictions: Sequence[Restriction] = (Restriction.FREE,),
    contexts: Sequence[int] = (1,),
    deadline: float = math.inf,
    progress: Progress = lambda done, total, best: None,
    incumbent_seconds: float = math.inf,
    share: tuple[int, int] = (0, 1),
) -> MeshSearch:
    """Search plans on sub-meshes.

    Args:
        contexts: context-parallel degrees that ways may have.
        deadline: time by `time.monotonic`; after it the best plan so far is the answer.
        incumbent_seconds: step seconds of the incumbent.
        share: (i, n): search every n-th number of samples, beginning with the i-th.
    Raises:
        ConfigError: nodes cannot be halved into sub-meshes.
    """
    begun = time.monotonic()
    search = _Meshes(task, run, tuple(contexts))
    batches = search.batches(restrictions)[share[0] :: share[1]]
    plans: dict[tuple[MeshStage, ...], MeshPlan] = {}
    bound, status, done, programs, cheapest, interrupted = math.inf, Status.OPTIMAL, 0, 0, 0, False
    try:
        for samples in batches:
            if time.monotonic() > deadline:
                status = Status.TIME_LIMIT
                break
            table = _Table(search, samples, restrictions)
            cheapest += int(np.isfinite(table.stable).sum())
            for restriction in restrictions:
                lowest, answers, solved = table.solve(restriction, deadline, FAR * incumbent_seconds)
                bound, programs = min(bound, lowest), programs + solved
                for stages in answers:
                    plans.setdefault(stages, search.priced_plan(stages))
            done += 1
            progress(done, len(batches), min(plans.values(), key=lambda plan: plan.seconds, default=None))
    except KeyboardInterrupt:
        status, interrupted = Status.TIME_LIMIT, True
    # Interpolated peaks are never too low; predictions decide in the end which plans fit.
    ranked = sorted((plan for plan in plans.values() if math.isfinite(plan.seconds)), key=lambda plan: plan.seconds)
    value = ranked[0] if ranked else None
    objective = math.inf if value is None else value.seconds
    if value is None and status is Status.OPTIMAL:
        status = Status.INFEASIBLE
    if value is not None and status is Status.OPTIMAL and bound < objective:
        status = Status.FEASIBLE
    solution = Solution(
        value=value,
        objective=objective,
        # Unsearched numbers of samples have no bound.
        bound=min(objective, bound if done == len(batches) else 0.0),
        status=status,
        seconds=time.monotonic() - begun,
    )
    return MeshSearch(
        solution=solution,
        ranked=tuple(ranked),
        programs=programs,
        priced=search.costs.stages_priced,
        cheapest=cheapest,
        is_interrupted=interrupted,
    )


class _Meshes:
    """Sub-meshes, layouts and costs that the searches of all micro-batch sizes share."""

    def __init__(self, task: UniformTask, run: Run, contexts: tuple[int, ...]) -> None:
        group = task.machine.cluster.group_of(0)
        per_node = group.gpus_per_node
        if per_node & (per_node - 1):
            rule = f"nodes of {per_node} GPUs cannot be halved into sub-meshes, which {task.space.name} searches"
            raise ConfigError("gpus_per_node", per_node, rule, "use another search space, or nodes of 2^p GPUs")
        self.run, self.contexts, self.group = run, contexts, group
        self.nodes, self.per_node = run.gpus // per_node, per_node
        self.meshes = submeshes(self.nodes, self.per_node)
        self.model = task.templates(1)[1]
        shapes = {mesh: self._ranks_on(mesh) for mesh in self.meshes}
        self.width = max(layout.tensor for layouts in shapes.values() for layout in layouts)
        self.template, self.model = task.templates(self.width)
        self.layouts = shapes
        padded = self.template, self.model
        self.task = replace(task, templates=lambda tensor: padded)
        self.costs = UniformCosts(self.task)
        self.capacity = task.machine.usable_bytes

    def _ranks_on(self, mesh: SubMesh) -> list[UniformLayout]:
        """Layouts of a sub-mesh, of every micro-batch size."""
        run = replace(self.run, gpus=mesh.devices)
        return [
            layout
            for layout in uniform_layouts(self.model, run)
            if layout.pipeline == 1
            and layout.context in self.contexts
            # Expert-tensor ranks: 1, or as many as attention has; other numbers need more transfers inside a layer.
            and layout.expert_tensor in (1, layout.tensor)
        ]

    def batches(self, restrictions: Sequence[Restriction]) -> list[int]:
        """The numbers of samples of a micro-batch, over all data ranks, that some way has."""
        only = restrictions == (Restriction.ONE_DEVICE,)
        meshes = self.meshes[:1] if only else self.meshes
        return sorted(
            {samples_on(layout, mesh) for mesh in meshes for layout in self.layouts[mesh]},
            # Small micro-batches come first: they hide the bubble, so a search that ends early has a good plan.
        )

    def at(self, mesh: SubMesh, samples: int) -> list[UniformLayout]:
        """The layouts of a sub-mesh with this number of samples."""
        return [layout for layout in self.layouts[mesh] if samples_on(layout, mesh) == samples]

    @cached_property
    def units(self) -> tuple[tuple[int, int], ...]:
        """The units, as ranges of layers."""
        layers = self.model.num_layers
        if layers <= UNITS:
            return tuple((layer, layer + 1) for layer in range(layers))
        graph = self.graph
        flops = {kind: self._flops(graph.part(kind)) for kind in graph.layer_kinds}
        # Hidden states of one size cross every cut, so only the balance of the units counts; the limit on a unit's FLOPs is
        # lifted, because a unit of two layers may exceed the mean by far.
        sizes = np.array([flops[kind] for kind in graph.layer_kinds])
        firsts = cluster(np.zeros((layers, layers)), sizes, UNITS, delta=float(UNITS)).value
        assert firsts is not None
        return tuple(zip(firsts, (*firsts[1:], layers), strict=True))

    def _flops(self, part: CapturedPart) -> float:
        """Multiplications and additions of both passes over one sample."""
        return float(evaluate([op.flops for op in part.ops], 1, self.template.sequence_length).sum())

    @cached_property
    def graph(self) -> CapturedModel:
        """The captured model on one rank."""
        all_layers = MeshStage(
            first=0,
            last=self.model.num_layers,
            mesh=self.meshes[0],
            layout=self.layouts[self.meshes[0]][0],
            memory=MemoryChoice(),
        )
        stage = _stage_plan(self.template, all_layers, Devices(mesh=(1, 1), ranks=(0,)))
        return self.task.graphs(replace(self.template, stages=(stage,)), self.model)[0]

    def equal_operators(self, stages: int) -> tuple[int, ...] | None:
        """First units of so many stages whose numbers of operators differ least; None if there are too few units."""
        graph = self.graph
        counts = np.array(
            [float(sum(len(graph.part(graph.layer_kinds[layer]).ops) for layer in range(*unit))) for unit in self.units]
        )
        counts[0] += len(graph.part("embedding").ops)
        counts[-1] += len(graph.part("head").ops)
        if stages > len(counts):
            return None
        return cluster(np.zeros((len(counts), len(counts))), counts, stages, delta=float(stages)).value

    def priced_plan(self, stages: tuple[MeshStage, ...]) -> MeshPlan:
        """A plan with its predicted seconds and bytes; infinite seconds if it does not fit."""
        unpriced = MeshPlan(stages=stages, width=self.width, nodes=self.nodes, per_node=self.per_node)
        prediction = self.prediction(unpriced)
        return replace(
            unpriced,
            seconds=prediction.predicted.step_seconds if prediction.fits else math.inf,
            needed_bytes=float(prediction.fullest.needed_bytes),
        )

    def prediction(self, candidate: MeshPlan) -> Prediction:
        """The analytic cost of a plan."""
        plan, machine = candidate.plan(self.template, self.model.num_layers), self.task.machine_of(candidate.layout)
        families = prepare(plan, self.model, self.task.graphs(plan, self.model), self.task.features, machine.load)
        return price(plan, self.model, families, machine, self.task.features)


def samples_on(layout: UniformLayout, mesh: SubMesh) -> int:
    """Samples of a micro-batch over all data ranks."""
    return layout.micro_batch * mesh.devices // (layout.tensor * layout.context)


@dataclass(frozen=True, slots=True)
class _Way:
    """A layout, and the share of its stage's layers that are recomputed."""

    layout: UniformLayout
    share: float


class _Table:
    """Costs of all stages for one number of samples (steps 1 and 2).

    Attributes:
        stable: [P, units, units, sub-meshes] seconds of a stable micro-batch.
        spread: the same with all other seconds of a step spread over the micro-batches.
        chosen: [P, units, units, sub-meshes] the way with the least `spread`.
    """

    def __init__(self, search: _Meshes, samples: int, restrictions: Sequence[Restriction]) -> None:
        self._search, self._samples = search, samples
        self.micro_batches = search.run.global_batch_size // samples
        only = tuple(restrictions) == (Restriction.ONE_DEVICE,)
        self.meshes = search.meshes[:1] if only else search.meshes
        units = len(search.units)
        self.depths = max(1, min(units, search.run.gpus, self.micro_batches))
        shape = (self.depths, units, units, len(self.meshes))
        self.stable, self.spread = np.full(shape, math.inf), np.full(shape, math.inf)
        self.chosen: Integers = np.full(shape, -1, dtype=np.intp)
        self.ways: list[_Way] = []
        self.sent = np.zeros(len(self.meshes))
        for option, mesh in enumerate(self.meshes):
            for layout in search.at(mesh, samples):
                self._price(option, mesh, layout)

    def _price(self, option: int, mesh: SubMesh, layout: UniformLayout) -> None:
        """Enter the stages of a layout into the tables where they are the fastest that fit."""
        search = self._search
        ranges = [(a, b) for a in range(len(search.units)) for b in range(a, len(search.units))]
        keys: dict[object, list[tuple[int, int]]] = {}
        for first, last in ranges:
            keys.setdefault(self._key(first, last), []).append((first, last))
        members = list(keys.values())
        layers = [(search.units[a][0], search.units[b][1]) for (a, b), *_ in members]
        if mesh.devices == search.run.gpus:  # No device remains for another stage.
            complete = [n for n, place in enumerate(layers) if place == (0, search.model.num_layers)]
            members, layers = [members[n] for n in complete], [layers[n] for n in complete]
        places = [self._placed(mesh, layout, *place) for place in layers]
        flying = sorted({*(n for n in DEPTHS if n <= self.depths), self.depths})
        shares = SHARES if search.task.space.recomputes and not search.task.features.overlap_experts else SHARES[:1]
        recomputes = [
            [MemoryChoice(layers=math.ceil(share * (last - first))) for share in shares] for first, last in layers
        ]
        search.costs.strategies = [(MemoryChoice().zero_level, MemoryChoice().offload)]
        named = replace(layout, pipeline=search.run.gpus + mesh.devices)  # A key of the sub-mesh only.
        costs, sent = search.costs.many_stage_costs(named, places, recomputes, flying)
        pair = axis_group(2, mesh.devices, search.run.gpus, search.group)
        rates = search.task.machine.constants.link_rates
        self.sent[option] = float(point_to_point_seconds(sent, pair, rates)) if mesh.devices < search.run.gpus else 0.0
        begin = len(self.ways)
        self.ways += [_Way(layout, share) for share in shares]
        for equal, cost in zip(members, costs, strict=True):
            self._keep(option, equal, cost, flying, begin)

    def _keep(
        self, option: int, equal: Sequence[tuple[int, int]], cost: StageCosts, flying: Sequence[int], begin: int
    ) -> None:
        """Enter the fastest way of equal ranges, for every number of later stages."""
        size = cost.forward_seconds.shape[1] // len(flying)
        needed = np.stack([needed_bytes(cost)[:, n * size : (n + 1) * size].ravel() for n in range(len(flying))])
        held = np.arange(1, self.depths + 1)
        # [P, ways] interpolated between two priced numbers of micro-batches in flight.
        bytes_of = np.stack([np.interp(held, flying, column) for column in needed.T], axis=1)
        now = cost.some(slice(0, size))
        # Later stages gather their first weights while they wait for the first micro-batch.
        begin_seconds = now.first_extra_seconds if equal[0][0] == 0 else 0.0
        once = begin_seconds + now.tail_seconds + now.optimizer_seconds
        stable = now.stable_seconds.ravel()
        spread = stable + once.ravel() / self.micro_batches
        fits = bytes_of <= self._search.capacity
        fastest = np.where(fits, stable, math.inf).min(axis=1)
        ways = np.where(fits, spread, math.inf)
        way = ways.argmin(axis=1)
        best = ways[np.arange(len(way)), way]
        for a, b in equal:
            self.stable[:, a, b, option] = np.minimum(self.stable[:, a, b, option], fastest)
            better = best < self.spread[:, a, b, option]
            self.spread[better, a, b, option] = best[better]
            self.chosen[better, a, b, option] = begin + way[better]

    def _key(self, first: int, last: int) -> object:
        """The equivalence key of a range of layers: ranges with one key have one cost."""
        search = self._search
        layers = range(search.units[first][0], search.units[last][1])
        ends = first == 0, last == len(search.units) - 1
        kinds = search.graph.layer_kinds
        return (*ends, len(layers)) if len(set(kinds)) == 1 else (*ends, tuple(kinds[layer] for layer in layers))

    def _placed(self, mesh: SubMesh, layout: UniformLayout, first: int, last: int) -> tuple[Plan, int]:
        """A plan in which a stage has these layers, and the stage's index; further stages of its shape have the other layers."""
        search = self._search
        layers, devices = (
            search.model.num_layers,
            Devices(mesh=(mesh.nodes, mesh.per_node), ranks=tuple(range(mesh.devices))),
        )
        ranges = [(0, first)] * (first > 0) + [(first, last)] + [(last, layers)] * (last < layers)
        stages = [
            _stage_plan(
                search.template, MeshStage(first=a, last=b, mesh=mesh, layout=layout, memory=MemoryChoice()), devices
            )
            for a, b in ranges
        ]
        # Rates depend on the number of ranks in the run: another stage gets all other ranks.
        stage_index, rest = int(first > 0), tuple(range(mesh.devices, search.run.gpus))
        for index in range(len(stages)):
            if index != stage_index:
                stages[index] = replace(stages[index], devices=Devices(mesh=(1, len(rest)), ranks=rest))
                rest = ()
        end = len(stages) - 1
        mtp = None if search.template.mtp_stage is None else end
        plan = replace(
            search.template, stages=tuple(stages), embedding_stage=0, mtp_stage=mtp, loss_stage=end, transfers=()
        )
        return replace(plan, pipeline_schedule="1f1b"), stage_index

    def solve(
        self, restriction: Restriction, deadline: float, beat: float
    ) -> tuple[float, list[tuple[MeshStage, ...]], int]:
        """Step 3: a bound of all plans, the best plans, and the number of programs that were solved.

        Args:
            beat: seconds; if the bound is not below them, no plan is searched.
        """
        bound, plans, programs = math.inf, [], 0
        for allowed in self._allowed(restriction):
            limit = min(CUT_SECONDS, max(0.0, deadline - time.monotonic()))
            # The bound comes first: it may prune the search for a plan.
            stable = self._problem(self.stable, allowed, restriction)
            lowest = cut_stages(replace(stable, micro_batches=self._least_weight()), limit, beat).bound
            bound, programs = min(bound, lowest), programs + 1
            if lowest >= beat:
                continue
            solution = cut_stages(self._problem(self.spread, allowed, restriction), limit)
            programs += 1
            if solution.value is None:
                continue
            plans.append(self._stages(solution.value))
            if restriction is Restriction.FREE:
                # Spreading is an approximation: a pipeline with one stage more or less may be faster.
                for count in (len(solution.value) - 1, len(solution.value) + 1):
                    other = self._of_length(count, limit)
                    programs += 1
                    plans += [] if other is None else [self._stages(other)]
        return bound, plans, programs

    def _least_weight(self) -> int:
        """The number of micro-batches with which the formula of cuts bounds all plans.

        The mean of the two chains at stage s, through its own passes and through the other stages, takes
        Σ t_i + (G - 1 - q_s / 2) t_s, where q_s is the number of later stages, at most G - 1.
        """
        later_stages = min(self.micro_batches, len(self._search.units), self._search.run.gpus) - 1
        return self.micro_batches - math.ceil(later_stages / 2)

    def _of_length(self, count: int, limit: float) -> tuple[CutStage, ...] | None:
        """Step 3 for this number of stages; None if there is no such plan, or none before the limit."""
        units = len(self._search.units)
        if not 1 <= count <= min(units, self._search.run.gpus):
            return None
        allowed = np.ones((max(self.depths, count), units, units), dtype=bool)
        # Only the first stage has count - 1 later stages.
        allowed[:, 0] = False
        allowed[count - 1, 0] = True
        allowed[count - 1, 1:] = False
        allowed[count:] = False
        return cut_stages(self._problem(self.spread, allowed, Restriction.FREE), limit).value

    def _allowed(self, restriction: Restriction) -> Iterator[NDArray[np.bool_] | None]:
        """[P, units, units] stages that a program may take; None: all."""
        if restriction is not Restriction.EQUAL_OPERATORS:
            yield None
            return
        units = len(self._search.units)
        for count in range(1, min(units, self._search.run.gpus) + 1):
            firsts = self._search.equal_operators(count)
            if firsts is None:
                continue
            allowed = np.zeros((max(self.depths, count), units, units), dtype=bool)
            for number, (first, end) in enumerate(zip(firsts, (*firsts[1:], units), strict=True)):
                allowed[count - 1 - number, first, end - 1] = True
            yield allowed

    def _problem(self, seconds: Floats, allowed: NDArray[np.bool_] | None, restriction: Restriction) -> CutProblem:
        options = 1 if restriction is Restriction.ONE_DEVICE else len(self.meshes)
        costs = seconds[..., :options]
        if allowed is not None:
            # A stage never holds more micro-batches than there are.
            costs = costs[np.minimum(np.arange(len(allowed)), len(costs) - 1)]
            costs = np.where(allowed[..., None], costs, math.inf)
        units = len(self._search.units)
        sent = coarse(self.sent[:options])
        if allowed is not None:
            sent = np.full(options, sent.min())
        return CutProblem(
            seconds=costs,
            devices_of=np.array([[mesh.devices] for mesh in self.meshes[:options]]),
            devices=(self._search.run.gpus,),
            micro_batches=self.micro_batches,
            transfer_seconds=np.tile(sent, (units - 1, 1)),
        )

    def _stages(self, cuts: Sequence[CutStage]) -> tuple[MeshStage, ...]:
        """The stages of an answer."""
        units, stages = self._search.units, []
        for number, cut in enumerate(cuts):
            later_stages = min(len(cuts) - 1 - number, self.depths - 1)
            way = self.ways[self.chosen[later_stages, cut.first, cut.last, cut.option]]
            first, last = units[cut.first][0], units[cut.last][1]
            memory = MemoryChoice(layers=math.ceil(way.share * (last - first)))
            stages.append(
                MeshStage(first=first, last=last, mesh=self.meshes[cut.option], layout=way.layout, memory=memory)
            )
        return tuple(stages)


def coarse(seconds: Floats) -> Floats:
    """Seconds of transfers by sub-mesh, reduced to SENT values: all but the longest ones become the shortest."""
    distinct = np.unique(seconds)[::-1]
    if len(distinct) <= SENT:
        return seconds
    return np.where(seconds >= distinct[SENT - 2], seconds, distinct[-1])
