"""A model's graphs under any layout from captures of a few.

A layout is answered in one of two ways. If captured layouts have every block in the class that it needs, and decide every
size, its parts are put together (`composition.py`). Otherwise it is captured itself, and from then on helps to answer others;
so a class of graphs is captured when the first of its layouts is asked for. What was captured although it could have been put
together is compared: a kind of part that differs is never put together again. `prepare` orders the captures so that few
suffice; `decide` adds those that tell apart the sums that sizes may still be.

A variant of recomputation is answered in a third way. A capture of it is compared with the graph without recomputation of the
same layout, rewritten (`recomputation.py`). If every part is equal, all layouts that are parallel on the same axes or fewer are
answered by rewriting theirs, and the variant needs no further capture; if one differs, its layouts are captured like any others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from megatron.training.cli.config import Config
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import ATTENTION, MLP
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.blocks import CORE, ROUTED, ROUTER, NotComposableError, block_class
from moe_overlap.tuner.capture.cache import CaptureFiles, Flags, joined, stage_requests
from moe_overlap.tuner.capture.composition import Composer, Composite, Sample
from moe_overlap.tuner.capture.graph import CapturedModel, Layout, Part
from moe_overlap.tuner.capture.recomputation import recomputed
from moe_overlap.tuner.capture.request import NO_RECOMPUTATION, Request, layer_kinds, prediction_kinds, versions
from moe_overlap.tuner.capture.scaling import Degrees, UndeterminedError
from moe_overlap.tuner.capture.stretches import NotRewrittenError

Capture = Callable[[Request], CapturedModel]
STAYS = "tokens stay on their rank"
"""A sight of captures of one expert rank, counted beside the classes that they show."""
DECIDING = 8
"""Captures at most that `BlockLibrary.decide` adds: a size that so many do not tell is no short sum."""


class BlockLibrary:
    """The graphs of one model, with one choice of what is recomputed, under any layout.

    Its requests differ in their layouts only, and in the padding of the vocabulary that goes with them (`_without_layout`).

    Args:
        capture: captures a request, or knows its capture.
        plain: of a variant of recomputation, the library of the same model without it; None captures the variant's layouts.
    """

    def __init__(self, capture: Capture, plain: BlockLibrary | None = None) -> None:
        self._capture, self._plain = capture, plain
        self._rewritten: dict[int, tuple[Part, Part]] = {}
        """By the identity of a part without recomputation: that part, and the rewritten one."""
        self._checked: list[set[str]] = []
        """The axes on which the layout of each capture is parallel that was equal to the rewritten graph."""
        self._captured: dict[tuple[Layout, int], CapturedModel] = {}
        self._composed: dict[tuple[Layout, int], tuple[Part, ...]] = {}
        self._samples: list[Sample] = []
        self._numbers: set[End] = set()
        """The numbers of ranks that captures have shown."""
        self._composer: Composer | None = None
        self._unlike: set[str] = set()

    @property
    def captured_layouts(self) -> tuple[Layout, ...]:
        """The layouts that were captured, in order."""
        return tuple(layout for layout, _ in self._captured)

    @property
    def unlike(self) -> tuple[str, ...]:
        """Kinds of parts that captures have shown to differ from what is put together."""
        return tuple(sorted({*self._unlike, *(self._composer.mixed if self._composer else ())}))

    @property
    def rewrites(self) -> bool:
        """Whether the variant's graphs are those without recomputation, rewritten, as far as captures have shown."""
        return self._plain is not None

    def _is_rewritten(self, request: Request) -> bool:
        """Whether a capture has shown a variant's collectives on all axes on which a layout is parallel."""
        return self.rewrites and any(_axes(request) <= axes for axes in self._checked)

    def model(self, request: Request) -> CapturedModel:
        """The captured model of a request.

        Raises:
            CaptureError: it must be captured and cannot be.
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
            samples: of a micro-batch; 1 gives the graph of one sample where there is one.
        """
        if self.rewrites or self._composer is None or kind in self._unlike or kind in self._composer.mixed:
            return None
        try:
            return self._composer.composite((kind, samples == 1 and kind in self._composer.single), request.layout)
        except (NotComposableError, UndeterminedError):
            return None

    def prepare(self, requests: Iterable[Request]) -> None:
        """Capture what all of these requests need.

        First those that show a class of a block that no other has shown, and on every axis the fewest and the most ranks of a
        class: between them a difference shows that no class foresees. They decide nearly all sizes; what they leave open is
        captured, too.
        """
        for request, is_new in _in_order(requests):
            key = request.layout, request.model.vocab_size
            if key not in self._captured and ((is_new and not self.rewrites) or self.must_capture(request)):
                self._learn(request)

    def decide(self, requests: Iterable[Request]) -> None:
        """Capture what shows the ends of all classes, and what tells apart the sums that sizes of these requests may be.

        Each capture does so for many layouts, and of those that show as many ends one that sizes leave open does both.
        """
        if self.rewrites:
            return
        left = [request for request, _ in _in_order(requests)]
        ends, further = _ends(left), 0
        while further < DECIDING:
            unshown = {request: len(_numbers(request) & (ends - self._numbers)) for request in left}
            is_open = {request: self._is_open(request) for request in left}
            further += not any(unshown.values())
            thin = self._undecided_classes(is_open)
            worth = {
                request: (unshown[request], is_open[request], len(_sights(request) & thin) if is_open[request] else 0)
                for request in left
            }
            best = max(left, key=worth.__getitem__, default=None)
            if best is None or not any(worth[best]):
                return
            self._learn(best)

    def _undecided_classes(self, is_open: Mapping[Request, bool]) -> set[object]:
        """The classes of blocks of which captures decide no other layout: one capture may show several of them."""
        captured = {layout for layout, _ in self._captured}
        decided = [request for request, it_is in is_open.items() if not it_is and request.layout not in captured]
        of_open = [_sights(request) for request, it_is in is_open.items() if it_is]
        return set().union(*of_open).difference(*map(_sights, decided))

    def _is_open(self, request: Request) -> bool:
        """Whether the captures of a layout's classes leave a size of it open; what has no such captures is another matter."""
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
        """Whether what was captured so far does not tell the graphs of a request."""
        try:
            self.composed(request)
        except (NotComposableError, UndeterminedError):
            return True
        return False

    def composed(self, request: Request) -> tuple[Part, ...]:
        """The parts of a request, put together.

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

    def _rewritten_parts(self, request: Request) -> tuple[Part, ...]:
        """The layers of a request, rewritten from those without recomputation.

        Raises:
            NotRewrittenError: the variant is none that the rewrite knows.
            CaptureError: the layout must be captured without recomputation and cannot be.
        """
        assert self._plain is not None
        model = self._plain.model(dataclasses.replace(request, variant=NO_RECOMPUTATION))
        layers = {*model.layer_kinds, *model.mtp_kinds}
        parts = [part for part in model.parts if part.kind in layers]
        for part in parts:
            # Equal parts are one object, which is priced once.
            if id(part) not in self._rewritten:
                self._rewritten[id(part)] = part, recomputed(part, request.variant)
        return tuple(self._rewritten[id(part)][1] for part in parts)

    def _check_rewrite(self, request: Request, captured: CapturedModel) -> None:
        """Compare a capture of a variant with the rewritten graph: one that differs ends all rewriting."""
        if self._plain is None:
            return
        try:
            rewritten = self._rewritten_parts(request)
        except NotRewrittenError:
            rewritten = ()
        of_kind = {(part.kind, part.one_sample): part for part in rewritten}
        if of_kind == {(part.kind, part.one_sample): part for part in captured.parts}:
            self._checked.append(_axes(request))
        else:
            self._plain = None

    def _parts(self, composer: Composer, kind: str, request: Request) -> tuple[Part, ...]:
        if kind in self._unlike:
            raise NotComposableError(f"{kind} was captured otherwise than put together")
        model = request.model
        return composer.parts(kind, request.layout, Degrees.of(request.layout, model))

    def _learn(self, request: Request) -> CapturedModel:
        """Capture a layout, and compare it with what the earlier ones say of it."""
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
    """The requests of one library in the order in which captures teach the most, and whether each shows a class or an end that
    none before it has shown."""
    left = {(request.layout, request.model.vocab_size): request for request in requests}
    ends = _ends(left.values())
    sights = {key: _sights(request) | (_numbers(request) & ends) for key, request in left.items()}
    ranks = {key: _ranks(key[0]) for key in left}
    shown: Counter[object] = Counter()
    unshown = set().union(*sights.values())

    def worth(key: tuple[Layout, int]) -> tuple[int, int, int, int, int]:
        """New sights; those seen once, above all where tokens stay on their rank, as what runs there is in no other class;
        numbers of ranks that are not shown yet; and many ranks, where sizes differ most."""
        times = [shown[sight] for sight in sights[key]]
        stays = key[0].expert * key[0].expert_tensor == 1 and shown[STAYS] == 1
        unseen = sum(not shown[pair] for pair in ranks[key])
        return times.count(0), stays, times.count(1), unseen, sum(number for _, number in ranks[key])

    while unshown:
        key = max(left, key=worth)
        yield left.pop(key), True
        shown.update({*sights[key], *ranks[key]})
        shown[STAYS] += key[0].expert * key[0].expert_tensor == 1
        unshown -= sights[key]
    # Nothing is new any more, so no worth changes: the rest is in order at once.
    for key in sorted(left, key=worth, reverse=True):
        yield left[key], False


def _certain(requests: Sequence[Request]) -> list[Request]:
    """One library's requests that are captured in any case.

    Of a variant, those that show whether it is rewritten: together they are parallel on all axes on which a layout is.
    """
    in_order = list(_in_order(requests))
    if requests[0].variant == NO_RECOMPUTATION:
        return _of_classes([request for request, is_new in in_order if is_new])
    left = [request for request, _ in in_order]
    certain = []
    while left:
        certain.append(max(left, key=lambda request: len(_axes(request))))
        left = [request for request in left if not _axes(request) <= _axes(certain[-1])]
    return certain


def _of_classes(requests: Sequence[Request]) -> list[Request]:
    """Those that show a class of a block which none before them has shown; the ends that are left are decided later."""
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
"""A class, an axis, and a number of ranks."""


def _sends_copies(request: Request) -> bool:
    """Whether a library dispatches tokens, which sends a token once to each rank that needs it."""
    return request.config.moe.moe_token_dispatcher_type == "flex"


def _sights(request: Request) -> set[object]:
    """The classes that a capture of a request shows."""
    of_copies = _sends_copies(request)
    blocks = (ATTENTION, CORE, ROUTED, MLP, *((ROUTER,) if of_copies else ()))
    return {(block, block_class(block, request.layout, request.model, of_copies)) for block in blocks}


def _numbers(request: Request) -> set[End]:
    """The numbers of ranks above 1 that a capture of a request shows; TP's by the class of attention, which it changes most."""
    ranks = dict(_ranks(request.layout))
    heads = block_class(ATTENTION, request.layout, request.model)
    return {(heads if axis == "tensor" else None, axis, number) for axis, number in ranks.items()}


def _ends(requests: Iterable[Request]) -> set[End]:
    """The fewest and the most ranks of every class and axis."""
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
    """Libraries of all models that are asked for; answers the cost model where many layouts are priced.

    Args:
        files: captures that are there, and where new ones go.
    """

    def __init__(self, files: CaptureFiles) -> None:
        self._files = files
        self._libraries: dict[str, BlockLibrary] = {}
        self._keys: dict[Request, str] = {}

    def of(self, request: Request) -> BlockLibrary:
        """The library that answers a request."""
        key = self._key(request)
        if key not in self._libraries:
            is_plain = request.variant == NO_RECOMPUTATION
            plain = None if is_plain else self.of(dataclasses.replace(request, variant=NO_RECOMPUTATION))
            self._libraries[key] = BlockLibrary(self._capture, plain)
        return self._libraries[key]

    def prepare(self, requests: Sequence[Request], all_layouts: bool = True) -> None:
        """Capture what these requests need.

        Args:
            all_layouts: whether to look at every request; else what few of them need is captured when they are asked for.
        """
        groups: dict[str, list[Request]] = {}
        # Variants behind the graphs without recomputation, which they are rewritten from.
        for request in sorted(requests, key=lambda request: request.variant != NO_RECOMPUTATION):
            groups.setdefault(self._key(request), []).append(request)
        # What is captured in any case is captured by one process: starting one takes longer than a capture.
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
                self._files.captures([one for one in members if library.must_capture(one)])
                for one in members:
                    if library.must_capture(one):
                        library.model(one)

    def graphs(self, config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> Mapping[int, CapturedModel]:
        """Captured models of the stages, as `cache.Graphs` has it.

        Raises:
            CaptureError: a layout that must be captured cannot be.
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
        """The key of a request's library; a hash of all flags is computed once for requests that differ in their layouts."""
        bare = _without_layout(request)
        if bare not in self._keys:
            self._keys[bare] = bare.sha256()
        return self._keys[bare]

    def _capture(self, request: Request) -> CapturedModel:
        (captured,) = self._files.captures([request])
        return captured
