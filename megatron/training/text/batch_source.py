"""Where a run's micro-batches come from: datasets of the right size, and iterators that start at any consumed sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.training.config import Config
from megatron.training.data import BatchSampler, Dataset, batches, build_datasets, unigram_entropy
from megatron.training.layers.context_parallel import part_of_batch
from megatron.training.text.tokenizers import Tokenizer


class BatchSource:
    """Micro-batches of one data-parallel rank.

    Args:
        total_steps, global_batch_size: size the datasets.
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
        total_steps: int,
        global_batch_size: int,
        data_rank: int,
        data_size: int,
        context_rank: int = 0,
        context_size: int = 1,
        device: torch.device,
    ) -> None:
        training = config.training
        assert config.model.seq_length is not None
        evaluations = 1 + (total_steps // training.eval_interval if training.eval_interval else 0)
        evaluated = training.eval_iters * (training.eval_global_batch_size or global_batch_size)
        grows = training.rampup_batch_size is not None or training.step_batch_size_schedule is not None
        total_samples = (training.train_samples or 0) if grows else total_steps * global_batch_size
        self._datasets = build_datasets(
            config.data,
            tokenizer,
            sequence_length=config.model.seq_length,
            seed=training.seed,
            samples=(total_samples, evaluations * evaluated, evaluated),
        )
        self._config, self._vocab_size, self._device = config, tokenizer.vocab_size, device
        self._data_rank, self._data_size = data_rank, data_size
        self._context_rank, self._context_size = context_rank, context_size
        self._entropies: dict[str, float] = {}

    @property
    def description(self) -> str:
        """One line: what the text is, how it is tokenized and split."""
        return self._datasets.source

    def unigram_entropy(self, split: str) -> float | None:
        """Nats per token of a model that knows only how often each token occurs in the split; None without text."""
        dataset: Dataset | None = getattr(self._datasets, split)
        if dataset is None or self._config.data.mock_data:
            return None
        if split not in self._entropies:
            self._entropies[split] = unigram_entropy(dataset)
        return self._entropies[split]

    def __call__(self, split: str, consumed_samples: int) -> Iterator[dict[str, Any]] | None:
        """Micro-batches of "train", "valid" or "test" from a sample on; None where the split holds none."""
        dataset: Dataset | None = getattr(self._datasets, split)
        if dataset is None:
            return None
        assert self._config.training.micro_batch_size is not None
        sampler = BatchSampler(
            total_samples=len(dataset),
            consumed_samples=consumed_samples,
            micro_batch_size=self._config.training.micro_batch_size,
            data_parallel_rank=self._data_rank,
            data_parallel_size=self._data_size,
            order=self._config.data.dataloader_type or "single",
            seed=self._config.training.seed,
        )
        whole = batches(
            dataset,
            sampler,
            num_workers=self._config.data.num_workers,
            seed=self._config.training.seed,
            vocab_size=self._vocab_size,
            device=self._device,
        )
        return (part_of_batch(batch, self._context_size, self._context_rank) for batch in whole)
