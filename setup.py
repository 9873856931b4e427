"""Installs `moe_overlap` and our portion of the `megatron` namespace, beside the pinned megatron-core wheel."""

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-moe-overlap",
    version="0.1.0",
    description="A Megatron-LM fork for Mixture-of-Experts training with overlapped communication and an auto-tuner",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megatron.training*", "moe_overlap*"]),
    package_data={"moe_overlap.describe": ["*.json"], "moe_overlap.tuner.cost": ["*.json"]},
    install_requires=[
        # Later wheels ship a megatron.training of their own, which would shadow ours.
        "megatron-core==0.16.1",
        "torch>=2.11,<2.14",
        "numpy<2.4",
        "ortools",
        "pandas",
    ],
    extras_require={
        "data": ["pyarrow", "sentencepiece", "tiktoken", "tokenizers", "transformers<5"],
        "logging": ["tensorboard", "wandb"],
        "gpu": ["transformer-engine[pytorch]", "triton"],
        "dev": ["mypy", "pytest", "ruff", "setuptools", "tensorboard", "transformers<5", "wheel"],
    },
)
