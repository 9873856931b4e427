"""Another mechanism for each class of layers: coordinate descent from one plan over what other plans decide for their layers.

Problem. Given plans of one layout, each with one mechanism on all layers, find a shorter plan that mixes them.
Terms. Layers are of one *class* where all that an overlap sees of them is equal: what they compute and recompute, what stands
before and behind them in their chunk, whether they are the first or the last mixture of experts there, and whether their stage
begins or ends the pipeline, where memory and the head make a difference. An *entry* is what a plan decides for one layer.
Steps.
1. Begin with a plan that has one mechanism everywhere.
2. Class after class: give its layers the entries of each of the other plans, and keep what shortens the step. The mechanisms that
   a class may have depend on its neighbours; what cannot run beside them, or does not fit, is passed over with its reason.
3. Repeat until a whole round changes nothing, or the predictions are used up.
The answer is never longer than the beginning. It may miss what only two classes together gain: `tests` compare it with all
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
"""Layer -> what a plan decides for it."""


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers for which one decision serves.

    Attributes:
        name: what they have in common, for a reader.
    """

    name: str
    layers: tuple[int, ...]


def layer_classes(plan: Plan, model: ModelDescription, kinds: Sequence[str]) -> tuple[LayerClass, ...]:
    """The classes, in order of their first layers.

    Args:
        kinds: of every layer, what it computes (`layer_kinds` of capture/request.py).
    """
    layers_of: dict[Kind, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        of_stage = "first stage" if index == 0 else "last stage" if index == len(plan.stages) - 1 else "inner stage"
        role = of_stage if len(plan.stages) > 1 else ""
        for first, last in stage.chunks:
            experts = [layer for layer in range(first, last) if model.moe_layers[layer]]
            for layer in experts:
                before = "" if layer == first else kinds[layer - 1]
                behind = "" if layer + 1 == last else kinds[layer + 1]
                # The first and the last mixture of a chunk have less around them to overlap with: a range there ends at
                # the chunk's border, whatever the neighbours are.
                ends = ("first" if layer == experts[0] else "", "last" if layer == experts[-1] else "")
                again = _recomputed(stage, layer - first)
                layers_of.setdefault((role, kinds[layer], before, behind, *ends, again), []).append(layer)
    return tuple(LayerClass(_name(kind), tuple(layers)) for kind, layers in layers_of.items())


def _recomputed(stage: StagePlan, place: int) -> str:
    """The recomputation of a layer at a place of its chunk, and where it stands in its group."""
    variant, group = layer_variant(stage, place), stage.recompute.layers
    if stage.recompute.granularity == "uniform" and group > 1:
        return f"recomputed as number {place % group} of {group}"
    return {"none": "", "full": "recomputed"}.get(variant, f"{variant} recomputed")


def _name(kind: Kind) -> str:
    """`inner stage, moe after dense, first`."""
    role, own, before, behind, first, last, again = kind
    neighbours = [f"after {before}"] if before not in ("", own) else []
    neighbours += [f"before {behind}"] if behind not in ("", own) else []
    where = "only" if first and last else first or last or "between"
    shown = [role, " ".join([own, *neighbours]), where, again]
    return ", ".join(word for word in shown if word)


def entries_of(plan: Plan) -> dict[int, LayerOverlap]:
    """The entries of a plan, layer by layer; a range over several layers becomes one for each.

    Such ranges, neighbours with equally many partitions, run as the one range does (plan/overlap.py).
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
            whole = entries[layer]
            # Split behind every merge: only hidden states cross there, so that lowering joins the two ranges to one
            # pipeline again.
            entries[layer] = replace(
                whole,
                mechanism="partitioned",
                partitions=owner.partitions,
                first_operator=first,
                last_operator=last,
                axis=owner.axis,
            )
            first = layer_operator(layer + 1, ATTENTION)
    return entries


def with_entries(plan: Plan, entries: Entries) -> Plan:
    """A plan with other entries, and no prediction; those that say nothing are left out."""
    stages = []
    for stage in plan.stages:
        decided = (entries[layer] for layer in stage.layers if layer in entries)
        layers = tuple(entry for entry in decided if entry != LayerOverlap(layer=entry.layer))
        stages.append(replace(stage, overlap=replace(stage.overlap, layers=layers)))
    return replace(plan, stages=tuple(stages), predicted=None)


def described(entries: Sequence[LayerOverlap]) -> str:
    """`partitioned*4`: mechanism and partitions or capacity chunks of layers, each once."""
    words = []
    for entry in entries:
        count = entry.partitions or entry.tutel_degree
        words.append(entry.mechanism + (f"*{count}" if count else ""))
    return ", ".join(dict.fromkeys(words))


Rule = Callable[[Plan], None]
"""ConfigError where a plan cannot run."""
Judge = Callable[[Plan], float]
"""Seconds of a plan's step; ConfigError where it does not fit."""
SHORTER = 1e-9
"""Share of a step by which another must be shorter to count."""


@dataclass(frozen=True, slots=True)
class Tried:
    """Seconds of the step if a class had another mechanism, the other classes as chosen; or why it cannot."""

    seconds: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ClassChoice:
    """The mechanism of a class, and the others that were tried.

    Attributes:
        chosen: as `described` names it.
        others: the mechanisms that were tried and not chosen.
    """

    layer_class: LayerClass
    chosen: str
    others: tuple[tuple[str, Tried], ...]


@dataclass(frozen=True, slots=True)
class Mix:
    """The answer.

    Attributes:
        changed: whether it is another plan than the beginning.
        complete: whether a last round changed nothing; else figures of `others` may stand beside earlier choices.
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
        start: what is begun with; its stages keep all but their layers. No weight gradients are deferred in any plan.
        seconds: of its step.
        others: of the same parallel layout.
        most: calls of `judge`.
    """
    return _Descent(start, [entries_of(plan) for plan in (start, *others)], classes, refuse, judge, most).run(seconds)


@dataclass(slots=True)
class _Descent:
    """State of a search; an option of a class is the number of the first plan that decides so for its layers."""

    start: Plan
    plans: Sequence[Entries]
    classes: Sequence[LayerClass]
    refuse: Rule
    judge: Judge
    most: int
    _judged: int = 0
    _known: dict[tuple[int, ...], Tried] = field(default_factory=dict)

    def run(self, seconds: float) -> Mix:
        """Steps 1 to 3."""
        current = (0,) * len(self.classes)
        self._known[current] = Tried(seconds)
        best, complete = seconds, False
        while not complete and self._judged < self.most:
            complete = True
            for place in range(len(self.classes)):
                # Moves of a class differ in its option alone, so they stay valid where one of them becomes `current`.
                for moved in self._moves(current, place):
                    tried = self._try(moved)
                    if tried is not None and tried.seconds is not None and tried.seconds < best * (1.0 - SHORTER):
                        current, best, complete = moved, tried.seconds, False
            # Running out of predictions also leaves a round without changes, but is no proof of a local optimum.
            complete = complete and all(m in self._known for p in range(len(current)) for m in self._moves(current, p))
        choices = tuple(self._choice(current, place) for place in range(len(self.classes)))
        plan = self._plan(current) if any(current) else self.start
        return Mix(plan, best, choices, self._judged, any(current), complete)

    def _moves(self, current: tuple[int, ...], place: int) -> Iterator[tuple[int, ...]]:
        """The other options of a class."""
        seen = []
        for option in range(len(self.plans)):
            entries = self._said(option, place)
            # Plans that decide alike for these layers are one option, and cost one prediction.
            if entries not in seen:
                seen.append(entries)
                if option != current[place]:
                    yield (*current[:place], option, *current[place + 1 :])

    def _try(self, moved: tuple[int, ...]) -> Tried | None:
        """Seconds of a combination; None where no prediction is left."""
        if moved not in self._known:
            plan = self._plan(moved)
            try:
                # Rules are cheap: only what has to be simulated counts as a prediction.
                self.refuse(plan)
                if self._judged == self.most:
                    return None
                self._judged += 1
                self._known[moved] = Tried(self.judge(plan))
            except ConfigError as error:
                self._known[moved] = Tried(None, f"{error.subject.rpartition('.')[2]} {error.value}: {error.rule}")
        return self._known[moved]

    def _plan(self, options: tuple[int, ...]) -> Plan:
        """Entries of the first plan for layers of no class stay."""
        entries = dict(self.plans[0])
        for layer_class, option in zip(self.classes, options, strict=True):
            for layer in layer_class.layers:
                # Removed first: a plan without an entry says that the layer overlaps nothing.
                entries.pop(layer, None)
                if layer in self.plans[option]:
                    entries[layer] = self.plans[option][layer]
        return with_entries(self.start, entries)

    def _choice(self, current: tuple[int, ...], place: int) -> ClassChoice:
        others = ((self._name(moved[place], place), self._known.get(moved)) for moved in self._moves(current, place))
        known = tuple((name, tried) for name, tried in others if tried is not None)
        return ClassChoice(self.classes[place], self._name(current[place], place), known)

    def _said(self, option: int, place: int) -> list[LayerOverlap]:
        entries = self.plans[option]
        return [entries.get(layer, LayerOverlap(layer=layer)) for layer in self.classes[place].layers]

    def _name(self, option: int, place: int) -> str:
        return described(self._said(option, place))
