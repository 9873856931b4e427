"""Another layout pads the vocabulary to another size: the saved rows stay, or a line says what new ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.padding_runs import told
from tests.spawn import run

# 301 ids: 384 rows of one tensor rank, 512 of two.
WORDS = """--untie-embeddings-and-output-weights --vocab-size 300 --micro-batch-size 1 --train-iters 4
    --moe-token-dispatcher-type alltoall"""
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
LINE = (
    "128 rows of the vocabulary are new: they start at random values and enter the softmax, which raises the first losses; "
    "--make-vocab-size-divisible-by 192 keeps the 384 saved rows"
)


def test_the_rows_that_were_saved_stay_and_others_are_told(tmp_path: Path) -> None:
    flags = f"{WORDS} --save {tmp_path}/saved --save-interval 2"
    ((whole, _),) = run(1, told, flags, str(tmp_path / "whole"))
    load = f"{WORDS} {TENSOR} --load {tmp_path}/saved --ckpt-step 2"
    (kept, printed), _ = run(2, told, load, str(tmp_path / "kept"))
    assert "rows of the vocabulary" not in printed
    for value, expected in zip(kept, whole[2:], strict=True):
        assert value == pytest.approx(expected, rel=2e-6)
    (other, printed), _ = run(2, told, f"{load} --make-vocab-size-divisible-by 128", str(tmp_path / "other"))
    assert LINE in printed
    assert other[0][0] > whole[2][0] * 1.001
    # A checkpoint of the kept rows is one of one process again.
    again = f"{load} --save {tmp_path}/again --save-interval 4"
    run(2, told, again, str(tmp_path / "again.jsonl"))
    ((_, printed),) = run(1, told, f"{WORDS} --load {tmp_path}/again --ckpt-step 4", str(tmp_path / "back"))
    assert "rows of the vocabulary" not in printed
