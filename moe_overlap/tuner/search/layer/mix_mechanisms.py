"""Another mechanism for each class of layers: coordinate descent from one plan over what other plans decide for their layers.

1. Begin with a plan that has one mechanism everywhere.
2. Class after class: give its layers what each of the other plans decides for them, and keep what shortens the step. What a
   class may be depends on its neighbours; what cannot run beside them, or does not fit, is passed over with its reason.
3. Repeat until a whole round changes nothing, or the predictions are used up.
The answer is never longer than the beginning. It may miss what only two classes together gain: `tests` compare it with all
combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.overlap import LayerOverlap
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.search.layer.layer_classes import Entries, LayerClass, described, entries_of, with_entries

Rule = Callable[[Plan], None]
"""ConfigError where a plan cannot run."""
Judge = Callable[[Plan], float]
"""Seconds of a plan's step; ConfigError where it does not fit."""
SHORTER = 1e-9
"""Share of a step by which another must be shorter to count."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What a class with another mechanism would make of the step, the other classes as chosen; or why it cannot be."""

    seconds: float | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class ClassChoice:
    """What was decided for a class.

    Attributes:
        chosen: as `described` names it.
        others: the same for what was not chosen.
    """

    alike: LayerClass
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
                for moved in self._moves(current, place):
                    tried = self._try(moved)
                    if tried is not None and tried.seconds is not None and tried.seconds < best * (1.0 - SHORTER):
                        current, best, complete = moved, tried.seconds, False
            complete = complete and all(m in self._known for p in range(len(current)) for m in self._moves(current, p))
        choices = tuple(self._choice(current, place) for place in range(len(self.classes)))
        plan = self._plan(current) if any(current) else self.start
        return Mix(plan, best, choices, self._judged, any(current), complete)

    def _moves(self, current: tuple[int, ...], place: int) -> Iterator[tuple[int, ...]]:
        """The other options of a class."""
        seen = []
        for option in range(len(self.plans)):
            said = self._said(option, place)
            if said not in seen:
                seen.append(said)
                if option != current[place]:
                    yield (*current[:place], option, *current[place + 1 :])

    def _try(self, moved: tuple[int, ...]) -> Tried | None:
        """What a combination takes; None where no prediction is left."""
        if moved not in self._known:
            plan = self._plan(moved)
            try:
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
        for alike, option in zip(self.classes, options, strict=True):
            for layer in alike.layers:
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
