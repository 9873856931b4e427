"""Argument lists of real jobs: each is accepted by a dry run, or refused for what needs Megatron-FSDP or muon."""

from __future__ import annotations

import json

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.flags.without_effect import idle_flags
from megatron.training.cli.start import StartMachine, obstacles, require_startable
from megatron.training.cli.validation import validate
from moe_overlap.describe.errors import ConfigError
from tools.answer_lists import RECORD, record
from tools.bench.real_lists import LISTS, ListAnswer, answer

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 5 --disable-bias-linear --num-experts 8"
)
GPU = StartMachine(cuda=True, packages=frozenset({"transformer_engine", "deep_ep"}))
CPU = StartMachine(cuda=False, packages=frozenset())
REFUSABLE = ("--use-megatron-fsdp", "muon", "dist_muon")


@pytest.fixture(scope="module")
def answers() -> list[ListAnswer]:
    return [answer(entry) for entry in json.loads(LISTS.read_text())]


def test_only_fsdp_and_muon_are_refused(answers: list[ListAnswer]) -> None:
    lists = json.loads(LISTS.read_text())
    assert len(lists) == len(answers) == 88
    needing = {entry["name"] for entry in lists if any(word in REFUSABLE for word in entry["arguments"])}
    assert {one.name for one in answers if one.refused is not None} == needing
    for one in answers:
        if one.refused is not None:
            assert one.refused.startswith(("--use-megatron-fsdp: not supported: ", "--optimizer muon: not supported: "))


def test_the_record_is_up_to_date(answers: list[ListAnswer]) -> None:
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
            "--use-precision-aware-optimizer",
            "--use-precision-aware-optimizer: needs Transformer Engine on a GPU: this machine lacks a GPU and "
            "transformer_engine; drop the flag, or start where they are; --dry-run accepts it",
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
        "--mtp-num-layers 1 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett|tt|m|L",
        "--context-parallel-size 2 --hybrid-context-parallel",
        "--position-embedding-type rope --no-rope-freq 4",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 3",
        "--use-torch-fsdp2",
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --save runs/a",
        "--use-precision-aware-optimizer --load runs/a",
    ],
)
def test_what_is_not_executed_stops_a_start_anywhere(words: str) -> None:
    parsed = parse([*SMALL.split(), *words.split()])
    for machine in (CPU, GPU):
        with pytest.raises(ConfigError, match="; .*--dry-run accepts (it|them)$"):
            require_startable(parsed, machine)


def test_optimizers_that_the_update_does_not_follow_stop_a_start_where_all_else_is_there() -> None:
    offloaded, aware = "--optimizer-cpu-offload", "--use-precision-aware-optimizer"
    shared = "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag"
    for words, flag in (
        (offloaded, offloaded),
        (aware, None),
        (f"{aware} --save runs/a", aware),
        (shared, None),
        (f"{shared} --overlap-grad-reduce --overlap-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"),
    ):
        found = [obstacle.subject for obstacle in obstacles(parse([*SMALL.split(), *words.split()]), GPU)]
        assert found == ([] if flag is None else [flag]), words


def test_context_parallelism_starts_however_upstream_would_send_keys_and_values() -> None:
    parsed = parse([*SMALL.split(), "--context-parallel-size", "2", "--cp-comm-type", "p2p"])
    assert obstacles(parsed, CPU) == []
    assert ("--cp-comm-type", "keys and values are gathered over the context ranks") in [
        (flag, reason.partition(" (")[0]) for flag, reason in parsed.without_effect
    ]


def test_settings_of_what_is_not_asked_for_stop_nothing() -> None:
    words = "--fp8-recipe blockwise --initial-loss-scale 65536 --offload-modules moe_act --moe-deepep-num-sms 20"
    assert obstacles(parse([*SMALL.split(), *words.split()]), CPU) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--tiktoken-pattern v2", "counts for --tokenizer-type TikTokenizer only"),
        ("--tiktoken-num-special-tokens 900", "counts for --tokenizer-type TikTokenizer only"),
        ("--lr-wsd-decay-iters 2", "counts with --lr-decay-style WSD only"),
        ("--lr-decay-style cosine --lr-wsd-decay-style linear", "counts with --lr-decay-style WSD only"),
    ],
)
def test_settings_that_upstream_does_not_read_are_listed_as_idle(words: str, reason: str) -> None:
    parsed = parse([*SMALL.split(), *words.split()])
    validate(parsed.config, 1)
    assert (words.split()[-2], reason) in idle_flags(parsed)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--data-impl mmap", "--data-impl: upstream has dropped this flag; drop it: data are indexed datasets"),
        ("--fp8-hybrid", "--fp8-hybrid: upstream has dropped this flag; use --fp8-format hybrid"),
        ("--activations-checkpoint-method uniform", "dropped this flag; use --recompute-method"),
        ("--moe-token-dispatcher-type alltoall_seq", "upstream has dropped this choice; use alltoall"),
        ("--spec local", "--spec local: not supported: layers follow from the flags"),
    ],
)
def test_flags_that_upstream_had_name_those_of_today(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*SMALL.split(), *words.split()])
    assert line in str(caught.value)
