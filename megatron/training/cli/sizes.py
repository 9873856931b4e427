"""Sizes that follow from the flags, derived as upstream derives them. No torch.

In order: the global batch of every step (constant, growing evenly with --rampup-batch-size, or in steps with
--step-batch-size-schedule); the layers of each pipeline stage and virtual stage; the ranks of the parallel layout; the model.
A batch size depends only on the samples trained so far, so that a resumed run continues as if it had not stopped.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.training.cli.config import Config
from megatron.training.data.tokenizers import TIKTOKEN_VOCAB_SIZE, ByteTokenizer
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import MOST_BYTES, Unreadable, bounded_json, whole_number
from moe_overlap.describe.model import LatentAttention, ModelDescription

# The global batch

_STEPS = "--step-batch-size-schedule"
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_LONGEST_NUMBER = 20
"""Characters of a number of tokens."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes in samples; `sizes[i]` holds from `first_samples[i]` trained samples on."""

    first_samples: tuple[int, ...]
    sizes: tuple[int, ...]

    def at(self, trained_samples: int) -> int:
        """The global batch of the step that begins after so many samples."""
        return self.sizes[bisect_right(self.first_samples, trained_samples) - 1]

    def steps(self, samples: int) -> int:
        """Steps that fit into so many samples; the remainder is less than a step."""
        steps = trained = 0
        for size, end in zip(self.sizes, (*self.first_samples[1:], samples), strict=True):
            count = max(0, min(math.ceil((min(end, samples) - trained) / size), (samples - trained) // size))
            steps, trained = steps + count, trained + count * size
        return steps


def batch_sizes(config: Config, data_size: int) -> BatchSizes:
    """The global batch sizes of a configuration.

    Args:
        data_size: number of data-parallel ranks; without any flag the batch is one micro-batch on each.
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
    """The global batch for which plan and memory are sized; also that of an evaluation."""
    return max(batch_sizes(config, data_size).sizes)


def _read_steps(texts: tuple[str, ...], seq_length: int) -> Iterator[tuple[int, int]]:
    """First sample and size of each step; thresholds are tokens, with K, M, B or T for a power of a thousand."""
    rule, fix = "must be pairs of trained tokens and batch size, the first at 0", 'write for example "0:384 200B:768"'
    seen = set()
    for step in " ".join(texts).split():
        tokens, colon, size = step.partition(":")
        number, unit = (tokens[:-1], _UNITS[tokens[-1]]) if tokens[-1:] in _UNITS else (tokens, 1)
        samples = whole_number(size)
        is_number = number.isascii() and number.replace(".", "", 1).isdigit() and len(number) <= _LONGEST_NUMBER
        if not (colon and samples and is_number):
            raise ConfigError(_STEPS, step, rule, fix)
        first = math.ceil(float(number) * unit / seq_length)
        if first in seen:
            raise ConfigError(_STEPS, step, "two sizes begin at the same sample", "correct one")
        seen.add(first)
        yield first, samples
    if 0 not in seen:
        raise ConfigError(_STEPS, " ".join(texts), rule, fix)


# Layers of the pipeline's stages

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
        sizes: layers of every chunk, from `chunk_sizes`.
    """
    chunks: list[list[tuple[int, int]]] = [[] for _ in sizes]
    first = 0
    for chunk in range(len(sizes[0])):
        for stage, counts in enumerate(sizes):
            chunks[stage].append((first, first + counts[chunk]))
            first += counts[chunk]
    return [tuple(ranges) for ranges in chunks]


def layout_parts(text: str) -> list[str]:
    """The letters of each virtual stage, shorthands written out: `Et*2|tL` gives `Ett` and `tL`.

    Raises:
        ConfigError: another letter than E, t, m and L, or a shorthand that is not closed.
    """
    written = text.replace(",", "").replace(" ", "")
    for shorthand in _SHORTHANDS:
        written = shorthand.sub(lambda match: (match[1] * _repeats(match[2]))[:_LONGEST], written)
    if not set(written) <= set("EtmL|"):
        rule = "has another letter than E (embedding), t (layer), m (prediction layers), L (loss) and |"
        raise ConfigError(_LAYOUT, text, rule, 'write for example "Et*3|(tt|)*6tL"')
    return written.split("|")


def _repeats(digits: str) -> int:
    number = whole_number(digits)
    return _LONGEST if number is None else min(number, _LONGEST)


# The parallel layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """Numbers of ranks that share tensors, layers, sequences, samples and experts; and the batch they make."""

    world_size: int
    tensor: int
    pipeline: int
    virtual: int
    """Model chunks per pipeline rank."""
    context: int
    data: int
    """Copies of the attention part: world / (TP · PP · CP)."""
    expert: int
    expert_tensor: int
    expert_data: int
    """Copies of one expert: world / (PP · EP · ETP)."""
    micro_batch_size: int
    global_batch_size: int
    """The largest of the run."""
    micro_batches: int
    """Micro-batches per step and data-parallel rank."""


def uses_sequence_parallel(config: Config) -> bool:
    """Whether norms and dropout are split along the sequence: the flag is set, and there are ranks to split over."""
    return config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1


def expert_tensor_size(config: Config) -> int:
    """Ranks that share each expert's matrices; default the tensor-parallel size."""
    return config.parallel.expert_tensor_parallel_size or config.parallel.tensor_model_parallel_size


def smallest_world(config: Config) -> int:
    """The fewest processes the parallel sizes allow: PP · lcm(TP · CP, ETP · EP)."""
    parallel = config.parallel
    attention = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    experts = expert_tensor_size(config) * parallel.expert_model_parallel_size
    return parallel.pipeline_model_parallel_size * math.lcm(attention, experts)


def parallel_layout(config: Config, world_size: int) -> ParallelLayout:
    """The layout of a validated configuration on `world_size` processes."""
    parallel, training = config.parallel, config.training
    assert training.micro_batch_size is not None
    tensor, pipeline, context = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    expert, expert_tensor = parallel.expert_model_parallel_size, expert_tensor_size(config)
    data = world_size // (tensor * pipeline * context)
    global_batch = largest_batch(config, data)
    return ParallelLayout(
        world_size=world_size,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual_stages(config),
        context=context,
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
        expert_data=world_size // (pipeline * expert * expert_tensor),
        micro_batch_size=training.micro_batch_size,
        global_batch_size=global_batch,
        micro_batches=global_batch // (training.micro_batch_size * data),
    )


# The model


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of `divisible_by` · `tensor_parallel`."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def known_vocab_size(config: Config) -> int | None:
    """The vocabulary before padding, if the flags determine it; None if it is in a tokenizer's files.

    Raises:
        ConfigError: --vocab-file is there and is no vocabulary.
    """
    data = config.data
    if data.vocab_size is not None:
        return data.vocab_size
    if data.tokenizer_type == "ByteTokenizer" or (data.tokenizer_type is None and data.vocab_file is None):
        return ByteTokenizer.vocab_size
    if data.tokenizer_type == "TikTokenizer":
        return TIKTOKEN_VOCAB_SIZE
    path = data.vocab_file if data.tokenizer_type in (None, "GPT2BPETokenizer") else None
    if path is not None and Path(path).is_file():
        return vocab_file_entries(path)
    return None


def vocab_file_entries(path: str) -> int:
    """Number of entries of a GPT-2 vocab.json."""
    try:
        entries = bounded_json(path, MOST_BYTES)
    except Unreadable as error:
        raise ConfigError("--vocab-file", path, str(error), error.fix) from None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError("--vocab-file", path, "must be a JSON object of token to number", "give GPT-2's vocab.json")
    return len(entries)


def moe_layers(config: Config) -> tuple[bool, ...]:
    """One entry per layer: true where the MLP is a mixture of experts. A frequency N makes layers 0, N, 2N, ... MoE."""
    layers, frequency = config.model.num_layers, config.moe.moe_layer_freq
    assert layers is not None
    if config.moe.num_experts is None:
        return (False,) * layers
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    return tuple(bool(entry) for entry in frequency)


def windows(config: Config) -> tuple[int | None, ...]:
    """For each layer, prediction layers after the decoder's: the largest number of keys that a query attends to; None for all.

    A number N for --window-attn-skip-freq gives layers N, 2N, … of 1, 2, … no window; a list has 1 for a window.
    """
    size, frequency = config.attention.window_size, config.attention.window_attn_skip_freq
    assert config.model.num_layers is not None
    layers = config.model.num_layers + (config.model.mtp_num_layers or 0)
    if size is None or size[0] < 0:
        return (None,) * layers
    if frequency is None:
        return (size[0] + 1,) * layers
    if isinstance(frequency, int):
        frequency = tuple(int((layer + 1) % frequency != 0) for layer in range(layers))
    return tuple(size[0] + 1 if entry else None for entry in frequency)


def dense_width(config: Config) -> int:
    """Width of the dense MLP: 4 · hidden; gated, 8/3 · hidden rounded down to a multiple of 64, as in upstream."""
    model = config.model
    assert model.hidden_size is not None
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    return int((4 * model.hidden_size * 2 / 3) / 64) * 64 if model.swiglu else 4 * model.hidden_size


def describe_model(config: Config, vocab_size: int, name: str = "model") -> ModelDescription:
    """Every size of the model, derived as upstream derives it.

    Args:
        config: a validated configuration.
        vocab_size: the tokenizer's vocabulary, before padding.
        name: the model's name in plans and reports.
    """
    model, moe = config.model, config.moe
    assert model.num_layers is not None and model.hidden_size is not None and model.num_attention_heads is not None
    latent = None
    if model.multi_latent_attention:
        latent = LatentAttention(
            q_lora_rank=model.q_lora_rank,
            kv_lora_rank=model.kv_lora_rank,
            qk_head_dim=model.qk_head_dim,
            qk_pos_emb_head_dim=model.qk_pos_emb_head_dim,
            v_head_dim=model.v_head_dim,
        )
    is_moe = moe.num_experts is not None
    tensor = config.parallel.tensor_model_parallel_size
    return ModelDescription(
        name=name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=dense_width(config),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups if model.group_query_attention else model.num_attention_heads,
        kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
        vocab_size=padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tensor),
        max_position_embeddings=model.max_position_embeddings or model.seq_length or 0,
        learned_positions=model.position_embedding_type == "learned_absolute",
        tied_embeddings=not model.untie_embeddings_and_output_weights,
        rms_norm=model.normalization == "RMSNorm",
        gated=model.swiglu or model.quick_geglu,
        linear_bias=model.add_bias_linear,
        qkv_bias=model.add_bias_linear or model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        windows=windows(config),
        attention_sinks=config.attention.softmax_type == "learnable",
        moe_layers=moe_layers(config),
        num_experts=moe.num_experts or 0,
        router_topk=moe.moe_router_topk if is_moe else 0,
        moe_ffn_hidden_size=(moe.moe_ffn_hidden_size or dense_width(config)) if is_moe else 0,
        moe_latent_size=(moe.moe_latent_size or 0) if is_moe else 0,
        shared_expert_hidden_size=(moe.moe_shared_expert_intermediate_size or 0) if is_moe else 0,
        shared_expert_gate=is_moe and moe.moe_shared_expert_gate,
        expert_bias=is_moe and moe.moe_router_enable_expert_bias,
        latent_attention=latent,
        mtp_layers=model.mtp_num_layers or 0,
        parallel_block=model.parallel_attention_mlp,
    )
