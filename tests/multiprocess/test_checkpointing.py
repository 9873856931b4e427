"""Runs that are stopped and resumed: bitwise in the same layout, within rounding in another; wrong checkpoints say what is wrong.

One launch of two processes does it all: together, and each by itself in a group of one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_overlap.describe.errors import ConfigError
from tests.multiprocess.checkpoint_runs import MODEL, UPSTREAM_MODEL, Steps, alone, train
from tests.spawn import run

SAVED_STEP, LAST_STEP = 2, 4
EP2, PP2 = "--expert-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
EXPERT_BIAS = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32"
    " --moe-router-load-balancing-type none --moe-aux-loss-coeff 0"
)
PREDICTION = "--mtp-num-layers 2"
PASSING = "--non-persistent-save-interval 1 --non-persistent-ckpt-type global"
LOG_ALL = "--dist-ckpt-strictness log_all"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"

TOGETHER = {
    "ep2": f"{EP2} {OVERLAP}",
    "tp2": TP2,
    "pp2": PP2,
    "bf16": f"{EP2} {OVERLAP} --bf16",
    "dropout": f"{EP2} {DROPOUT}",
    "async": f"{EP2} {OVERLAP} --async-save --ckpt-assume-constant-structure",
    # Lists gather weights under the next step's passes: what is saved between two steps was gathered for it.
    "lists": f"{EP2} {OVERLAP} --moe-gate topk --moe-token-dispatcher-type irregular --defer-weight-gradients",
}
ALONE = {"one": "", "one-dropout": DROPOUT}
RESHARDED = [
    ("ep2", PP2),
    ("tp2", PP2),
    ("pp2", EP2),
    ("one", f"{EP2} {OVERLAP}"),
    ("one", TP2),
]
TO_ONE = [("ep2", ""), ("tp2", "")]


def twice(folder: Path, name: str, flags: str, model: str = MODEL) -> tuple[Steps, Steps]:
    """An undisturbed run that saves on its way, and what another one makes of the checkpoint."""
    whole = train(folder, name, f"{flags} --save {folder / name} --save-interval {SAVED_STEP}", model)
    again = train(folder, f"{name}-again", f"{flags} --load {folder / name} --ckpt-step {SAVED_STEP}", model)
    return whole, again


def message_of(folder: Path, flags: str) -> str:
    try:
        train(folder, "refused", flags)
    except ConfigError as error:
        return str(error)
    return "no error"


def all_resumes(place: str) -> dict[str, Any]:
    """The results of one rank: pairs of runs, resharded runs, error lines."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    folder, rank = Path(place), dist.get_rank()
    same = resumed(folder, TOGETHER)
    same["defaults"] = twice(folder, "defaults", EP2, UPSTREAM_MODEL)
    name = list(ALONE)[rank]
    with alone(folder, 1):
        same[name] = twice(folder, name, ALONE[name])
        source, flags = TO_ONE[rank]
        to_one = train(folder, f"{source}-to-one", f"{flags} --load {folder / source} --ckpt-step {SAVED_STEP}")
    other = resharded(folder, RESHARDED)
    errors = wrong_checkpoints(folder, rank)
    assert not parallel_state.model_parallel_is_initialized()
    return {"same": same, "to one": to_one, "other": other, "errors": errors, **accepted(folder)}


def wrong_checkpoints(folder: Path, rank: int) -> dict[str, str]:
    """Error lines of this rank."""
    import torch.distributed as dist

    good = folder / "ep2"
    base = f"{EP2} --load"
    if rank == 0:
        for name in ("incomplete", "flipped", "cut", "absent-file"):
            shutil.copytree(good, folder / name)
        (folder / "incomplete" / "step-000004" / "complete.json").unlink()
        data = folder / "flipped" / "step-000004" / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
        data = folder / "cut" / "step-000004" / "__0_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])
        (folder / "absent-file" / "step-000004" / ".metadata").unlink()
        (folder / "a-file").write_text("")
    dist.barrier()
    return {
        "incomplete": message_of(folder, f"{base} {folder}/incomplete"),
        "flipped": message_of(folder, f"{base} {folder}/flipped"),
        "cut": message_of(folder, f"{base} {folder}/cut"),
        "absent file": message_of(folder, f"{base} {folder}/absent-file"),
        "width": message_of(folder, f"{base} {good} --hidden-size 48"),
        "layers": message_of(folder, f"{base} {good} --num-layers 1"),
        "experts": message_of(folder, f"{base} {good} --moe-ffn-hidden-size 48"),
        "bias": message_of(folder, f"{base} {good} --add-qkv-bias"),
        "precision": message_of(folder, f"{base} {good} --bf16"),
        "optimizer": message_of(folder, f"{base} {good} --optimizer sgd"),
        "schedule": message_of(folder, f"{base} {good} --lr 2e-2"),
        "vocabulary": message_of(folder, f"{base} {good} --vocab-size 300"),
        "no such folder": message_of(folder, f"{EP2} --load {folder}/nothing --pretrained-checkpoint {folder}/nowhere"),
        "save": message_of(folder, f"{EP2} --save {folder}/a-file/checkpoints"),
    }


def accepted(folder: Path) -> dict[str, Any]:
    """Loads that take less than everything, or a schedule of their own."""
    keep = "--save-interval 1 --keep-last-checkpoints 1 --save-retain-interval 3"
    good = f"{EP2} {OVERLAP} --load {folder / 'ep2'} --ckpt-step {SAVED_STEP}"
    return {
        "finetune": train(folder, "finetune", f"{good} --finetune --lr 5e-3"),
        "no optimizer": train(folder, "no-optimizer", f"{good} --no-load-optim"),
        "override": train(folder, "override", f"{good} --lr 2e-2 --override-opt-param-scheduler"),
        "saved schedule": train(folder, "saved", f"{good} --lr 2e-2 --use-checkpoint-opt-param-scheduler"),
        "pretrained": train(
            folder,
            "pretrained",
            f"{EP2} --load {folder / 'nothing'} --pretrained-checkpoint {folder / 'ep2'} --lr 5e-3",
        ),
        "bias": train(folder, "biased", f"{good} --add-qkv-bias --save {folder / 'biased'} {LOG_ALL}"),
        "extra": message_of(folder, f"{EP2} --load {folder / 'biased'}"),
        "no bias": train(folder, "unbiased", f"{EP2} --load {folder / 'biased'} --finetune {LOG_ALL}"),
        "passing": train(
            folder,
            "passing",
            f"{EP2} {PASSING} --save-interval 2 --exit-interval 3 --async-save --save {folder}/passing",
        ),
        "resumed": train(folder, "resumed", f"{EP2} {PASSING} --load {folder}/passing"),
        "empty": train(folder, "empty", f"{EP2} --load {folder / 'nothing'}"),
        "kept": train(folder, "kept", f"{EP2} --save {folder}/kept {keep}"),
    }


MORE = {
    "sgd": f"{OVERLAP} --optimizer sgd",
    "vpp2": f"{VPP2} --num-layers 4",
    "prediction": f"{EP2} {OVERLAP} {PREDICTION}",
    "bias": f"{EP2} {EXPERT_BIAS}",
    "shared": f"{OVERLAP} --bf16 --ckpt-fully-parallel-load",
}
MORE_RESHARDED = [
    ("vpp2", f"{EP2} {OVERLAP} --num-layers 4"),
    ("prediction", f"{PP2} {PREDICTION} --pipeline-model-parallel-layout Ett|mmL"),
    ("prediction", f"{TP2} {PREDICTION}"),
]
DEEPER = "--num-layers 4"
FOUR = {
    "ep2-pp2": f"{EP2} {PP2} {OVERLAP} {DEEPER}",
    "tp2-ep2-etp2": f"{TP2} {EP2} --expert-tensor-parallel-size 2 {DEEPER}",
    "tp2-ep2-etp1": f"{TP2} {EP2} --expert-tensor-parallel-size 1 {OVERLAP} {DEEPER}",
    "ep2-edp2": f"{EP2} {OVERLAP} {EXPERT_BIAS} {DEEPER}",
    "ep2-pp2-prediction": f"{EP2} {PP2} {OVERLAP} {PREDICTION} {DEEPER}",
}
"""Layouts of four processes that mix two kinds of parallelism."""
FOUR_RESHARDED = [
    ("ep2-pp2", FOUR["tp2-ep2-etp2"]),
    ("tp2-ep2-etp2", FOUR["ep2-pp2"]),
    ("tp2-ep2-etp1", f"{VPP2} {EP2} {DEEPER}"),
    ("ep2-pp2-prediction", f"{TP2} {PP2} {PREDICTION} {DEEPER}"),
    ("ep2-edp2", f"--expert-model-parallel-size 4 {EXPERT_BIAS} {DEEPER}"),
]


def resumed(folder: Path, runs: dict[str, str]) -> dict[str, tuple[Steps, Steps]]:
    """Pairs of runs by name."""
    return {name: twice(folder, name, flags) for name, flags in runs.items()}


def resharded(folder: Path, runs: list[tuple[str, str]]) -> list[Steps]:
    """Runs that go on from the checkpoint of another one, in a layout of their own."""
    return [
        train(folder, f"{source}-other-{index}", f"{flags} --load {folder / source} --ckpt-step {SAVED_STEP}")
        for index, (source, flags) in enumerate(runs)
    ]


def more_resumes(place: str, runs: dict[str, str], others: list[tuple[str, str]]) -> dict[str, Any]:
    """Both."""
    return {"same": resumed(Path(place), runs), "other": resharded(Path(place), others)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "runs", "others"),
    [(2, MORE, MORE_RESHARDED), pytest.param(4, FOUR, FOUR_RESHARDED, marks=pytest.mark.sweep)],
    ids=["more features", "mixed layouts"],
)
def test_more_checkpoints(tmp_path: Path, processes: int, runs: dict[str, str], others: list[tuple[str, str]]) -> None:
    seen = run(processes, more_resumes, str(tmp_path), runs, others)[0]
    for name, (whole, again) in seen["same"].items():
        assert list(whole) == [1, 2, 3, 4] and again == {3: whole[3], 4: whole[4]}, name
    for (source, _), steps in zip(others, seen["other"], strict=True):
        close(steps, seen["same"][source][0])


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return run(2, all_resumes, str(folder)), folder


Launch = tuple[list[dict[str, Any]], Path]


@pytest.mark.parametrize("name", [*TOGETHER, *ALONE, "defaults"])
def test_a_resumed_run_continues_bitwise(launch: Launch, name: str) -> None:
    ranks, _ = launch
    whole, again = next(rank["same"][name] for rank in ranks if name in rank["same"])
    assert list(whole) == [1, 2, 3, 4] and list(again) == [3, 4]
    assert again == {step: whole[step] for step in again}


@pytest.mark.parametrize("index", range(len(RESHARDED)))
def test_a_checkpoint_loads_in_another_layout(launch: Launch, index: int) -> None:
    ranks, _ = launch
    source, _ = RESHARDED[index]
    whole, _ = next(rank["same"][source] for rank in ranks if source in rank["same"])
    close(ranks[0]["other"][index], whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_of_two_processes_loads_on_one(launch: Launch, rank: int) -> None:
    ranks, _ = launch
    close(ranks[rank]["to one"], ranks[rank]["same"][TO_ONE[rank][0]][0])


def close(steps: Steps, whole: Steps) -> None:
    """Summation order apart, the same run."""
    assert list(steps) == [3, 4]
    for step, (loss, norm) in steps.items():
        assert loss == pytest.approx(whole[step][0], rel=1e-5) and norm == pytest.approx(whole[step][1], rel=1e-4)


def test_wrong_checkpoints_are_named_on_every_rank(launch: Launch) -> None:
    ranks, folder = launch
    errors = ranks[0]["errors"]
    assert ranks[1]["errors"] == errors
    fix = "delete step-000004, or choose another checkpoint by --ckpt-step"
    data = (
        f"/step-000004/__0_0.distcp: is corrupt: {(folder / 'ep2/step-000004/__0_0.distcp').stat().st_size - 1} bytes"
    )
    assert errors["incomplete"] == (
        f"--load {folder}/incomplete: step 4 is incomplete (no completion mark); the last complete checkpoint is step 2:"
        " add --ckpt-step 2 or delete step-000004"
    )
    assert errors["flipped"] == (
        f"--load {folder}/flipped/step-000004/__1_0.distcp: is corrupt: its content is not what was written; {fix}"
    )
    assert errors["cut"].startswith(f"--load {folder}/cut{data}") and errors["cut"].endswith(fix)
    assert errors["absent file"].startswith(
        f"--load {folder}/absent-file/step-000004/.metadata: cannot be read: No such"
    )
    assert "step 4 was saved with --hidden-size 32, this run has 48 (also different: --kv-channels);" in errors["width"]
    assert "step 4 was saved with --num-layers 2, this run has 1" in errors["layers"]
    assert (
        "is of another model (decoder.layers.0.mlp.experts.experts.linear_fc1.weight is [4, 64, 32] in"
        in errors["experts"]
    )
    assert "[4, 96, 32] here;" in errors["experts"] and "more)" in errors["experts"]
    assert "linear_qkv.bias [64] is not in the checkpoint" in errors["bias"]
    assert "optimizer state of step 4 is of fp32, this run uses bf16; correct --bf16 or add" in errors["precision"]
    assert (
        "step 4 was saved with --lr 0.01, this run has 0.02; add --override-opt-param-scheduler" in errors["schedule"]
    )
    assert "step 4 was saved with --vocab-size 257, this run has 300;" in errors["vocabulary"]
    assert (
        errors["no such folder"] == f"--pretrained-checkpoint {folder}/nowhere: holds no checkpoint; correct the path"
    )
    assert errors["save"].startswith(f"--save {folder}/a-file/checkpoints: cannot be written: Not a directory;")


def test_parts_of_a_checkpoint(launch: Launch) -> None:
    ranks, folder = launch
    seen, whole = ranks[0], ranks[0]["same"]["ep2"][0]
    assert list(seen["finetune"]) == [1, 2, 3, 4] and seen["finetune"][1][0] < whole[1][0]
    # Steps 1 and 3 were saved for a while only; the end of the run saves its step to stay.
    assert list(seen["passing"]) == [1, 2, 3] and list(seen["resumed"]) == [4]
    assert sorted(path.name for path in (folder / "passing").iterdir()) == [
        "non_persistent",
        "step-000002",
        "step-000003",
    ]
    assert [path.name for path in (folder / "passing/non_persistent").iterdir()] == ["step-000003"]
    assert list(seen["pretrained"]) == [1, 2, 3, 4] and seen["pretrained"][1][0] < whole[1][0]
    # A bias that no checkpoint holds begins at zero.
    assert seen["bias"][3][0] == whole[3][0] and seen["bias"][4][0] != whole[4][0]
    assert "layers.0.self_attention.linear_qkv.bias [64] is only in the checkpoint; " in seen["extra"]
    assert seen["no bias"][1][0] < whole[1][0]
    # The first loss comes from the weights alone; the step after it shows what else was loaded.
    for name in ("no optimizer", "override", "saved schedule"):
        assert seen[name][3] == whole[3], name
    assert seen["no optimizer"][4] != whole[4] and seen["override"][4] != whole[4]
    assert seen["saved schedule"][4] == whole[4]
    assert list(seen["empty"]) == [1, 2, 3, 4]
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["step-000003", "step-000004"]
