"""One target per format: a valid input, and the reader that must answer every other one with a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.training.checkpoint.mark import MARK, Damaged, mark_text, read_mark
from megatron.training.checkpoint.metadata_file import METADATA, Refused, read_metadata
from megatron.training.cli.arguments import parse
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import check_indexed_dataset
from moe_overlap.describe.cluster import known_gpus, load_cluster, node_group
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad, read_expert_loads
from moe_overlap.describe.files import Unreadable
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.describe.readers.shell_script import script_flags
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.trace import read_traces

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = (ConfigError, Damaged, Refused, Unreadable)
"""What a reader may raise: each is printed as one line."""


@dataclass(frozen=True, slots=True)
class Target:
    """A format.

    Attributes:
        seeds: valid inputs.
        read: reads an input from a folder that is the target's own.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]


def _from_file(folder: Path, name: str, reader: Callable[[Path], object]) -> Callable[[bytes], object]:
    def read(content: bytes) -> object:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return reader(folder / name)

    return read


def targets(folder: Path) -> tuple[Target, ...]:
    """Every target; files are written under `folder`."""
    golden = ROOT / "tests/golden"
    model = next((ROOT / "examples/models").glob("*.json")).read_bytes()
    load = ExpertLoad(1, 4, 0, 8, (5, 1, 0, 2), (0, 0, 0, 8), 1.3).to_line().encode()
    trace = {"ph": "X", "name": "expert.L0.forward", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": {"chunk": 0}}
    track = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}}
    launcher = (
        b'#!/bin/bash\n#SBATCH -N 2\nLR=1e-4,1\nrun() {\n local L=${1:-4}\n eval "torchrun train.py --x $L ${LR%%,*} $@"\n}\n'
        b'case "$M" in 7B|8*) L=32;; *) L=1 ;; esac\ncat <<EOF >log\n$(date) `id` $L\nEOF\n[[ -z $Z || 2 -gt 1 ]] && run 7 --y\n'
        b"for i in 1 2; do A+=(--z $i); done\n((L > 3 && 1)) || srun bash -c 'python p.py ${A[@]} \"$(( L*(2+1) ))\"' &\n"
    )
    script = b"A=1\nif [ $A = 1 ]; then\n ARGS=(--lr 1e-3 --num-layers $((2*2)))\nfi\ntorchrun train.py ${ARGS[@]} --seed $A\n"
    mark = mark_text({"step": 7, "order": 1, "files": {"__0_0.distcp": [1, 2]}, "progress": {"iteration": 7}})
    old_mark = json.dumps({"format": 1, "step": 7, "order": 1, "files": {"a": [1, 2]}, "layout": {"world": 2}})
    with indexed_dataset(str(folder / "seed"), 300) as writer:
        for length in (3, 1, 4):
            writer.add_document([7] * length)
    index, data = (folder / "seed.idx").read_bytes(), (folder / "seed.bin").read_bytes()

    def read_index(path: Path) -> object:
        path.with_suffix(".bin").write_bytes(data)
        return check_indexed_dataset(str(path.with_suffix("")))

    metadata, sizes = _metadata(folder)
    arguments = (
        b"--num-layers 2 --hidden-size 32 --num-attention-heads 4 # a comment\n--lr 1e-3 --moe-layer-freq '[1,0]'\n"
    )
    group = node_group(known_gpus()["H100"], 2, 8)
    cluster = json.dumps({"name": "c", "groups": [group]}).encode()
    return (
        Target(
            "mark", (mark.encode(), old_mark.encode()), _from_file(folder / "step-000007", MARK, _parent(read_mark))
        ),
        Target(
            "metadata", (metadata,), _from_file(folder / "m", METADATA, lambda path: read_metadata(path.parent, sizes))
        ),
        Target("plan", ((golden / "example_plan.json").read_bytes(),), _from_file(folder, "plan.json", load_plan)),
        Target("model", (model,), _from_file(folder, "model.json", lambda path: read_model(str(path)))),
        Target("cluster", (cluster,), _from_file(folder, "cluster.json", load_cluster)),
        Target("loads", (load + b"\n" + load,), _from_file(folder, "loads.jsonl", read_expert_loads)),
        Target(
            "trace",
            (json.dumps({"traceEvents": [track, trace]}).encode(),),
            _from_file(folder, "t.json", read_traces),
        ),
        Target(
            "script", (script, launcher), lambda content: script_flags(content.decode("utf-8", "replace"), {}, "job.sh")
        ),
        Target("arguments", (arguments,), _from_file(folder, "job.args", lambda path: parse([f"@{path}"]))),
        Target("index", (index,), _from_file(folder, "data.idx", read_index)),
    )


def _parent(reader: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: reader(path.parent)


def _metadata(folder: Path) -> tuple[bytes, dict[str, int]]:
    import tarfile

    with tarfile.open(ROOT / "tests/golden/checkpoint_format_1.tar.gz") as archive:
        archive.extractall(folder / "golden", filter="data")
    step = folder / "golden/saved/step-000002"
    files = json.loads((step / MARK).read_text())["files"]
    return (step / METADATA).read_bytes(), {name: size for name, (size, _) in files.items()}
