"""Argument lists of real jobs: each is accepted by a dry run, or refused for what needs Megatron-FSDP or muon."""

from __future__ import annotations

import json

import pytest

from megatron.training.arguments import parse
from megatron.training.rules.start import Machine, obstacles, require_startable
from moe_overlap.describe.errors import ConfigError
from tools.answer_lists import LISTS, RECORD, Answer, answer, record

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8"
)
GPU = Machine(cuda=True, packages=frozenset({"transformer_engine", "deep_ep"}))
CPU = Machine(cuda=False, packages=frozenset())
REFUSABLE = ("--use-megatron-fsdp", "muon", "dist_muon")


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    return [answer(entry) for entry in json.loads(LISTS.read_text())]


def test_only_fsdp_and_muon_are_refused(answers: list[Answer]) -> None:
    lists = json.loads(LISTS.read_text())
    assert len(lists) == len(answers) == 88
    needing = {entry["name"] for entry in lists if any(word in REFUSABLE for word in entry["arguments"])}
    assert {one.name for one in answers if one.refused is not None} == needing
    for one in answers:
        if one.refused is not None:
            assert one.refused.startswith(("--use-megatron-fsdp: not supported: ", "--optimizer muon: not supported: "))


def test_the_record_is_up_to_date(answers: list[Answer]) -> None:
    assert RECORD.read_text() == record(answers)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--fp8-format hybrid --fp8-recipe tensorwise",
            "--fp8-format hybrid: needs Transformer Engine on a GPU: this machine lacks a GPU and transformer_engine; "
            "drop the flag, or start where they are; --dry-run accepts it",
        ),
        (
            "--moe-token-dispatcher-type flex --moe-enable-deepep",
            "--moe-token-dispatcher-type flex: needs DeepEP on a GPU: this machine lacks a GPU and deep_ep; "
            "drop the flag, or start where they are; --dry-run accepts it",
        ),
        (
            "--recompute-granularity selective --recompute-modules moe_act",
            "--recompute-modules moe_act: needs Transformer Engine on a GPU: this machine lacks a GPU and "
            "transformer_engine; drop the flag, or start where they are; --dry-run accepts it",
        ),
        (
            "--optimizer-cpu-offload",
            "--optimizer-cpu-offload: needs a GPU: this machine lacks a GPU; "
            "drop the flag, or start where they are; --dry-run accepts it",
        ),
    ],
)
def test_what_needs_a_gpu_stops_a_start_on_the_cpu_only(words: str, line: str) -> None:
    parsed = parse([*SMALL.split(), *words.split()])
    assert [str(obstacle) for obstacle in obstacles(parsed, CPU)] == [line]
    assert obstacles(parsed, GPU) == []


@pytest.mark.parametrize(
    "words",
    [
        "--mtp-standalone",
        "--context-parallel-size 2 --hybrid-context-parallel",
        "--position-embedding-type rope --no-rope-freq 4",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        "--use-torch-fsdp2",
    ],
)
def test_what_is_not_executed_stops_a_start_anywhere(words: str) -> None:
    parsed = parse([*SMALL.split(), *words.split()])
    for machine in (CPU, GPU):
        with pytest.raises(ConfigError, match="; .*--dry-run accepts it$"):
            require_startable(parsed, machine)


def test_context_parallelism_starts_however_upstream_would_send_keys_and_values() -> None:
    parsed = parse([*SMALL.split(), "--context-parallel-size", "2", "--cp-comm-type", "p2p"])
    assert obstacles(parsed, CPU) == []
    assert ("--cp-comm-type", "keys and values are gathered over the context ranks") in [
        (flag, reason.partition(" (")[0]) for flag, reason in parsed.without_effect
    ]


def test_settings_of_what_is_not_asked_for_stop_nothing() -> None:
    words = "--fp8-recipe blockwise --initial-loss-scale 65536 --offload-modules moe_act --moe-deepep-num-sms 20"
    assert obstacles(parse([*SMALL.split(), *words.split()]), CPU) == []
