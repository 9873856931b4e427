"""The global batch of every step: constant, growing evenly (--rampup-batch-size), or in steps (--step-batch-size-schedule).

A size depends on the samples trained so far alone, so that a resumed run goes on as if it had not stopped. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.training.config import Config
from moe_overlap.describe.errors import ConfigError

_STEPS = "--step-batch-size-schedule"
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes in samples; `sizes[i]` holds from `first_samples[i]` trained samples on."""

    first_samples: tuple[int, ...]
    sizes: tuple[int, ...]

    def at(self, trained_samples: int) -> int:
        """The global batch of the step that begins after so many samples."""
        return self.sizes[bisect_right(self.first_samples, trained_samples) - 1]

    def steps(self, samples: int) -> int:
        """Steps that fit into so many samples; what is left is less than a step."""
        steps = trained = 0
        for size, end in zip(self.sizes, (*self.first_samples[1:], samples), strict=True):
            count = max(0, min(math.ceil((min(end, samples) - trained) / size), (samples - trained) // size))
            steps, trained = steps + count, trained + count * size
        return steps


def batch_sizes(config: Config, data_size: int) -> BatchSizes:
    """The sizes of a configuration.

    Args:
        data_size: data-parallel ranks: without any flag the batch is one micro-batch on each.
    Raises:
        ConfigError: a flag that cannot be read.
    """
    training = config.training
    if training.step_batch_size_schedule is not None:
        pairs = sorted(_read_steps(training.step_batch_size_schedule, config.model.seq_length or 1))
        return BatchSizes(tuple(first for first, _ in pairs), tuple(size for _, size in pairs))
    assert training.micro_batch_size is not None
    last = training.global_batch_size or training.micro_batch_size * data_size
    if training.rampup_batch_size is None:
        return BatchSizes((0,), (last,))
    start, increment, samples = training.rampup_batch_size
    rises = (last - start) // increment
    firsts = (math.ceil(rise * samples / rises) for rise in range(rises)) if samples and rises else ()
    sizes = {first: start + rise * increment for rise, first in enumerate(firsts)} | {samples if rises else 0: last}
    return BatchSizes(tuple(sizes), tuple(sizes.values()))


def largest_batch(config: Config, data_size: int) -> int:
    """The global batch that plan and memory must hold; also that of an evaluation."""
    return max(batch_sizes(config, data_size).sizes)


def _read_steps(words: tuple[str, ...], seq_length: int) -> Iterator[tuple[int, int]]:
    """First sample and size of each step; thresholds are tokens, with K, M, B or T for a power of a thousand."""
    rule, fix = "must be pairs of trained tokens and batch size, the first at 0", 'write for example "0:384 200B:768"'
    seen = set()
    for word in " ".join(words).split():
        tokens, colon, size = word.partition(":")
        number, unit = (tokens[:-1], _UNITS[tokens[-1]]) if tokens[-1:] in _UNITS else (tokens, 1)
        if not (colon and size.isdigit() and int(size) > 0 and number.replace(".", "", 1).isdigit()):
            raise ConfigError(_STEPS, word, rule, fix)
        first = math.ceil(float(number) * unit / seq_length)
        if first in seen:
            raise ConfigError(_STEPS, word, "two sizes begin at the same sample", "correct one")
        seen.add(first)
        yield first, int(size)
    if 0 not in seen:
        raise ConfigError(_STEPS, " ".join(words), rule, fix)
