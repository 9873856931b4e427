"""Our calls of Transformer Engine and apex, and our stand-ins for them, against the signatures of their releases.

`tests/stand_ins/library_signatures.json` holds the signatures, as the libraries' sources state them; its writer is beside it.
Every difference has a line here with its reason; one that comes or goes fails. Nothing here runs a kernel.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import transformer_engine_stand_in as linears
from tests.stand_ins.library_calls import APEX, ENGINE, Call, Packages, calls
from tests.stand_ins.library_sources import ANYTHING, Library, parameters_of
from tests.stand_ins.write_signatures import FILE, TEXTS, compiled_signature, needed_names, stand_ins

ROOT = Path(__file__).parents[3]
RECORD = json.loads(FILE.read_text())
RELEASES: list[str] = RECORD["releases"]
TE = "transformer_engine.pytorch."
RECIPE = "transformer_engine.common.recipe."

OLD = "for releases before 1.0, under a condition of megatron-core"
NEW = "under a condition of megatron-core on this release"
DELAYED = "recipes are dataclasses of pydantic, which ignores them: --no-fp8-wgrad, the second one, is refused for that"
CALLS = {
    f"{RECIPE}DelayedScaling": ("device interval override_linear_precision params_dtype", RELEASES, DELAYED),
    f"{TE}DotProductAttention": ("return_max_logit", ["2.8.0"], NEW),
    f"{TE}DotProductAttention.forward": ("num_splits", ["2.8.0", "2.9.0"], NEW),
    f"{TE}LayerNormLinear": ("ub_atomic_gemm_ag ub_split_ag", RELEASES, OLD),
    f"{TE}Linear": ("ub_atomic_gemm_ag ub_atomic_gemm_rs ub_split_ag ub_split_rs", RELEASES, OLD),
    f"{TE}cpp_extensions.general_gemm": ("workspace", RELEASES[2:], "not called: get_workspace is imported before"),
    f"{TE}tensor.utils.cast_master_weights_to_fp8": ("manual_post_all_gather_processing", RELEASES[:2], NEW),
}
"""What is called -> arguments that it does not take, in which releases, and why that is right."""
APEX_CALLS = {
    "apex.optimizers.FusedAdam": (
        "exp_avg_dtype exp_avg_sq_dtype master_weight_dtype store_param_remainders use_decoupled_grad",
        "of --use-precision-aware-optimizer, which needs Transformer Engine",
    )
}
ABSENT = {
    f"{RECIPE}CustomRecipe": (["2.8.0"], "--fp8-recipe custom needs 2.9"),
    f"{TE}attention._SplitAlongDim.apply": (
        RELEASES,
        "megatron-core splits queries, keys and values by torch.split instead",
    ),
    f"{TE}cpp_extensions.cast_to_fp8": (RELEASES, "for releases before 2.0, under a condition of megatron-core"),
    f"{TE}cpu_offload_v1": (RELEASES, "megatron-core imports cpu_offload instead"),
    f"{TE}module.base.get_workspace": (RELEASES[2:], "megatron-core multiplies the router's weights by torch instead"),
    f"{TE}tensor.utils.post_all_gather_processing": (RELEASES[:2], "megatron-core does without"),
}
"""Names that megatron-core asks for -> releases without them, and what it does there."""
PLAIN = "the stand-in's attention is causal and of whole sequences: windows, sinks and context ranks are not tested"
CONSTANT = "settings of the recipe that megatron-core leaves alone"
STAND_INS = {
    f"{RECIPE}Float8CurrentScaling": ("fp8_gemm_fprop fp8_gemm_dgrad fp8_gemm_wgrad", CONSTANT),
    f"{RECIPE}Float8BlockScaling": (
        "use_f32_scales x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim fp8_gemm_fprop fp8_gemm_dgrad "
        "fp8_gemm_wgrad fp8_dpa fp8_mha",
        CONSTANT,
    ),
    f"{RECIPE}MXFP8BlockScaling": ("fp8_dpa fp8_mha enable_2d_quantization", CONSTANT),
    f"{RECIPE}NVFP4BlockScaling": (
        "disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation nvfp4_4over6 "
        "nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format fp8_format fp8_dpa fp8_mha backward_override",
        "a name that megatron-core asks for: nothing here computes in 4 bits",
    ),
    f"{TE}DotProductAttention": (
        "window_size bottom_right_diagonal softcap cp_group cp_global_ranks cp_stream cp_comm_type softmax_type "
        "return_max_logit name",
        PLAIN,
    ),
    f"{TE}DotProductAttention.forward": (
        "qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv "
        "window_size bottom_right_diagonal softcap checkpoint_core_attention core_attention_bias_type core_attention_bias "
        "alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod "
        "score_mod_bprop score_mod_tensors score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim "
        "thd_attention_policies thd_attention_policy_dispatch; order or defaults",
        f"{PLAIN}; queries, keys and values are given",
    ),
}
"""Stand-in -> the arguments of the newest release that it lacks; it has no others."""


@cache
def signature(name: str, release: str) -> str | None:
    """Of Transformer Engine: what the last change up to a release has made of it."""
    changes = RECORD["transformer_engine"][name]
    return changes[max((begin for begin in changes if _number(begin) <= _number(release)), key=_number)]


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


@pytest.mark.parametrize(("packages", "table"), [(ENGINE, "transformer_engine"), (APEX, "apex")])
def test_the_file_has_every_name(packages: Packages, table: str) -> None:
    """After an update of megatron-core or of a stand-in: write the file anew."""
    assert set(needed_names(packages)) == set(RECORD[table]) - set(TEXTS)


def test_names_are_there() -> None:
    absent = {
        name: releases
        for name in RECORD["transformer_engine"]
        if (releases := [release for release in RELEASES if signature(name, release) is None])
    }
    assert absent == {name: releases for name, (releases, _) in ABSENT.items()}
    assert [name for name, state in RECORD["apex"].items() if state is None] == []


def test_calls_fit() -> None:
    differences: dict[str, dict[str, str]] = {}
    for call in calls(ENGINE):
        for release in RELEASES:
            state = signature(call.name, release)
            if state is not None and (mismatch := " ".join(call.mismatches(state))):
                differences.setdefault(call.name, {})[release] = mismatch
    assert len(calls(ENGINE)) > 80
    assert differences == {name: dict.fromkeys(releases, words) for name, (words, releases, _) in CALLS.items()}


def test_arguments_by_position_mean_the_same_in_all_releases() -> None:
    for call in calls(ENGINE):
        states = {state for release in RELEASES if (state := signature(call.name, release)) not in (None, ANYTHING)}
        first = {parameters_of(state).positional[: call.positional] for state in states}
        assert len(first) <= 1, (call, first)


def test_calls_of_apex_fit() -> None:
    mismatches = {call.name: " ".join(call.mismatches(RECORD["apex"][call.name])) for call in calls(APEX)}
    assert len(calls(APEX)) > 10
    assert {name: words for name, words in mismatches.items() if words} == {
        n: words for n, (words, _) in APEX_CALLS.items()
    }


VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def difference(stand_in: Any, state: str) -> str:
    """What a stand-in has otherwise than a signature: arguments that it lacks, that it adds, and the order of the rest."""
    own = inspect.signature(stand_in.__init__ if isinstance(stand_in, type) else stand_in).parameters.values()
    is_bare = isinstance(stand_in, type) and stand_in.__init__ is object.__init__
    parameters = [] if is_bare else [x for x in own if x.name != "self" and x.kind not in VARIABLE]
    names, library = [x.name for x in parameters], parameters_of(state)
    required = {x.name for x in parameters if x.default is x.empty}
    lacks, adds = [[x for x in a if x not in b] for a, b in ((library.names, names), (names, library.names))]
    both = [x for x in library.names if x in names]
    reordered = [x for x in names if x in both] != both or required - set(adds) != set(library.required) - set(lacks)
    texts = ("lacks", lacks), ("adds", adds), ("order or defaults", [""] if reordered else [])
    return "; ".join(" ".join([text, *words]).strip() for text, words in texts if words)


def test_stand_ins_have_the_signatures_of_the_newest_release() -> None:
    differences = {}
    for name, stand_in in stand_ins():
        state = signature(name, RELEASES[-1])
        assert state is not None, name
        if state != ANYTHING and (words := difference(stand_in, state)):
            differences[name] = words
    assert differences == {name: f"lacks {words}" for name, (words, _) in STAND_INS.items()}


def test_stand_ins_for_linears_alone_have_those_signatures_too() -> None:
    for stand_in in (linears.Linear, linears.GroupedLinear):
        state = signature(f"{TE}{stand_in.__name__}", RELEASES[-1])
        assert state is not None and difference(stand_in, state) == ""


def test_what_the_runtime_reads_and_sets_is_there() -> None:
    assert {text: RECORD["transformer_engine"][text] for text in TEXTS} == dict.fromkeys(TEXTS, {RELEASES[0]: ""})


def test_releases_of_the_extra_were_compared_and_the_page_names_them() -> None:
    (engine,) = re.findall(r'"(transformer-engine.*?)"', (ROOT / "setup.py").read_text())
    page = (ROOT / "docs" / "install_gpu.md").read_text()
    assert f"The extra `gpu` is `{engine}`" in page
    assert set(re.findall(r"transformer-engine\[core_cu13,pytorch]>=[^\s`\"]+", page)) == {engine}
    assert f"Signatures of {RELEASES[0].removesuffix('.0')} to {RELEASES[-1]}" in page
    first, end = (_number(text) for text in re.findall(r"[\d.]+", engine.partition("]")[2]))
    assert _number(RELEASES[0]) <= first < end <= _number(RELEASES[-1])
    assert len([release for release in RELEASES if first <= _number(release) < end]) >= 2


LIBRARY = """
from dataclasses import dataclass
from compiled import kernel
class Base:
    def __init__(self, size, *, bias=True): pass
    def forward(self, x): pass
class Product(Base): pass
class Function:
    @staticmethod
    def forward(ctx, x, scale=1.0): pass
@dataclass
class Recipe:
    margin: int = 0
run = Function.apply
"""


def test_sources_are_read_as_python_reads_them(tmp_path: Path) -> None:
    (tmp_path / "library" / "inner").mkdir(parents=True)
    (tmp_path / "library" / "__init__.py").write_text(
        "from .inner.module import Product as Linear, kernel\nfrom .inner import *\n"
    )
    (tmp_path / "library" / "inner" / "__init__.py").write_text("from .module import Function, Recipe, run\n")
    (tmp_path / "library" / "inner" / "module.py").write_text(LIBRARY)
    library = Library(tmp_path)
    expected = {
        "Linear": "size, *, bias=True",
        "Linear.forward": "x",
        "Linear.backward": None,
        "Recipe": "margin=0",
        "Function.apply": "x, scale=1.0",
        "kernel": ANYTHING,
        "inner.run": ANYTHING,
        "inner.module.lost": None,
    }
    assert {name: library.signature(f"library.{name}") for name in expected} == expected
    assert library.mentions("margin", "library") and not library.mentions("nothing", "library")


@pytest.mark.parametrize(
    ("positional", "keywords", "is_complete", "expected"),
    [
        (1, {"scale"}, True, []),
        (1, {"lost"}, True, ["lost"]),
        (3, set(), True, ["too many"]),
        (0, {"scale"}, True, ["without x"]),
        (0, {"scale"}, False, []),
    ],
)
def test_what_a_call_does_not_fit(positional: int, keywords: set[str], is_complete: bool, expected: list[str]) -> None:
    call = Call("library.Function", "here:1", positional, frozenset(keywords), is_complete)
    assert call.mismatches("x, scale=1.0") == expected
    assert call.mismatches(ANYTHING) == []


def test_compiled_functions_are_read_by_their_names(tmp_path: Path) -> None:
    source = tmp_path / "module.cpp"
    source.write_text('void add_stub(at::Tensor& x, const float scale);\nm.def("add", &add_stub, "adds");\n')
    assert compiled_signature(source, "add") == "x, scale, /" and compiled_signature(source, "lost") is None
