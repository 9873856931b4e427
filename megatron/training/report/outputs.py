"""The outputs of a run: proven writable before the first step, and never a reason to stop after it.

`prove_outputs` writes to every place that the flags name, on every rank that will write there. It checks the folder of the
checkpoints first: a run that trains for days and cannot save has trained for nothing. `Sink` writes reports later: a full disk
costs one warning and the report, not the run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.training.checkpoint.folder import leftovers, non_persistent_folder
from megatron.training.cli.config import Config
from megatron.training.cli.sizes import describe_model, known_vocab_size
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import printable
from moe_overlap.describe.model import model_parameters

_PROBE_BYTES = 4096
_FIX = "free space, correct permissions, or choose another place"


class Sink:
    """A destination of reports; its first failure is one line on stderr, and then it is silent.

    Args:
        flag: the flag that requested it, and its value.
    Attributes:
        works: whether nothing has failed so far.
    """

    def __init__(self, flag: str, place: object) -> None:
        self._name, self.works = f"{flag} {place or ''}".strip(), True

    def attempt(self, work: Callable[[], object]) -> None:
        """Do some of the sink's work, unless it has failed before."""
        if not self.works:
            return
        try:
            work()
        except Exception as error:  # A report is not worth the run, whatever a library raises in it.
            self.works = False
            reason = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
            with contextlib.suppress(OSError):
                line = f"warning: {self._name}: cannot be written: {reason}; training goes on without it"
                print(printable(line, len(line)), file=sys.stderr, flush=True)


def prove_outputs(config: Config, rank: int) -> None:
    """Write to every place of this rank's outputs, and require one folder of checkpoints for all ranks. Collective.

    Raises:
        ConfigError: on every rank: a place cannot be written, or the folder differs between nodes.
    """
    # Not imported at the top: a launcher calls `prove_places` without torch.
    from megatron.training.initialize import on_every_rank, on_first_rank

    on_every_rank(lambda: prove_places(config, rank))
    for flag, folder in _checkpoint_folders(config):
        probe = Path(on_first_rank(lambda folder=folder: str(_probe(folder))))  # type: ignore[misc]
        try:
            on_every_rank(lambda flag=flag, probe=probe: _require_shared(flag, probe))  # type: ignore[misc]
        finally:
            if rank == 0:
                probe.unlink(missing_ok=True)


def places(config: Config, rank: int) -> Iterator[tuple[str, Path, bool]]:
    """Yield flag, path and whether it is a folder, for every output of a rank; checkpoints first."""
    logging = config.logging
    for flag, folder in _checkpoint_folders(config):
        yield flag, folder, True
    suffix = f".rank{rank}" if rank else ""
    if logging.log_json is not None:
        yield "--log-json", Path(logging.log_json + suffix), False
    if rank == 0 and config.overlap.trace is not None:
        yield "--trace", Path(config.overlap.trace), False
    if rank == 0 and logging.log_expert_load is not None:
        yield "--log-expert-load", Path(logging.log_expert_load), False
    profiles = logging.profile and logging.use_pytorch_profiler and rank in logging.profile_ranks
    if logging.tensorboard_dir and (rank == 0 or profiles):
        yield "--tensorboard-dir", Path(logging.tensorboard_dir), True
    elif profiles:
        yield "--use-pytorch-profiler", Path(), True
    if rank == 0 and logging.wandb_project and logging.wandb_save_dir:
        yield "--wandb-save-dir", Path(logging.wandb_save_dir), True


def _checkpoint_folders(config: Config) -> Iterator[tuple[str, Path]]:
    flags = config.checkpoint
    if flags.save is None:
        return
    yield "--save", Path(flags.save)
    if flags.non_persistent_save_interval is not None:
        own_folder = flags.non_persistent_global_ckpt_dir
        flag = "--save" if own_folder is None else "--non-persistent-global-ckpt-dir"
        yield flag, non_persistent_folder(flags.save, own_folder)


def prove_places(config: Config, rank: int) -> None:
    """Write to every place of one rank's outputs.

    Raises:
        ConfigError: a place cannot be written.
    """
    for flag, path, is_folder in places(config, rank):
        _prove(flag, path, is_folder)
    if rank == 0:
        for flag, folder in _checkpoint_folders(config):
            _require_space(flag, folder, least_checkpoint_bytes(config))


def least_checkpoint_bytes(config: Config) -> int:
    """A lower bound of a checkpoint's bytes: weights of at least 2 bytes, and Adam's two fp32 moments."""
    model = describe_model(config, known_vocab_size(config) or 0)
    has_moments = config.optimizer.optimizer == "adam" and not config.checkpoint.no_save_optim
    return model_parameters(model).total * (2 + (8 if has_moments else 0))


def _require_space(flag: str, folder: Path, least_bytes: int) -> None:
    """Refuse a file system with less free space than a checkpoint needs; the remains of killed saves are removed first."""
    reclaimed = sum(path.stat().st_size for place in leftovers(folder) for path in place.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + reclaimed
    if free < least_bytes:
        rule = f"has {free / 1e9:.3g} GB free, and a checkpoint takes at least {least_bytes / 1e9:.3g}"
        raise ConfigError(flag, folder, rule, "make space, or choose another folder")


def _prove(flag: str, path: Path, is_folder: bool) -> None:
    """Write to one place; ConfigError if that fails."""
    try:
        folder = path if is_folder else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if is_folder or not path.exists():
            # A missing file is not created: a probe in its folder proves as much.
            _probe(folder).unlink()
        else:
            # Without O_NONBLOCK, opening a pipe without reader would wait for ever.
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise ConfigError(flag, path, f"cannot be written: {error.strerror or error}", _FIX) from None


def refused_places(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each place of the first rank that cannot be written, without creating any; for a dry run."""
    for flag, path, is_folder in places(config, 0):
        folder = (path if is_folder else path.parent).absolute()
        created = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
        try:
            _prove(flag, path, is_folder)
        except ConfigError as error:
            yield error
        for place in created:
            with contextlib.suppress(OSError):  # It was not made after all, or is in use by now.
                place.rmdir()


def _probe(folder: Path) -> Path:
    """A new file with some bytes, flushed to the device."""
    path = folder / f".probe-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        written = 0
        while written < _PROBE_BYTES:  # A full disk takes what fits, and reports the error at the next write.
            written += os.write(descriptor, bytes(_PROBE_BYTES - written))
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return path


def _require_shared(flag: str, probe: Path) -> None:
    if not probe.is_file():
        raise ConfigError(flag, probe.parent, "is not the same folder on every node", "choose a shared file system")
