"""`--help`: the topics and the flags that most runs need; `--help TOPIC`: the flags of one topic; `--help all`: all of them.

A topic is a group of the configuration (`cli/config.py`), or `launch`: the start of the ranks. No torch.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence

from megatron.training.cli.config import Config
from megatron.training.cli.flags.launch import LAUNCH_IS, launch_help
from megatron.training.cli.flags.table import USAGE, config_flags, field_docs, flag_lines, help_text
from moe_overlap.describe.errors import ConfigError

ALL, LAUNCH = "all", "launch"
NEEDED = (
    "--data-path --tokenizer-type --seq-length --micro-batch-size --global-batch-size --train-iters --lr --bf16 "
    "--tensor-model-parallel-size --pipeline-model-parallel-size --expert-model-parallel-size --moe-gate "
    "--moe-token-dispatcher-type --moe-overlap-partitions --plan --save --load --log-interval --trace"
).split()
"""Flags that most runs have, in the order in which `--help` shows them."""
HEAD = 12
"""Columns of a topic's name."""


def help_about(topic: str | None) -> str:
    """The answer to `--help`, alone or with a topic.

    Raises:
        ConfigError: there is no such topic.
    """
    about = {name: str(group.__doc__) for name, group in typing.get_type_hints(Config).items()}
    if topic is None:
        lines = [f"  {name:<{HEAD}}{text}" for name, text in {LAUNCH: LAUNCH_IS, **about}.items()]
        shown = _lines_of(NEEDED)
        topics = ["topics of --help TOPIC (--help all: every flag)", *lines]
        return "\n".join([USAGE, "flags that most runs need", *shown, "", *topics])
    if topic == ALL:
        return help_text()
    if topic == LAUNCH:
        return launch_help().rstrip()
    if topic not in about:
        raise ConfigError("--help", topic, "is no topic", f"use {', '.join((LAUNCH, *about))} or {ALL}")
    names = [flag.names[0] for flag in config_flags() if flag.group == topic]
    return "\n".join([about[topic], *_lines_of(names)])


def _lines_of(names: Sequence[str]) -> list[str]:
    """Flags and what each does, in the order of their names."""
    docs, groups = field_docs(), typing.get_type_hints(Config)
    flags = {name: flag for flag in config_flags() for name in flag.names}
    chosen = [flags[name] for name in names]
    return [line for flag in chosen for line in flag_lines(flag, docs[groups[flag.group].__name__, flag.field])]
