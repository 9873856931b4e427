"""A slow interpreter of lists: what every sample becomes, as an expression of what it was computed from.

Two lists that compute the same give the same expressions, however their operators are cut and ordered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.instructions import Instruction
from moe_overlap.plan.lowering.deferral import gradient_name, split_weights
from moe_overlap.plan.operators import BACKWARD, RECOMPUTE, parse_operator

Samples = dict[int, int]
"""Sample -> hash of its expression."""
Outcome = dict[tuple[object, ...], int]


class Interpreter:
    """Runs one list in issue order.

    Attributes:
        outcome: of losses, sent tensors, and the contribution of each sample to each weight gradient.
    """

    def __init__(self, made: Sequence[Instruction], samples: int, model: ModelDescription) -> None:
        self._samples, self._model = samples, model
        self._counts: dict[tuple[str, int | None], int] = {}
        for i in made:
            if i.kind != "weight-gradient":
                self._counts[i.name, i.micro_batch] = max((*i.partition, self._counts.get((i.name, i.micro_batch), 0)))
        self._buffers: dict[str, Samples] = {}
        self.outcome: Outcome = {}
        for i in made:
            if i.micro_batch is not None:
                self._run(i)
        # A weight gradient may stand in the list once for each partition; together they cover the micro-batch.
        for name, micro_batch in {(i.name, i.micro_batch) for i in made if i.kind == "weight-gradient"}:
            assert all((name, micro_batch, sample) in self.outcome for sample in range(samples)), (name, micro_batch)

    def _run(self, i: Instruction) -> None:
        operator = parse_operator(i.name)
        wanted = range(self._samples) if i.kind != "weight-gradient" else range(0)
        if i.partition and i.kind != "weight-gradient":
            wanted = self._share(i.partition[0], self._counts[i.name, i.micro_batch] + 1)
        inputs: dict[str, Samples] = {}
        for name in i.reads:
            if not name.startswith(("gradient", "capacity")):
                inputs.setdefault(stem(name), {}).update(self._buffers.get(name) or self._given(name))
        what = i.name.removesuffix("." + RECOMPUTE)
        made = {
            sample: hash((what, i.chunk, i.micro_batch, tuple((key, inputs[key][sample]) for key in sorted(inputs))))
            for sample in wanted
        }
        saved = [name for name in i.writes if name.startswith("saved")]
        for name in i.writes:
            if not name.startswith(("gradient", "capacity")):
                kept = self._kept(name, i)
                label = "" if name in saved else stem(name)
                self._buffers[name] = {s: hash((label, made[s])) if label else made[s] for s in wanted if s in kept}
        if i.name.startswith("send") or i.name == "head.loss":
            self._add((i.name, i.chunk, i.micro_batch), made)
        if i.kind == "weight-gradient":
            (values,) = inputs.values()
            self._add((i.name, i.micro_batch), values)
        elif operator.phase == BACKWARD and any(name.startswith("gradient") for name in (*i.writes, *saved)) or saved:
            kept_apart = {stem(name).removeprefix("saved.") + ".dW" for name in saved}
            for weight in split_weights(operator.kind, self._model):
                name = gradient_name(operator.kind, weight, operator.layer)
                if name not in kept_apart:
                    assert any(buffer.startswith("gradient") for buffer in i.writes), i
                    self._add((name, i.micro_batch), made)

    def _add(self, key: tuple[object, ...], values: Samples) -> None:
        for sample, value in values.items():
            assert (*key, sample) not in self.outcome, (key, sample)
            self.outcome[(*key, sample)] = value

    def _given(self, name: str) -> Samples:
        assert name.startswith(("tokens", "labels")), name
        return {sample: hash(name) for sample in range(self._samples)}

    def _share(self, index: int, count: int) -> range:
        size = self._samples // count
        return range(index * size, (index + 1) * size)

    def _kept(self, name: str, i: Instruction) -> range:
        """Samples that a buffer holds."""
        found = re.search(r"\.p(\d+)$", name)
        if found is None:
            assert not i.partition, f"{i.name} of a partition writes the whole {name}"
            return range(self._samples)
        siblings = sum(stem(other) == stem(name) for other in i.writes)
        count = self._counts[i.name, i.micro_batch] + 1 if i.partition else siblings
        return self._share(int(found[1]), count)


def stem(name: str) -> str:
    """Without partition and micro-batch."""
    return re.sub(r"(\.m\d+)?(\.p\d+)?$", "", name)
