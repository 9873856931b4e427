"""The graphs of any layout, composed of blocks of captured layouts. No torch.

`arranged` takes the blocks from several named parts, in the order of one of them. A `Composite` is the graph of all layouts
whose blocks have the same classes: operators and storages by name, and a scaling of every size. `Composer` makes composites of
samples (captured layouts by name), and evaluates them for a layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.operators import SHARED
from moe_overlap.tuner.capture.blocks import (
    CORE,
    ROUTED,
    NotComposableError,
    block_class,
    block_of,
    expert_replicas,
    group_size,
    has_heads,
    has_vocabulary,
    is_of_expert,
)
from moe_overlap.tuner.capture.expression import Expression, Monomial
from moe_overlap.tuner.capture.graph import CapturedModel, CapturedPart, Layout
from moe_overlap.tuner.capture.names import (
    OF_OPERATORS,
    SUMS,
    NamedOp,
    NamedPart,
    NamedStorage,
    OpName,
    Size,
    StorageName,
    named,
    numbered,
)
from moe_overlap.tuner.capture.scaling import (
    Degrees,
    Products,
    Samples,
    Scaling,
    UndeterminedError,
    dense_products,
    routed_products,
    total,
)

PartKey = tuple[str, bool]
"""Kind, and whether the part is that of one sample."""
Classes = tuple[tuple[str, tuple[Any, ...]], ...]
"""Blocks with their classes."""
SampledValues = tuple[tuple[int, int], ...]
"""Index of a sample, and the identity of the size there: captures repeat few sizes, each as one object, and hashing their
numbers would cost as much as the rest of a scaling. The samples hold the objects."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A captured layout by names."""

    layout: Layout
    degrees: Degrees
    kinds: tuple[str, ...]
    """Kinds of all captured parts, including those without names."""
    parts: Mapping[PartKey, NamedPart]
    sizes: Mapping[PartKey, Mapping[Size, Expression]]

    @staticmethod
    def of(captured: CapturedModel, model: ModelDescription) -> Sample:
        """A captured model by names; parts that cannot be named are left out.

        Args:
            model: the model, with its vocabulary padded for this layout.
        """
        layout, parts = captured.layout, {}
        for part in captured.parts:
            try:
                parts[part.kind, part.one_sample] = named(part, layout, model)
            except NotComposableError:
                continue
        sizes = {key: dict(part.sizes()) for key, part in parts.items()}
        kinds = tuple(dict.fromkeys(part.kind for part in captured.parts))
        return Sample(layout, Degrees.of(layout, model), kinds, parts, sizes)

    def with_single(self, kind: str) -> Sample:
        """A copy of the sample with a one-sample part of a kind, if one sample runs the same operators as several."""
        if (kind, True) in self.parts or (kind, False) not in self.parts:
            return self
        many = self.parts[kind, False]
        single = dataclasses.replace(many, part=dataclasses.replace(many.part, one_sample=True))
        sizes = {size: at_one_sample(expression) for size, expression in self.sizes[kind, False].items()}
        return dataclasses.replace(
            self, parts={**self.parts, (kind, True): single}, sizes={**self.sizes, (kind, True): sizes}
        )


def at_one_sample(expression: Expression) -> Expression:
    """A polynomial at b = 1."""
    terms: dict[Monomial, Fraction] = {}
    for monomial, coefficient in expression.terms:
        rest = tuple(factor for factor in monomial if factor[0] != "b")
        terms[rest] = terms.get(rest, Fraction(0)) + coefficient
    return sum((Expression(((rest, value),)) for rest, value in terms.items() if value), Expression())


def arranged(backbone: NamedPart, of_block: Mapping[str, NamedPart]) -> NamedPart:
    """Compose a part: the operators of each block come from another part.

    Args:
        backbone: gives the order of the blocks.
        of_block: block -> the part that provides its operators and their storages.
    Raises:
        NotComposableError: the parts order their blocks differently, or an operator needs a storage that no block writes.
    """
    runs = backbone.runs
    if any(source.runs != runs for source in of_block.values()):
        raise NotComposableError(f"{backbone.part.kind}: blocks in another order")
    stretches = {id(source): _stretches(source) for source in of_block.values()}
    ops = tuple(op for place, (_, block) in enumerate(runs) for op in stretches[id(of_block[block])][place])
    block_of_op = {named_op.name: block_of(named_op.op) for named_op in ops}
    storages: dict[StorageName, NamedStorage] = {}
    homes: dict[StorageName, str] = {}
    outside = (*backbone.held, *backbone.returned, *backbone.appended)
    used = dict.fromkeys((*outside, *(name for op in ops for name in (*op.reads, *op.writes))))
    for name in used:
        block = _home(name, block_of_op)
        # Storages from outside are the same in all parts, but some (a buffer that a block shares) are in some parts only.
        sources = (backbone, *of_block.values()) if block is None else (of_block[block],)
        storage = next((source.storages[name] for source in sources if name in source.storages), None)
        if storage is None:
            raise NotComposableError(f"{backbone.part.kind}: no block makes {name}")
        if storage.freed is not None and storage.freed not in block_of_op:
            storage = _ended_elsewhere("freed", name, of_block, block_of_op)
        for mark in ("released", "replaced"):
            operator = getattr(storage, mark)
            if operator is not None and operator not in block_of_op:
                other = _ended_elsewhere(mark, name, of_block, block_of_op)
                storage = dataclasses.replace(storage, **{mark: getattr(other, mark)})
        storages[name] = storage
        if block is not None:
            homes[name] = block
    emptied = _emptied(backbone, of_block, block_of_op)
    shares = {op.name: of_block[block_of(op.op)].shares[op.name] for op in ops}
    return dataclasses.replace(backbone, ops=ops, storages=storages, homes=homes, emptied=emptied, shares=shares)


def _emptied(
    backbone: NamedPart, of_block: Mapping[str, NamedPart], block_of_op: Mapping[OpName, str]
) -> tuple[StorageName, ...]:
    """The storages that the backward pass refills, in the order of the backbone's blocks."""
    emptied_of = {
        block: [name for name in source.emptied if _home(name, block_of_op) == block]
        for block, source in of_block.items()
    }
    order = [backbone.home(name) for name in backbone.emptied]
    if any(len(names) != order.count(block) for block, names in emptied_of.items()):
        raise NotComposableError(f"{backbone.part.kind}: blocks empty different numbers of storages")
    remaining = {block: iter(names) for block, names in emptied_of.items()}
    return tuple(next(remaining[block]) for block in order)


def _home(name: StorageName, block_of_op: Mapping[OpName, str]) -> str | None:
    if name[0] not in OF_OPERATORS:
        return None
    return SHARED if name[1] == SHARED else block_of_op.get(name[1])


def _ended_elsewhere(
    field: str, name: StorageName, of_block: Mapping[str, NamedPart], block_of_op: Mapping[OpName, str]
) -> NamedStorage:
    """The storage as described by the block that frees or releases it: operators of another block hold it.

    Args:
        field: a field of `NamedStorage`: `freed`, `released` or `replaced`.
    """
    for block, source in of_block.items():
        storage = source.storages.get(name)
        operator: OpName | None = getattr(storage, field, None)
        if storage is not None and operator is not None and block_of_op.get(operator) == block:
            return storage
    raise NotComposableError(f"no block frees {name}")


def _stretches(source: NamedPart) -> list[list[NamedOp]]:
    return [list(ops) for _, ops in groupby(source.ops, key=lambda op: (op.op.phase, block_of(op.op)))]


@dataclass(frozen=True, slots=True)
class Composite:
    """The graph of all layouts whose blocks have the same classes."""

    part: NamedPart
    """The part with all blocks."""
    scalings: Mapping[Size, Scaling]
    axes: tuple[str, ...]
    """Parallel axes of its collectives, without repetition."""
    is_of_experts: bool
    """True if it has operators or storages for each expert, or with separate replicas."""
    runs_each_expert: bool
    """True if it has operators for each expert."""
    open: tuple[Scaling, ...]
    """Scalings for which the samples allow several sums."""

    @staticmethod
    def of(graph: NamedPart, scalings: Mapping[Size, Scaling]) -> Composite:
        """The graph with these scalings of its sizes."""
        collectives = [named_op.op.collective for named_op in graph.ops]
        runs_each_expert = any(named_op.per_expert for named_op in graph.ops)
        is_of_experts = runs_each_expert or any(
            entry.per_expert or is_of_expert(entry.storage) for entry in graph.storages.values()
        )
        axes = dict.fromkeys(collective.axis for collective in collectives if collective is not None)
        undecided = {id(scaling): scaling for scaling in scalings.values() if not scaling.is_unique}
        return Composite(graph, scalings, tuple(axes), is_of_experts, runs_each_expert, tuple(undecided.values()))

    def is_decided(self, degrees: Degrees) -> bool:
        """Whether the samples determine every size of a layout."""
        try:
            for scaling in self.open:
                scaling.at(degrees)
        except UndeterminedError:
            return False
        return True

    def values(self, degrees: Degrees) -> dict[int, Expression]:
        """The value of every scaling, by its identity: graphs repeat few scalings.

        Raises:
            UndeterminedError: the samples do not determine one of them.
        """
        return {id(scaling): scaling.at(degrees) for scaling in {id(s): s for s in self.scalings.values()}.values()}

    def sizes(self, degrees: Degrees) -> dict[Size, Expression]:
        """Every size of a layout.

        Raises:
            UndeterminedError: see `values`.
        """
        return self.sizes_of(self.values(degrees))

    def sizes_of(self, values: Mapping[int, Expression]) -> dict[Size, Expression]:
        """Every size, of the `values` of a layout."""
        return {size: values[id(scaling)] for size, scaling in self.scalings.items()}


class Composer:
    """Composes parts from samples.

    Args:
        model: the model; its vocabulary does not matter.
        samples: captured layouts.
        of_copies: whether a library dispatches tokens.
    """

    def __init__(self, model: ModelDescription, samples: Sequence[Sample], of_copies: bool = False) -> None:
        self._of_copies = of_copies
        kinds = dict.fromkeys(kind for sample in samples for kind in sample.kinds)
        self.single = tuple(kind for kind in kinds if any((kind, True) in sample.parts for sample in samples))
        """Kinds with a separate graph of one sample, at least under some layouts."""
        for kind in self.single:
            samples = [sample.with_single(kind) for sample in samples]
        self._model, self._samples = model, tuple(samples)
        self._blocks: dict[PartKey, dict[str, None]] = {}
        for sample in samples:
            for key, part in sample.parts.items():
                self._blocks.setdefault(key, {}).update((block, None) for _, block in part.runs)
        self._scalings = Samples([sample.degrees for sample in samples])
        self._values: dict[PartKey, dict[Size, SampledValues]] = {}
        self._known: dict[tuple[str, tuple[Any, ...], bool], dict[SampledValues, Scaling]] = {}
        """By block, its class, whether there are fewer key/value heads than ranks, and values."""
        self._shared: dict[tuple[Products, SampledValues], Scaling] = {}
        """By products and values: those of one sum."""
        self._totals: dict[tuple[int, ...], tuple[Scaling, Sequence[Scaling]]] = {}
        """By the identities of some scalings: their sum, and the scalings, so that no others get their identities."""
        self._composites: dict[tuple[PartKey, Classes, bool], Composite | NotComposableError | UndeterminedError] = {}
        # Embedding, head and dense layers are equal under many layouts; equal parts are one object, which is priced once.
        self._parts: dict[tuple[object, ...], tuple[CapturedPart, ...]] = {}
        self.kinds = tuple(kinds)
        self.mixed = tuple(kind for kind in kinds if self._is_mixed((kind, False)) or self._is_mixed((kind, True)))
        """Kinds with a block that differs between samples of one class: they are never composed."""

    def parts(self, kind: str, layout: Layout, degrees: Degrees) -> tuple[CapturedPart, ...]:
        """The graph of a kind of part under a layout, and that of one sample if it differs.

        Raises:
            NotComposableError, UndeterminedError: the samples do not determine it.
        """
        if kind in self.mixed:
            raise NotComposableError(f"{kind} depends on more than the classes of its blocks")
        many = self.composite((kind, False), layout)
        composites = (many, self.composite((kind, True), layout)) if kind in self.single else (many,)
        values = [composite.values(degrees) for composite in composites]
        of_experts = (self._experts(layout), expert_replicas(layout)) if many.is_of_experts else ()
        ranks = tuple(group_size(layout, axis) for composite in composites for axis in composite.axes)
        key = (*map(id, composites), of_experts, ranks, *(tuple(of_one.values()) for of_one in values))
        if key not in self._parts:
            sizes = [composite.sizes_of(of_one) for composite, of_one in zip(composites, values, strict=True)]
            self._parts[key] = self._numbered(composites, layout, sizes)
        return self._parts[key]

    def _numbered(
        self, composites: Sequence[Composite], layout: Layout, sizes: Sequence[Mapping[Size, Expression]]
    ) -> tuple[CapturedPart, ...]:
        experts, many = self._experts(layout), composites[0]
        parts = [numbered(many.part, layout, experts, sizes[0])]
        for single, of_single in zip(composites[1:], sizes[1:], strict=True):
            same = [op.structure for op in single.part.ops] == [op.structure for op in many.part.ops]
            if not same or {size: at_one_sample(value) for size, value in sizes[0].items()} != of_single:
                parts.append(numbered(single.part, layout, experts, of_single))
        return tuple(parts)

    def composite(self, key: PartKey, layout: Layout) -> Composite:
        """The graph of a part under all layouts of the same classes.

        Raises:
            NotComposableError, UndeterminedError: the samples do not determine it.
        """
        classes = self.classes(key, layout)
        place = (key, classes, self._is_split(layout))
        if place not in self._composites:
            try:
                self._composites[place] = self._composite(key, layout, dict(classes))
            except (NotComposableError, UndeterminedError) as error:
                self._composites[place] = error.with_traceback(None)
        composite = self._composites[place]
        if not isinstance(composite, Composite):
            raise composite
        return composite

    def classes(self, key: PartKey, layout: Layout) -> Classes:
        """The classes of a part's blocks under a layout."""
        if key not in self._blocks:
            raise NotComposableError(f"{key[0]}: its operators have no names")
        return tuple((block, self._class(block, layout)) for block in self._blocks[key])

    def _class(self, block: str, layout: Layout) -> tuple[Any, ...]:
        return block_class(block, layout, self._model, self._of_copies)

    def _experts(self, layout: Layout) -> int:
        return self._model.num_experts // layout.expert

    def _is_mixed(self, key: PartKey) -> bool:
        structures: dict[tuple[str, tuple[Any, ...]], Any] = {}
        for sample in self._samples:
            if key in sample.parts:
                for block, structure in sample.parts[key].blocks().items():
                    place = (block, self._class(block, sample.layout))
                    if structures.setdefault(place, structure) != structure:
                        return True
        return False

    def _composite(self, key: PartKey, layout: Layout, classes: Mapping[str, tuple[Any, ...]]) -> Composite:
        of_block: dict[str, NamedPart] = {}
        for block, needed in classes.items():
            of_class = [
                sample.parts[key]
                for sample in self._samples
                if key in sample.parts and self._class(block, sample.layout) == needed
            ]
            if not of_class:
                raise NotComposableError(f"{key[0]}: nothing captured has {block} of class {needed}")
            of_block[block] = of_class[0]
        backbone = of_block[ROUTED] if ROUTED in of_block else next(iter(of_block.values()))
        graph = arranged(backbone, of_block)
        blocks = {named_op.name: block_of(named_op.op) for named_op in graph.ops}
        homes = {size: blocks.get(size[0]) or graph.home(size[0]) for size, _ in graph.sizes()}
        values = self._sampled(key)
        scalings: dict[Size, Scaling] = {}
        for block in dict.fromkeys(homes.values()):
            # Keyed by the identities of its values in all samples, which are the same samples for all sizes of a part.
            cached = self._known.setdefault((block, self._class(block, layout), self._is_split(layout)), {})
            for size in (size for size, home in homes.items() if home == block):
                if values[size] not in cached:
                    cached[values[size]] = self._scaling(key, size, block, layout)
                scalings[size] = cached[values[size]]
        return Composite.of(graph, self._with_totals({size: scalings[size] for size in homes}))

    def _with_totals(self, scalings: Mapping[Size, Scaling]) -> dict[Size, Scaling]:
        """The scalings that `numbered` takes: those of an operator's storages are summed."""
        totals: dict[Size, Scaling] = {}
        for (name, which), group in groupby(scalings.items(), key=lambda entry: entry[0][:2]):
            members = list(group)
            if which not in SUMS:
                totals.update(members)
                continue
            key = tuple(id(scaling) for _, scaling in members)
            # The values of a layout are looked up by the identities of their scalings, so equal sums must be one object.
            if key not in self._totals:
                parts = [scaling for _, scaling in members]
                self._totals[key] = total(parts), parts
            totals[name, SUMS[which], 0] = self._totals[key][0]
        return totals

    def _sampled(self, key: PartKey) -> dict[Size, SampledValues]:
        """The values of every size of a part in all samples."""
        if key not in self._values:
            values: dict[Size, list[tuple[int, int]]] = {}
            for index, sample in enumerate(self._samples):
                for size, value in sample.sizes.get(key, {}).items():
                    values.setdefault(size, []).append((index, id(value)))
            self._values[key] = {size: tuple(of_size) for size, of_size in values.items()}
        return self._values[key]

    def _scaling(self, key: PartKey, size: Size, block: str, layout: Layout) -> Scaling:
        """The scaling of a size: from all samples that have it, else from those that split key/value heads as far as the layout
        may, else from those whose block has the same class."""
        of_heads = has_heads(block, self._model) and any(self._is_split(sample.layout) for sample in self._samples)
        dense = dense_products(has_vocabulary(block), of_heads)
        products = routed_products(self._of_copies) if block == ROUTED else dense
        captured = {
            index: sample.sizes[key][size]
            for index, sample in enumerate(self._samples)
            if size in sample.sizes.get(key, {})
        }
        split, needed = self._is_split(layout), self._class(block, layout)
        of_class = (index for index in captured if self._class(block, self._samples[index].layout) == needed)
        lots = [[*captured], [*of_class]]
        if of_heads:
            lots.insert(1, [index for index in captured if self._is_split(self._samples[index].layout) == split])
        reason = ""
        for lot in lots:
            shared = products, tuple((index, id(captured[index])) for index in lot)
            try:
                if shared not in self._shared:
                    self._shared[shared] = self._scalings.scaling({index: captured[index] for index in lot}, products)
                return self._shared[shared]
            except UndeterminedError as error:
                reason = str(error)
        raise UndeterminedError(f"{key[0]}, {size}: {reason}")

    def _is_split(self, layout: Layout) -> bool:
        """Whether there are fewer key/value heads than tensor ranks."""
        return has_heads(CORE, self._model) and layout.tensor > self._model.num_query_groups
