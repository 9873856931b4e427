"""Which batches a part is recorded at: few where its sizes are of degree 1 in the tokens, more where they are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_overlap.tuner.capture.capture import NoPolynomialError, _capture_part
from moe_overlap.tuner.capture.expression import B, Expression, S
from moe_overlap.tuner.capture.graph import CapturedPart, Storage

UNIT = 32


class Recorded:
    """Stands for a model's recorder: a part of one storage, of so many bytes at a batch."""

    def __init__(self, size: Callable[[int, int], int]) -> None:
        self._size, self.batches = size, list[tuple[int, int]]()

    def record(self, runnable: object, samples: int, tokens: int) -> CapturedPart:
        self.batches.append((samples, tokens))
        return CapturedPart(
            kind="dense",
            variant="none",
            one_sample=samples == 1,
            ops=(),
            storages=(Storage(id=0, bytes=Expression.of(self._size(samples, tokens)), role="input"),),
            saved=(),
            inputs=(0,),
            outputs=(0,),
            gradient_inputs=(0,),
            gradient_outputs=(0,),
        )


def captured(size: Callable[[int, int], int]) -> tuple[list[Expression], list[tuple[int, int]]]:
    """The sizes of what is captured, and the batches it was recorded at."""
    recorder: Any = Recorded(size)
    parts = _capture_part(recorder, recorder, UNIT)
    return [part.storages[0].bytes for part in parts], recorder.batches


def test_sizes_of_degree_1_are_told_by_few_batches() -> None:
    sizes, batches = captured(lambda b, s: 6 * b * s + 3 * s + 7)
    assert sizes == [6 * B * S + 3 * S + 7] and len(batches) == 6


def test_one_sample_that_differs_is_recorded_apart() -> None:
    sizes, batches = captured(lambda b, s: 6 * b * s if b > 1 else 5 * s)
    assert sizes == [6 * B * S, 5 * S] and len(batches) == 8


def test_sizes_of_degree_2_take_further_batches_each_recorded_once() -> None:
    sizes, batches = captured(lambda b, s: b * s * s + 2 * s)
    assert sizes == [B * S * S + 2 * S] and len(batches) == len(set(batches)) == 8
    sizes, batches = captured(lambda b, s: b * s * s if b > 1 else 3 * s * s)
    assert sizes == [B * S * S, 3 * S * S] and len(batches) == len(set(batches)) == 11


@pytest.mark.parametrize("size", [lambda b, s: b * s**3, lambda b, s: -(-b * s // (3 * UNIT)), lambda b, s: b * b])
def test_what_is_no_polynomial_is_refused(size: Callable[[int, int], int]) -> None:
    with pytest.raises(NoPolynomialError):
        captured(size)
