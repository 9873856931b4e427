"""Measured runs as Megatron flags: what a row of the tables in data/ says, and what its source is known to switch on.

The rows are published measurements (column `source`); data/README.md says where they come from. What a row of measured.csv.gz
does not say is taken from its source's habits, in one place: `SOURCES`. Rows of moe_recipes.csv carry all of their arguments,
rows of mlperf_v6.csv every setting that matters.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).resolve().parent / "data"
SCORED_METRICS = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
NAMED_SIZES = re.compile(r"gpt-[\d.]+b\(h(\d+),L(\d+),a(\d+)\)")


@dataclass(frozen=True, slots=True)
class Habits:
    """What the runs of a source switch on without saying so."""

    overlapped: bool = True
    """Gradients and parameters under computation."""
    tensor_overlap: bool = False
    sequence_parallel: bool = True
    flash: bool = True
    words: tuple[str, ...] = ()


BF16_GRADIENTS = "--grad-reduce-in-bf16"
FUSED_LOSS = ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te")
BRIDGE = ("--moe-router-force-load-balancing", "--moe-router-fusion", BF16_GRADIENTS, *FUSED_LOSS)
"""Every timed recipe of Megatron-Bridge: `grad_reduce_in_fp32=False` in `_perf_precision`, `cross_entropy_fusion_impl="te"`."""
SMALL_STATES = (
    "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16".split()
)
SMALL_STATE_MODELS = ("deepseek-v3", "kimi-k2")
"""Models whose recipes in Megatron-Bridge keep Adam's moments in bf16 (recipes/deepseek/deepseek_v3.py, recipes/kimi)."""
_OVERLAP = "overlap-grad-reduce"
SOURCES = {
    "MooreThreads/SimuMax": Habits(overlapped=False, words=FUSED_LOSS),
    "VIA-Research/vTrain": Habits(overlapped=False, sequence_parallel=False, flash=False),
    "arXiv": Habits(overlapped=False, sequence_parallel=False, flash=False),
    # Its own log shows gradients in bf16: 32.1 GiB between the steps of nemotron4-15b (row 793). What it allocates beyond them
    # speaks for an unfused loss, which scripts/performance of that time does not replace either.
    "NVIDIA/dgxc-benchmarking": Habits(tensor_overlap=True, words=(BF16_GRADIENTS,)),
    "NVIDIA-NeMo/Megatron-Bridge": Habits(tensor_overlap=True, words=BRIDGE),
    # examples/llama/train_llama3_8b_h100_fp8.sh
    "NVIDIA/Megatron-LM:examples/llama": Habits(words=(BF16_GRADIENTS,)),
    "NVIDIA/Megatron-LM": Habits(overlapped=False, sequence_parallel=False),
    # sbatch_benchmarking.sh adds --tp-comm-overlap to runs in bf16, as both scored ones are;
    # model_configs/benchmarking/Qwen3-235B-A22B.yaml fuses the router.
    "yanring/Megatron-MoE-ModelZoo": Habits(
        tensor_overlap=True, words=("--moe-router-force-load-balancing", "--moe-router-fusion", *FUSED_LOSS)
    ),
    "Richardyu114/training_results_v6.0": Habits(words=FUSED_LOSS),
}
"""By the begin of the column `source`."""
NATURAL = ("NVIDIA/Megatron-LM:tests/",)
"""Sources in measured.csv.gz whose experts get what the router gives them; the others force equal loads."""

PROVIDERS = {
    "gpt_oss_provider.py": "--softmax-type learnable --quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0"
}
"""What the provider of a model switches on that models.json does not say, by the end of the entry's source."""
UPSTREAM_DEFAULTS = ("mcore-test:gpt3_7b_", "mcore-test:gpt3_mcore_te_tp1_pp1_", "mcore-test:gpt3_mcore_tp1_pp1_")
"""Models whose argument list (tests/golden/argument_lists.json) leaves dropout, biases and positions as upstream has them."""
_LOCAL_TEST = re.compile(r"mcore-test:gpt3_mcore_tp\d(?!.*_te)")
"""Upstream's tests of megatron-core's own modules: each argument list whose name has `mcore_tp` and no `te` says
`--transformer-impl local`, all others Transformer Engine, whose attention `--attention-backend unfused` takes apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    number: int
    """Line of the file, the header being 1."""
    fields: dict[str, str]
    file: str = ""
    """`mlperf` or `recipe` where the row stands in a file of its own; empty in measured.csv.gz."""

    def __getitem__(self, name: str) -> str:
        return self.fields[name]

    @property
    def name(self) -> str:
        """The row in tables: its line, behind the file's name unless that is measured.csv.gz."""
        return f"{self.file}{self.number}"

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return int(self["n_gpus"])

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return bool(_facts(self).get("experts"))

    @property
    def routing(self) -> str:
        """`forced` balance of the experts' loads, or `natural`; empty for a dense model."""
        if not self.is_moe:
            return ""
        natural = self.fields.get("routing") == "natural" or self["source"].startswith(NATURAL)
        return "natural" if natural else "forced"

    @property
    def is_logged(self) -> bool:
        """Whether norms and zeros of every parameter were logged in each step, as upstream's tests do."""
        return self["source"].startswith(NATURAL)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run, as its source names it; empty in measured.csv.gz."""
        content: dict[str, Any] = json.loads(self.fields.get("flags_json", "{}"))
        return content

    @property
    def seconds(self) -> float:
        """Measured seconds of a step; tokens per second are turned into them."""
        value = float(self["value"])
        if derived := self.settings.get("derived"):
            # Megatron's own operations per step over the published rate: the source prints the rate alone.
            return float(derived["megatron_flops_per_step"]) / (value * 1e12 * self.gpus)
        if self["metric"] == "tokens_per_s_per_gpu":
            return int(self["global_batch"]) * int(self["seq_len"]) / (value * self.gpus)
        return value

    @property
    def gib(self) -> float:
        """Measured peak memory."""
        return float(self["value"])

    @property
    def is_reserved(self) -> bool:
        """Whether the peak is what the allocator reserved, not what was allocated."""
        # NeMo logs `torch.cuda.max_memory_reserved` as peak_memory_usage (lightning/pytorch/strategies/megatron_strategy.py).
        return self["other_flags"].startswith(("RESERVED", "peak_memory_usage="))

    @property
    def gpu_type(self) -> str:
        """Types under one name: `B200-SXM` is B200."""
        return {"B200-SXM": "B200", "A100-80GB": "A100"}.get(self["gpu"], self["gpu"])

    @property
    def habits(self) -> Habits:
        """Of its source."""
        return next(habits for prefix, habits in SOURCES.items() if self["source"].startswith(prefix))


@cache
def table(file: str) -> pd.DataFrame:
    """A file of data/, every field as its text. The index counts rows as an editor shows them: the first stands in line 2."""
    frame = pd.read_csv(DATA / file, dtype=str, keep_default_na=False)
    return frame.set_index(pd.RangeIndex(2, 2 + len(frame)))


def records(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Its rows, by column."""
    return [{str(column): str(value) for column, value in row.items()} for row in frame.to_dict("records")]


@cache
def measured_rows() -> tuple[Row, ...]:
    """Every row of the table."""
    return _rows_of("measured.csv.gz")


@cache
def published_rows() -> tuple[Row, ...]:
    """Every row of mlperf_v6.csv and moe_recipes.csv."""
    return (*_rows_of("mlperf_v6.csv", "mlperf"), *_rows_of("moe_recipes.csv", "recipe"))


def _rows_of(file: str, prefix: str = "") -> tuple[Row, ...]:
    frame = table(file)
    return tuple(Row(number, row, prefix) for number, row in zip(frame.index, records(frame), strict=True))


def scored_rows() -> list[Row]:
    """Rows that count in a table of errors."""
    measured = [row for row in measured_rows() if row["scored"] == "yes" and row["metric"] in SCORED_METRICS]
    return [*measured, *(row for row in published_rows() if row["scored"] == "yes")]


def launched_rows() -> list[Row]:
    """Calibration rows of small models, whose steps are bound by the host: too small to be scored, but what tells of launching.

    Left out are a run whose activations are offloaded, and one that takes five times as long as its twin on twice the GPUs.
    """
    small = [row for row in measured_rows() if (row["scored"], row["metric"]) == ("toy size", "step_time_s")]
    known = [row for row in small if row["split"] == "calibration" and row["n_gpus"]]
    return [row for row in known if not row["model"].endswith(("_fine_grained_offloading", "_1node"))]


@cache
def models() -> dict[str, dict[str, Any]]:
    """Architectures by name."""
    content: dict[str, dict[str, Any]] = json.loads((DATA / "models.json").read_text(encoding="utf-8"))
    return content


def flags_of(row: Row) -> list[str]:
    """The Megatron flags of a row."""
    if row.file == "recipe":
        return _recipe_flags(row)
    layers = _facts(row)["layers"]
    own = _mlperf_flags(row) if row.file == "mlperf" else []
    return [*_model_flags(row), *_parallel_flags(row, layers), *_speed_flags(row), *row.habits.words, *own]


def _recipe_flags(row: Row) -> list[str]:
    """Arguments that are written out, and a vocabulary."""
    words = ["--vocab-size", str(_facts(row)["vocab"]), "--train-iters", "10", "--lr", "1e-4"]
    for name, value in row.settings["args"].items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [flag, *map(str, values)]
    return words


def _mlperf_flags(row: Row) -> list[str]:
    """Settings of a run of MLPerf: Megatron-Bridge's variables, as far as a flag of Megatron says the same."""
    settings = row.settings
    words = ["--cuda-graph-impl", "local", "--cuda-graph-scope", str(settings["CUDA_GRAPH_SCOPE"])]
    if int(row["ep"]) > 1:
        words += ["--moe-token-dispatcher-type", settings["MOE_TOKEN_DISPATCHER_TYPE"]]
        words += ["--moe-flex-dispatcher-backend", settings["MOE_FLEX_DISPATCHER_BACKEND"]]
    words += ["--overlap-moe-expert-parallel-comm"] if settings.get("OVERLAP_MOE_EXPERT_PARALLEL_COMM") else []
    words += ["--delay-wgrad-compute"] if settings.get("DELAY_WGRAD_COMPUTE") else []
    words += ["--moe-paged-stash"] if settings.get("MOE_PAGED_STASH") else []
    words += ["--use-transformer-engine-op-fuser"] if settings.get("USE_TE_OPS") else []
    words += ["--moe-router-fusion"] if settings.get("MOE_ROUTER_FUSION") else []
    words += [BF16_GRADIENTS] if settings.get("grad_reduce_in_fp32") is False else []
    if int(row["cp"]) > 1:
        words += ["--cp-comm-type", settings["cp_comm_type"]]
    if settings.get("PIPELINE_LAYOUT"):
        words += ["--pipeline-model-parallel-layout", settings["PIPELINE_LAYOUT"]]
    return words


def _facts(row: Row) -> dict[str, Any]:
    named = NAMED_SIZES.fullmatch(row["model"])
    facts = dict(models().get(row["model"], {}))
    if named and "layers" not in facts:
        hidden, layers, heads = map(int, named.groups())
        facts |= {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 51200, "gated": False}
    return facts


def _model_flags(row: Row) -> list[str]:
    facts = _facts(row)
    ffn = facts.get("ffn", facts.get("ffn_dense"))
    gpt = not facts["gated"] and facts.get("activation", "gelu") == "gelu"
    as_upstream = row["model"].startswith(UPSTREAM_DEFAULTS)
    words = f"""--num-layers {facts["layers"]} --hidden-size {facts["hidden"]} --ffn-hidden-size {ffn}
        --num-attention-heads {facts["heads"]} --vocab-size {facts["vocab"]} --seq-length {row["seq_len"]}
        --max-position-embeddings {row["seq_len"]} --train-iters 10 --lr 1e-4""".split()
    words += ["--kv-channels", str(facts["head_dim"])] if "head_dim" in facts else []
    if facts.get("kv_groups", facts["heads"]) != facts["heads"]:
        words += ["--group-query-attention", "--num-query-groups", str(facts["kv_groups"])]
    if not as_upstream and not (gpt and not row.habits.flash):
        words += "--attention-dropout 0.0 --hidden-dropout 0.0".split()
    if not gpt or ("mcore-test" in row["model"] and not as_upstream):
        words += ["--position-embedding-type", "rope"]
        words += [] if facts.get("attention_bias") and facts.get("experts") else ["--disable-bias-linear"]
    if not gpt:
        words += ["--normalization", "RMSNorm"]
    provided = next((more.split() for end, more in PROVIDERS.items() if facts.get("source", "").endswith(end)), [])
    words += provided
    if "sliding_window" in facts:
        # A query sees itself and the tokens before it.
        words += [
            "--window-size",
            f"{facts['sliding_window'] - 1},0",
            "--window-attn-skip-freq",
            str(facts["swa_every"]),
        ]
    words += ["--swiglu"] if facts["gated"] and "--quick-geglu" not in provided else []
    words += ["--no-gradient-accumulation-fusion"] if as_upstream else []
    words += ["--squared-relu"] if facts.get("activation") == "squared-relu" else []
    untied = facts.get("untied", not facts.get("tied_embeddings", gpt))
    words += ["--untie-embeddings-and-output-weights"] if untied else []
    words += ["--qk-layernorm"] if facts.get("qk_layernorm") or facts.get("mla") else []
    return [*words, *_latent_flags(facts), *_moe_flags(row, facts)]


def _latent_flags(facts: dict[str, Any]) -> list[str]:
    latent = facts.get("mla")
    if not latent:
        return []
    words = f"""--multi-latent-attention --kv-lora-rank {latent["kv_lora_rank"]} --qk-head-dim {latent["qk_head_dim"]}
        --qk-pos-emb-head-dim {latent["qk_rope_head_dim"]} --v-head-dim {latent["v_head_dim"]}""".split()
    return words + (["--q-lora-rank", str(latent["q_lora_rank"])] if latent["q_lora_rank"] else [])


def _moe_flags(row: Row, facts: dict[str, Any]) -> list[str]:
    if not facts.get("experts"):
        return []
    dense = facts.get("first_dense_layers", 0)
    frequency = facts.get("moe_layer_freq", f"([0]*{dense}+[1]*{facts['layers'] - dense})" if dense else "1")
    words = f"""--num-experts {facts["experts"]} --moe-router-topk {facts["topk"]} --moe-layer-freq {frequency}
        --moe-ffn-hidden-size {facts["moe_ffn"]} --expert-model-parallel-size {row["ep"]} --moe-grouped-gemm""".split()
    words += ["--expert-tensor-parallel-size", row["etp"] or "1"]
    if facts.get("shared_expert_ffn"):
        words += ["--moe-shared-expert-intermediate-size", str(facts["shared_expert_ffn"])]
    if str(facts.get("router", "")).startswith("sigmoid"):
        words += "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32".split()
    if limited := re.search(r"(\d+) groups, topk group (\d+)", str(facts.get("router", ""))):
        words += ["--moe-router-num-groups", limited[1], "--moe-router-group-topk", limited[2]]
    if predictions := _predictions(row):
        words += ["--mtp-num-layers", str(predictions)]
    flags = row["other_flags"].lower()
    if "hybridep" in flags:
        return [*words, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
    if "deepep" in flags:
        return [*words, "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
    return [*words, "--moe-token-dispatcher-type", "alltoall"]


def _predictions(row: Row) -> int:
    """Multi-token-prediction layers of the run."""
    without = "MTP" in row["other_flags"].partition("w/o")[2]
    return 0 if without else int(_facts(row).get("mtp_layers", 0))


def _parallel_flags(row: Row, layers: int) -> list[str]:
    pipeline, virtual, tensor = int(row["pp"]), _virtual(row), int(row["tp"])
    words = f"""--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}
        --context-parallel-size {row["cp"]} --micro-batch-size {row["micro_batch"]}
        --global-batch-size {row["global_batch"]} --use-distributed-optimizer""".split()
    if tensor > 1 and (row.habits.sequence_parallel or _says_sequence_parallel(row) or _facts(row).get("experts")):
        words.append("--sequence-parallel")
    layout = re.search(r"pp_layout=(\S+?),? ", row["other_flags"] + " ")
    chunks = pipeline * virtual
    if layout:
        words += ["--pipeline-model-parallel-layout", layout[1]]
    elif layers % chunks == 0:
        words += ["--num-virtual-stages-per-pipeline-rank", str(virtual)] if virtual > 1 else []
    elif (layers + 2) % chunks == 0:
        words += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
        words += ["--num-virtual-stages-per-pipeline-rank", str(virtual)] if virtual > 1 else []
    else:
        words += ["--pipeline-model-parallel-layout", _full_layout(layers, chunks, _predictions(row))]
    return words


def _says_sequence_parallel(row: Row) -> bool:
    text = row["other_flags"]
    return ("sequence-parallel" in text or "sequence parallel" in text) and "no sequence parallel" not in text


def _full_layout(layers: int, chunks: int, predictions: int) -> str:
    """Every chunk full but the last one, which has the rest, prediction layers and the loss.

    Source: Megatron-Bridge's recipes of DeepSeek-V3 and Kimi K2, whose tables of layouts have this form.
    """
    full = -(-layers // chunks)
    rest = layers - full * (chunks - 1)
    assert rest > 0, f"{layers} layers leave nothing for the last of {chunks} chunks"
    return "E" + ("t" * full + "|") * (chunks - 1) + "t" * rest + "m" * predictions + "L"


def _speed_flags(row: Row) -> list[str]:
    habits, flags = row.habits, row["other_flags"]
    words = ["--fp16"] if row["precision_class"] == "fp16" else ["--bf16"]
    words += {
        "fp8": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather".split(),
        "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather".split(),
        "nvfp4": "--fp4-format e2m1".split(),
    }.get(row["precision_class"], [])
    if "fp32 grad accum" in flags:
        words.append("--accumulate-allreduce-grads-in-fp32")
    if (habits.overlapped or _OVERLAP in flags) and "no overlap-grad-reduce" not in flags:
        words += ["--overlap-grad-reduce", "--overlap-param-gather"]
    words += ["--tp-comm-overlap"] if habits.tensor_overlap and int(row["tp"]) > 1 else []
    words += _attention_flags(row)
    # Megatron-Bridge sets both (set_moe_a2a_overlap_overrides).
    words += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"] if "a2a_overlap=True" in flags else []
    words += ["--delay-wgrad-compute"] if "delay_wgrad=True" in flags else []
    if "paged_stash=True" in flags:
        # megatron-core's recipe of the paged stash (moe_recipes.csv) switches both on; it is of a model with plain SwiGLU.
        fused = _facts(row).get("attention_bias") is None
        words += ["--moe-paged-stash", *(["--use-transformer-engine-op-fuser"] if fused else [])]
    if row["source"].startswith("NVIDIA-NeMo/Megatron-Bridge") and row["model"] in SMALL_STATE_MODELS:
        words += SMALL_STATES
    words += ["--cp-comm-type", "a2a"] if "cp a2a" in flags else []
    words += _graph_flags(flags) + _recompute_flags(row)
    if "fsdp" in row["zero/fsdp"]:
        words += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
        # The user guide of Megatron-FSDP recommends it. In fp32, experts' weights and gradients alone would keep the links of row
        # 717 busy for as long as its whole step at their line rate (examples/records/2026-11-25_predictions).
        words += [] if BF16_GRADIENTS in row.habits.words else [BF16_GRADIENTS]
    offloaded = re.search(r"cpu_offload_layers=(\d+)", flags)
    return words + (["--cpu-offloading-num-layers", offloaded[1]] if offloaded else [])


def _attention_flags(row: Row) -> list[str]:
    """Whose modules run, and whether attention is one kernel."""
    if not row.habits.flash or _LOCAL_TEST.match(row["model"]):
        return ["--transformer-impl", "local"]
    return (
        ["--attention-backend", "unfused"]
        if "attention-backend=unfused" in row["other_flags"]
        else ["--use-flash-attn"]
    )


def _graph_flags(flags: str) -> list[str]:
    implementation = re.search(r"cuda_graph=(\w+)", flags)
    if not implementation or implementation[1] == "none":
        return []
    if implementation[1] == "full_iteration":
        return ["--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"]
    return ["--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn", "moe_router", "moe_preprocess"]


def _recompute_flags(row: Row) -> list[str]:
    kind, _, modules = row["recompute"].partition(":")
    if kind.startswith("full"):
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    if kind != "selective" or not modules:
        return []
    return ["--recompute-granularity", "selective", "--recompute-modules", *modules.split(",")]


def _virtual(row: Row) -> int:
    """Virtual stages; where the table has none, what the next release's same line says, which the row quotes."""
    quoted = re.search(r"VP listed NA in [\d.]+, (\d+) in", row["other_flags"])
    return int(row["vp"] or (quoted[1] if quoted else 1))
