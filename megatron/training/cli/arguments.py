"""The command line of `pretrain_moe.py`: Megatron-LM's flag names and meanings, `@FILE`, later flags win. No torch.

Steps of `parse`:
    1. expand `@FILE` and older spellings, so that one flat list of arguments is left;
    2. group the arguments by flag: a later mention of a flag, or of its off switch, replaces an earlier one;
    3. put the flags of `--model FILE` in front of the written ones, which thereby win;
    4. turn the values into the fields of `Config`, and answer every upstream flag that is no field here.
`validation.py` checks what the values must fulfil together.
"""

from __future__ import annotations

import dataclasses
import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.cli.config import Config
from megatron.training.cli.flags.help import help_about
from megatron.training.cli.flags.launch import LAUNCH_FLAGS
from megatron.training.cli.flags.table import Flag, config_flags, flag_texts
from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.files import Unreadable, bounded_text, names_file, whole_number
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.describe.readers.shell_script import script_flags
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedArguments:
    """A command line that was understood."""

    config: Config
    name: str
    """The run's name: the model's of --model, else that of the first @FILE, else `model`."""
    model_notes: tuple[str, ...]
    """Lines that say where megatron-core computes otherwise than the source of the model file."""
    without_effect: tuple[tuple[str, str], ...]
    """Accepted upstream flags that change nothing here, each with the reason."""
    awaited: tuple[tuple[str, str], ...]
    """Upstream flags, with their values, that ask for what is not executed yet, each with what that is."""
    given: frozenset[str]
    """Names of the configuration flags that were written."""
    dry_run: bool
    world_size: int | None
    told: tuple[tuple[str, str], ...] = ()
    """Remarks for the user on how the command line was understood: subject and text."""
    layout_world: int | None = None
    """Processes that the layout flags are held against where a plan's stages have unlike shape: those of the first stage."""
    implied: frozenset[str] = frozenset()
    """Those names of `given` that only the file of --model states."""

    def written_fields(self) -> frozenset[str]:
        """The configuration fields ("group.field") whose flags the user wrote."""
        written = self.given - self.implied
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
    own = {name: flag for flag in config_flags() for name in (*flag.names, flag.off) if name is not None}
    upstream = load_upstream_flags()
    written = _values_by_flag(arguments, own, upstream)
    by_hand = frozenset(written)
    model = read_model(*written["--model"]) if "--model" in written else None
    if model is not None:
        written = _values_by_flag([*model.arguments, *arguments], own, upstream)
    for asked in ("--help", "-h"):
        if asked in written:
            print(help_about(next(iter(written[asked]), None)))
            raise SystemExit(0)
    if "--version" in written:
        print(VERSION_LINE)
        raise SystemExit(0)
    values: dict[str, dict[str, Any]] = {}
    without_effect: list[tuple[str, str]] = []
    unexecuted: list[tuple[str, str]] = []
    for name, texts in written.items():
        if name in own:
            flag = own[name]
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
        given=frozenset(name for name in written if name in own),
        dry_run="--dry-run" in written,
        world_size=_world_size(written) or (script_gpus(argv) if "--dry-run" in written else None),
        implied=frozenset(name for name in written if name in own and name not in by_hand),
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
"""Ends of the names of files that are read as shell scripts."""
MOST_FILES, MOST_DEPTH = 1000, 50
MOST_ARGUMENT_BYTES = 1 << 18
"""Argument files of one command line: how many, how deep they include each other, and the bytes of each."""


def expand_files(
    argv: Sequence[str], folder: Path = Path(), inside: tuple[Path, ...] = (), read: list[Path] | None = None
) -> Iterator[str]:
    """Replace each `@FILE` of a command line by the arguments in the file.

    Files are read as a shell would: quotes, comments after `#`, several arguments per line. `@OTHER` inside a file is
    relative to that file, and so is a `--plan` whose file lies beside it. A shell script gives the flags of its training command
    (`shell_script.py`).

    Args:
        folder: folder that a relative `@FILE` starts from.
        inside: the files being read, outermost first; none may include itself.
        read: every file that has been read so far; two files that name each other twice would be read without end.
    Raises:
        ConfigError: a file that cannot be read or split, is no list of flags, or includes itself; too many files.
    """
    read = [] if read is None else read
    for argument in argv:
        if "\0" in argument:  # A file can hold it, and no path or number does.
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
            words = script_flags(text, {}, argument).arguments if is_script else _beside(text, path.parent)
        except (Unreadable, OSError) as error:
            reason = str(error).removeprefix("cannot be read: ")
            raise ConfigError(argument, "", f"cannot read {path}: {reason}", "correct the path") from None
        except ValueError as error:
            raise ConfigError(argument, "", f"cannot be split into words: {error}", "close the quotation") from None
        if words and not words[0].startswith(("-", "@")):
            rule = f"begins with {words[0][:40]!r}, which is no flag"
            raise ConfigError(argument, "", rule, "give a file of Megatron flags, or a shell script (.sh)")
        yield from expand_files(words, path.parent, (*inside, path.resolve()), read)


def script_gpus(argv: Sequence[str]) -> int | None:
    """Nodes times processes per node of the last shell script among the arguments; None where no script says them.

    Raises:
        ConfigError: the script cannot be read.
    """
    found = None
    for argument in argv:
        if argument.startswith("@") and Path(argument[1:]).suffix in SCRIPTS:
            try:
                text = bounded_text(Path(argument[1:]), MOST_ARGUMENT_BYTES)
            except (Unreadable, OSError) as error:
                raise ConfigError(argument, "", f"cannot be read: {error}", "correct the path") from None
            found = script_flags(text, {}, argument).num_gpus or found
    return found


def _beside(text: str, folder: Path) -> list[str]:
    """The words of an argument file in a folder, with the path of a plan that lies there."""
    words = shlex.split(text, comments=True)
    for place, (flag, value) in enumerate(zip(words, words[1:], strict=False), 1):
        # So a folder with a plan and its flags can be moved, and the run started from anywhere.
        if flag == "--plan" and not value.startswith("--") and (folder / value).is_file():
            words[place] = str(folder / value)
    return words


def _values_by_flag(
    arguments: list[str], own: Mapping[str, Flag], upstream: Mapping[str, UpstreamFlag]
) -> dict[str, tuple[str, ...]]:
    """The values of each flag's last mention, in the order of those mentions."""
    written: dict[str, tuple[str, ...]] = {}
    position = 0
    while position < len(arguments):
        name, equals, attached = arguments[position].partition("=")
        position += 1
        if not name.startswith("-"):
            after = f" (after {next(reversed(written))})" if written else ""
            rule, word = f"a word that belongs to no flag{after}", arguments[position - 1]
            # Whoever means a file of flags forgets its @.
            fix = f"write @{word} for the flags in it" if names_file(word) else "quote values with spaces"
            raise ConfigError(word, "", rule, fix)
        texts: list[str] = [attached] if equals else []
        fewest, most = _arity(name, own, upstream)
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
        for other in _same_field(name, own):
            written.pop(other, None)
        written[name] = tuple(texts)
    return written


def _same_field(name: str, own: Mapping[str, Flag]) -> tuple[str, ...]:
    """Every name of a flag, its off switch included: a mention of any of them replaces the former mention."""
    flag = own.get(name)
    return (name,) if flag is None else (*flag.names, *([flag.off] if flag.off else []))


def _arity(name: str, own: Mapping[str, Flag], upstream: Mapping[str, UpstreamFlag]) -> tuple[int, int]:
    """Fewest and most values of a flag."""
    many = 1_000_000
    if name in COMMAND_FLAGS:
        return COMMAND_FLAGS[name]
    if name in own:
        flag = own[name]
        return (0, 0) if flag.kind == "switch" else (1, many if flag.many else 1)
    if name in upstream:
        nargs = upstream[name].nargs
        ranges = {None: (1, 1), "0": (0, 0), "+": (1, many), "*": (0, many)}
        return ranges[nargs] if nargs in ranges else (int(str(nargs)), int(str(nargs)))
    if name in DROPPED:
        raise ConfigError(name, "", "upstream has dropped this flag", DROPPED[name])
    if name in LAUNCH_FLAGS:
        raise ConfigError(name, "", "starts the ranks, which an argument file does not", "give it on the command line")
    known = sorted({*own, *COMMAND_FLAGS, *LAUNCH_FLAGS})
    near = difflib.get_close_matches(name, known, 1, 0.75) or difflib.get_close_matches(name, upstream, 1, 0.75)
    raise ConfigError(name, "", "unknown flag", f"did you mean {near[0]}?" if near else "see --help")


def _without_brackets(texts: list[str]) -> list[str]:
    """The entries of `[a b c]`, which upstream's argument lists write as one argument or as several."""
    joined = " ".join(texts).strip()
    if not (joined.startswith("[") and joined.endswith("]")):
        return texts
    return joined[1:-1].replace(",", " ").split()


def _refuse_upstream_choice(
    flag: Flag, name: str, texts: tuple[str, ...], upstream: Mapping[str, UpstreamFlag]
) -> None:
    for text in texts:
        if flag.choices is not None and text not in flag.choices:
            if (name, text) in DROPPED_CHOICES:
                raise ConfigError(name, text, "upstream has dropped this choice", DROPPED_CHOICES[name, text])
            reason = choice_refusal(name, text)
            known = upstream[name].choices if name in upstream else None
            if reason is not None and (known is None or text in known):
                raise ConfigError(name, text, f"not supported: {reason}", f"use {one_of(flag.choices)}")


def _upstream_flag(flag: UpstreamFlag, name: str, texts: tuple[str, ...]) -> tuple[str | None, bool]:
    """The reason why an upstream flag has no effect, and whether its feature is awaited; None where it asks for nothing.

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
    """An argument, or those that an older spelling stands for."""
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
