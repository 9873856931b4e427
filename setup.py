"""Installs `moe_overlap` and our portion of the `megatron` namespace. Predictions need no torch; training needs the extra train.

A wheel also holds the example models, argument files and clusters, in `moe_overlap/examples`, and the captures that `make wheel`
records for the shipped models.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
EXAMPLES = ("*.args", "models/*.json", "clusters/*.json")
# Later wheels of megatron-core ship a megatron.training of their own, which would shadow ours.
TRAIN = ["megatron-core==0.16.1", "torch>=2.11,<2.14"]

# Releases that megatron-core 0.16.1 names and whose build knows CUDA 13; their torch half compiles against the installed torch.
GPU = ["transformer-engine[core_cu13,pytorch]>=2.10,<2.12", "triton"]


class BuildWithExamples(build_py):
    """Copies the examples into the package; an editable installation reads them in the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for pattern in EXAMPLES:
            for path in sorted((ROOT / "examples").glob(pattern)):
                copy = Path(self.build_lib) / "moe_overlap" / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


setup(
    name="megatron-moe-overlap",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "moe_overlap/describe/version.py").read_text()).group(1),
    description="A Megatron-LM fork for Mixture-of-Experts training with overlapped communication and an auto-tuner",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The authors of megatron-moe-overlap",
    license="Apache-2.0",
    project_urls={
        "Megatron-LM": "https://github.com/NVIDIA/Megatron-LM",
        "megatron-core": "https://pypi.org/project/megatron-core/",
    },
    python_requires=">=3.11,<3.14",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_namespace_packages(include=["megatron.training*", "moe_overlap*"], exclude=["moe_overlap.*.shipped"]),
    package_data={
        "moe_overlap": ["py.typed"],
        "moe_overlap.describe": ["*.json"],
        "moe_overlap.describe.readers": ["*.json"],
        "moe_overlap.tuner.calibrate.fit": ["*.json", "data/*"],
        "moe_overlap.tuner.capture": ["shipped/*.json"],
        "moe_overlap.tuner.cost": ["*.json"],
        "moe_overlap.tuner.write": ["*.sh"],
    },
    cmdclass={"build_py": BuildWithExamples},
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
    install_requires=["numpy<2.4", "ortools<10", "pandas<4"],
    extras_require={
        "train": TRAIN,
        "data": ["pyarrow", "sentencepiece", "tiktoken", "tokenizers", "transformers<5"],
        "logging": ["tensorboard", "wandb"],
        "gpu": GPU,
        "completion": ["shtab"],
        # All that `make` installs: to train, to test and to check.
        "dev": [
            *TRAIN,
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
