"""The command line of `pretrain_moe.py`: Megatron-LM's flag names and meanings, `@FILE`, later flags win. No torch.

Steps of `parse`:
    1. expand `@FILE` and older spellings into one flat list of arguments;
    2. group the arguments by flag: a later mention of a flag, or of its off switch, replaces an earlier one;
    3. put the flags of `--model NAME` before the written ones, which thereby win;
    4. turn the values into the fields of `Config`, and answer every upstream flag that is no field here.
`validation.py` checks what the values must fulfil together.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.training.cli.config import Config
from megatron.training.cli.flags.help import help_about
from megatron.training.cli.flags.launch import LAUNCH_FLAGS
from megatron.training.cli.flags.table import Flag, config_flags, flag_texts
from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.files import Unreadable, bounded_text, names_file, whole_number
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.describe.readers.shell_program import AS_FLAGS
from moe_overlap.describe.readers.shell_script import VARIABLE, script_flags
from moe_overlap.describe.readers.upstream_flags import (
    DROPPED,
    DROPPED_CHOICES,
    UpstreamFlag,
    awaited,
    choice_refusal,
    load_upstream_flags,
    refusal,
    without_effect_reason,
)
from moe_overlap.describe.version import VERSION_LINE

ALIASES = {
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--moe-layer-recompute": ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe"),
    "--encoder-num-layers": ("--num-layers",),
    "--encoder-seq-length": ("--seq-length",),
    "--persistent-save-interval": ("--save-interval",),
    "--disable-fp8-wgrad": ("--no-fp8-wgrad",),
    "--disable-log-loss-scale-to-tensorboard": ("--no-log-loss-scale-to-tensorboard",),
    "--disable-ckpt-fully-parallel-save": ("--no-ckpt-fully-parallel-save",),
    "--disable-use-tokenizer-model-from-checkpoint-args": ("--no-use-tokenizer-model-from-checkpoint-args",),
}
"""Older spellings that upstream still reads -> the arguments they stand for; a value follows the last of them."""
COMMAND_FLAGS = {
    "--help": (0, 1),
    "-h": (0, 1),
    "--version": (0, 0),
    "--dry-run": (0, 0),
    "--world-size": (1, 1),
    "--model": (1, 1),
}
"""Flags of the command itself, with their number of values."""
NOT_HERE = {"--megatron-args": "write @FILE for the flags in it", "--gpu": "tools/predict.py has it"}
"""Flags of the tools that predict and tune -> what training has in their place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedArguments:
    """A command line as it was read."""

    config: Config
    name: str
    """The run's name: the model's of --model, else that of the first @FILE, else `model`."""
    model_notes: tuple[str, ...]
    """Differences between megatron-core's computation and the source of the model file, one line each."""
    without_effect: tuple[tuple[str, str], ...]
    """Accepted upstream flags that change nothing here, each with the reason."""
    awaited: tuple[tuple[str, str], ...]
    """Upstream flags, with their values, whose feature is not executed yet, each with that feature."""
    flag_names: frozenset[str]
    """Names of the configuration flags that were written."""
    dry_run: bool
    world_size: int | None
    remarks: tuple[tuple[str, str], ...] = ()
    """Lines for the user about the reading of the command line: subject and text."""
    layout_world: int | None = None
    """Processes that the layout flags describe if a plan's stages have different shapes: those of the first stage."""
    implied: frozenset[str] = frozenset()
    """The names in `flag_names` that only the file of --model contains."""

    def written_fields(self) -> frozenset[str]:
        """The configuration fields ("group.field") whose flags the user wrote."""
        written = self.flag_names - self.implied
        return frozenset(
            f"{flag.group}.{flag.field}"
            for flag in config_flags()
            if not written.isdisjoint((*flag.names, *([flag.off] if flag.off else [])))
        )


def parse(argv: Sequence[str]) -> ParsedArguments:
    """Read a command line into a configuration.

    Args:
        argv: the arguments after the program's name; `@FILE` stands for the arguments in a file.
    Raises:
        ConfigError: an unknown or refused flag, a wrong value, a file that is not there.
        SystemExit: code 0 after `--help` or `--version`.
    """
    arguments = [current for written in expand_files(argv) for current in _current_spelling(written)]
    fields = {name: flag for flag in config_flags() for name in (*flag.names, flag.off) if name is not None}
    upstream = load_upstream_flags()
    written = _values_by_flag(arguments, fields, upstream)
    by_hand = frozenset(written)
    model = read_model(*written["--model"]) if "--model" in written else None
    if model is not None:
        written = _values_by_flag([*model.arguments, *arguments], fields, upstream)
    for help_flag in ("--help", "-h"):
        if help_flag in written:
            print(help_about(next(iter(written[help_flag]), None)))
            raise SystemExit(0)
    if "--version" in written:
        print(VERSION_LINE)
        raise SystemExit(0)
    values: dict[str, dict[str, Any]] = {}
    without_effect: list[tuple[str, str]] = []
    unexecuted: list[tuple[str, str]] = []
    for name, texts in written.items():
        if name in fields:
            flag = fields[name]
            _require_values(flag, name, texts)
            _refuse_upstream_choice(flag, name, texts, upstream)
            values.setdefault(flag.group, {})[flag.field] = flag.value(name, texts)
        elif name in upstream:
            reason, is_awaited = _upstream_flag(upstream[name], name, texts)
            if reason is not None and is_awaited:
                unexecuted.append((" ".join((name, *texts)), reason))
            elif reason is not None:
                without_effect.append((name, reason))
    config = _build(values)
    if "--no-position-embedding" in written and config.model.position_embedding_type == "learned_absolute":
        rule = "--position-embedding-type is learned_absolute"
        raise ConfigError("--no-position-embedding", "", rule, "add --position-embedding-type rope or none")
    return ParsedArguments(
        config=config,
        name=model.name if model else next((Path(text[1:]).stem for text in argv if text.startswith("@")), "model"),
        model_notes=model.notes if model else (),
        without_effect=tuple(without_effect),
        awaited=tuple(unexecuted),
        flag_names=frozenset(name for name in written if name in fields),
        dry_run="--dry-run" in written,
        world_size=_world_size(written) or (script_gpus(argv) if "--dry-run" in written else None),
        implied=frozenset(name for name in written if name in fields and name not in by_hand),
    )


def config_to_flags(config: Config) -> list[str]:
    """The arguments that differ from the defaults; `parse` gives the configuration back."""
    arguments: list[str] = []
    for flag in config_flags():
        value = getattr(getattr(config, flag.group), flag.field)
        if value != flag.default:
            arguments += flag_texts(flag, value)
    return arguments


SCRIPTS = (".sh", ".sbatch", ".slurm")
"""Suffixes of files that are read as shell scripts."""
YAML = (".yaml", ".yml")
MOST_FILES, MOST_DEPTH = 1000, 50
MOST_ARGUMENT_BYTES = 1 << 18
"""Argument files of one command line: how many, how deep they include each other, and the bytes of each."""


def expand_files(
    argv: Sequence[str],
    folder: Path = Path(),
    inside: tuple[Path, ...] = (),
    read: list[Path] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Replace each `@FILE` of a command line by the arguments in the file.

    Files are read as a shell would: quotes, comments after `#`, several arguments per line. `@OTHER` inside a file is
    relative to that file, and so is a `--plan` in the same folder. A shell script gives the flags of its training command
    (`shell_script.py`).

    Args:
        folder: folder that a relative `@FILE` starts from.
        inside: the files being read, outermost first; none may include itself.
        variables: of shell scripts, name to value, in place of the environment's.
        read: every file read so far; two files that name each other twice would otherwise be read without end.
    Raises:
        ConfigError: a file that cannot be read or split, is no list of flags, or includes itself; too many files.
    """
    read = [] if read is None else read
    for argument in argv:
        if "\0" in argument:  # Possible in a file, but in no path or number.
            raise ConfigError(argument, "", "holds a NUL character", "correct the file")
        if not argument.startswith("@"):
            yield argument
            continue
        path = folder / argument[1:]
        if path.resolve() in inside:
            raise ConfigError(argument, "", "the file includes itself", "remove that line")
        if len(read) >= MOST_FILES or len(inside) >= MOST_DEPTH:
            rule = f"is one of more than {MOST_FILES} files, or {MOST_DEPTH} files deep"
            raise ConfigError(argument, "", rule, "write the flags into fewer files")
        read.append(path)
        try:
            text = bounded_text(path, MOST_ARGUMENT_BYTES)
            is_script = path.suffix in SCRIPTS
            if path.suffix in YAML:
                raise _yaml_refusal(argument, text)
            arguments = (
                script_flags(text, variables, argument).arguments if is_script else _arguments_of(text, path.parent)
            )
        except (Unreadable, OSError) as error:
            reason = str(error).removeprefix("cannot be read: ")
            raise ConfigError(argument, "", f"cannot read {path}: {reason}", "correct the path") from None
        except ValueError as error:
            raise ConfigError(argument, "", f"cannot be split into words: {error}", "close the quotation") from None
        if arguments and not arguments[0].startswith(("-", "@")):
            rule = f"begins with {arguments[0][:40]!r}, which is no flag"
            raise ConfigError(argument, "", rule, "give a file of Megatron flags, or a shell script (.sh)")
        yield from expand_files(arguments, path.parent, (*inside, path.resolve()), read, variables)


def script_gpus(argv: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> int | None:
    """Nodes times processes per node of the last shell script among the arguments; None if no script sets them.

    Raises:
        ConfigError: the script cannot be read.
    """
    gpus = None
    for argument in argv:
        if argument.startswith("@") and Path(argument[1:]).suffix in SCRIPTS:
            try:
                text = bounded_text(Path(argument[1:]), MOST_ARGUMENT_BYTES)
            except (Unreadable, OSError) as error:
                raise ConfigError(argument, "", f"cannot be read: {error}", "correct the path") from None
            gpus = script_flags(text, variables, argument).num_gpus or gpus
    return gpus


def _yaml_refusal(source: str, text: str) -> ConfigError:
    """The error for a YAML file in the place of flags."""
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    kind = "Hydra's" if keys & {"defaults", "hydra"} else "a launcher's"
    return ConfigError(source, "", f"is a YAML file, {kind} settings, which are not read", AS_FLAGS)


def _arguments_of(text: str, folder: Path) -> list[str]:
    """The arguments of an argument file, with the full path of a plan in the same folder."""
    split = shlex.split(text, comments=True)
    arguments = [part for word in split for part in (word.split("=", 1) if word.startswith("--plan=") else [word])]
    for place, (flag, value) in enumerate(zip(arguments, arguments[1:], strict=False), 1):
        # So that a folder with a plan and its flags can be moved, and the run started from anywhere.
        if flag == "--plan" and not value.startswith("--") and (folder / value).is_file():
            arguments[place] = str(folder / value)
    return arguments


def _values_by_flag(
    arguments: list[str], fields: Mapping[str, Flag], upstream: Mapping[str, UpstreamFlag]
) -> dict[str, tuple[str, ...]]:
    """The values of each flag's last occurrence, in the order of those occurrences.

    Raises:
        ConfigError: unknown flags, or words that belong to no flag, all at once; a wrong number of values.
    """
    written: dict[str, tuple[str, ...]] = {}
    unknown, stray = dict[str, None](), list[str]()
    name = preceding = ""
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("-"):
            preceding = preceding if stray else name
            stray += [] if unknown else [argument]
            continue
        name, equals, attached = argument.partition("=")
        texts: list[str] = [attached] if equals else []
        arity = _arity(name, fields, upstream)
        if arity is None:
            unknown[name] = None
            continue
        fewest, most = arity
        while not equals and len(texts) < most and position < len(arguments):
            if arguments[position].startswith("--"):
                break
            texts.append(arguments[position])
            position += 1
        if most > 1:
            texts = _without_brackets(texts)
        if len(texts) < fewest:
            raise ConfigError(name, "", "needs a value", f"write {name} VALUE")
        if len(texts) > most:
            raise ConfigError(name, attached, "takes no value", f"write {name} alone")
        for other in _same_field(name, fields):
            written.pop(other, None)
        written[name] = tuple(texts)
    if stray:
        raise _stray_words(stray, preceding)
    if unknown:
        raise _unknown_flags(tuple(unknown), fields, upstream)
    return written


def _stray_words(stray: list[str], flag: str) -> ConfigError:
    """The error for words that belong to no flag; the first stands behind `flag` and its values, which is empty if none does."""
    rule = f"a word that belongs to no flag{f' (after {flag})' if flag else ''}"
    # A user who means a file of flags often forgets its @.
    fix = f"write @{stray[0]} for the flags in it" if names_file(stray[0]) else "quote values with spaces"
    return ConfigError(", ".join(stray), "", rule, fix)


def _unknown_flags(
    names: tuple[str, ...], fields: Mapping[str, Flag], upstream: Mapping[str, UpstreamFlag]
) -> ConfigError:
    """The error for all unknown flags of a command line, with the nearest known one of each."""
    known = sorted({*fields, *COMMAND_FLAGS, *LAUNCH_FLAGS})
    near: dict[str, str] = {}
    for name in names:
        matches = difflib.get_close_matches(name, known, 1, 0.75) or difflib.get_close_matches(name, upstream, 1, 0.75)
        near |= {name: matches[0]} if matches else {}
    if len(names) == 1:
        fix = NOT_HERE.get(names[0]) or (f"did you mean {near[names[0]]}?" if near else "see --help")
        return ConfigError(names[0], "", "unknown flag", fix)
    meant = tuple(f"{near[name]} for {name}" for name in names if name in near and name not in NOT_HERE)
    parts = [f"for {name} {NOT_HERE[name]}" for name in names if name in NOT_HERE]
    parts += [f"did you mean {one_of(meant)}? Else" if meant else "see --help, or"]
    parts[-1] += " predict and tune without them by --ignore-unknown of tools/predict.py and tools/autotune.py"
    return ConfigError(", ".join(names), "", "unknown flags", "; ".join(parts))


def _same_field(name: str, fields: Mapping[str, Flag]) -> tuple[str, ...]:
    """Every name of a flag, its off switch included: each occurrence of one replaces earlier occurrences of all."""
    flag = fields.get(name)
    return (name,) if flag is None else (*flag.names, *([flag.off] if flag.off else []))


def _arity(name: str, fields: Mapping[str, Flag], upstream: Mapping[str, UpstreamFlag]) -> tuple[int, int] | None:
    """Smallest and largest number of values of a flag; None for an unknown flag."""
    many = 1_000_000
    if name in COMMAND_FLAGS:
        return COMMAND_FLAGS[name]
    if name in fields:
        flag = fields[name]
        return (0, 0) if flag.kind == "switch" else (1, many if flag.many else 1)
    if name in upstream:
        nargs = upstream[name].nargs
        ranges = {None: (1, 1), "0": (0, 0), "+": (1, many), "*": (0, many)}
        return ranges[nargs] if nargs in ranges else (int(str(nargs)), int(str(nargs)))
    if name in DROPPED:
        raise ConfigError(name, "", "upstream has dropped this flag", DROPPED[name])
    if name in LAUNCH_FLAGS:
        raise ConfigError(name, "", "starts the ranks, which an argument file does not", "give it on the command line")
    return None


def _without_brackets(texts: list[str]) -> list[str]:
    """The entries of `[a b c]`, which upstream's argument lists pass as one argument or as several."""
    joined = " ".join(texts).strip()
    if not (joined.startswith("[") and joined.endswith("]")):
        return texts
    return joined[1:-1].replace(",", " ").split()


def _require_values(flag: Flag, name: str, texts: tuple[str, ...]) -> None:
    """Refuse a variable of a shell script where a number or a choice must stand."""
    for text in texts if flag.kind != "str" or flag.choices else ():
        if unset := VARIABLE.search(text):
            variable = unset[0][2:-1]
            fix = f"write --set {variable}=VALUE for tools/predict.py, autotune.py or import_flags.py, or {name} VALUE behind it"
            raise ConfigError(name, text, f"the shell script gives {variable} no value", fix)


def _refuse_upstream_choice(
    flag: Flag, name: str, texts: tuple[str, ...], upstream: Mapping[str, UpstreamFlag]
) -> None:
    for text in texts:
        if flag.choices is not None and text not in flag.choices:
            if (name, text) in DROPPED_CHOICES:
                raise ConfigError(name, text, "upstream has dropped this choice", DROPPED_CHOICES[name, text])
            reason = choice_refusal(name, text)
            upstream_choices = upstream[name].choices if name in upstream else None
            if reason is not None and (upstream_choices is None or text in upstream_choices):
                raise ConfigError(name, text, f"not supported: {reason}", f"use {one_of(flag.choices)}")


def _upstream_flag(flag: UpstreamFlag, name: str, texts: tuple[str, ...]) -> tuple[str | None, bool]:
    """Why an upstream flag has no effect, and whether its feature is not executed yet; None if its value is the default.

    Raises:
        ConfigError: the flag is refused, or its value is none that upstream knows.
    """
    for text in texts:
        if flag.choices is not None and text not in flag.choices:
            raise ConfigError(name, text, "unknown choice", f"use {one_of(flag.choices)}")
        if choice_refusal(name, text):
            raise ConfigError(name, text, f"not supported: {choice_refusal(name, text)}", "drop the flag")
        if not flag.reads(text):
            raise ConfigError(
                name, text, f"must be a {'whole ' if flag.type == 'int' else ''}number", "correct the value"
            )
    accepted = without_effect_reason(name)
    if accepted is not None:
        return accepted, False
    if flag.is_default(texts):
        return None, False
    feature = awaited(name)
    if feature is not None:
        return feature, True
    refused = refusal(name)
    assert refused is not None, name
    raise ConfigError(" ".join((name, *texts)), "", f"not supported: {refused[0]}", refused[1])


def _current_spelling(argument: str) -> tuple[str, ...]:
    """An argument, or the current arguments for an older spelling."""
    name, equals, value = argument.partition("=")
    current = ALIASES.get(name, (name,))
    return (*current[:-1], current[-1] + equals + value)


def _build(values: Mapping[str, Mapping[str, Any]]) -> Config:
    groups = {group.name: group.default_factory for group in dataclasses.fields(Config)}
    assert all(factory is not dataclasses.MISSING for factory in groups.values())
    return Config(**{group: factory(**values.get(group, {})) for group, factory in groups.items()})  # type: ignore[operator]


def _world_size(written: Mapping[str, tuple[str, ...]]) -> int | None:
    if "--world-size" not in written:
        return None
    text = written["--world-size"][0]
    if "--dry-run" not in written:
        raise ConfigError("--world-size", text, "torchrun sets it", "use torchrun --nproc-per-node N")
    number = whole_number(text)
    if not number:
        raise ConfigError("--world-size", text, "must be a positive whole number", "correct the value")
    return number
