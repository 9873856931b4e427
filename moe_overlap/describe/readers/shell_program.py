"""The training command of a shell script: the Python program that it starts, and its flags. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError

UNKNOWN = re.compile("\0(\\d+)\0")
"""The mark of an unknown value inside a text, with its number."""
_TRAINS = re.compile(r"train|finetune|run_\w+\.py")
_OTHERS = frozenset("echo printf mkdir cd cp mv rm ls ln cat grep sed awk chmod touch tee test source . [".split())
"""Commands that never start a training program, whatever their arguments."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command that starts a Python program."""

    line: int
    launcher: tuple[str, ...]
    program: str
    flags: tuple[str, ...]

    @property
    def num_gpus(self) -> int | None:
        """Nodes times processes per node, from torchrun's flags; None if they are missing or unknown."""
        nodes, processes = 1, None
        tokens = [part for word in self.launcher for part in word.split("=", 1)]
        for name, value in zip(tokens, tokens[1:], strict=False):
            if name.replace("_", "-") in ("--nnodes", "--nproc-per-node"):
                if not re.fullmatch(r"\d{1,7}", value):
                    return None
                nodes, processes = (int(value), processes) if "nnodes" in name else (nodes, int(value))
        return None if processes is None else nodes * processes


def script_variables(pairs: Sequence[str]) -> dict[str, str]:
    """The variables of `--set NAME=VALUE`, name to value.

    Raises:
        ConfigError: a text without a name or an equals sign.
    """
    values = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not (name and sign):
            raise ConfigError("--set", pair, "is no NAME=VALUE", f"write --set {name or 'NAME'}=VALUE")
        values[name] = value
    return values


def inner_script(tokens: list[str], document: str) -> str | None:
    """The script that a command passes to a shell: `... bash -c "SCRIPT"`, or a here-document of `sbatch` or `bash`; else
    None."""
    for place, word in enumerate(tokens):
        if re.search(r"(^|/)(ba|z|da)?sh$", word):
            option = tokens[place + 1 : place + 2]
            if option and re.fullmatch(r"-\w*c", option[0]):
                return " ".join(tokens[place + 2 : place + 3])
            return document if document and (not option or option[0] == "-s") else None
    return document if document and tokens[0] == "sbatch" else None


def started(line: int, tokens: list[str]) -> Command | None:
    """The Python program that a command starts, with its flags; None if it starts none."""
    if tokens[0] in _OTHERS:
        return None
    launches = ""
    for place, word in enumerate(tokens):
        name = word.rpartition("/")[2]
        if re.fullmatch(r"python[\d.]*|torchrun", name):
            launches = name
        elif word == "-m" and launches and tokens[place + 1 : place + 2]:
            module = tokens[place + 1]
            if not module.startswith("torch.distributed."):
                return Command(line, tuple(tokens[:place]), module, tuple(tokens[place + 2 :]))
        elif word.endswith(".py") and (launches or place == 0 or "srun" in tokens[:place] or UNKNOWN.search(word)):
            return Command(line, tuple(tokens[:place]), word, tuple(tokens[place + 1 :]))
    return None


def training_command(commands: list[Command], source: str) -> Command:
    """The training command.

    Raises:
        ConfigError: there is none, or there are several different ones.
    """
    trains = [command for command in commands if _TRAINS.search(command.program)] or commands
    if not trains:
        fix = "give the script that calls torchrun"
        raise ConfigError(source, "", "holds no command that starts a Python program", fix)
    if len({(command.program, command.flags) for command in trains}) > 1:
        lines = " and ".join(dict.fromkeys(str(command.line) for command in trains))
        fix = "leave one of them in a copy of the script"
        raise ConfigError(source, "", f"starts training in lines {lines}: which is meant is not known", fix)
    return trains[-1]
