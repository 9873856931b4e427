"""Measured runs as Megatron flags: the settings in a row of data/measured.csv.gz, and the habits of its source.

The rows are published measurements (column `source`); data/README.md lists the sources. Settings that a row does not have are
taken from its source's habits, in one place: `SOURCES`.
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
    """Settings that the runs of a source use and do not name."""

    overlapped: bool = True
    """Gradients and parameters under computation."""
    tensor_overlap: bool = False
    sequence_parallel: bool = True
    flash: bool = True
    arguments: tuple[str, ...] = ()


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
    "MooreThreads/SimuMax": Habits(overlapped=False, arguments=FUSED_LOSS),
    "VIA-Research/vTrain": Habits(overlapped=False, sequence_parallel=False, flash=False),
    "arXiv": Habits(overlapped=False, sequence_parallel=False, flash=False),
    # Its own log shows gradients in bf16: 32.1 GiB between the steps of nemotron4-15b (row 793). What it allocates beyond them
    # speaks for an unfused loss, which scripts/performance of that time does not replace either.
    "NVIDIA/dgxc-benchmarking": Habits(tensor_overlap=True, arguments=(BF16_GRADIENTS,)),
    "NVIDIA-NeMo/Megatron-Bridge": Habits(tensor_overlap=True, arguments=BRIDGE),
    # examples/llama/train_llama3_8b_h100_fp8.sh
    "NVIDIA/Megatron-LM:examples/llama": Habits(arguments=(BF16_GRADIENTS,)),
    "NVIDIA/Megatron-LM": Habits(overlapped=False, sequence_parallel=False),
    # sbatch_benchmarking.sh adds --tp-comm-overlap to runs in bf16, as both scored ones are;
    # model_configs/benchmarking/Qwen3-235B-A22B.yaml fuses the router.
    "yanring/Megatron-MoE-ModelZoo": Habits(
        tensor_overlap=True, arguments=("--moe-router-force-load-balancing", "--moe-router-fusion", *FUSED_LOSS)
    ),
}
"""By the begin of the column `source`."""
NATURAL = ("NVIDIA/Megatron-LM:tests/",)
"""Sources in measured.csv.gz with the router's own loads of experts; the others force equal loads."""

PROVIDERS = {
    "gpt_oss_provider.py": "--softmax-type learnable --quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0"
}
"""Flags that a model's provider sets and models.json does not have, by the end of the entry's source."""
UPSTREAM_DEFAULTS = ("mcore-test:gpt3_7b_", "mcore-test:gpt3_mcore_te_tp1_pp1_", "mcore-test:gpt3_mcore_tp1_pp1_")
"""Models whose argument list (tests/golden/argument_lists.json) leaves dropout, biases and positions as upstream has them."""
_LOCAL_TEST = re.compile(r"mcore-test:gpt3_mcore_tp\d(?!.*_te)")
"""Upstream's tests of megatron-core's own modules: each argument list whose name has `mcore_tp` and no `te` says
`--transformer-impl local`, all others Transformer Engine, whose attention `--attention-backend unfused` takes apart."""


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measurement."""

    number: int
    """Line of the file, the header being 1."""
    fields: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.fields[name]

    @property
    def name(self) -> str:
        """The row in tables: its line."""
        return str(self.number)

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return int(self["n_gpus"])

    @property
    def is_moe(self) -> bool:
        """True if the model has experts."""
        return bool(self.facts.get("experts"))

    @property
    def routing(self) -> str:
        """`forced` balance of the experts' loads, or `natural`; empty for a dense model."""
        if not self.is_moe:
            return ""
        return "natural" if self["source"].startswith(NATURAL) else "forced"

    @property
    def is_logged(self) -> bool:
        """True if norms and zeros of every parameter were logged in each step, as in upstream's tests."""
        return self["source"].startswith(NATURAL)

    @property
    def seconds(self) -> float:
        """Measured seconds of a step; tokens per second are turned into them."""
        value = float(self["value"])
        if self["metric"] == "tokens_per_s_per_gpu":
            return int(self["global_batch"]) * int(self["seq_len"]) / (value * self.gpus)
        return value

    @property
    def gib(self) -> float:
        """Measured peak memory."""
        return float(self["value"])

    @property
    def is_time(self) -> bool:
        """True if the row measures seconds."""
        return self["metric"] != "peak_mem_gib"

    @property
    def is_reserved(self) -> bool:
        """True if the peak is of reserved memory, False if of allocated memory."""
        # NeMo logs `torch.cuda.max_memory_reserved` as peak_memory_usage (lightning/pytorch/strategies/megatron_strategy.py).
        return self["other_flags"].startswith(("RESERVED", "peak_memory_usage="))

    @property
    def facts(self) -> dict[str, Any]:
        """The architecture of its model, as models.json or the model's name has it."""
        named = NAMED_SIZES.fullmatch(self["model"])
        facts = dict(models().get(self["model"], {}))
        if named and "layers" not in facts:
            hidden, layers, heads = map(int, named.groups())
            facts |= {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "ffn": 4 * hidden,
                "vocab": 51200,
                "gated": False,
            }
        return facts

    @property
    def flags(self) -> list[str]:
        """The Megatron flags of the run."""
        layers = self.facts["layers"]
        return [*_model_flags(self), *_parallel_flags(self, layers), *_speed_flags(self), *self.habits.arguments]

    @property
    def gpu_type(self) -> str:
        """Types under one name: `B200-SXM` is B200."""
        return {"B200-SXM": "B200", "A100-80GB": "A100"}.get(self["gpu"], self["gpu"])

    @property
    def habits(self) -> Habits:
        """The habits of the row's source."""
        return next(habits for prefix, habits in SOURCES.items() if self["source"].startswith(prefix))


@cache
def table(file: Path) -> pd.DataFrame:
    """A table, every field as its text. The index counts rows as an editor shows them: the first stands in line 2."""
    frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    return frame.set_index(pd.RangeIndex(2, 2 + len(frame)))


def records(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Its rows, by column."""
    return [{str(column): str(value) for column, value in row.items()} for row in frame.to_dict("records")]


@cache
def measured_rows() -> tuple[MeasuredRow, ...]:
    """Every row of the table."""
    frame = table(DATA / "measured.csv.gz")
    return tuple(MeasuredRow(number, row) for number, row in zip(frame.index, records(frame), strict=True))


def scored_measurements() -> list[MeasuredRow]:
    """Rows that count in a table of errors."""
    return [row for row in measured_rows() if row["scored"] == "yes" and row["metric"] in SCORED_METRICS]


def calibration_rows(times: bool) -> list[MeasuredRow]:
    """Rows that constants may be fitted to: step times, with those of small models, or peaks of memory."""
    rows = [row for row in scored_measurements() if row["split"] == "calibration" and row.is_time == times]
    return [*rows, *(launched_rows() if times else ())]


def launched_rows() -> list[MeasuredRow]:
    """Calibration rows of small models, whose steps are bound by the host; too small to be scored, they show launch costs.

    Excluded: a run with offloaded activations, and one that takes five times as long as the same job on twice the GPUs.
    """
    small = [row for row in measured_rows() if (row["scored"], row["metric"]) == ("toy size", "step_time_s")]
    rows = [row for row in small if row["split"] == "calibration" and row["n_gpus"]]
    return [row for row in rows if not row["model"].endswith(("_fine_grained_offloading", "_1node"))]


@cache
def models() -> dict[str, dict[str, Any]]:
    """Architectures by name."""
    content: dict[str, dict[str, Any]] = json.loads((DATA / "models.json").read_text(encoding="utf-8"))
    return content


def _model_flags(row: MeasuredRow) -> list[str]:
    facts = row.facts
    ffn = facts.get("ffn", facts.get("ffn_dense"))
    gpt = not facts["gated"] and facts.get("activation", "gelu") == "gelu"
    as_upstream = row["model"].startswith(UPSTREAM_DEFAULTS)
    arguments = f"""--num-layers {facts["layers"]} --hidden-size {facts["hidden"]} --ffn-hidden-size {ffn}
        --num-attention-heads {facts["heads"]} --vocab-size {facts["vocab"]} --seq-length {row["seq_len"]}
        --max-position-embeddings {row["seq_len"]} --train-iters 10 --lr 1e-4""".split()
    arguments += ["--kv-channels", str(facts["head_dim"])] if "head_dim" in facts else []
    if facts.get("kv_groups", facts["heads"]) != facts["heads"]:
        arguments += ["--group-query-attention", "--num-query-groups", str(facts["kv_groups"])]
    if not as_upstream and not (gpt and not row.habits.flash):
        arguments += "--attention-dropout 0.0 --hidden-dropout 0.0".split()
    if not gpt or ("mcore-test" in row["model"] and not as_upstream):
        arguments += ["--position-embedding-type", "rope"]
        arguments += [] if facts.get("attention_bias") and facts.get("experts") else ["--disable-bias-linear"]
    if not gpt:
        arguments += ["--normalization", "RMSNorm"]
    provided = next((more.split() for end, more in PROVIDERS.items() if facts.get("source", "").endswith(end)), [])
    arguments += provided
    if "sliding_window" in facts:
        # A query sees itself and the tokens before it.
        arguments += [
            "--window-size",
            f"{facts['sliding_window'] - 1},0",
            "--window-attn-skip-freq",
            str(facts["swa_every"]),
        ]
    arguments += ["--swiglu"] if facts["gated"] and "--quick-geglu" not in provided else []
    arguments += ["--no-gradient-accumulation-fusion"] if as_upstream else []
    arguments += ["--squared-relu"] if facts.get("activation") == "squared-relu" else []
    untied = facts.get("untied", not facts.get("tied_embeddings", gpt))
    arguments += ["--untie-embeddings-and-output-weights"] if untied else []
    arguments += ["--qk-layernorm"] if facts.get("qk_layernorm") or facts.get("mla") else []
    return [*arguments, *_latent_flags(facts), *_moe_flags(row, facts)]


def _latent_flags(facts: dict[str, Any]) -> list[str]:
    latent = facts.get("mla")
    if not latent:
        return []
    arguments = f"""--multi-latent-attention --kv-lora-rank {latent["kv_lora_rank"]} --qk-head-dim {latent["qk_head_dim"]}
        --qk-pos-emb-head-dim {latent["qk_rope_head_dim"]} --v-head-dim {latent["v_head_dim"]}""".split()
    return arguments + (["--q-lora-rank", str(latent["q_lora_rank"])] if latent["q_lora_rank"] else [])


def _moe_flags(row: MeasuredRow, facts: dict[str, Any]) -> list[str]:
    if not facts.get("experts"):
        return []
    dense = facts.get("first_dense_layers", 0)
    frequency = facts.get("moe_layer_freq", f"([0]*{dense}+[1]*{facts['layers'] - dense})" if dense else "1")
    arguments = f"""--num-experts {facts["experts"]} --moe-router-topk {facts["topk"]} --moe-layer-freq {frequency}
        --moe-ffn-hidden-size {facts["moe_ffn"]} --expert-model-parallel-size {row["ep"]} --moe-grouped-gemm""".split()
    arguments += ["--expert-tensor-parallel-size", row["etp"] or "1"]
    if facts.get("shared_expert_ffn"):
        arguments += ["--moe-shared-expert-intermediate-size", str(facts["shared_expert_ffn"])]
    if str(facts.get("router", "")).startswith("sigmoid"):
        arguments += (
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-dtype fp32".split()
        )
    if limited := re.search(r"(\d+) groups, topk group (\d+)", str(facts.get("router", ""))):
        arguments += ["--moe-router-num-groups", limited[1], "--moe-router-group-topk", limited[2]]
    if predictions := _predictions(row):
        arguments += ["--mtp-num-layers", str(predictions)]
    flags = row["other_flags"].lower()
    if "hybridep" in flags:
        return [*arguments, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
    if "deepep" in flags:
        return [*arguments, "--moe-token-dispatcher-type", "flex", "--moe-enable-deepep"]
    return [*arguments, "--moe-token-dispatcher-type", "alltoall"]


def _predictions(row: MeasuredRow) -> int:
    """Multi-token-prediction layers of the run."""
    without = "MTP" in row["other_flags"].partition("w/o")[2]
    return 0 if without else int(row.facts.get("mtp_layers", 0))


def _parallel_flags(row: MeasuredRow, layers: int) -> list[str]:
    pipeline, virtual, tensor = int(row["pp"]), _virtual(row), int(row["tp"])
    arguments = f"""--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}
        --context-parallel-size {row["cp"]} --micro-batch-size {row["micro_batch"]}
        --global-batch-size {row["global_batch"]} --use-distributed-optimizer""".split()
    if tensor > 1 and (row.habits.sequence_parallel or _says_sequence_parallel(row) or row.facts.get("experts")):
        arguments.append("--sequence-parallel")
    layout = re.search(r"pp_layout=(\S+?),? ", row["other_flags"] + " ")
    chunks = pipeline * virtual
    if layout:
        arguments += ["--pipeline-model-parallel-layout", layout[1]]
    elif layers % chunks == 0:
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(virtual)] if virtual > 1 else []
    elif (layers + 2) % chunks == 0:
        arguments += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(virtual)] if virtual > 1 else []
    else:
        arguments += ["--pipeline-model-parallel-layout", _full_layout(layers, chunks, _predictions(row))]
    return arguments


def _says_sequence_parallel(row: MeasuredRow) -> bool:
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


def _speed_flags(row: MeasuredRow) -> list[str]:
    habits, flags = row.habits, row["other_flags"]
    arguments = ["--fp16"] if row["precision_class"] == "fp16" else ["--bf16"]
    arguments += {
        "fp8": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather".split(),
        "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather".split(),
        "nvfp4": "--fp4-format e2m1".split(),
    }.get(row["precision_class"], [])
    if "fp32 grad accum" in flags:
        arguments.append("--accumulate-allreduce-grads-in-fp32")
    if (habits.overlapped or _OVERLAP in flags) and "no overlap-grad-reduce" not in flags:
        arguments += ["--overlap-grad-reduce", "--overlap-param-gather"]
    arguments += ["--tp-comm-overlap"] if habits.tensor_overlap and int(row["tp"]) > 1 else []
    arguments += _attention_flags(row)
    # Megatron-Bridge sets both (set_moe_a2a_overlap_overrides).
    arguments += ["--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"] if "a2a_overlap=True" in flags else []
    arguments += ["--delay-wgrad-compute"] if "delay_wgrad=True" in flags else []
    if "paged_stash=True" in flags:
        # megatron-core's recipe of the paged stash (moe_recipes.csv) switches both on; it is of a model with plain SwiGLU.
        fused = row.facts.get("attention_bias") is None
        arguments += ["--moe-paged-stash", *(["--use-transformer-engine-op-fuser"] if fused else [])]
    if row["source"].startswith("NVIDIA-NeMo/Megatron-Bridge") and row["model"] in SMALL_STATE_MODELS:
        arguments += SMALL_STATES
    arguments += ["--cp-comm-type", "a2a"] if "cp a2a" in flags else []
    arguments += _graph_flags(flags) + _recompute_flags(row)
    if "fsdp" in row["zero/fsdp"]:
        arguments += ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
        # The user guide of Megatron-FSDP recommends it. In fp32, experts' weights and gradients alone would keep the links of row
        # 717 busy for as long as its whole step at their line rate (examples/records/2026-11-25_predictions).
        arguments += [] if BF16_GRADIENTS in row.habits.arguments else [BF16_GRADIENTS]
    offloaded = re.search(r"cpu_offload_layers=(\d+)", flags)
    return arguments + (["--cpu-offloading-num-layers", offloaded[1]] if offloaded else [])


def _attention_flags(row: MeasuredRow) -> list[str]:
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


def _recompute_flags(row: MeasuredRow) -> list[str]:
    kind, _, modules = row["recompute"].partition(":")
    if kind.startswith("full"):
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    if kind != "selective" or not modules:
        return []
    return ["--recompute-granularity", "selective", "--recompute-modules", *modules.split(",")]


def _virtual(row: MeasuredRow) -> int:
    """Virtual stages; if the table has none, those of the same line of the next release, which the row quotes."""
    quoted = re.search(r"VP listed NA in [\d.]+, (\d+) in", row["other_flags"])
    return int(row["vp"] or (quoted[1] if quoted else 1))
