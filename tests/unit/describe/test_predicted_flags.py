"""Flags of any release, read for a prediction: what is priced, what is listed as not modelled, and what stays a mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.training.cli.arguments import parse
from moe_overlap.api import features_of, predict, read_job, tune
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.predicted_flags import (
    STAND_INS,
    USUAL_VOCABULARY,
    assumed_vocabulary,
    effect_of,
    not_modelled,
    read,
    zero_level,
)
from moe_overlap.describe.readers.upstream_flags import UpstreamFlag, awaited, load_upstream_flags
from moe_overlap.plan.overlap import SearchLimits
from moe_overlap.plan.serialize import save_plan
from tests.unit.tuner.cost.test_cost_predict import CONSTANTS, JOB, by_hand, predicted

PLAIN = [word for word in JOB if word != "--use-distributed-optimizer"]
LISTED = [word for word in PLAIN if word not in ("--overlap-param-gather", "--moe-token-dispatcher-type", "alltoall")]
CUT = "--moe-overlap-partitions 2 --moe-gate topk --moe-token-dispatcher-type irregular --micro-batch-size 2"
LIMITS = SearchLimits(max_partitions=2, group_seconds=0.0, range_limit=4)
ANOTHER_MODEL = re.compile(r"--(hybrid|gdp|mamba|mtp-hybrid)-")
"""Flags that newer releases have for layers without attention."""
NEWER = sorted(
    {flag.names[0]: flag for flag in load_upstream_flags().values() if not flag.in_core_0_16_1}.items(),
)


def levels(words: str) -> set[int]:
    return {stage.zero_level for stage in read_job([*PLAIN, *words.split()], 32).plan.stages}


def test_states_are_sharded_as_the_flags_say() -> None:
    assert levels("") == {0}
    assert levels("--use-distributed-optimizer") == {1}
    assert levels("--use-megatron-fsdp") == levels("--use-torch-fsdp2") == {3}
    for level, name in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params")):
        assert levels(f"--use-megatron-fsdp --data-parallel-sharding-strategy {name}") == {level}
    with pytest.raises(ConfigError, match="--data-parallel-sharding-strategy half: unknown choice; use no_shard, "):
        zero_level({"--use-megatron-fsdp": (), "--data-parallel-sharding-strategy": ("half",)})


def test_states_that_are_not_sharded_are_held_whole_and_reduced_once() -> None:
    sharded = predicted("--use-distributed-optimizer").predicted.stages[0].peak_bytes_by_category
    given = {"graphs": by_hand, "constants": CONSTANTS}
    plain = predict(PLAIN, shipped_cluster("H100", 32), **given).predicted
    whole = plain.stages[0].peak_bytes_by_category
    assert whole.parameters == sharded.parameters and whole.gradients == sharded.gradients
    # Two pipeline stages leave 16 data ranks, of which every two hold the same experts.
    assert 2 * sharded.optimizer < whole.optimizer < 16 * sharded.optimizer


def test_what_this_fork_executes_has_its_distributed_optimizer() -> None:
    assert {stage.zero_level for stage in read_job([*LISTED, *CUT.split()], 32).plan.stages} == {1}
    words = [*PLAIN, "--pipeline-model-parallel-size", "1", "--num-layers", "2"]
    given = {"graphs": by_hand, "constants": CONSTANTS}
    tuned = tune(words, shipped_cluster("H100", 16), LIMITS, 0.1, **given)
    assert {stage.zero_level for stage in tuned.chosen.decided.stages} == {1}
    assert tuned.assumed == ("ZeRO-1, as this fork runs: --use-distributed-optimizer is always on in it",)
    with pytest.raises(ConfigError, match="--optimizer muon: not supported"):
        tune([*words, "--optimizer", "muon"], shipped_cluster("H100", 16), LIMITS, 0.1, **given)


def asked(flag: UpstreamFlag) -> list[str]:
    """A flag with values that ask for something."""
    value = flag.choices[-1] if flag.choices else {"int": "7", "float": "0.7"}.get(flag.type or "", "x")
    times = int(flag.nargs) if (flag.nargs or "").isdigit() else 1
    return [flag.names[0], *[value] * times]


def fate(flag: UpstreamFlag) -> str:
    """A prediction reads, prices, lists or refuses every flag that asks for something."""
    reading = read(asked(flag))
    if not reading.arguments:
        return "listed" if not_modelled(reading.flags) else "left out"
    try:
        parse(reading.arguments)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_no_flag_of_a_newer_release_stops_a_prediction_but_those_of_another_model() -> None:
    assert len(NEWER) > 200
    fates = {name: fate(flag) for name, flag in NEWER}
    stopped = {name for name, said in fates.items() if "not supported" in said}
    assert stopped and all(ANOTHER_MODEL.match(name) for name in stopped), stopped
    left_out = {name for name, said in fates.items() if said in ("listed", "left out")}
    assert len(left_out) > 20
    for name in left_out:
        with pytest.raises(ConfigError, match="not supported"):  # Training refuses what a prediction leaves out.
            parse([*PLAIN, *asked(load_upstream_flags()[name])])


def test_what_is_not_modelled_says_what_it_would_change() -> None:
    flags = "--moe-mlp-glu-interleave-size 32 --chunked-optimizer-state-offload --attention-output-gate".split()
    named = predicted(*flags).not_modelled
    assert set(named) == {flag for flag in flags if flag.startswith("--")}
    assert all(effect_of(flag) for flag in named)
    assert awaited("--attention-output-gate") is not None  # accepted by a dry run, and priced as though it were absent
    assert not_modelled({"--num-distributed-optimizer-instances": ("1",), "--moe-paged-stash": ()}) == (
        "--moe-paged-stash",
    )
    assert predicted("--head-lr-mult", "3").not_modelled == ()


def test_a_choice_of_another_release_is_replaced_and_said() -> None:
    for (name, value), (chosen, missed) in STAND_INS.items():
        reading = read([name, value])
        assert reading.arguments == (() if chosen is None else (name, chosen))
        assert reading.assumed == ((f"{name} {value}: {missed}",) if missed else ())
        with pytest.raises(ConfigError, match="not supported"):
            parse([*PLAIN, name, value])
    muon = predicted("--optimizer", "muon", "--muon-momentum", "0.9")
    assert muon.assumed[0].startswith("--optimizer muon: one moment as in SGD")
    assert muon.predicted.step_seconds == predicted("--optimizer", "sgd").predicted.step_seconds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--hybrid-layer-pattern M*M*",
            "--hybrid-layer-pattern M.M.: not supported: the model family has attention in",
        ),
        ("--bert-no-binary-head", "--bert-no-binary-head: not supported: this fork trains decoder-only"),
        ("--moe-paged-stahs", "--moe-paged-stahs: unknown flag; did you mean --moe-paged-stash?"),
        ("--moe-combine-bwd-dtype fp6", "--moe-combine-bwd-dtype fp6: unknown choice; use bf16 or mxfp8"),
        ("--gtp-remat-opt-in", "--gtp-remat-opt-in: unknown flag; did you mean --gtp-remat-opt-in-modules?"),
        ("--cp-comm-type ring", "--cp-comm-type ring: unknown choice; use p2p, a2a, allgather, all_gather or a2a.p2p"),
    ],
)
def test_other_models_and_unknown_flags_stay_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_job([*JOB, *words.split()], 32)


GROUPS = "--group-query-attention --num-query-groups 4 --pipeline-model-parallel-size 1"


@pytest.mark.parametrize(
    ("words", "heads"),
    [
        ("--context-parallel-size 8 --cp-comm-type a2a", 4),
        ("--context-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel --cp-comm-type a2a", 2),
        ("--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 8 1", 4),
        ("--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 0 1", 4),
    ],
)
def test_an_all_to_all_of_heads_needs_a_head_for_every_context_rank(words: str, heads: int) -> None:
    arguments = [*JOB, *GROUPS.split(), *words.split()]
    rule = rf"context ranks cannot deal out the {heads} key-value heads of a tensor rank; use p2p, or fewer"
    with pytest.raises(ConfigError, match=rule):
        read_job(arguments, 32)
    read_job([*arguments, "--cp-comm-type", "p2p"], 32)
    read_job([*JOB, *GROUPS.split(), "--context-parallel-size", "4", "--cp-comm-type", "a2a"], 32)


def test_a_gather_of_keys_is_priced_under_both_of_its_names() -> None:
    """Transformer Engine writes all_gather, the help of upstream's flag allgather; a ring hides under attention."""
    words = "--context-parallel-size 4 --pipeline-model-parallel-size 1".split()
    named = [predicted(*words, "--cp-comm-type", kind).predicted.step_seconds for kind in ("allgather", "all_gather")]
    assert named[0] == named[1]


def test_a_plan_among_the_flags_decides(tmp_path: Path) -> None:
    """A plan completes the flags, as in training, and those that were written must agree with it."""
    path = tmp_path / "plan.json"
    cut = read_job([*LISTED, *CUT.split()], 32).plan
    save_plan(cut, path)
    named = read_job([*LISTED, "--micro-batch-size", "2", "--moe-gate", "topk", "--plan", str(path)], 32)
    assert named.plan.stages[0].overlap == cut.stages[0].overlap and named.plan.stages[0].overlap.is_listed
    with pytest.raises(ConfigError, match="micro_batch_size"):
        read_job([*LISTED, "--plan", str(path)], 32)


def test_a_vocabulary_that_lies_in_files_is_assumed_and_said() -> None:
    without = [word for word in JOB if word not in ("--vocab-size", "32000")]
    gpt2 = read_job([*without, "--vocab-file", "nowhere/vocab.json"], 32)
    assert gpt2.assumed == (
        "a vocabulary of 50257 tokens, the size of every GPT2BPETokenizer; --vocab-size says another",
    )
    assert gpt2.model.vocab_size == 50304
    assert assumed_vocabulary("GPTSentencePieceTokenizer", "${DATA}/nemotron_2_256k.model") == (
        256000,
        "a vocabulary of 256000 tokens, as nemotron_2_256k.model is called; --vocab-size says another",
    )
    qwen = (
        151936,
        "a vocabulary of 151936 tokens, as published with models like Qwen3-30B-A3B; --vocab-size says another",
    )
    assert assumed_vocabulary("HuggingFaceTokenizer", "Qwen/Qwen3-30B-A3B") == qwen
    assert assumed_vocabulary("HuggingFaceTokenizer", "${2}", "Qwen3-30B-A3B") == qwen
    usual = "a vocabulary of 131072 tokens, as recent models have, since the tokenizer's files are not read"
    for unknown in ("org/model-7b", f"model-{'9' * 5000}k", None):
        assert assumed_vocabulary("HuggingFaceTokenizer", unknown) == (
            USUAL_VOCABULARY,
            f"{usual}; --vocab-size says another",
        )
    assert read_job(without, 32).assumed[0].startswith("a vocabulary of 257 bytes, as no tokenizer is named")
    assert read_job(JOB, 32).assumed == ()


def test_optimizer_states_wait_on_the_host_as_the_flags_say() -> None:
    """Whole, or the written share; the advice to offload them is priced when it is followed, but for the step on the CPU."""
    assert not_modelled({"--optimizer-cpu-offload": ()}) == ("--optimizer-cpu-offload",)
    assert not_modelled({"--reset-attention-mask": ()}) == ("--reset-attention-mask",)
    # What training does without, for it changes no loss, may change seconds and bytes.
    for flag, values in (
        ("--mlp-chunks-for-training", ("4",)),
        ("--flash-attention-version", ("3",)),
        ("--high-priority-a2a-comm-stream", ()),
        ("--dataloader-inter-document-masking", ()),
    ):
        assert not_modelled(read_job([*JOB, flag, *values], 32).flags) == (flag,)
    job = read_job([*JOB, "--optimizer-cpu-offload"], 32)
    assert {stage.offload.optimizer for stage in job.plan.stages} == {1.0}
    half = read_job([*JOB, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"], 32)
    assert {stage.offload.optimizer for stage in half.plan.stages} == {0.5}
    assert {stage.offload.optimizer for stage in read_job(JOB, 32).plan.stages} == {0.0}
    for share in ("2", "nan", "x"):
        with pytest.raises(ConfigError, match=f"--optimizer-offload-fraction {share}"):
            read_job([*JOB, "--optimizer-cpu-offload", "--optimizer-offload-fraction", share], 32)


@pytest.mark.parametrize("flag", ["--cuda-graph-scope", "--cuda-graph-modules"])
def test_graphs_of_some_modules_are_partial_under_both_names(flag: str) -> None:
    flags = {"--cuda-graph-impl": ("transformer_engine",), flag: ("attn",)}
    job = read_job(JOB, 32)
    assert features_of(job.config, "bf16", flags).graphs == "partial"
    assert features_of(job.config, "bf16", {"--cuda-graph-impl": ("local",)}).graphs == "full"


@pytest.mark.parametrize(
    ("scope", "graphs", "outside"),
    [
        ("attn moe_router moe_preprocess", "partial", ()),
        ("[attn mlp moe_router]", "partial", ()),
        ("attn", "partial", ("moe.gate", "moe.shared", "mlp")),
        ("moe_router", "partial", ("attention",)),
        ("mlp", "partial", ("attention", "moe.gate", "moe.shared")),
        ("mamba", "none", ()),
        ("full", "full", ()),
    ],
)
def test_graphs_record_what_their_scope_names(scope: str, graphs: str, outside: tuple[str, ...]) -> None:
    flags = {"--cuda-graph-impl": ("transformer_engine",), "--cuda-graph-scope": tuple(scope.split())}
    features = features_of(read_job(JOB, 32).config, "bf16", flags)
    assert (features.graphs, features.outside_graphs) == (graphs, outside)


def test_our_overlap_without_the_distributed_optimizer_says_what_it_has() -> None:
    said = read_job([*LISTED, *CUT.split()], 32).assumed
    assert any(text.startswith("ZeRO-1, as this fork runs") for text in said)
    assert read_job([*LISTED, *CUT.split(), "--use-distributed-optimizer"], 32).assumed == ()
