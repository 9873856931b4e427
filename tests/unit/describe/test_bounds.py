"""Tests of every reader's bounds: what would fill the memory, or never end, is refused in one line within 512 MiB.

Time is not asked for: a reader that hangs meets the limit on the processor's seconds, which is far above what any needs.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_overlap.commands.compare import read_losses
from moe_overlap.commands.import_flags import main as import_flags
from moe_overlap.commands.show_plan import load_model
from moe_overlap.describe.cluster import load_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import read_expert_loads
from moe_overlap.describe.files import MOST_BYTES, MOST_VALUES, Unreadable, plain_json
from moe_overlap.describe.model import MOST_LAYERS, require_bounded_layers
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.trace import read_traces
from moe_overlap.tuner.calibrate.interference import read_samples
from moe_overlap.tuner.profile.database import Database

MEMORY_BYTES = 512 << 20
READERS: dict[str, Callable[[Path], object]] = {
    "plan": load_plan,
    "cluster": load_cluster,
    "loads": read_expert_loads,
    "model": lambda path: read_model(str(path)),
    "described": lambda path: load_model(str(path)),
    "trace": read_traces,
    "log": read_losses,
    "database": Database.load,
    "samples": read_samples,
}
CONTENTS = {
    "deep": b'{"a":' * 200_000,
    "digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
    "hundreds of digits": b'{"num_hidden_layers": ' + b"9" * 400 + b"}",
    "no number": b'{"groups": NaN, "traceEvents": Infinity, "step": -Infinity}',
    "no text": b"\xff\xfe\x00" * 100,
    "packed": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xec\xc1\x01\x01" * 1000,
    "empty": b"",
    "control": b'{"\x1b[2J": 1}',
}


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", READERS)
def test_what_no_reader_takes_is_one_line_within_512_mebibytes(name: str, tmp_path: Path) -> None:
    for content, text in CONTENTS.items():
        (tmp_path / content).write_bytes(text)
    (tmp_path / "values").write_bytes(b"[" + b"{},[]," * (MOST_VALUES // 3) + b"[]]")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    paths = [*tmp_path.iterdir(), Path("/dev/zero"), Path("/dev/stdin/x"), tmp_path / "absent"]
    assert len(paths) == len(CONTENTS) + 8
    for path in paths:
        if (name, path.name) in (("loads", "empty"), ("log", "empty"), ("samples", "empty")):
            continue  # No lines are read as no lines.
        with bounded_memory(), pytest.raises(ConfigError) as caught:
            READERS[name](path)
        assert str(caught.value).isprintable(), path


def test_values_are_counted_before_they_are_made() -> None:
    text = "[" + "[]," * (MOST_BYTES // 3 - 1) + "[]]"
    with bounded_memory(), pytest.raises(Unreadable, match="holds more than 4000000 values"):
        plain_json(text)


def test_a_billion_layers() -> None:
    require_bounded_layers("--mtp-num-layers", MOST_LAYERS)
    require_bounded_layers("--mtp-num-layers", None)
    with pytest.raises(ConfigError, match="--mtp-num-layers 1000000000: is more than 10000; correct the value"):
        require_bounded_layers("--mtp-num-layers", 10**9)


def test_a_script_brings_no_control_characters_to_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    script.write_text("python pretrain.py --save '\x1b[2J'\n")
    assert import_flags([str(script)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {script} '\\x1b[2J': holds control characters")
