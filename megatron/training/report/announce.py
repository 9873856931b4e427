"""What a run says before its first step and after its last."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import version

import torch

from megatron.training.arguments import ParsedArguments
from megatron.training.config import Config
from megatron.training.describe import parallel_layout
from megatron.training.dry_run import layout_line, model_line
from megatron.training.flags.idle import idle_flags
from megatron.training.metrics import MetricsLog
from moe_overlap.describe.model import ModelDescription


def announce(log: MetricsLog, parsed: ParsedArguments, model: ModelDescription, world_size: int, corpus: str) -> None:
    """Environment, corpus, model, layout, what was decided between flags, and the flags that have no effect here."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    packages = f"torch {torch.__version__} ({device}), megatron-core {version('megatron-core')}"
    log.say("environment", f"python {platform.python_version()}, {packages}")
    log.say("corpus", corpus)
    log.say("model", model_line(model))
    for note in parsed.model_notes:
        log.say("not the same", note)
    log.say("layout", layout_line(parallel_layout(parsed.config, world_size), parsed.config))
    for subject, text in parsed.told:
        log.say(subject, text)
    idle = idle_flags(parsed)
    if idle:
        log.say("no effect", " ".join(name for name, _ in idle))


def announce_end(log: MetricsLog, argv: Sequence[str], config: Config, world_size: int, reason: str | None) -> None:
    """Why the run ended early, if it did, and the command that continues it.

    Args:
        argv: the words of this run's command line.
        reason: of an early end, or None.
    """
    if reason is not None:
        log.say("stopped", reason)
    if config.checkpoint.save is None:
        return
    command = f"torchrun --nproc-per-node {world_size} pretrain_moe.py {shlex.join(argv)}"
    longer = f" --train-iters {2 * (config.training.train_iters or 0)} --override-opt-param-scheduler"
    more = longer if reason is None and config.training.train_iters else ""
    log.say("next", f"{command} --load {config.checkpoint.save}{more}")
