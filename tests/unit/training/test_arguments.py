"""The flag dialect: words, files, defaults, help."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from megatron.training.cli import config as config_module
from megatron.training.cli.arguments import ALIASES, config_to_flags, parse
from megatron.training.cli.config import Config
from megatron.training.cli.flags.table import config_flags, field_docs, flag_texts, help_text
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.readers.upstream_flags import (
    AWAITED,
    REFUSED,
    WITHOUT_EFFECT,
    awaited,
    load_upstream_flags,
    refusal,
    without_effect_reason,
)

OTHER_DEFAULTS = {
    "no_load_optim": "upstream writes None for off",
    "no_load_rng": "upstream writes None for off",
    "no_save_optim": "upstream writes None for off",
    "no_save_rng": "upstream writes None for off",
    "moe_router_load_balancing_type": "a list of one; upstream unpacks it",
    "moe_aux_loss_coeff": "a list of one; upstream unpacks it",
    "profile_ranks": "upstream's empty list stands for rank 0",
    "ckpt_fully_parallel_save": "on, as upstream has it; its flag is one of old",
    "dist_ckpt_strictness": "weights that one side lacks are an error unless the user says otherwise",
    "offload_modules": "an empty list; written as a tuple",
    "yarn_correction_range_round_to_int": "upstream writes None for on",
}
OWN_FLAGS = {
    "defer_weight_gradients",
    "keep_last_checkpoints",
    "log_expert_load",
    "log_json",
    "max_deferred_bytes",
    "moe_gate",
    "moe_overlap_capacity_chunks",
    "moe_overlap_cuda_graphs",
    "moe_overlap_device_connections",
    "moe_overlap_forward_send",
    "moe_overlap_grad_reduce",
    "moe_overlap_micro_batches",
    "moe_overlap_nccl_ctas",
    "moe_overlap_partitions",
    "moe_overlap_range",
    "parallel_attention_mlp",
    "plan",
    "resume_with_changes",
    "trace",
}
OWN_CHOICES = {"ByteTokenizer", "irregular"}


def test_defaults_are_upstreams() -> None:
    upstream = load_upstream_flags()
    different, unknown = set(), set()
    for flag in config_flags():
        named = [upstream[name] for name in (*flag.names, flag.off) if name in upstream]
        if not named:
            unknown.add(flag.field)
        elif any(str(flag.default) != str(entry.default) for entry in named):
            different.add(flag.field)
    assert different == set(OTHER_DEFAULTS)
    assert unknown == OWN_FLAGS


def test_choices_are_among_upstreams() -> None:
    upstream = load_upstream_flags()
    for flag in config_flags():
        choices = upstream[flag.names[0]].choices if flag.names[0] in upstream else None
        if flag.choices and choices:
            assert set(flag.choices) - set(choices) <= OWN_CHOICES, flag.field


def test_every_upstream_flag_has_one_answer() -> None:
    own = {name for flag in config_flags() for name in (*flag.names, flag.off)}
    for name in load_upstream_flags():
        answered = name in own or name in ALIASES or name == "--help"
        answered = answered or without_effect_reason(name) or awaited(name) or refusal(name)
        assert answered, name


def test_every_pattern_is_for_some_flag() -> None:
    from fnmatch import filter as matching

    names = list(load_upstream_flags())
    for group in (*WITHOUT_EFFECT, *AWAITED, *REFUSED):
        for pattern in group.patterns:
            assert matching(names, pattern), pattern


def test_every_field_survives_the_way_through_flags() -> None:
    """Each flag in turn is set to a value other than its default."""
    samples = {"int": "7", "float": "0.25", "str": "word", "layers": "([0]*1+[1]*2)", "pair": "(8, 0)"}
    for flag in config_flags():
        if flag.kind == "switch":
            words = [flag.off or flag.names[0]]
        else:
            text = next((c for c in flag.choices if c != str(flag.default)), flag.choices[0]) if flag.choices else ""
            words = [flag.names[0], *([text or samples[flag.kind]] * (2 if flag.many else 1))]
        config = parse(words).config
        value = getattr(getattr(config, flag.group), flag.field)
        assert value != flag.default or flag.choices, flag.field
        assert parse(config_to_flags(config)).config == config, flag.field
        if value != flag.default:
            assert parse(flag_texts(flag, value)).config == config, flag.field
    assert config_to_flags(Config()) == []


def test_files_are_read_as_a_shell_reads(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "sizes.args").write_text("--num-layers 2 # two\n--hidden-size=64\n@more.args\n")
    (tmp_path / "inner" / "more.args").write_text("--moe-layer-freq '([0]*1 + [1]*1)'\n")
    (tmp_path / "job.args").write_text("# a job\n@inner/sizes.args\n--num-layers 4\n")
    parsed = parse([f"@{tmp_path}/job.args", "--hidden-size", "32"])
    assert (parsed.config.model.num_layers, parsed.config.model.hidden_size) == (4, 32)
    assert parsed.config.moe.moe_layer_freq == (0, 1)
    assert parsed.name == "job"


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.args").write_text("@b.args\n")
    (tmp_path / "b.args").write_text("@a.args\n")
    with pytest.raises(ConfigError, match="includes itself"):
        parse([f"@{tmp_path}/a.args"])


def test_a_file_that_is_no_list_of_flags_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("Notes on --bf16")
    (tmp_path / "job.args").write_text("@notes.md --bf16")
    for named in (tmp_path / "notes.md", tmp_path / "job.args"):
        with pytest.raises(ConfigError, match="notes.md: begins with 'Notes', which is no flag; give a file of"):
            parse([f"@{named}"])


def test_later_flags_win_also_over_refused_ones() -> None:
    words = ["--optimizer", "muon", "--mtp-num-layers", "1", "--no-mmap-bin-files"]
    later = ["--optimizer", "sgd", "--mtp-num-layers", "0", "--mmap-bin-files"]
    config = parse([*words, *later]).config
    assert config.optimizer.optimizer == "sgd"
    assert config.data.mmap_bin_files
    assert parse(["--mmap-bin-files", "--no-mmap-bin-files", "--mmap-bin-files"]).config.data.mmap_bin_files


def test_older_spellings_are_read_as_upstream_reads_them() -> None:
    for old, new in (
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--recompute-activations", "--recompute-granularity selective"),
        ("--encoder-num-layers 3", "--num-layers 3"),
        ("--persistent-save-interval=7", "--save-interval 7"),
    ):
        assert parse(old.split()).config == parse(new.split()).config != Config()


def test_what_is_awaited_is_accepted_with_its_values() -> None:
    parsed = parse(["--mtp-standalone", "--qk-l2-norm", "--no-rope-freq", "4"])
    assert parsed.awaited == (
        ("--mtp-standalone", "multi-token prediction on other stages than the loss"),
        ("--qk-l2-norm", "other norms and clips of queries and keys"),
        ("--no-rope-freq 4", "layers without positions"),
    )
    with pytest.raises(ConfigError, match="--max-seqlen-per-dp-cp-rank one: must be a whole number"):
        parse(["--max-seqlen-per-dp-cp-rank", "one"])


def test_brackets_around_lists() -> None:
    for words in (["[core_attn moe]"], ["[core_attn", "moe]"], ["core_attn", "moe"]):
        assert parse(["--recompute-modules", *words]).config.parallel.recompute_modules == ("core_attn", "moe")


def test_flags_for_faster_gpu_code_are_listed() -> None:
    parsed = parse(["--use-flash-attn", "--attention-backend", "flash", "--num-distributed-optimizer-instances", "1"])
    assert [name for name, _ in parsed.without_effect] == ["--use-flash-attn", "--attention-backend"]
    assert parsed.config == Config()


def test_every_field_has_a_docstring_and_stands_in_help() -> None:
    docs, text = field_docs(), help_text()
    for group, cls in typing.get_type_hints(Config).items():
        assert f"\n{cls.__doc__}\n" in text, group
        for field in dataclasses.fields(cls):
            assert docs[cls.__name__, field.name].endswith("."), field.name
    for flag in config_flags():
        assert f"  {flag.off or flag.names[0]}" in text
    assert max(map(len, text.splitlines())) <= 140
    assert config_module.__doc__


def test_help_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--num-layers", "2", "--help"])
    assert end.value.code == 0
    assert "mixture of experts" in capsys.readouterr().out


def test_no_message_moves_the_cursor(tmp_path: Path) -> None:
    for words in (
        ["--lr", "\x1b[2J\x07"],
        ["--\x1b[2J"],
        ["@\x1b[2J"],
        ["--optimizer", "a\udcff\u202e"],
        ["--lr", "a\0b"],
    ):
        with pytest.raises(ConfigError) as caught:
            parse(words)
        assert str(caught.value).isprintable() and "?" in str(caught.value)
    (tmp_path / "nul.args").write_bytes(b"--save a\0b")
    with pytest.raises(ConfigError, match=r"^--save a\?b: |^a\?b: holds a NUL character; correct the file$"):
        parse([f"@{tmp_path}/nul.args"])
