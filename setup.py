"""Installs `moe_overlap` and our portion of the `megatron` namespace, beside the pinned megatron-core wheel."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

VERSION_FILE = Path(__file__).parent / "moe_overlap/describe/version.py"

setup(
    name="megatron-moe-overlap",
    version=re.search(r'__version__ = "(.+)"', VERSION_FILE.read_text()).group(1),
    description="A Megatron-LM fork for Mixture-of-Experts training with overlapped communication and an auto-tuner",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Operating System :: POSIX :: Linux",
    ],
    packages=find_namespace_packages(include=["megatron.training*", "moe_overlap*"]),
    package_data={
        "moe_overlap": ["py.typed"],
        "moe_overlap.describe": ["*.json"],
        "moe_overlap.describe.readers": ["*.json"],
        "moe_overlap.tuner.calibrate.fit": ["*.json", "data/*"],
        "moe_overlap.tuner.cost": ["*.json"],
        "moe_overlap.tuner.write": ["*.sh"],
    },
    entry_points={
        "console_scripts": [
            "moe-train = moe_overlap.commands.train:run",
            "moe-predict = moe_overlap.commands.predict:main",
            "moe-tune = moe_overlap.commands.autotune:run",
            "moe-profile = moe_overlap.commands.profile_cluster:run",
            "moe-preprocess-data = moe_overlap.commands.preprocess_data:main",
            "moe-import-flags = moe_overlap.commands.import_flags:main",
            "moe-show-plan = moe_overlap.commands.show_plan:main",
            "moe-compare-losses = moe_overlap.commands.compare:compare_losses",
            "moe-compare-trace = moe_overlap.commands.compare:compare_traces",
        ]
    },
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
        "dev": [
            "mypy",
            "pip>=25",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools",
            "tensorboard",
            "transformers<5",
            "wheel",
        ],
    },
)
