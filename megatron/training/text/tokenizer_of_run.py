"""The tokenizer a run's flags ask for. No torch."""

from __future__ import annotations

import dataclasses

from megatron.training.config import DataConfig
from megatron.training.describe import vocab_file_entries
from megatron.training.text.tokenizers import NullTokenizer, Tokenizer, TokenizerFiles, build_tokenizer


def tokenizer_of_run(data: DataConfig) -> Tokenizer:
    """Bytes by default; with a GPT-2 --vocab-file and no type, the ids of data that are tokenized already: its entries, unless
    --vocab-size counts them.

    Raises:
        ConfigError: an unknown type, missing files, a vocabulary that is too small.
    """
    if data.tokenizer_type is None and data.vocab_file is not None:
        return NullTokenizer(data.vocab_size or vocab_file_entries(data.vocab_file))
    return build_tokenizer(data.tokenizer_type, tokenizer_files(data), data.vocab_size)


def tokenizer_files(data: DataConfig) -> TokenizerFiles:
    """The flags that name a tokenizer's files; those that the type does not read are left alone (a dry run lists them)."""
    return TokenizerFiles(**{field.name: getattr(data, field.name) for field in dataclasses.fields(TokenizerFiles)})
