"""The state of every random-number generator of a process."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_states() -> dict[str, Any]:
    """Python, numpy, torch on the host and on the GPU, and megatron-core's named streams."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue where `random_states` was called; a GPU's state is set where there is one on both sides."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
