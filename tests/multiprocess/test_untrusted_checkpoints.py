"""Checkpoints that somebody else may have written: a save of format 1 resumes, and nothing in a folder is executed."""

from __future__ import annotations

import json
import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.checkpoint_runs import Steps, train
from tests.spawn import run

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_format_1.tar.gz"
MODEL = """
    --num-layers 1 --hidden-size 24 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0.1
    --hidden-dropout 0.1 --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 16
    --moe-token-dispatcher-type alltoall
"""
FLAGS = (
    "--micro-batch-size 2 --lr 1e-2 --min-lr 0 --lr-decay-style constant --weight-decay 0.01"
    " --make-vocab-size-divisible-by 1"
)
LOSSES = {3: 5.438208818435669, 4: 5.410690784454346}
"""Losses of the run that saved the golden checkpoint, after its save; dropout is on, so they need the random-number states."""


class Attack:
    """Makes a folder where it is unpickled by Python's own loader."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def unpacked(folder: Path) -> Path:
    """The golden checkpoint's step."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(folder, filter="data")
    return folder / "saved/step-000002"


def sign(step: Path) -> None:
    """Write a completion mark for the files as they are now: whoever changes a file can do that, too."""
    from megatron.training.checkpoint import folder as cf
    from megatron.training.checkpoint.mark import MARK, mark_text

    content = json.loads((step / MARK).read_text())
    files = cf.checksums(path for path in step.iterdir() if path.name != MARK)
    kept = {key: value for key, value in content.items() if key not in ("format", "checksum")}
    (step / MARK).write_text(mark_text({**kept, "files": files}))


def with_object(step: Path, key: str, value: Any) -> None:
    """Put another object in the place of one, behind everything else in the data file."""
    import io

    import torch

    file = io.BytesIO()
    torch.save([value], file)
    data = step / "__0_0.distcp"
    index = pickle.loads((step / ".metadata").read_bytes())
    place = next(info for entry, info in index.storage_data.items() if entry.fqn.startswith(key))
    place.offset, place.length = data.stat().st_size, len(file.getvalue())
    with data.open("ab") as end:
        end.write(file.getvalue())
    (step / ".metadata").write_bytes(pickle.dumps(index))


def with_common(step: Path, value: Any) -> None:
    import torch

    torch.save(value, step / "common.pt")


EVIL: dict[str, Any] = {
    "index": lambda step, mark: (step / ".metadata").write_bytes(pickle.dumps(Attack(mark))),
    "random states": lambda step, mark: with_object(step, "random_states", Attack(mark)),
    "extra state": lambda step, mark: with_object(step, "decoder.layers.0.self_attention.linear_qkv._e", Attack(mark)),
    "other states": lambda step, mark: with_object(step, "random_states", {"python": 1, "numpy": 2}),
    "common": lambda step, mark: with_common(step, Attack(mark)),
    "entries": lambda step, mark: with_common(step, {"model": 1}),
    "backend": lambda step, mark: (step / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
}


def all_loads(place: str) -> tuple[Steps, dict[str, str]]:
    """The losses of a resumed run, and what every evil checkpoint is answered with."""
    from moe_overlap.describe.errors import ConfigError

    folder, mark, answers = Path(place), Path(place) / "executed", {}
    step = unpacked(folder / "good")
    resumed = train(folder, "resumed", f"{FLAGS} --load {step.parent}", MODEL)
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    for name, change in EVIL.items():
        step = unpacked(folder / name.replace(" ", "-"))
        change(step, mark)
        sign(step)
        try:
            train(folder, "refused", f"{FLAGS} --load {step.parent}", MODEL)
            answers[name] = "no error"
        except ConfigError as error:
            answers[name] = str(error).replace(str(step), "STEP")
    assert not mark.exists()
    return resumed, answers


def test_a_save_of_format_1_resumes_and_no_checkpoint_is_executed(tmp_path: Path) -> None:
    ((resumed, answers),) = run(1, all_loads, str(tmp_path))
    assert {step: loss for step, (loss, _) in resumed.items()} == pytest.approx(LOSSES, rel=1e-5)
    fix = "choose another checkpoint by --ckpt-step"
    executed = "that names posix.mkdir, no number, text or tensor"
    assert answers == {
        "index": f"--load STEP/.metadata: names posix.mkdir, which no index of tensors holds; {fix}",
        "random states": f"--load STEP: cannot be read: holds an object, random_states/shard_0_1, {executed}; {fix}",
        "extra state": "--load STEP: cannot be read: holds an object, "
        f"decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1, {executed}; {fix}",
        "other states": "--load STEP: holds random-number states that no generator takes (TypeError); add --no-load-rng",
        "common": f"--load STEP/common.pt: holds an object, common, {executed}; {fix}",
        "entries": f"--load STEP/common.pt: has entries, and a save writes none there; {fix}",
        "backend": f"--load STEP/metadata.json: is not what a save writes there; {fix}",
    }
