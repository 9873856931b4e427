"""Optional packages: those that flags name, and libraries that megatron-core imports if they are installed.

A missing or broken one is one line before anything starts. This module imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.util

from megatron.training.cli.config import Config
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable

TOKENIZER_PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "tokenizers",
    "TikTokenizer": "tiktoken",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
}
LIBRARIES = {"transformer_engine": "transformer_engine.pytorch", "apex": "apex"}
"""Package -> what megatron-core imports of it, if it is installed."""


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


def require_importable_libraries() -> None:
    """Refuse a library that is installed and cannot be imported.

    megatron-core ends with a traceback, or does without it where this project builds layers from it. Typical causes: a build for
    another torch, or a GPU image on a machine without a driver.

    Raises:
        ConfigError: with the library's own reason.
    """
    for package, module in LIBRARIES.items():
        if not is_installed(package):
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            rule = f"is installed and cannot be imported: {printable(reason, 200)}"
            fix = f"build it for this torch and driver, or pip uninstall {package.replace('_', '-')}"
            raise ConfigError(package, "", rule, fix) from error
