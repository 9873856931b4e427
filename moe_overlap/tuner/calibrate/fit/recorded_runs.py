"""Runs that Mist and Aceso recorded (mist_runs.csv.gz), each with its configuration as a plan.

For Mist's runs the data has every field of a plan: layers, recomputed layers, micro-batch, DP, TP, ZeRO flags and offload ratios
of every stage; for Megatron runs, whose times follow from Mist's and a printed ratio, the layout. For Aceso's runs it has the
tensor-parallel size and the number of operators per stage (a layer has 13), in all and recomputed. Aceso cuts between operators:
the plan has the nearest complete layers, and `layers_of_stages` corrects their costs. The data does not name the recomputed
operators: see `_again`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from moe_overlap.describe.cluster import Cluster, shipped_cluster
from moe_overlap.job import Job, read_job
from moe_overlap.plan.plan import Devices, Offload, Recompute, StagePlan
from moe_overlap.tuner.calibrate.fit.rows import DATA, models, records, table

MEASURED = ("measured", "derived_from_measured")
ACESO_SIZES = {"gpt-1_3B": "1.3b", "gpt-2_6B": "2.7b", "gpt-6_7B": "7b", "gpt-13B": "13b", "gpt-22B": "22b"}
"""Mist's name of the same size."""
LLAMA_FFN = 256
"""Llama's MLP is 8/3 as wide as its hidden states, up to a multiple of this."""
LAYER_OPERATORS = 13
"""Operators of a layer in Aceso's count, which also has the embedding, the last norm and the head."""
CORE_OPERATORS = 4
"""Those of attention's core: scores, softmax, dropout and the product with the values."""
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather".split()


@dataclass(frozen=True, slots=True)
class Value:
    """One recorded figure."""

    value: float
    split: str


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One recorded run.

    Attributes:
        harness: Mist, Megatron (timed in Mist's harness), Aceso: never compared with each other.
        settings: the recorded configuration.
        values: by metric.
    """

    harness: str
    model: str
    gpu: str
    gpus: int
    batch: int
    micro_batch: int
    sequence: int
    flash: bool
    settings: Mapping[str, Any]
    values: dict[str, Value]

    @property
    def name(self) -> str:
        """For a line of a table."""
        return f"{self.harness} {self.model} {self.gpu} x{self.gpus}{' flash' if self.flash else ''}"

    @property
    def gpu_type(self) -> str:
        """The GPU type, as constants name it."""
        return "L4" if self.gpu.startswith("l4") else "A100"

    @property
    def is_calibration(self) -> bool:
        """True if constants may be fitted to its step."""
        return "iteration_time" in self.values and self.values["iteration_time"].split == "calibration"

    @property
    def cluster(self) -> Cluster:
        """The machines; the A100s have 40 GB, and a network at the rate that Mist measured between two nodes."""
        cluster = shipped_cluster(self.gpu_type, self.gpus)
        if self.gpu_type != "A100":
            return cluster
        (group,) = cluster.groups
        gpu = replace(group.gpu, memory_gib=40.0, memory_gb_per_s=1555.0)
        return replace(cluster, groups=(replace(group, gpu=gpu, network_gb_per_s=1.3, host_gb_per_s=7.0),))


@cache
def recorded_runs() -> tuple[RecordedRun, ...]:
    """Every timed run that a plan can express; `left_out` names the others."""
    return tuple(run for run in _all_runs() if not _why_not(run))


def left_out() -> dict[str, str]:
    """Runs without a prediction, and why."""
    return {run.name: why for run in _all_runs() if (why := _why_not(run))}


def measured_links() -> dict[str, float]:
    """Efficiencies of the links of an L4 host, from the rates that Mist measured on one node of eight and on two such nodes.

    A ring of n ranks moves (n - 1) / n of the gathered bytes at the measured rate; across nodes each GPU moves its share.
    """
    row = next(
        row
        for row in _rows()
        if (row["gpu"], row["metric"], row["split"]) == ("l4", "gpu_gpu_comm_params", "calibration")
    )
    rates = json.loads(row["value"])[::2]
    (links,) = shipped_cluster("L4", 16).groups
    across = rates[7] / links.gpus_per_node * (1 / 2) / (15 / 16)
    return {"domain": rates[3] / links.node_gb_per_s, "network": across / links.network_gb_per_s}


@cache
def _rows() -> tuple[dict[str, str], ...]:
    return tuple(records(table(DATA / "mist_runs.csv.gz")))


@cache
def _all_runs() -> tuple[RecordedRun, ...]:
    runs: dict[str, RecordedRun] = {}
    for row in _rows():
        if row["measured_or_predicted"] in MEASURED and row["seq"]:
            settings = json.loads(row["stage_config_json"])
            harness = settings.get("system", "Mist").split("-")[0].split()[0]
            key = json.dumps(
                [harness, row["model"], row["gpu"], row["flash"], settings.get("G"), settings.get("stages")]
            )
            run = runs.setdefault(key, _run(row, harness, settings))
            run.values.setdefault(row["metric"].partition("(")[0], Value(float(row["value"]), row["split"]))
    return tuple(runs.values())


def _run(row: Mapping[str, str], harness: str, settings: Mapping[str, Any]) -> RecordedRun:
    return RecordedRun(
        harness=harness,
        model=row["model"],
        gpu=row["gpu"],
        gpus=int(row["n_gpus"]),
        batch=int(row["global_batch"]),
        micro_batch=int(row["micro_batch"] or 1),
        sequence=int(row["seq"]),
        flash=row["flash"] == "True",
        settings=settings,
        values={},
    )


def _why_not(run: RecordedRun) -> str:
    if run.harness == "DeepSpeed":
        return "the best of a list of configurations, which one is not said"
    return ""


def job_of(run: RecordedRun) -> Job:
    """The run with its plan."""
    job = read_job(_flags(run), 1)
    stages = _aceso_stages(run) if run.harness == "Aceso" else _mist_stages(run)
    placed = []
    for first, stage in zip(_first_ranks(stages), stages, strict=True):
        count = stage.tensor * stage.data
        placed.append(replace(stage, devices=Devices(mesh=(1, count), ranks=tuple(range(first, first + count)))))
    plan = replace(job.plan, stages=tuple(placed), embedding_stage=0, loss_stage=len(placed) - 1)
    return replace(job, plan=plan)


def _first_ranks(stages: list[StagePlan]) -> list[int]:
    return [sum(stage.tensor * stage.data for stage in stages[:index]) for index in range(len(stages))]


def _flags(run: RecordedRun) -> list[str]:
    """Megatron's flags for model, batch and kernels; Mist's GPT has no position embedding, its Llama rotary ones."""
    family, _, size = run.model.partition("-")
    facts = models()[f"mist-gpt-{ACESO_SIZES.get(run.model, size)}"]
    hidden = int(facts["hidden"])
    ffn = -(-hidden * 8 // 3 // LLAMA_FFN) * LLAMA_FFN if family == "llama" else facts["ffn"]
    vocabulary = 51200 if run.harness == "Aceso" else facts["vocab"]
    arguments = f"""--num-layers {facts["layers"]} --hidden-size {hidden} --ffn-hidden-size {ffn}
        --num-attention-heads {facts["heads"]} --vocab-size {vocabulary} --seq-length {run.sequence}
        --max-position-embeddings {run.sequence} --micro-batch-size 1 --global-batch-size {run.batch}
        --train-iters 10 --lr 1e-4 --fp16 --use-distributed-optimizer""".split()
    if run.harness != "Aceso":
        arguments += (
            "--attention-dropout 0.0 --hidden-dropout 0.0 --untie-embeddings-and-output-weights".split() + OVERLAPPED
        )
    if family == "llama":
        arguments += "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear".split()
    elif run.harness != "Aceso":
        arguments += ["--position-embedding-type", "none"]
    if run.harness != "Megatron":
        # Neither runtime has Transformer Engine's modules, and with them their placeholders of gradients.
        arguments.append("--no-gradient-accumulation-fusion")
    return arguments + (["--use-flash-attn"] if run.flash else ["--transformer-impl", "local"])


def _mist_stages(run: RecordedRun) -> list[StagePlan]:
    """The stages of a plan of Mist's, or of a uniform Megatron run that recomputes every layer."""
    settings = run.settings
    if run.harness == "Mist":
        recorded = settings["stages"]
    else:
        layers = models()[f"mist-gpt-{run.model.partition('-')[2]}"]["layers"] // settings["pp"]
        same = {"layers": layers, "ckpt_layers": layers, "b": settings["micro_batch"], "zero_o": 1}
        recorded = [same | {"dp": settings["dp"], "tp": settings["tp"]}] * settings["pp"]
    stages, first = [], 0
    for row in recorded:
        zero = next((level for level, flag in ((3, "zero_w"), (2, "zero_g"), (1, "zero_o")) if row.get(flag)), 0)
        again = Recompute(layers=row["ckpt_layers"], granularity="full") if row["ckpt_layers"] else Recompute()
        offload = Offload(
            weights=row.get("wo", 0.0),
            gradients=row.get("go", 0.0),
            optimizer=row.get("oo", 0.0),
            activations=row.get("ao", 0.0),
        )
        stage = _stage(first, row["layers"], row["b"], settings["G"], row["tp"], row["dp"], again)
        stages.append(replace(stage, zero_level=zero, offload=offload))
        first += row["layers"]
    return stages


def _aceso_stages(run: RecordedRun) -> list[StagePlan]:
    """The complete layers nearest to the operators of each stage, without those of embedding and head."""
    stages, passed, first = [], 0.0, 0
    for row, exact in zip(run.settings["stages"], layers_of_stages(run), strict=True):
        passed += exact
        last = round(passed)
        (tensor,), (data,) = row["tp_of_ops"], row["dp_of_ops"]
        again = _again(row["recomputed_ops"], exact, last - first)
        stages.append(_stage(first, last - first, run.micro_batch, run.batch // run.micro_batch, tensor, data, again))
        first = last
    return stages


def layers_of_stages(run: RecordedRun) -> list[float]:
    """Layers in each of Aceso's stages, with parts of layers; the first has the embedding, the last a norm and the head."""
    counts = [row["n_ops"] for row in run.settings["stages"]]
    counts[0] -= 1
    counts[-1] -= 2
    return [count / LAYER_OPERATORS for count in counts]


def _again(operators: int, exact: float, layers: int) -> Recompute:
    """The recomputation of a number of operators: core attention, which needs the most memory, or every operator."""
    if not operators:
        return Recompute()
    if operators > LAYER_OPERATORS * exact * 3 / 4:
        return Recompute(layers=layers, granularity="full")
    again = min(1.0, operators / (CORE_OPERATORS * exact))
    return Recompute(layers=max(1, round(again * layers)), granularity="selective", modules=("core_attn",))


def _stage(first: int, layers: int, size: int, steps: int, tensor: int, data: int, again: Recompute) -> StagePlan:
    return StagePlan(
        chunks=((first, first + layers),),
        devices=Devices(mesh=(1, tensor * data), ranks=()),
        micro_batch_size=size,
        gradient_accumulation_steps=steps,
        tensor=tensor,
        context=1,
        data=data,
        expert=1,
        expert_tensor=tensor,
        zero_level=1,
        recompute=again,
        offload=Offload(),
    )
