"""Modules that every process of tests.spawn needs, imported once: by the server that they are forked from.

The server starts no thread and touches no device: whether there is one is asked of the driver's library alone.
"""

from __future__ import annotations

import gc
import importlib
import os

from megatron.training import cpu_backend
from megatron.training.cli.start import quiet_libraries

MODULES = (
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
)

os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the program itself does before it imports torch (moe_overlap/commands/train.py).
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
quiet_libraries()
if cpu_backend.is_needed():
    cpu_backend.install()
for module in MODULES:
    importlib.import_module(module)
# No collection of a process walks through what the libraries have made, or copies its pages.
gc.freeze()
