"""The tokenizer a run's flags ask for. No torch."""

from __future__ import annotations

from megatron.training.config import DataConfig
from megatron.training.describe import vocab_file_entries
from megatron.training.tokenizers import NullTokenizer, Tokenizer, build_tokenizer


def tokenizer_of_run(data: DataConfig) -> Tokenizer:
    """Bytes by default; with a GPT-2 --vocab-file and no type, the ids of data that are tokenized already.

    Raises:
        ConfigError: an unknown type, missing files, a vocabulary that is too small.
    """
    if data.tokenizer_type is None and data.vocab_file is not None:
        return NullTokenizer(vocab_file_entries(data.vocab_file))
    # The flag may stand in an argument file whose tokenizer a later flag has replaced; a dry run lists it as without effect.
    model = data.tokenizer_model if data.tokenizer_type == "HuggingFaceTokenizer" else None
    return build_tokenizer(data.tokenizer_type, model, data.vocab_size)
