"""The training command of a shell script: the Python program that it starts, and its flags. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_overlap.describe.errors import ConfigError

UNKNOWN = re.compile("\0(\\d+)\0")
"""The mark of an unknown value inside a text, with its number."""
_TRAINS = re.compile(r"train|finetune|run_\w+\.py")
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
"""Programs that start a Python program named among their arguments; `uv run` does as well."""
_WRAPPERS = frozenset("srun mpirun exec env nohup time timeout numactl".split())
"""Programs that start the command among their arguments, whatever it is."""
OTHER_LAUNCHERS: Mapping[str, str] = {
    "primus-cli": "the experiment in a YAML file",
    "primus": "the experiment in a YAML file",
    "flagscale": "the configuration in YAML files",
    "nemo": "a recipe in Python",
    "nemorun": "a recipe in Python",
    "llamafactory-cli": "a YAML file",
    "swift": "its own arguments",
    "axolotl": "a YAML file",
}
"""Launchers that hide the training command -> where their settings stand."""
_DIALECTS = (("megatron", "sft"), ("megatron", "pt"), ("megatron", "rlhf"))
"""Launchers with the flags of Megatron-LM in another spelling: `--x_y true` is --x-y."""
_HYDRA = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@]*=.*", re.DOTALL)
"""An override of Hydra: `model.num_layers=4`."""
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
    """The Python program that a command starts, with its flags; None if it starts none.

    A launcher that hides the program is the command's first word, or stands behind a wrapper such as `srun`. There it may be the
    value of the wrapper's flag (`srun --job-name nemo python train.py`): a program that follows it then counts.
    """
    if tokens[0] in _OTHERS:
        return None
    launches, is_wrapped, hidden, previous = "", False, None, ""
    for place, word in enumerate(tokens):
        name = word.rpartition("/")[2]
        if _LAUNCHERS.fullmatch(name) or (word == "run" and previous == "uv"):
            launches = name
        elif (name, *tokens[place + 1 : place + 2]) in _DIALECTS:
            return Command(
                line, tuple(tokens[:place]), f"{name} {tokens[place + 1]}", _from_dialect(tokens[place + 2 :])
            )
        elif name in OTHER_LAUNCHERS and (place == 0 or (is_wrapped and not launches and hidden is None)):
            hidden = Command(line, (), name, tuple(tokens[place + 1 :]))
            if place == 0 or not tokens[place - 1].startswith("-"):
                return hidden
        elif word in _OTHERS and is_wrapped and not launches and not tokens[place - 1].startswith("-"):
            return hidden
        elif word == "-m" and launches and tokens[place + 1 : place + 2]:
            module = tokens[place + 1]
            if not module.startswith("torch.distributed."):
                return Command(line, tuple(tokens[:place]), module, tuple(tokens[place + 2 :]))
        elif word.endswith(".py") and (launches or place == 0 or is_wrapped or UNKNOWN.search(word)):
            return Command(line, tuple(tokens[:place]), word, tuple(tokens[place + 1 :]))
        is_wrapped |= name in _WRAPPERS
        previous = previous if word.startswith("-") else name
    return hidden


def training_command(commands: list[Command], source: str) -> Command:
    """The training command.

    Raises:
        ConfigError: there is none, or there are several different ones.
    """
    trains = [command for command in commands if _TRAINS.search(command.program)] or commands
    if not trains:
        fix = "give the script that calls torchrun"
        raise ConfigError(source, "", "holds no command that starts a Python program", fix)
    hidden = trains[-1]
    if hidden.program in OTHER_LAUNCHERS:
        rule = f"starts {hidden.program}, which takes {OTHER_LAUNCHERS[hidden.program]} and no flags of Megatron-LM"
        raise ConfigError(f"{source} line {hidden.line}", "", rule, AS_FLAGS)
    is_hydra = sum(bool(_HYDRA.fullmatch(word)) for word in hidden.flags) * 2 > len(hidden.flags)
    if hidden.flags and (is_hydra or any(word.startswith("--config-") for word in hidden.flags)):
        rule = f"starts {hidden.program} with Hydra's settings (a.b=c), not with flags of Megatron-LM"
        raise ConfigError(f"{source} line {hidden.line}", "", rule, AS_FLAGS)
    if len({(command.program, command.flags) for command in trains}) > 1:
        lines = " and ".join(dict.fromkeys(str(command.line) for command in trains))
        fix = "leave one of them in a copy of the script"
        raise ConfigError(source, "", f"starts training in lines {lines}: which is meant is not known", fix)
    return trains[-1]


AS_FLAGS = "write its settings into a file of flags (num_layers: 4 is --num-layers 4); the model may come by --model config.json"
"""The fix for settings that are no flags of Megatron-LM."""


def _from_dialect(arguments: Sequence[str]) -> tuple[str, ...]:
    """Flags as Megatron-LM spells them: dashes for underscores, a switch for `true`, nothing for `false`."""
    flags: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            name, sign, value = word.partition("=")
            flags += [name.replace("_", "-"), *([value] if sign else [])]
        else:
            flags.append(word)
        if flags[-1] == "true":
            del flags[-1]
        elif flags[-1] == "false" and len(flags) > 1:
            del flags[-2:]
    return tuple(flags)
