"""One job searched over several spaces: the row of most of Mist's and Alpa's comparisons.

A figure names its spaces and its cases (`Figure`). `rows` searches every case over every space, and gives the speedup of each
plan over that of the first space. `sizes` gives the number of priced points and the time of the same searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.plan_search.results import TIE
from moe_overlap.tuner.search.space import LEVELS, ON_HOST, Restriction, SearchSpace
from tools.bench.paper_rows import Row
from tools.bench.paper_searches import KeptSearches, Machines, Outcome, Search

UNKNOWN = "not searched"
AGAINST = "widest / best other"
"""Column: speedup of the plan of the last space over the best plan of the others; at least 1, except for ties."""


PAPER_SPACES = {
    space.name: space
    for space in (
        SearchSpace("data", recomputes=True, overlaps=False, zero_levels=(0,), only_data=True),
        SearchSpace("zero2", recomputes=True, overlaps=False, zero_levels=(2,), only_data=True),
        SearchSpace("zero3", recomputes=True, overlaps=False, zero_levels=(3,), only_data=True),
        SearchSpace(
            "equal-layer",
            recomputes=True,
            overlaps=False,
            zero_levels=LEVELS,
            offloads=ON_HOST,
            frees_stages=True,
            equal_layers=True,
        ),
        SearchSpace(
            "intra-only", recomputes=True, overlaps=False, zero_levels=LEVELS, one_stage=True, shards_operators=True
        ),
        SearchSpace("inter-only", recomputes=True, overlaps=False, meshes=(Restriction.ONE_DEVICE,)),
        SearchSpace(
            "equal-operator", recomputes=True, overlaps=False, meshes=(Restriction.EQUAL_OPERATORS,), uniform=False
        ),
    )
}
"""Restrictions of the full space that papers compare with; their plans overlap nothing."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """A space with its name in a paper.

    Attributes:
        averages: True if its search prices all micro-batches of a stage as their mean.
    """

    name: str
    space: SearchSpace
    averages: bool = False


@dataclass(frozen=True, kw_only=True)
class PaperCase:
    """A job of a figure: flags, GPUs and the paper's text on it."""

    name: str
    arguments: tuple[str, ...]
    machines: Machines
    paper: str = ""

    def search(self, space: Space) -> Search:
        """The search of one space."""
        return Search(arguments=self.arguments, machines=self.machines, space=space.space, averages=space.averages)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a paper.

    Attributes:
        spaces: in the order of the paper; with `widens` the last one includes all others.
        columns: name of a space -> outcome, to the figures of a row.
    """

    name: str
    spaces: tuple[Space, ...]
    cases: tuple[PaperCase, ...]
    columns: Callable[[Mapping[str, Outcome]], dict[str, float | None]]
    widens: bool = True


def rows(figure: Figure, searches: KeptSearches, most_gpus: int) -> Iterator[Row]:
    """A row for each case on at most `most_gpus` GPUs; missing outcomes are searched one after the other."""
    for case in figure.cases:
        if case.machines.gpus > most_gpus:
            continue
        by_space = {space.name: searches.outcome(case.search(space)) for space in figure.spaces}
        outcomes = {name: outcome for name, outcome in by_space.items() if outcome is not None}
        columns = figure.columns(outcomes)
        if figure.widens:
            columns[AGAINST] = against(list(by_space.values()))
        yield Row(
            figure=figure.name,
            case=case.name,
            figures=columns,
            paper=case.paper,
            notes=tuple(f"{case.name}, {name}: {summary(outcome)}" for name, outcome in by_space.items()),
        )


def search_all(figures: Sequence[Figure], searches: KeptSearches, most_gpus: int) -> None:
    """Search the missing outcomes of several figures, those on few GPUs first, because they are faster."""
    cases = [(case, space) for figure in figures for case in figure.cases for space in figure.spaces]
    for case, space in sorted(cases, key=lambda pair: pair[0].machines.gpus):
        if case.machines.gpus <= most_gpus:
            searches.outcome(case.search(space))


def gains(outcomes: Mapping[str, Outcome]) -> dict[str, float | None]:
    """The first space's step, and how many times as fast the other spaces' plans are; of the whole row the processor seconds."""
    (first, *others) = outcomes or [""]
    columns: dict[str, float | None] = {}
    if first:
        columns[f"{first} seconds"] = outcomes[first].seconds
    for name in others:
        columns[name] = ratio(outcomes[first].seconds, outcomes[name].seconds)
    columns["CPU seconds"] = sum(outcome.cpu_seconds for outcome in outcomes.values())
    return columns


def seconds_and_gains(outcomes: Mapping[str, Outcome]) -> dict[str, float | None]:
    """Steps of all spaces, and `gains`: for figures whose first space may have no plan."""
    steps = {f"{name} seconds": outcome.seconds for name, outcome in outcomes.items()}
    return steps | gains(outcomes)


def sizes(outcomes: Mapping[str, Outcome]) -> dict[str, float | None]:
    """Points and processor seconds of each space."""
    columns: dict[str, float | None] = {}
    for name, outcome in outcomes.items():
        columns[f"{name} points"] = float(outcome.points)
        columns[f"{name} CPU seconds"] = outcome.cpu_seconds
    return columns


def ratio(slower: float | None, faster: float | None) -> float | None:
    """None if one is unknown."""
    return None if slower is None or faster is None else slower / faster


def against(outcomes: Sequence[Outcome | None]) -> float | None:
    """The fastest of all but the last over the last; None if the last is not known, or nothing else has a plan."""
    *others, last = outcomes
    seconds = [outcome.seconds for outcome in others if outcome is not None and outcome.seconds is not None]
    return ratio(min(seconds, default=None), None if last is None else last.seconds)


def is_worse(row: Row) -> bool:
    """Whether the widest space's plan is slower than another space's by more than the predictions' resolution."""
    least = row.figures.get(AGAINST)
    return least is not None and least < 1.0 - TIE


def summary(outcome: Outcome | None) -> str:
    """One line about an outcome."""
    if outcome is None:
        return UNKNOWN
    step = "" if outcome.seconds is None else f"{outcome.seconds:.3f} s, "
    took = f"{outcome.cpu_seconds:.0f} CPU s, {outcome.points:,} points, {outcome.rss_gib:.1f} GiB"
    return f"{step}{outcome.plan} ({outcome.status}, {took})"
