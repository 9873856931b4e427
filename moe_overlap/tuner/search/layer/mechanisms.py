"""A mechanism for each class of layers: coordinate descent that mixes the entries of several plans.

Problem. Given plans of one layout, each with one mechanism on all layers, find a shorter plan that mixes them.
Terms. An *entry* is a plan's decision for one layer. A *class* is a set of layers that no overlap can tell apart: equal
computation and recomputation, equal neighbours in their chunk, the same position among the chunk's MoE layers (first, last,
between), and the same role of their stage (first, last, inner), since memory and the head differ there.
Steps.
1. Begin with a plan that has one mechanism everywhere.
2. For each class in turn: give its layers the entries of each other plan, and keep the entries that shorten the step. Which
   mechanisms a class may have depends on its neighbours: combinations that a rule refuses, or that do not fit, are noted with
   their reason and skipped.
3. Repeat until a round changes nothing, or the predictions are used up.
The answer is never longer than the start. It misses gains that need two classes to change at once; tests compare it with all
combinations.

Source: not in Lancet, which has one mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, GATE, MERGE, layer_operator
from moe_overlap.plan.overlap import LayerOverlap, order_of, part_order, range_ends
from moe_overlap.plan.plan import Plan, StagePlan
from moe_overlap.tuner.cost.stage_parts import layer_variant

Kind = tuple[str, ...]
Entries = Mapping[int, LayerOverlap]
"""Layer -> the plan's decision for it."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers that get the same decision.

    Attributes:
        name: their common properties, for messages.
    """

    name: str
    layers: tuple[int, ...]


def layer_classes(plan: Plan, model: ModelDescription, kinds: Sequence[str]) -> tuple[LayerClass, ...]:
    """The classes, in order of their first layers.

    Args:
        kinds: kind of every layer (`layer_kinds` of capture/request.py).
    """
    layers_of: dict[Kind, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        of_stage = "first stage" if index == 0 else "last stage" if index == len(plan.stages) - 1 else "inner stage"
        role = of_stage if len(plan.stages) > 1 else ""
        for first, last in stage.chunks:
            experts = [layer for layer in range(first, last) if model.moe_layers[layer]]
            for layer in experts:
                previous = "" if layer == first else kinds[layer - 1]
                following = "" if layer + 1 == last else kinds[layer + 1]
                # The first and the last MoE layer of a chunk have less computation to overlap with: a range ends at the
                # chunk's border, whatever the neighbours are.
                ends = ("first" if layer == experts[0] else "", "last" if layer == experts[-1] else "")
                again = _recomputed(stage, layer - first)
                layers_of.setdefault((role, kinds[layer], previous, following, *ends, again), []).append(layer)
    return tuple(LayerClass(_name(kind), tuple(layers)) for kind, layers in layers_of.items())


def _recomputed(stage: StagePlan, place: int) -> str:
    """The recomputation of a layer, and its position in its group if layers are recomputed in groups."""
    variant, group = layer_variant(stage, place), stage.recompute.layers
    if stage.recompute.granularity == "uniform" and group > 1:
        return f"recomputed as number {place % group} of {group}"
    return {"none": "", "full": "recomputed"}.get(variant, f"{variant} recomputed")


def _name(kind: Kind) -> str:
    """A class in words: `inner stage, moe after dense, first`."""
    role, layer_kind, previous, following, first, last, again = kind
    neighbours = [f"after {previous}"] if previous not in ("", layer_kind) else []
    neighbours += [f"before {following}"] if following not in ("", layer_kind) else []
    where = "only" if first and last else first or last or "between"
    shown = [role, " ".join([layer_kind, *neighbours]), where, again]
    return ", ".join(word for word in shown if word)


def entries_of(plan: Plan) -> dict[int, LayerOverlap]:
    """The entries of a plan, layer by layer; a range over several layers is split into one range per layer.

    The split does not change the execution: neighbouring ranges with equal partitions run as one (plan/overlap.py).
    """
    return {layer: entry for stage in plan.stages for layer, entry in _entries_of(stage).items()}


def _entries_of(stage: StagePlan) -> dict[int, LayerOverlap]:
    entries = {entry.layer: entry for entry in stage.overlap.layers}
    for owner in stage.overlap.layers:
        if owner.mechanism != "partitioned" or owner.axis != "batch":
            continue
        end = order_of(range_ends(owner)[1])
        held = [layer for layer in sorted(entries) if owner.layer < layer and (layer, part_order(GATE)) <= end]
        first = owner.first_operator
        for place, layer in enumerate([owner.layer, *held]):
            is_last = place == len(held)
            last = owner.last_operator if is_last else layer_operator(layer, MERGE)
            uncut = entries[layer]
            # Split after every merge: only hidden states cross there, so lowering joins the two ranges to one pipeline again.
            entries[layer] = replace(
                uncut,
                mechanism="partitioned",
                partitions=owner.partitions,
                first_operator=first,
                last_operator=last,
                axis=owner.axis,
            )
            first = layer_operator(layer + 1, ATTENTION)
    return entries


def with_entries(plan: Plan, entries: Entries) -> Plan:
    """A plan with other entries and no prediction; default entries are left out."""
    stages = []
    for stage in plan.stages:
        decided = (entries[layer] for layer in stage.layers if layer in entries)
        layers = tuple(entry for entry in decided if entry != LayerOverlap(layer=entry.layer))
        stages.append(replace(stage, overlap=replace(stage.overlap, layers=layers)))
    return replace(plan, stages=tuple(stages), predicted=None)


def described(entries: Sequence[LayerOverlap]) -> str:
    """The different mechanisms of layers with their numbers of partitions or capacity chunks: `partitioned*4`."""
    mechanisms = []
    for entry in entries:
        count = entry.partitions or entry.tutel_degree
        mechanisms.append(entry.mechanism + (f"*{count}" if count else ""))
    return ", ".join(dict.fromkeys(mechanisms))


Rule = Callable[[Plan], None]
"""Raises ConfigError if a plan cannot run."""
Judge = Callable[[Plan], float]
"""Seconds of a plan's step; raises ConfigError if the plan does not fit."""
SHORTER = 1e-9
"""Share of a step; a smaller saving is rounding and does not count."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Seconds of the step if one class had another mechanism and the others kept theirs; or why that cannot run."""

    seconds: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ClassChoice:
    """The mechanism of a class, and the others that were tried.

    Attributes:
        chosen: the mechanism, as `described` writes it.
        others: the mechanisms that were tried and not chosen, with their results.
    """

    layer_class: LayerClass
    chosen: str
    others: tuple[tuple[str, Tried], ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """The answer.

    Attributes:
        predictions: calls of `judge`.
        changed: whether the plan differs from the start.
        complete: whether a complete last round changed nothing; if not, seconds in `others` may belong to earlier choices of the
            other classes.
    """

    plan: Plan
    seconds: float
    classes: tuple[ClassChoice, ...]
    predictions: int
    changed: bool
    complete: bool


def mix_mechanisms(
    start: Plan,
    seconds: float,
    others: Sequence[Plan],
    classes: Sequence[LayerClass],
    refuse: Rule,
    judge: Judge,
    most: int,
) -> Mix:
    """Decide class by class.

    Args:
        start: the first plan; the answer keeps everything of its stages except the entries. No plan may defer weight gradients.
        seconds: of the start's step.
        others: plans of the same parallel layout.
        most: limit of calls of `judge`.
    """
    return _Descent(start, [entries_of(plan) for plan in (start, *others)], classes, refuse, judge, most).run(seconds)


@dataclass(slots=True)
class _Descent:
    """State of the descent. A class's option is the index of the plan whose entries its layers have; 0 is the start."""

    start: Plan
    plans: Sequence[Entries]
    classes: Sequence[LayerClass]
    refuse: Rule
    judge: Judge
    most: int
    _judged: int = 0
    _outcomes: dict[tuple[int, ...], Tried] = field(default_factory=dict)

    def run(self, seconds: float) -> Mix:
        """Steps 1 to 3."""
        # Step 1.
        current = (0,) * len(self.classes)
        self._outcomes[current] = Tried(seconds)
        best, complete = seconds, False
        while not complete and self._judged < self.most:
            # Steps 2 and 3: one round over the classes.
            complete = True
            for place in range(len(self.classes)):
                # The moves of one class differ in its option only, so the rest stay valid after one of them becomes `current`.
                for moved in self._moves(current, place):
                    tried = self._try(moved)
                    if tried is not None and tried.seconds is not None and tried.seconds < best * (1.0 - SHORTER):
                        current, best, complete = moved, tried.seconds, False
            # A round may also end without a change because predictions ran out, which does not prove a local optimum.
            complete = complete and all(
                m in self._outcomes for p in range(len(current)) for m in self._moves(current, p)
            )
        choices = tuple(self._choice(current, place) for place in range(len(self.classes)))
        plan = self._plan(current) if any(current) else self.start
        return Mix(plan, best, choices, self._judged, any(current), complete)

    def _moves(self, current: tuple[int, ...], place: int) -> Iterator[tuple[int, ...]]:
        """The other options of a class."""
        seen = []
        for option in range(len(self.plans)):
            entries = self._class_entries(option, place)
            # Plans with equal entries for these layers are one option, so that they cost one prediction.
            if entries not in seen:
                seen.append(entries)
                if option != current[place]:
                    yield (*current[:place], option, *current[place + 1 :])

    def _try(self, moved: tuple[int, ...]) -> Tried | None:
        """The outcome of a combination; None if predictions have run out."""
        if moved not in self._outcomes:
            plan = self._plan(moved)
            try:
                # Rules are cheap, so only simulated plans count as predictions.
                self.refuse(plan)
                if self._judged == self.most:
                    return None
                self._judged += 1
                self._outcomes[moved] = Tried(self.judge(plan))
            except ConfigError as error:
                self._outcomes[moved] = Tried(None, f"{error.subject.rpartition('.')[2]} {error.value}: {error.rule}")
        return self._outcomes[moved]

    def _plan(self, options: tuple[int, ...]) -> Plan:
        """The plan of a combination; layers outside all classes keep the entries of the start."""
        entries = dict(self.plans[0])
        for layer_class, option in zip(self.classes, options, strict=True):
            for layer in layer_class.layers:
                # Removed first, because a layer without an entry in the option's plan overlaps nothing.
                entries.pop(layer, None)
                if layer in self.plans[option]:
                    entries[layer] = self.plans[option][layer]
        return with_entries(self.start, entries)

    def _choice(self, current: tuple[int, ...], place: int) -> ClassChoice:
        others = ((self._name(moved[place], place), self._outcomes.get(moved)) for moved in self._moves(current, place))
        judged = tuple((name, tried) for name, tried in others if tried is not None)
        return ClassChoice(self.classes[place], self._name(current[place], place), judged)

    def _class_entries(self, option: int, place: int) -> list[LayerOverlap]:
        entries = self.plans[option]
        return [entries.get(layer, LayerOverlap(layer=layer)) for layer in self.classes[place].layers]

    def _name(self, option: int, place: int) -> str:
        return described(self._class_entries(option, place))
