"""What libraries say about themselves stays out of the console: a warning of ours is one line, once."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Silence the import-time remarks of torch and megatron-core (missing apex, missing Transformer Engine, spec types)."""
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\b.*")
    warnings.filterwarnings("ignore", message=r".*(Apex|apex|Transformer Engine|nvidia_resiliency|multi-storage).*")
    for name in ("megatron.core", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
