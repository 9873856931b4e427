"""Which layers each pipeline stage and virtual stage holds, as the flags share them out. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.training.config import Config
from moe_overlap.describe.errors import ConfigError

_LAYOUT = "--pipeline-model-parallel-layout"
_SHORTHANDS = (re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([EtmL|])\*(\d+)"))
"""`(tt|)*6` and `t*3`."""
_LONGEST = 100_000


def virtual_stages(config: Config) -> int:
    """Model chunks per pipeline rank; 1 without interleaving."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        parts = layout_parts(parallel.pipeline_model_parallel_layout)
        return max(1, len(parts) // parallel.pipeline_model_parallel_size)
    if parallel.num_virtual_stages_per_pipeline_rank is not None:
        return parallel.num_virtual_stages_per_pipeline_rank
    if parallel.num_layers_per_virtual_pipeline_stage is None:
        return 1
    per_rank = counted_layers(config) // parallel.pipeline_model_parallel_size
    return per_rank // parallel.num_layers_per_virtual_pipeline_stage


def counted_layers(config: Config) -> int:
    """Layers, and embedding and loss where they count as one each."""
    parallel = config.parallel
    assert config.model.num_layers is not None
    extra = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    return config.model.num_layers + extra


def stage_counts(config: Config) -> list[int]:
    """Layers of each pipeline stage without a layout; embedding and loss included where they count as one each."""
    parallel, stages = config.parallel, config.parallel.pipeline_model_parallel_size
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    fixed = [count for count in (first, last) if count is not None]
    middle_stages = stages - len(fixed)
    middle = (counted_layers(config) - sum(fixed)) // middle_stages if middle_stages else 0
    counts = [middle] * stages
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def chunk_sizes(config: Config) -> list[list[int]]:
    """Layers of every chunk: stage by stage, virtual stage by virtual stage."""
    parallel, stages, virtual = config.parallel, config.parallel.pipeline_model_parallel_size, virtual_stages(config)
    if parallel.pipeline_model_parallel_layout is not None:
        counts = [part.count("t") for part in layout_parts(parallel.pipeline_model_parallel_layout)]
        return [counts[stage::stages] for stage in range(stages)]
    sizes = [[count // virtual] * virtual for count in stage_counts(config)]
    sizes[0][0] -= parallel.account_for_embedding_in_pipeline_split
    sizes[-1][-1] -= parallel.account_for_loss_in_pipeline_split
    return sizes


def stage_chunks(sizes: Sequence[Sequence[int]]) -> list[tuple[tuple[int, int], ...]]:
    """The layer ranges [first, last) of every stage's chunks.

    Chunk c of stage s is virtual stage c · stages + s: the model passes all stages once per chunk.

    Args:
        sizes: layers of every chunk, as `chunk_sizes` has them.
    """
    chunks: list[list[tuple[int, int]]] = [[] for _ in sizes]
    first = 0
    for chunk in range(len(sizes[0])):
        for stage, counts in enumerate(sizes):
            chunks[stage].append((first, first + counts[chunk]))
            first += counts[chunk]
    return [tuple(ranges) for ranges in chunks]


def layout_parts(text: str) -> list[str]:
    """What each virtual stage holds, shorthands written out: `Et*2|tL` gives `Ett` and `tL`.

    Raises:
        ConfigError: another letter than E, t, m and L, or a shorthand that is not closed.
    """
    written = text.replace(",", "").replace(" ", "")
    for shorthand in _SHORTHANDS:
        written = shorthand.sub(lambda found: (found[1] * min(int(found[2]), _LONGEST))[:_LONGEST], written)
    if not set(written) <= set("EtmL|"):
        rule = "has another letter than E (embedding), t (layer), m (prediction layers), L (loss) and |"
        raise ConfigError(_LAYOUT, text, rule, 'write for example "Et*3|(tt|)*6tL"')
    return written.split("|")
