"""One target per format: valid inputs, how others are made of them, and the reader that must answer each with a line.

The table of formats, readers and targets stands in SECURITY.md; `test_fuzz.py` compares it with the targets.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy
import torch

from megatron.training.checkpoint.checkpointing import random_states
from megatron.training.checkpoint.folder import Stored
from megatron.training.checkpoint.loader import decoded_states, encoded_states, index_of, plain_object
from megatron.training.checkpoint.lock import LOCK, owner_of
from megatron.training.checkpoint.mark import MARK, Damaged, mark_text, read_mark
from megatron.training.checkpoint.metadata_file import METADATA, Refused, read_metadata
from megatron.training.cli.arguments import parse
from megatron.training.cli.config import DataConfig
from megatron.training.cli.sizes import vocab_file_entries
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import check_indexed_dataset, data_source
from megatron.training.data.tokenizers import TokenizerFiles, build_tokenizer
from moe_overlap.commands.compare import compare_losses, compare_traces
from moe_overlap.commands.import_flags import main as import_flags
from moe_overlap.commands.preprocess_data import read_documents, texts_of
from moe_overlap.commands.profile_cluster import Ranks
from moe_overlap.commands.show_plan import load_model
from moe_overlap.commands.show_plan import main as show_plan
from moe_overlap.commands.train import place_among_ranks
from moe_overlap.describe.cluster import known_gpus, load_cluster, node_group
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import ExpertLoad, read_expert_loads, shares_by_layer
from moe_overlap.describe.files import Unreadable
from moe_overlap.describe.readers.model_file import read_model
from moe_overlap.plan.serialize import load_plan
from moe_overlap.plan.trace import read_traces
from moe_overlap.tuner.calibrate.interference import read_samples
from moe_overlap.tuner.capture.cache import CorruptFileError, load_captured
from moe_overlap.tuner.cost.hardware import Refined
from moe_overlap.tuner.profile.database import Database, Device, LinkKey, OperatorKey
from tests.fuzz.mutate import (
    Mutation,
    archive_changed,
    bytes_changed,
    calls_inserted,
    either,
    json_changed,
    lines_changed,
    packed,
)

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = (ConfigError, Damaged, Refused, Unreadable, CorruptFileError)
"""Errors that a reader may raise: each is printed as one line."""
JSON, LINES = either(bytes_changed, json_changed, json_changed), either(bytes_changed, lines_changed, lines_changed)
Read = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Target:
    """A format.

    Attributes:
        seeds: valid inputs.
        read: reads an input from a folder that is the target's own.
        change: makes an input of a seed.
        weight: how often the target is drawn; slow readers get fewer inputs.
        is_command: whether `read` is a whole command, whose status counts too.
        prints_numbers: whether what it prints is its own figures, none of which may be no number.
    """

    name: str
    seeds: tuple[bytes, ...]
    read: Read
    change: Mutation = bytes_changed
    weight: float = 1.0
    is_command: bool = False
    prints_numbers: bool = False


def targets(folder: Path) -> tuple[Target, ...]:
    """Every target; files are written under `folder`."""
    return (
        *_flags(folder / "flags"),
        *_jobs(folder / "jobs"),
        *_measurements(folder / "measurements"),
        *_checkpoints(folder / "checkpoints"),
        *_data(folder / "data"),
    )


def from_file(folder: Path, name: str, reader: Callable[[Path], object]) -> Read:
    """A reader of bytes from the reader of a file."""
    folder.mkdir(parents=True, exist_ok=True)

    def read(content: bytes) -> object:
        (folder / name).write_bytes(content)
        return reader(folder / name)

    return read


# Flags: what is written by hand


def _flags(folder: Path) -> tuple[Target, ...]:
    script = b"A=1\nif [ $A = 1 ]; then\n ARGS=(--lr 1e-3 --num-layers $((2*2)))\nfi\ntorchrun train.py ${ARGS[@]} --seed $A\n"
    launcher = (
        b'#!/bin/bash\n#SBATCH -N 2\nLR=1e-4,1\nrun() {\n local L=${1:-4}\n eval "torchrun train.py --x $L ${LR%%,*} $@"\n}\n'
        b'case "$M" in 7B|8*) L=32;; *) L=1 ;; esac\ncat <<EOF >log\n$(date) `id` $L\nEOF\n[[ -z $Z || 2 -gt 1 ]] && run 7 --y\n'
        b"for i in 1 2; do A+=(--z $i); done\n((L > 3 && 1)) || srun bash -c 'python p.py ${A[@]} \"$(( L*(2+1) ))\"' &\n"
    )
    published = (ROOT / "tests/golden/train_moe.sh").read_bytes()
    arguments = (
        b"--num-layers 2 --hidden-size 32 --num-attention-heads 4 # a comment\n--lr 1e-3 --moe-layer-freq '[1,0]'\n"
    )
    environment = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    blend = b"0.3 data/a 0.7 data/b\n"
    parts = {"train": ["0.3", "data/a", 0.7, "data/b"], "valid": ["data/c"]}
    scripts = from_file(folder, "job.sh", lambda path: import_flags([str(path)]))
    return (
        Target("script", (script, launcher, published), scripts, is_command=True),
        Target("arguments", (arguments,), from_file(folder, "job.args", lambda path: parse([f"@{path}"]))),
        Target("environment", (json.dumps(environment).encode(),), _environment, JSON),
        Target(
            "blend",
            (blend,),
            from_file(folder, "blend", lambda path: data_source(DataConfig(data_args_path=str(path)))),
        ),
        Target(
            "parts",
            (json.dumps(parts).encode(),),
            from_file(folder, "parts", lambda path: data_source(DataConfig(per_split_data_args_path=str(path)))),
            JSON,
        ),
    )


def _environment(content: bytes) -> object:
    """The variables of a launcher, in JSON; a system takes no other text."""
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        return None
    variables = {str(key): str(value).replace("\0", "") for key, value in given.items()} if type(given) is dict else {}
    with patch.dict(os.environ, _settable(variables)):
        place_among_ranks(os.environ)
        return Ranks.of_environment()


def _settable(variables: Mapping[str, str]) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value.encode("utf-8", "replace").decode() for name, value in variables.items() if name in names}


# Jobs: models, machines, plans


def _jobs(folder: Path) -> tuple[Target, ...]:
    golden = ROOT / "tests/golden"
    models = tuple(path.read_bytes() for path in sorted((ROOT / "examples/models").glob("*.json"))[:4])
    configs = json.loads((golden / "hugging_face_configs.json").read_bytes()).values()
    plans = tuple((golden / f"{name}.json").read_bytes() for name in ("example_plan", "pp2_ep2", "pp2_ep2_partitioned"))
    described = (golden / "pp2_ep2_model.json").read_bytes()
    group = node_group(known_gpus()["H100"], 2, 8)
    cluster = json.dumps({"name": "c", "groups": [group]}).encode()
    model_of_plan = folder / "pp2_ep2_model.json"
    folder.mkdir(parents=True, exist_ok=True)
    model_of_plan.write_bytes(described)

    def listed(path: Path) -> object:
        return show_plan([str(path), "--model", str(model_of_plan), "--list", "--rank", "0"])

    return (
        Target("model", models, from_file(folder, "model.json", lambda path: parse(["--model", str(path)])), JSON),
        Target(
            "config",
            tuple(json.dumps(config).encode() for config in configs),
            from_file(folder, "config.json", lambda path: read_model(str(path), is_predicted=True)),
            JSON,
        ),
        Target(
            "described", (described,), from_file(folder, "described.json", lambda path: load_model(str(path))), JSON
        ),
        Target("cluster", (cluster,), from_file(folder, "cluster.json", load_cluster), JSON),
        Target("plan", plans, from_file(folder, "plan.json", load_plan), JSON),
        Target(
            "shown",
            plans,
            from_file(folder, "shown.json", lambda path: show_plan([str(path)])),
            json_changed,
            0.3,
            is_command=True,
        ),
        Target("listed", plans[1:], from_file(folder, "listed.json", listed), json_changed, 0.2, is_command=True),
    )


# Measurements: what programs wrote


def _measurements(folder: Path) -> tuple[Target, ...]:
    load = ExpertLoad(1, 4, 0, 8, (5, 1, 0, 2), (0, 0, 0, 8), 1.3).to_line().encode()
    span = {"ph": "X", "name": "expert.L0.forward", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0, "args": {"chunk": 0}}
    track = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "compute"}}
    other = {
        **span,
        "name": "attention.L0.backward",
        "ts": 3.5,
        "args": {"chunk": 0, "micro_batch": 1, "partition": [0]},
    }
    trace = json.dumps({"traceEvents": [track, span, other], "otherData": {"job": "j"}}).encode()
    log = b"".join(
        json.dumps({"step": step, "loss": 4.0 / step, "lr": 1e-3, "grad_norm": 1.0}).encode() + b"\n"
        for step in range(1, 5)
    )
    own_trace, own_log = folder / "own.json", folder / "own.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    own_trace.write_bytes(trace)
    own_log.write_bytes(log)
    rows = (
        "source_path,model,gpu,n_gpus,stage_config_json,metric,value,unit,split",
        *(
            f'a.json,m,l4,8,"{{""N"":{n},""g2g_allgather_MB"":0,""h2d_MB"":{h},""d2h_MB"":0,""intra"":2,""inter"":1,'
            f'""std_over_mean"":""0.01""}}",concurrent_latency,0.3,s,{split}'
            for n, h, split in ((4096, 0, "calibration"), (0, 512, "test"))
        ),
    )
    samples = gzip.compress("\n".join(rows).encode(), mtime=0)
    recorded = (ROOT / "tests/golden/sharding_whole.json").read_bytes()
    return (
        Target(
            "loads",
            (load + b"\n" + load,),
            from_file(folder, "loads.jsonl", lambda path: shares_by_layer(read_expert_loads(path))),
            LINES,
        ),
        Target("trace", (trace, gzip.compress(trace)), from_file(folder, "t.json", read_traces), _json_or_bytes),
        Target(
            "traces",
            (trace,),
            from_file(folder, "with.json", lambda path: compare_traces([str(own_trace), str(path)])),
            json_changed,
            is_command=True,
            prints_numbers=True,
        ),
        Target(
            "log",
            (log,),
            from_file(folder, "log.jsonl", lambda path: compare_losses([str(own_log), str(path), "--json"])),
            LINES,
            is_command=True,
            prints_numbers=True,
        ),
        Target("database", (_database(folder),), from_file(folder, "database.jsonl", Database.load), LINES),
        Target("samples", (samples,), from_file(folder, "samples.csv.gz", read_samples), packed(bytes_changed)),
        Target(
            "capture",
            (recorded,),
            from_file(folder, "capture.json", load_captured),
            bytes_changed,
            0.3,
        ),
        Target(
            "captured", (recorded.partition(b"\n")[2],), from_file(folder, "signed.json", _signed_capture), JSON, 0.3
        ),
    )


def _signed_capture(path: Path) -> object:
    """A capture whose first line is the hash of what follows, whatever that is."""
    body = path.read_bytes().rstrip(b"\n")
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n")
    return load_captured(path)


def _json_or_bytes(seed: bytes, draw: object) -> bytes:
    change: Mutation = JSON if seed.startswith(b"{") else packed(JSON)
    return change(seed, draw)  # type: ignore[arg-type]


def _database(folder: Path) -> bytes:
    database = Database.open(folder / "measured.jsonl", Device("cpu", "a processor", 1, "2.13.0"))
    database.add_operator(OperatorKey("gemm", "forward", "float32", (8, 8, 8)), 1e-5)
    database.add_operator(OperatorKey("add", "forward", "float32", (64, 2)), 1e-6)
    database.add_link(LinkKey("all_to_all", "node", 2, 1024), 1e-4)
    database.add_rate("product_flops", 1e10)
    database.add_job("j", Refined({("moe.experts", True): 2.0}, {"copy": 1e-5}))
    return database.path.read_bytes()


# Checkpoints


def _calls() -> tuple[bytes, ...]:
    """Opcodes that call a function, by every way a pickle has."""
    stack = b"\x8c\x10tests.fuzz.guard\x8c\x06canary\x93"
    old = b"ctests.fuzz.guard\ncanary\n"
    text = b"\x8c\x2bimport tests.fuzz.guard as g; g.canary('by')"
    return (
        old + b")R0",
        stack + b")R0",
        old + b")R",
        stack + b"]\x8c\x01a\x85R",
        b"cbuiltins\nexec\n" + text.replace(b"\x2b", bytes([len(text) - 2])) + b"\x85R0",
        b"cbuiltins\neval\n\x8c\x2b__import__('tests.fuzz.guard').fuzz.guard.canary()"[:0] + old + b"(tR0",
        b"ctests.fuzz.guard\ncanary\n)\x81",
        b"(itests.fuzz.guard\ncanary\n0",
        b"(" + old + b"o0",
        b"ctorch.storage\n_load_from_bytes\nC\x04abcd\x85R0",
        b"cposix\nsystem\nX\x04\x00\x00\x00true\x85R0",
    )


def _checkpoints(folder: Path) -> tuple[Target, ...]:
    mark = mark_text({"step": 7, "order": 1, "files": {"__0_0.distcp": [1, 2]}, "progress": {"iteration": 7}})
    old_mark = json.dumps({"format": 1, "step": 7, "order": 1, "files": {"a": [1, 2]}, "layout": {"world": 2}})
    with tarfile.open(ROOT / "tests/golden/checkpoint_format_1.tar.gz") as archive:
        archive.extractall(folder / "golden", filter="data")
    step = folder / "golden/saved/step-000002"
    golden_mark = (step / MARK).read_bytes()
    files = json.loads(golden_mark)["files"]
    sizes = {name: size for name, (size, _) in files.items()}
    metadata, backend = (step / METADATA).read_bytes(), (step / "metadata.json").read_bytes()
    calls = calls_inserted(_calls())
    owner = {"host": "h", "space": "s", "process": 7, "started": 8, "since": "2026-01-01"}

    def state(content: bytes) -> object:
        loaded = plain_object(io.BytesIO(content), "random_states")
        try:
            return decoded_states(loaded[0] if type(loaded) is list and loaded else loaded)
        except (KeyError, TypeError, ValueError):  # The caller turns these into a line.
            return None

    return (
        Target(
            "mark",
            (mark.encode(), old_mark.encode(), golden_mark),
            from_file(folder / "step-000007", MARK, lambda path: read_mark(path.parent)),
            either(bytes_changed, json_changed, _marked_anew, _marked_anew),
        ),
        Target(
            "metadata",
            (metadata,),
            from_file(folder / "m", METADATA, lambda path: read_metadata(path.parent, sizes)),
            calls,
            0.5,
        ),
        Target("states", (_saved_states(), _old_states()), state, either(archive_changed, calls)),
        Target(
            "common",
            (_saved({}),),
            lambda content: plain_object(io.BytesIO(content), "common"),
            either(archive_changed, calls),
        ),
        Target(
            "backend",
            (backend,),
            from_file(step, "metadata.json", lambda path: index_of(Stored(path.parent, 2, 1, json.loads(golden_mark)))),
            JSON,
            0.3,
        ),
        Target("lock", (json.dumps(owner).encode(),), from_file(folder / "locked", LOCK, owner_of), JSON),
    )


def _marked_anew(seed: bytes, draw: object) -> bytes:
    """A completion mark with other entries, and the right checksum of them."""
    content = json_changed(seed, draw)  # type: ignore[arg-type]
    try:
        entries = json.loads(content)
        entries.pop("checksum", None)
        entries.pop("format", None)
        return mark_text(entries).encode()
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return content


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _saved_states() -> bytes:
    return _saved([encoded_states(random_states())])


def _old_states() -> bytes:
    """States as format 1 wrote them, by the serialization of old that is a bare pickle."""
    file = io.BytesIO()
    state = {
        **random_states(),
        "numpy": ("MT19937", numpy.arange(8, dtype=numpy.uint32), 1, 0, 0.0),
        "python": (3, (1, 2), None),
    }
    torch.save([state], file, _use_new_zipfile_serialization=False, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()


# Data and tokenizers


def _data(folder: Path) -> tuple[Target, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    with indexed_dataset(str(folder / "seed"), 300) as writer:
        for length in (3, 1, 4):
            writer.add_document([7] * length)
    index, tokens = (folder / "seed.idx").read_bytes(), (folder / "seed.bin").read_bytes()

    def with_tokens(path: Path) -> object:
        path.with_suffix(".bin").write_bytes(tokens)
        return check_indexed_dataset(str(path.with_suffix("")))

    def with_index(path: Path) -> object:
        path.with_suffix(".idx").write_bytes(index)
        return check_indexed_dataset(str(path.with_suffix("")))

    def documents(path: Path) -> object:
        return [texts_of(document, ["text"]) for document in read_documents([str(path)], "line", ["text"])]

    lines = b'{"text": "a line"}\n{"text": "another \\u00fc", "n": [1, 2.5]}\n'
    vocab = json.dumps({**{chr(0x100 + i): i for i in range(20)}, "<|endoftext|>": 20, "\u0100\u0101": 21}).encode()
    merges = "#version: 0.2\n\u0100 \u0101\n".encode()
    (folder / "merges.txt").write_bytes(merges)
    (folder / "vocab.json").write_bytes(vocab)

    def from_vocab(path: Path) -> object:
        vocab_file_entries(str(path))
        return build_tokenizer("GPT2BPETokenizer", TokenizerFiles(None, str(path), str(folder / "merges.txt")), None)

    def from_merges(path: Path) -> object:
        return build_tokenizer("GPT2BPETokenizer", TokenizerFiles(None, str(folder / "vocab.json"), str(path)), None)

    return (
        Target("index", (index,), from_file(folder, "data.idx", with_tokens)),
        Target("tokens", (tokens,), from_file(folder, "tokens.bin", with_index), weight=0.3),
        Target("documents", (lines,), from_file(folder, "text.jsonl", documents), LINES),
        Target(
            "packed",
            (gzip.compress(lines, mtime=0),),
            from_file(folder, "text.jsonl.gz", documents),
            packed(LINES),
            0.5,
        ),
        Target("vocabulary", (vocab,), from_file(folder, "changed.json", from_vocab), JSON, 0.3),
        Target("merges", (merges,), from_file(folder, "changed.txt", from_merges), weight=0.3),
    )
