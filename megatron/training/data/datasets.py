"""Micro-batches of a run: megatron.core datasets of the right size, and iterators that start at any consumed sample.

The order of samples is a function of flags alone (seed, sequence length, number of samples), so the number of consumed samples
is the complete state of the data: a run resumes at the exact sample, also at another data-parallel size or micro-batch.

In order: the datasets of training, validation and test, with their indices in a cache (`build_datasets`); the samples of a rank's
micro-batches (`BatchSampler`) and their tensors (`batches`); all of it for a run (`BatchSource`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy
import torch
from megatron.core import package_info
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch import Tensor
from torch.utils.data import DataLoader

from megatron.training.cli.config import Config, DataConfig
from megatron.training.data.index_cache import CACHE_VERSION, build_with_cache
from megatron.training.data.indexed import prepare_builtin_corpus
from megatron.training.data.sources import (
    BUILTIN_SPLIT,
    DEFAULT_SPLIT,
    HEADER,
    Blend,
    DataSource,
    cache_folder,
    check_indexed_dataset,
    data_source,
    dataset_digest,
    parse_split,
)
from megatron.training.data.tokenizers import Tokenizer
from megatron.training.data.watch import WatchedFiles, WatchedSamples, start
from megatron.training.initialize import on_every_rank, on_first_rank
from megatron.training.model.layers.attention import part_of_batch
from moe_overlap.describe.errors import ConfigError

Dataset: TypeAlias = GPTDataset | BlendedDataset
PARTS = ("train", "validation", "test")
ORIGIN = "dataset_id"
"""megatron-core's key for the number of a sample's dataset in a blend."""
FIRST_SAMPLES = 4
"""Number of samples whose digest identifies the order of a text."""


@dataclass(frozen=True, slots=True)
class Datasets:
    """The three parts; a part is None if no sample of it is needed or --split leaves it out."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    source: str
    """A line for the user: the text, how it is tokenized and split."""
    digest: str
    """Identifies the content of the text; "mock" for mock data."""
    order: str
    """Identifies the first samples of training, which depend on seed, split, sequence length and number of epochs."""
    files: WatchedFiles
    """Files that the samples are read from."""


def build_datasets(
    data: DataConfig, tokenizer: Tokenizer, *, sequence_length: int, seed: int, samples: tuple[int, int, int]
) -> Datasets:
    """Datasets of a run. Collective over the default process group, which must exist when there are several processes.

    Args:
        data: the data flags; without a path and without mock data, the built-in corpus.
        tokenizer: gives end of document and vocabulary; it tokenizes the built-in corpus.
        sequence_length: tokens of a sample.
        seed: decides the order of documents and samples.
        samples: numbers needed for train, validation, test; a short text is repeated in epochs.
    Raises:
        ConfigError: on every rank, for data that are missing, corrupt, too few or not of this vocabulary, a wrong
            split, or a cache that cannot be written.
    """
    cache = cache_folder(data.data_cache_path)
    source, split, shown = _source(data, tokenizer, cache)
    parts = None
    if source.parts is not None:
        parts = [_as_pair(blend) if count else None for blend, count in zip(source.parts, samples, strict=True)]
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=_as_pair(source.all_parts),
        blend_per_split=parts,
        split=None if parts else split,
        path_to_cache=None,
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        # A causal mask needs no tensor; only masks that end at documents are built.
        create_attention_mask=data.reset_attention_mask,
    )
    # megatron-core would split mock data evenly, ignoring the flag, and build a whole epoch of parts that nobody reads.
    matrix = [(0.0, 1.0)] * len(PARTS)
    if parts is None:
        matrix = convert_split_vector_to_split_matrix([part / sum(parse_split(split)) for part in parse_split(split)])
    config.split_matrix = [part if count else None for part, count in zip(matrix, samples, strict=True)]
    on_every_rank(lambda: _check_parts(source, split, config.split_matrix, tokenizer))

    key = [
        package_info.__version__,
        CACHE_VERSION,
        seed,
        sequence_length,
        split,
        samples,
        tokenizer.unique_identifiers,
        _state(source),
    ]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if data.mock_data else GPTDataset, list(samples), lambda: True, config
    )
    train, valid, test = build_with_cache(builder, cache / "indices" / name)
    _check_lengths((train, valid, test), samples, has_parts=parts is not None)
    digest = "mock" if data.mock_data else on_first_rank(lambda: dataset_digest(source))
    order = on_first_rank(lambda: _first_samples(train))
    return Datasets(train, valid, test, shown, digest, order, WatchedFiles(source.prefixes))


def _first_samples(train: Dataset | None) -> str:
    """A digest of the first samples of a training set; megatron-core reorders a text for every number of epochs."""
    digest = hashlib.sha256()
    for number in range(0 if train is None else min(len(train), FIRST_SAMPLES)):
        digest.update(train[number]["tokens"].numpy().tobytes())  # type: ignore[index]
    return digest.hexdigest()[:16]


def _as_pair(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
    """A blend in megatron-core's form."""
    return None if blend is None else (list(blend.prefixes), list(blend.weights) if blend.weights else None)


def _source(data: DataConfig, tokenizer: Tokenizer, cache: Path) -> tuple[DataSource, str, str]:
    """The text: its blends (none for mock data), the split of a single blend, and the line for the user."""
    source = on_every_rank(lambda: data_source(data))
    split = data.split if data.split is not None else DEFAULT_SPLIT if source.all_parts else BUILTIN_SPLIT
    if source.parts is not None:
        return source, split, f"{source}, {type(tokenizer).__name__}"
    shown = f"{type(tokenizer).__name__}, {'/'.join(f'{part:g}' for part in parse_split(split))} train/valid/test"
    if data.mock_data:
        return source, split, f"mock data, {shown}"
    if source.all_parts is not None:
        return source, split, f"{source}, {shown}"
    corpus = prepare_builtin_corpus(cache, tokenizer, on_first_rank)
    text = f"Python standard library, {corpus.files:,} files, {corpus.text_bytes / 1e6:.0f} MB"
    return DataSource(all_parts=Blend((corpus.prefix,), None)), split, f"{text}, {shown}"


def _check_parts(source: DataSource, split: str, matrix: list[Any], tokenizer: Tokenizer) -> None:
    """Require files that fit together, known ids, and tokens in every needed part (without them megatron-core never ends)."""
    for prefix in source.prefixes:
        facts = check_indexed_dataset(prefix)
        lengths = numpy.memmap(prefix + ".idx", "<i4", "r", offset=HEADER.size, shape=(facts.sequences,))
        for part, blend, bounds in zip(PARTS, source.blends, matrix, strict=True):
            if bounds is None or blend is None or prefix not in blend.prefixes:
                continue
            first, last = (round(bound * facts.sequences) for bound in bounds)
            if not lengths[first:last].any():
                raise ConfigError(
                    "--split",
                    split,
                    f"leaves no text of {prefix} ({_counted(facts.sequences)}) for {part}",
                    f"give it a larger part, {_MORE if facts.sequences == 1 else ''}or evaluate nothing: --eval-iters 0",
                )
        width = {1: "u1", 2: "<u2", 4: "<i4", 8: "<i8"}[facts.bytes_per_token]
        head = numpy.memmap(prefix + ".bin", width, "r", shape=(min(facts.tokens, 1 << 20),))
        _check_vocabulary(int(head.min()), int(head.max()), tokenizer.vocab_size, prefix)


_MORE = "more documents (tools/preprocess_data.py --txt-documents line makes one of every line of a .txt), "


def _counted(documents: int) -> str:
    return "1 document" if documents == 1 else f"{documents:,} documents"


def _check_vocabulary(lowest: int, highest: int, vocab_size: int, prefix: object) -> None:
    if lowest < 0 or highest >= vocab_size:
        raise ConfigError(
            "--data-path",
            prefix,
            f"holds token id {lowest if lowest < 0 else highest}, the vocabulary has {vocab_size} ids",
            "choose the --tokenizer-type (and --vocab-size) the dataset was made with",
        )


def _state(source: DataSource) -> list[Any]:
    """Identifies the blends' content, including rewritten files, which megatron-core's own key misses."""
    files = [Path(prefix + suffix).stat() for prefix in source.prefixes for suffix in (".bin", ".idx")]
    blends = asdict(source)
    # "whole" is the key of earlier releases, whose caches stay valid.
    named = {"whole": blends["all_parts"], "parts": blends["parts"]}
    return [named, [(f.st_size, f.st_mtime_ns) for f in files]]


def _check_lengths(parts: tuple[Dataset | None, ...], samples: tuple[int, int, int], has_parts: bool) -> None:
    if samples[0] and parts[0] is None and has_parts:
        raise ConfigError("--train-data-path", "", "is missing: the parts have paths of their own", "name it as well")
    if samples[0] and parts[0] is None:
        raise ConfigError("--split", "", "leaves nothing for training", "give its first number a value")
    for name, dataset, needed in zip(PARTS, parts, samples, strict=True):
        if dataset is not None and len(dataset) < needed:
            raise ConfigError(
                "--data-path",
                "",
                f"without weights each text is read once: {len(dataset)} {name} samples, the run needs {needed}",
                "put a weight before each prefix, or train fewer steps",
            )


class BatchSampler:
    """The samples of each micro-batch of one data-parallel rank. Resumable: `consumed_samples` is the complete state.

    The stream of samples is cut into chunks of micro_batch_size · data_parallel_size; rank r takes the r-th micro-batch
    of each chunk, as Megatron does. An incomplete last chunk is dropped. The stream:
        single: 0, 1, 2, … total_samples - 1.
        cyclic: endless; epoch e is the permutation drawn from (seed, e), and a chunk may span two epochs, so that the
            stream is the same for every micro-batch and data-parallel size (upstream's is not).
    """

    def __init__(
        self,
        *,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        order: Literal["single", "cyclic"] = "single",
        seed: int = 0,
    ) -> None:
        assert total_samples > 0 and consumed_samples >= 0 and micro_batch_size > 0
        assert 0 <= data_parallel_rank < data_parallel_size
        self._total, self._consumed = total_samples, consumed_samples
        self._chunk, self._micro_batch = micro_batch_size * data_parallel_size, micro_batch_size
        self._offset = data_parallel_rank * micro_batch_size
        self._order, self._seed = order, seed

    def __iter__(self) -> Iterator[list[int]]:
        at = self._place_of(self._order)
        start = self._consumed
        while self._order == "cyclic" or start + self._chunk <= self._total:
            first = start + self._offset
            yield [at(place) for place in range(first, first + self._micro_batch)]
            start += self._chunk

    def _place_of(self, order: str) -> Callable[[int], int]:
        if order == "single":
            return lambda place: place
        epoch_of_permutation, permutation = -1, numpy.empty(0, dtype=numpy.int64)

        def shuffled(place: int) -> int:
            nonlocal epoch_of_permutation, permutation
            epoch, index = divmod(place, self._total)
            if epoch != epoch_of_permutation:
                permutation = numpy.random.default_rng([self._seed, epoch]).permutation(self._total)
                epoch_of_permutation = epoch
            return int(permutation[index])

        return shuffled


def batches(
    dataset: Dataset,
    sampler: BatchSampler,
    *,
    num_workers: int,
    seed: int,
    vocab_size: int,
    files: WatchedFiles,
    device: torch.device | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Micro-batches in the sampler's order.

    Args:
        num_workers: loader processes; 0 reads in this one.
        seed: seeds the loader's own generator; the global one, from which dropout draws, stays unchanged.
        vocab_size: the tokenizer's; a larger id would crash or corrupt the embedding.
        files: the files that the samples are read from.
    Yields:
        tokens, labels, position_ids [B, S] int64 and loss_mask [B, S] float32; with --reset-attention-mask also
        attention_mask [B, 1, S, S], true where attention is forbidden. On `device`, if it is not None.
    Raises:
        ConfigError: a token id outside the vocabulary, or a file that was cut since the run began.
    """
    on_gpu = device is not None and device.type == "cuda"
    watched: Any = WatchedSamples(dataset, files)
    loader: DataLoader[dict[str, Tensor] | ConfigError] = DataLoader(
        watched,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_stack,
        pin_memory=on_gpu,
        generator=torch.Generator().manual_seed(seed),
    )
    ahead = start(loader)
    while True:
        try:
            batch = next(ahead, None)
        except RuntimeError:  # torch's, for a killed worker: by SIGBUS if a file was truncated while it read.
            files.check_all()
            raise
        if batch is None:
            return
        if isinstance(batch, ConfigError):
            raise batch
        _check_ids(batch, dataset, batch.pop(ORIGIN), vocab_size)
        yield {k: v.to(device, non_blocking=on_gpu) for k, v in batch.items()} if device is not None else batch


def _stack(samples: list[dict[str, Any]] | ConfigError) -> dict[str, Tensor] | ConfigError:
    if isinstance(samples, ConfigError):
        return samples
    # A blend adds the number of the dataset, which is no tensor.
    stacked = {key: torch.stack([s[key] for s in samples]) for key in samples[0] if key != ORIGIN}
    return stacked | {ORIGIN: torch.tensor([int(s.get(ORIGIN, 0)) for s in samples])}


def _check_ids(batch: dict[str, Tensor], dataset: Dataset, origins_B: Tensor, vocab_size: int) -> None:
    tokens, labels = batch["tokens"], batch["labels"]
    (lowest, highest), highest_label = tokens.aminmax(), int(labels.max())
    if int(lowest) >= 0 and max(int(highest), highest_label) < vocab_size:
        return
    outside_B = ((tokens < 0) | (tokens >= vocab_size) | (labels >= vocab_size)).any(dim=1)
    origin = int(origins_B[outside_B][0])
    part = dataset.datasets[origin] if isinstance(dataset, BlendedDataset) else dataset
    prefix = getattr(part.dataset, "path_prefix", "")
    _check_vocabulary(int(lowest), max(int(highest), highest_label), vocab_size, prefix)


def unigram_entropy(dataset: Dataset | numpy.ndarray, max_tokens: int = 1 << 26) -> float:
    """Nats per token of a model that knows only the frequency of each id: the baseline for a trained loss.

    Args:
        dataset: a part (each of its documents is counted once), or an array of ids.
        max_tokens: stop after the document that reaches this many.
    """
    counts = numpy.zeros(0, dtype=numpy.int64)
    for ids in [dataset] if isinstance(dataset, numpy.ndarray) else _documents(dataset):
        longer = numpy.bincount(ids.astype(numpy.int64).reshape(-1), minlength=len(counts))
        longer[: len(counts)] += counts
        counts = longer
        if counts.sum() >= max_tokens:
            break
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * numpy.log(shares)).sum())


def _documents(dataset: Dataset) -> Iterator[numpy.ndarray]:
    for part in dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]:
        for document in part.indices:
            yield part.dataset.get(int(document))


class BatchSource:
    """Micro-batches of one data-parallel rank.

    Args:
        sequence_length: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
        total_steps, global_batch_size: determine the size of the datasets.
        data_rank, data_size: this rank's place among the replicas.
        context_rank, context_size: its place among the ranks that share a sequence.
    Raises:
        ConfigError: data that cannot be read, on every rank.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        micro_batch_size: int,
        total_steps: int,
        global_batch_size: int,
        data_rank: int,
        data_size: int,
        context_rank: int = 0,
        context_size: int = 1,
        device: torch.device,
    ) -> None:
        training = config.training
        evaluations = 1 + (total_steps // training.eval_interval if training.eval_interval else 0)
        evaluated = training.eval_iters * (training.eval_global_batch_size or global_batch_size)
        grows = training.rampup_batch_size is not None or training.step_batch_size_schedule is not None
        total_samples = (training.train_samples or 0) if grows else total_steps * global_batch_size
        self._datasets = build_datasets(
            config.data,
            tokenizer,
            sequence_length=sequence_length,
            seed=training.seed,
            samples=(total_samples, evaluations * evaluated, evaluated),
        )
        self._config, self._vocab_size, self._device = config, tokenizer.vocab_size, device
        self._micro_batch_size, self._data_rank, self._data_size = micro_batch_size, data_rank, data_size
        self._context_rank, self._context_size = context_rank, context_size
        self._entropies: dict[str, float] = {}

    @property
    def description(self) -> str:
        """A line for the user: the text, how it is tokenized and split."""
        return self._datasets.source

    @property
    def digest(self) -> str:
        """A digest of the content of the text."""
        return self._datasets.digest

    @property
    def order(self) -> str:
        """A digest of the samples that training reads first."""
        return self._datasets.order

    def unigram_entropy(self, split: str) -> float | None:
        """Nats per token of a model that knows only the frequency of each token in the split; None without text."""
        dataset: Dataset | None = getattr(self._datasets, split)
        if dataset is None or self._config.data.mock_data:
            return None
        if split not in self._entropies:
            self._entropies[split] = unigram_entropy(dataset)
        return self._entropies[split]

    def __call__(self, split: str, consumed_samples: int) -> Iterator[dict[str, Any]] | None:
        """Micro-batches of "train", "valid" or "test" from a sample on; None if the split holds none."""
        dataset: Dataset | None = getattr(self._datasets, split)
        if dataset is None:
            return None
        sampler = BatchSampler(
            total_samples=len(dataset),
            consumed_samples=consumed_samples,
            micro_batch_size=self._micro_batch_size,
            data_parallel_rank=self._data_rank,
            data_parallel_size=self._data_size,
            order=self._config.data.dataloader_type or "single",
            seed=self._config.training.seed,
        )
        sample_batches = batches(
            dataset,
            sampler,
            num_workers=self._config.data.num_workers,
            seed=self._config.training.seed,
            vocab_size=self._vocab_size,
            files=self._datasets.files,
            device=self._device,
        )
        return (part_of_batch(batch, self._context_size, self._context_rank) for batch in sample_batches)
