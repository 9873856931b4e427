"""Optional packages that flags ask for. A missing one is reported in one line before anything starts. No torch."""

from __future__ import annotations

import importlib.util

from megatron.training.cli.config import Config
from moe_overlap.describe.errors import ConfigError

TOKENIZER_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "tokenizers",
    "TikTokenizer": "tiktoken",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
}


def packages_of(config: Config) -> tuple[tuple[str, str, str], ...]:
    """(flag, its value, package) for every optional package that a run of this configuration imports."""
    logging, tokenizer = config.logging, config.data.tokenizer_type
    requests = (
        ("--tokenizer-type", tokenizer, TOKENIZER_PACKAGES.get(tokenizer or "")),
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--wandb-project", logging.wandb_project, "wandb"),
    )
    return tuple((flag, value, package) for flag, value, package in requests if value and package)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require_package(flag: str, value: str, package: str) -> None:
    """Raise ConfigError where a package is missing."""
    if not is_installed(package):
        raise ConfigError(flag, value, f"needs the package {package}", f"pip install {package}")


def require_packages(config: Config) -> None:
    """Raise ConfigError for the first package of a run that is missing."""
    for flag, value, package in packages_of(config):
        require_package(flag, value, package)
