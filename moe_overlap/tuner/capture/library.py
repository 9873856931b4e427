"""A model's graphs under any layout from captures of a few.

A layout is answered in one of two ways. If captured layouts have every block in the class that it needs, and determine every
size, its parts are composed (`composition.py`). Otherwise it is captured itself, and then helps to answer others; so a class of
graphs is captured when the first of its layouts is requested. A capture of a layout that could have been composed is compared
with the composition: a kind of part that differs is never composed again. `prepare` orders the captures so that few suffice;
`decide` adds those that distinguish the remaining candidate sums of sizes.

A variant of recomputation is answered in a third way. A capture of it is compared with the rewritten graph without recomputation
of the same layout (`recomputation.py`). If every part is equal, all layouts that are parallel on the same axes or fewer are
answered by rewriting, and the variant needs no further capture; if one differs, its layouts are captured like any others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from megatron.training.cli.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, MLP
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.blocks import CORE, ROUTED, ROUTER, NotComposableError, block_class
from moe_overlap.tuner.capture.cache import CaptureFiles, Flags, joined, stage_requests
from moe_overlap.tuner.capture.composition import Composer, Composite, Sample
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Layout
from moe_overlap.tuner.capture.recomputation import recomputed
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request, layer_kinds, prediction_kinds, versions
from moe_overlap.tuner.capture.scaling import Degrees, UndeterminedError
from moe_overlap.tuner.capture.stretches import NotRewrittenError

Capture = Callable[[Request], CapturedModel]
STAYS = "tokens stay on their rank"
"""Entry for captures with one expert rank, counted along with the classes that they show."""
DECIDING = 8
"""Largest number of captures that `BlockLibrary.decide` adds: a size that so many do not determine is no short sum."""


class BlockLibrary:
    """The graphs of one model with one variant of recomputation, under any layout.

    Its requests differ only in their layouts, and in the padding of the vocabulary that follows from them (`_without_layout`).

    Args:
        capture: captures a request, or returns its stored capture.
        baseline: for a variant of recomputation, the library of the same model without it; None captures the variant's layouts.
    """

    def __init__(self, capture: Capture, baseline: BlockLibrary | None = None) -> None:
        self._capture, self._baseline = capture, baseline
        self._rewritten: dict[int, tuple[CapturedPart, CapturedPart]] = {}
        """By the identity of a part without recomputation: that part, and the rewritten one."""
        self._checked: list[set[str]] = []
        """For each capture that equals the rewritten graph, the axes on which its layout is parallel."""
        self._captured: dict[tuple[Layout, int], CapturedModel] = {}
        self._composed: dict[tuple[Layout, int], tuple[CapturedPart, ...]] = {}
        self._samples: list[Sample] = []
        self._numbers: set[End] = set()
        """The numbers of ranks in the captures so far."""
        self._composer: Composer | None = None
        self._unlike: set[str] = set()

    @property
    def captured_layouts(self) -> tuple[Layout, ...]:
        """The layouts that were captured, in order."""
        return tuple(layout for layout, _ in self._captured)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Kinds of parts whose captures differ from their compositions."""
        return tuple(sorted({*self._unlike, *(self._composer.mixed if self._composer else ())}))

    @property
    def rewrites(self) -> bool:
        """Whether captures so far allow answering the variant by rewriting graphs without recomputation."""
        return self._baseline is not None

    def _is_rewritten(self, request: Request) -> bool:
        """Whether a capture has verified the variant's collectives on all axes on which a layout is parallel."""
        return self.rewrites and any(_axes(request) <= axes for axes in self._checked)

    def model(self, request: Request) -> CapturedModel:
        """The captured model of a request.

        Raises:
            CaptureError: it must be captured, and the capture fails.
        """
        if (request.layout, request.model.vocab_size) in self._captured:
            return self._captured[request.layout, request.model.vocab_size]
        try:
            parts = self.composed(request)
        except (NotComposableError, UndeterminedError):
            return self._learn(request)
        return CapturedModel(
            parts=parts,
            layer_kinds=layer_kinds(request.model),
            mtp_kinds=prediction_kinds(request.model),
            layout=request.layout,
            implementation=request.implementation,
            versions=versions(),
            sha256=request.sha256(),
        )

    def graph_of(self, kind: str, request: Request, samples: int) -> Composite | None:
        """The graph of a part under all layouts whose blocks have the classes of a request's; None if it must be captured.

        Args:
            samples: samples of a micro-batch; 1 gives the one-sample graph if there is one.
        """
        if self.rewrites or self._composer is None or kind in self._unlike or kind in self._composer.mixed:
            return None
        try:
            return self._composer.composite((kind, samples == 1 and kind in self._composer.single), request.layout)
        except (NotComposableError, UndeterminedError):
            return None

    def prepare(self, requests: Iterable[Request]) -> None:
        """Capture what all of these requests need.

        First the requests that show a new class of a block, and on every axis the smallest and the largest number of ranks of a
        class, whose comparison reveals differences that no class foresees. They determine nearly all sizes; requests with
        undetermined sizes are captured, too.
        captured, too.
        """
        for request, is_new in _in_order(requests):
            key = request.layout, request.model.vocab_size
            if key not in self._captured and ((is_new and not self.rewrites) or self.must_capture(request)):
                self._learn(request)

    def decide(self, requests: Iterable[Request]) -> None:
        """Capture the extreme rank numbers of all classes, and layouts that distinguish the candidate sums of sizes.

        Each capture serves many layouts; of those that show equally many extremes, one with undetermined sizes is captured,
        since it serves both purposes.
        """
        if self.rewrites:
            return
        candidates = [request for request, _ in _in_order(requests)]
        ends, extra = _ends(candidates), 0
        while extra < DECIDING:
            unshown = {request: len(_numbers(request) & (ends - self._numbers)) for request in candidates}
            is_open = {request: self._is_open(request) for request in candidates}
            extra += not any(unshown.values())
            thin = self._undecided_classes(is_open)
            worth = {
                request: (unshown[request], is_open[request], len(_sights(request) & thin) if is_open[request] else 0)
                for request in candidates
            }
            best = max(candidates, key=worth.__getitem__, default=None)
            if best is None or not any(worth[best]):
                return
            self._learn(best)

    def _undecided_classes(self, is_open: Mapping[Request, bool]) -> set[object]:
        """The classes of blocks whose captures determine no other layout: one capture may show several of them."""
        captured = {layout for layout, _ in self._captured}
        decided = [request for request, it_is in is_open.items() if not it_is and request.layout not in captured]
        of_open = [_sights(request) for request, it_is in is_open.items() if it_is]
        return set().union(*of_open).difference(*map(_sights, decided))

    def _is_open(self, request: Request) -> bool:
        """Whether the captures of a layout's classes leave one of its sizes undetermined; false without such captures."""
        composer, model = self._composer, request.model
        if self.rewrites or composer is None or (request.layout, model.vocab_size) in self._captured or self.unlike:
            return False
        degrees = Degrees.of(request.layout, model)
        keys = [(kind, False) for kind in composer.kinds] + [(kind, True) for kind in composer.single]
        try:
            return not all(composer.composite(key, request.layout).is_decided(degrees) for key in keys)
        except UndeterminedError:
            return True
        except NotComposableError:
            return False

    def must_capture(self, request: Request) -> bool:
        """Whether the captures so far do not determine the graphs of a request."""
        try:
            self.composed(request)
        except (NotComposableError, UndeterminedError):
            return True
        return False

    def composed(self, request: Request) -> tuple[CapturedPart, ...]:
        """The composed parts of a request.

        Raises:
            NotComposableError, UndeterminedError: it must be captured.
        """
        if self._is_rewritten(request):
            try:
                return self._rewritten_parts(request)
            except NotRewrittenError as error:
                raise NotComposableError(str(error)) from error
        if self._composer is None:
            raise NotComposableError("nothing is captured")
        key = request.layout, request.model.vocab_size
        if key not in self._composed:
            composer = self._composer
            self._composed[key] = tuple(
                part for kind in composer.kinds for part in self._parts(composer, kind, request)
            )
        return self._composed[key]

    def _rewritten_parts(self, request: Request) -> tuple[CapturedPart, ...]:
        """The layers of a request, rewritten from those without recomputation.

        Raises:
            NotRewrittenError: the rewrite does not know the variant.
            CaptureError: the layout must be captured without recomputation, and the capture fails.
        """
        assert self._baseline is not None
        model = self._baseline.model(dataclasses.replace(request, variant=NO_RECOMPUTATION))
        layers = {*model.layer_kinds, *model.mtp_kinds}
        parts = [part for part in model.parts if part.kind in layers]
        for part in parts:
            # Equal parts are one object, which is priced once.
            if id(part) not in self._rewritten:
                self._rewritten[id(part)] = part, recomputed(part, request.variant)
        return tuple(self._rewritten[id(part)][1] for part in parts)

    def _check_rewrite(self, request: Request, captured: CapturedModel) -> None:
        """Compare a capture of a variant with the rewritten graph: one difference ends all rewriting."""
        if self._baseline is None:
            return
        try:
            rewritten = self._rewritten_parts(request)
        except NotRewrittenError:
            rewritten = ()
        of_kind = {(part.kind, part.one_sample): part for part in rewritten}
        if of_kind == {(part.kind, part.one_sample): part for part in captured.parts}:
            self._checked.append(_axes(request))
        else:
            self._baseline = None

    def _parts(self, composer: Composer, kind: str, request: Request) -> tuple[CapturedPart, ...]:
        if kind in self._unlike:
            raise NotComposableError(f"{kind} was captured otherwise than put together")
        model = request.model
        return composer.parts(kind, request.layout, Degrees.of(request.layout, model))

    def _learn(self, request: Request) -> CapturedModel:
        """Capture a layout, and compare it with the composition of the earlier captures."""
        captured = self._captured[request.layout, request.model.vocab_size] = self._capture(request)
        self._check_rewrite(request, captured)
        self._numbers |= _numbers(request)
        for kind in self._composer.kinds if self._composer is not None else ():
            assert self._composer is not None
            try:
                expected = self._parts(self._composer, kind, request)
            except (NotComposableError, UndeterminedError):
                continue
            if expected != tuple(part for part in captured.parts if part.kind == kind):
                self._unlike.add(kind)
        self._composed.clear()
        self._samples.append(Sample.of(captured, request.model))
        self._composer = Composer(request.model, self._samples, _sends_copies(request))
        return captured


def _in_order(requests: Iterable[Request]) -> Iterator[tuple[Request, bool]]:
    """The requests of one library in the order in which captures teach the most, and whether each shows a class or an extreme
    that no earlier one has shown."""
    remaining = {(request.layout, request.model.vocab_size): request for request in requests}
    ends = _ends(remaining.values())
    sights = {key: _sights(request) | (_numbers(request) & ends) for key, request in remaining.items()}
    ranks = {key: _ranks(key[0]) for key in remaining}
    shown: Counter[object] = Counter()
    unshown = set().union(*sights.values())

    def worth(key: tuple[Layout, int]) -> tuple[int, int, int, int, int]:
        """Number of new classes; then of those seen once, above all if tokens stay on their rank, since those operators are in
        no other class; then of new rank numbers; then more ranks, since sizes differ most there."""
        times = [shown[sight] for sight in sights[key]]
        stays = key[0].expert * key[0].expert_tensor == 1 and shown[STAYS] == 1
        unseen = sum(not shown[pair] for pair in ranks[key])
        return times.count(0), stays, times.count(1), unseen, sum(number for _, number in ranks[key])

    while unshown:
        key = max(remaining, key=worth)
        yield remaining.pop(key), True
        shown.update({*sights[key], *ranks[key]})
        shown[STAYS] += key[0].expert * key[0].expert_tensor == 1
        unshown -= sights[key]
    # No request is new any more, so no worth changes: the rest is sorted at once.
    for key in sorted(remaining, key=worth, reverse=True):
        yield remaining[key], False


def _certain(requests: Sequence[Request]) -> list[Request]:
    """One library's requests that are captured in any case.

    For a variant: those that show whether it can be rewritten; together they are parallel on all axes of any layout.
    """
    in_order = list(_in_order(requests))
    if requests[0].variant == NO_RECOMPUTATION:
        return _of_classes([request for request, is_new in in_order if is_new])
    remaining = [request for request, _ in in_order]
    certain = []
    while remaining:
        certain.append(max(remaining, key=lambda request: len(_axes(request))))
        remaining = [request for request in remaining if not _axes(request) <= _axes(certain[-1])]
    return certain


def _of_classes(requests: Sequence[Request]) -> list[Request]:
    """Requests that show a class of a block which no earlier one has shown; the other extremes are chosen later."""
    shown: set[object] = set()
    certain = []
    for request in requests:
        if not _sights(request) <= shown:
            certain.append(request)
            shown |= _sights(request)
    return certain


def _axes(request: Request) -> set[str]:
    """The axes on which a layout is parallel."""
    return {axis for axis, _ in _ranks(request.layout)}


End = tuple[object, str, int]
"""A class, an axis, and a number of ranks: extremes are compared by it."""


def _sends_copies(request: Request) -> bool:
    """Whether a library dispatches tokens, sending each once to every rank that needs it."""
    return request.config.moe.moe_token_dispatcher_type == "flex"


def _sights(request: Request) -> set[object]:
    """The classes that a capture of a request shows."""
    of_copies = _sends_copies(request)
    blocks = (ATTENTION, CORE, ROUTED, MLP, *((ROUTER,) if of_copies else ()))
    return {(block, block_class(block, request.layout, request.model, of_copies)) for block in blocks}


def _numbers(request: Request) -> set[End]:
    """The numbers of ranks above 1 in a capture of a request; TP's by the class of attention, which it changes most."""
    ranks = dict(_ranks(request.layout))
    heads = block_class(ATTENTION, request.layout, request.model)
    return {(heads if axis == "tensor" else None, axis, number) for axis, number in ranks.items()}


def _ends(requests: Iterable[Request]) -> set[End]:
    """The smallest and the largest number of ranks of every class and axis."""
    numbers: dict[tuple[object, str], set[int]] = {}
    for request in requests:
        for kind, axis, number in _numbers(request):
            numbers.setdefault((kind, axis), set()).add(number)
    return {(*key, end) for key, seen in numbers.items() for end in (min(seen), max(seen))}


def _ranks(layout: Layout) -> tuple[tuple[str, int], ...]:
    axes = ("tensor", "context", "expert", "expert_tensor")
    return tuple((axis, getattr(layout, axis)) for axis in axes if getattr(layout, axis) > 1)


def _without_layout(request: Request) -> Request:
    layout = Layout(precision=request.layout.precision)
    return dataclasses.replace(request, layout=layout, model=dataclasses.replace(request.model, vocab_size=0))


class Libraries:
    """Libraries of all requested models; answers the cost model when it prices many layouts.

    Args:
        files: stored captures, and the folder of new ones.
    """

    def __init__(self, files: CaptureFiles) -> None:
        self._files = files
        self._libraries: dict[str, BlockLibrary] = {}
        self._keys: dict[Request, str] = {}

    def until(self, deadline: float) -> AbstractContextManager[None]:
        """A context in which captures end with `OutOfTime` at a deadline of `time.monotonic`."""
        return self._files.until(deadline)

    def of(self, request: Request) -> BlockLibrary:
        """The library that answers a request."""
        key = self._key(request)
        if key not in self._libraries:
            is_baseline = request.variant == NO_RECOMPUTATION
            baseline = None if is_baseline else self.of(dataclasses.replace(request, variant=NO_RECOMPUTATION))
            self._libraries[key] = BlockLibrary(self._capture, baseline)
        return self._libraries[key]

    def prepare(self, requests: Sequence[Request], all_layouts: bool = True) -> None:
        """Capture what these requests need.

        Args:
            all_layouts: whether to examine every request; else a layout is captured when it is first requested.
        """
        groups: dict[str, list[Request]] = {}
        # Variants after the graphs without recomputation, from which they are rewritten.
        for request in sorted(requests, key=lambda request: request.variant != NO_RECOMPUTATION):
            groups.setdefault(self._key(request), []).append(request)
        # One process captures all certain requests: starting another takes longer than a capture.
        certain = {key: _certain(members) for key, members in groups.items()}
        self._files.captures([request for of_one in certain.values() for request in of_one])
        for key, members in groups.items():
            library = self.of(members[0])
            library.prepare(certain[key])
            if members[0].variant != NO_RECOMPUTATION and not library.rewrites:
                certain[key] = _of_classes([request for request, is_new in _in_order(members) if is_new])
                self._files.captures(certain[key])
                library.prepare(certain[key])
            library.decide(members)
            if all_layouts:
                self._files.captures([request for request in members if library.must_capture(request)])
                for request in members:
                    if library.must_capture(request):
                        library.model(request)

    def graphs(self, config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
        """Captured models of the stages, as a `cache.Graphs`.

        Raises:
            CaptureError: a layout must be captured, and the capture fails.
        """
        requests = stage_requests(config, model, plan)
        # Equal stages share their parts: the cost model counts parts by identity.
        models: dict[tuple[Layout, str], CapturedModel] = {}
        for request in (request for of_stage in requests.values() for request in of_stage):
            if (request.layout, request.variant) not in models:
                models[request.layout, request.variant] = self.of(request).model(request)
        return {
            index: joined([models[request.layout, request.variant] for request in of_stage], model)
            for index, of_stage in requests.items()
        }

    def _key(self, request: Request) -> str:
        """The key of a request's library; the hash of all flags is computed once for requests that differ only in layout."""
        bare = _without_layout(request)
        if bare not in self._keys:
            self._keys[bare] = bare.sha256()
        return self._keys[bare]

    def _capture(self, request: Request) -> CapturedModel:
        (captured,) = self._files.captures([request])
        return captured
