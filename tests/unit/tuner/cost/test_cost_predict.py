"""Predictions as a whole, on graphs written by hand: what must hold whatever the constants are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.training.cli.config import Config
from moe_overlap.api import Options, busiest_load, predict, read_job, simulated
from moe_overlap.describe.cluster import GIB, Cluster, Measured, shipped_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.expert_load import NATURAL, NATURAL_LOAD, ExpertLoad
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.calibrate.fit.grid import START
from moe_overlap.tuner.capture.cache import Flags, Tell
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.hardware import Constants, ReleaseConstants
from moe_overlap.tuner.cost.interference import interference_of
from moe_overlap.tuner.cost.links import axis_group
from moe_overlap.tuner.cost.machine import Machine, concurrency
from tests.unit.tuner.hand_made import captured_by_hand

CONSTANTS = Constants(
    {"H100": dataclasses.replace(START, grouped_gemm=0.6, host_seconds=1e-9, step_seconds=0.0)},
    {
        "26.02": {"Hopper": ReleaseConstants(loss=1.3, measured=("bf16 MoE",))},
        "26.04": {"Hopper": ReleaseConstants(measured=("bf16 MoE",))},
        "26.08": {"Hopper": ReleaseConstants(loss=0.7, measured=("bf16 MoE",))},
    },
)
JOB = """--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 4096
    --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 128 --bf16 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --train-iters 10 --lr 1e-4 --pipeline-model-parallel-size 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 4096
    --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall""".split()


def by_hand(
    config: Config, model: ModelDescription, plan: Plan, flags: Flags, tell: Tell | None = None
) -> dict[int, CapturedModel]:
    graphs = {}
    for index, stage in enumerate(plan.stages):
        layout = Layout(
            tensor=stage.tensor, context=stage.context, expert=stage.expert, expert_tensor=stage.expert_tensor
        )
        graphs[index] = captured_by_hand(model, layout)
    return graphs


def predicted(*words: str, cluster: Cluster | None = None, **options: Any) -> Prediction:
    given = {"graphs": by_hand, "constants": CONSTANTS} | options
    return predict([*JOB, *words], cluster or shipped_cluster("H100", 32), **given)  # type: ignore[arg-type]


BASE = predicted()
SECONDS = BASE.predicted.step_seconds


def test_the_breakdown_adds_up_to_the_step() -> None:
    for prediction in (BASE, predicted("--tensor-model-parallel-size", "2", "--sequence-parallel")):
        assert sum(prediction.breakdown.values()) == pytest.approx(prediction.predicted.step_seconds)
        assert min(prediction.breakdown.values()) >= 0
    tokens = 128 * 4096 / 32 / SECONDS
    assert BASE.predicted.tokens_per_second_per_gpu == pytest.approx(tokens)
    assert BASE.mfu == pytest.approx(BASE.predicted.model_tflops_per_gpu / 989)
    assert dataclasses.asdict(BASE.predicted.provenance) == {"measured": 0, "interpolated": 0, "roofline": 1}


def test_overlap_hides_exchanges_and_a_dispatcher_sends_less() -> None:
    wide = ("--expert-model-parallel-size", "16", "--num-experts", "32", "--moe-router-topk", "8")
    exposed = predicted(*wide).breakdown["exposed_expert_seconds"]
    assert predicted(*wide, "--overlap-moe-expert-parallel-comm").breakdown["exposed_expert_seconds"] < 0.5 * exposed
    flex = ("--moe-token-dispatcher-type", "flex", "--moe-enable-deepep")
    assert predicted(*wide, *flex).breakdown["exposed_expert_seconds"] < 0.6 * exposed


def test_recomputation_trades_memory_for_time() -> None:
    full = predicted(*"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
    assert 1.15 < full.predicted.step_seconds / SECONDS < 1.4
    kept = [one.predicted.stages[0].peak_bytes_by_category.activations for one in (full, BASE)]
    assert kept[0] < 0.3 * kept[1]


def test_releases_and_unknown_gpus() -> None:
    assert predicted(software="26.04").predicted.step_seconds == SECONDS
    assert predicted(software="26.02").predicted.step_seconds > SECONDS
    assert predicted(software="26.08").predicted.step_seconds < SECONDS
    assert predicted(software="26.04").extrapolating == ()
    dense = {"26.05": {"Hopper": ReleaseConstants(measured=("bf16 dense",))}}
    constants = dataclasses.replace(CONSTANTS, releases={**CONSTANTS.releases, **dense})
    asked = "no calibration run of release 26.05 on Hopper in bf16 MoE; that of 26.04, its median release, is assumed"
    assert predicted(software="26.05", constants=constants).extrapolating == (asked,)
    assert predicted(cluster=shipped_cluster("H200", 32)).extrapolating == ("no calibration run of H200",)


@pytest.mark.parametrize("release", ["new", "26.05", "99.99"])
def test_a_release_that_changes_no_price_is_refused_before_layers_are_captured(release: str) -> None:
    with pytest.raises(ConfigError) as caught:
        predicted(software=release, graphs=lambda *_: pytest.fail("captured"))
    rule = "is no release (year.month, as 26.04 or 26.04.01) of a calibration run"
    fix = "use 26.02, 26.04 or 26.08, or drop it for the median one of the GPU"
    assert str(caught.value) == f"--software {release}: {rule}; {fix}"
    with pytest.raises(ConfigError, match="the prices are measured, whatever the release; drop it"):
        predicted(software=release, constants=Constants(CONSTANTS.gpus))


def test_the_zero_level_of_flags_without_a_distributed_optimizer_is_said() -> None:
    """This fork shards the optimizer's states always, Megatron-LM where a flag says so."""
    unsharded = [word for word in JOB if word not in ("--use-distributed-optimizer", "--overlap-param-gather")]
    options: Options = {"graphs": by_hand, "constants": CONSTANTS}
    level = "ZeRO-0, as Megatron-LM runs these flags; this fork runs ZeRO-1, which --use-distributed-optimizer predicts"
    assert predict(unsharded, shipped_cluster("H100", 32), **options).assumed == (level,)
    one_replica = [
        *unsharded,
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
        "--expert-model-parallel-size",
        "1",
    ]
    assert predict(one_replica, shipped_cluster("H100", 4), **options).assumed == BASE.assumed == ()


def test_lower_precision_is_faster_and_what_is_not_modelled_is_named() -> None:
    assert 0.5 < predicted(precision="fp8").predicted.step_seconds / SECONDS < 0.95
    named = predicted("--delay-wgrad-compute", "--moe-paged-stash").not_modelled
    assert named == ("--moe-paged-stash",)


def test_sharding_parameters_holds_less_and_costs_gathers() -> None:
    one = ("--pipeline-model-parallel-size", "1", "--expert-model-parallel-size", "2")
    fsdp = predicted(*one, "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params")
    plain = predicted(*one)
    assert fsdp.predicted.stages[0].peak_bytes < plain.predicted.stages[0].peak_bytes
    assert fsdp.predicted.step_seconds > plain.predicted.step_seconds


def test_what_does_not_fit_is_answered_with_stage_and_category() -> None:
    big = predicted("--num-layers", "64", "--hidden-size", "8192", "--moe-ffn-hidden-size", "16384")
    assert not big.fits
    assert big.overflow[0].startswith("does not fit: stage 0 needs ")
    assert f", of {big.available_bytes / GIB:.1f}; largest part: " in big.overflow[0]
    assert BASE.fits and not BASE.overflow


def test_recorded_loads_slow_the_experts_down(tmp_path: Path) -> None:
    def recorded(counts: list[int]) -> str:
        row = ExpertLoad(1, 1, 0, sum(counts), tuple(counts), (0,) * 16, 1.0)
        (tmp_path / "load.jsonl").write_text(row.to_line() + "\n")
        return str(tmp_path / "load.jsonl")

    assert predicted(expert_load=recorded([100] * 16)).predicted == BASE.predicted
    skewed = predicted(expert_load=recorded([200, 200] + [100] * 14))
    assert skewed.predicted.step_seconds > SECONDS
    held, before = (one.predicted.stages[0].peak_bytes for one in (skewed, BASE))
    assert held >= before
    assert json.loads((tmp_path / "load.jsonl").read_text())["load"][0] == 200


def test_natural_routing_is_an_assumed_load(tmp_path: Path) -> None:
    """As of a file that says the same of the ranks; ranks that share no experts have nothing to share unequally."""
    ranks = read_job(JOB, 32).plan.stages[0].expert
    assert ranks > 1
    shares = [NATURAL_LOAD] + [(ranks - NATURAL_LOAD) / (ranks - 1)] * (ranks - 1)
    load = tuple(round(1e6 * shares[expert * ranks // 16]) for expert in range(16))
    row = ExpertLoad(1, 1, 0, sum(load), load, (0,) * 16, 1.0)
    (tmp_path / "load.jsonl").write_text(row.to_line() + "\n")
    natural = predicted(expert_load=NATURAL).predicted.step_seconds
    assert natural == pytest.approx(
        predicted(expert_load=str(tmp_path / "load.jsonl")).predicted.step_seconds, rel=1e-5
    )
    assert natural > 1.01 * SECONDS
    alone = ["--expert-model-parallel-size", "1"]
    assert predicted(*alone, expert_load=NATURAL).predicted == predicted(*alone).predicted
    with pytest.raises(ConfigError, match="--routing natural: the model has no experts; drop it"):
        busiest_load(NATURAL, 0, 1)


def test_a_router_whose_loop_depends_on_the_data_is_captured_without_it() -> None:
    """sinkhorn iterates until its result stands still, which a capture without data cannot tell."""
    seen = []

    def spy(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> dict[int, CapturedModel]:
        seen.append((config.moe.moe_router_load_balancing_type, config.moe.moe_router_pre_softmax))
        return by_hand(config, model, plan, flags)

    words = [*JOB, "--moe-router-load-balancing-type", "sinkhorn", "--moe-router-topk", "1"]
    answer = predict(words, shipped_cluster("H100", 32), graphs=spy, constants=CONSTANTS)
    assert set(seen) == {(("none",), True)}
    assert answer.assumed == ("a router without the iterations of sinkhorn, whose number depends on the data",)


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "holds no record"), (ExpertLoad(1, 1, 0, 0, (0,) * 16, (0,) * 16, 0.0).to_line(), "no token of its layer 0")],
)
def test_a_file_of_loads_without_loads_is_one_line(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "load.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=rf"--expert-load .*load.jsonl: {rule}"):
        predicted(expert_load=str(tmp_path / "load.jsonl"))


def test_a_job_without_vocabulary_is_one_line() -> None:
    words = [word for word in JOB if word not in ("--vocab-size", "32000")] + "--tokenizer-type NullTokenizer".split()
    with pytest.raises(ConfigError, match="--vocab-size"):
        predict(words, shipped_cluster("H100", 32), graphs=by_hand, constants=CONSTANTS)


def test_measured_interference_is_priced_where_there_is_some() -> None:
    """A100's factors by the group of its replicas; one constant where none were measured, or the machine itself was."""
    compute, exchange, nothing = np.array([2.0]), np.array([1.0]), np.zeros(1)

    def together(gpu: str, measured: bool = False) -> float:
        cluster = shipped_cluster(gpu, 16)
        here = Measured(database="none", device="cuda", latency_seconds=0.0, constants={})
        cluster = dataclasses.replace(cluster, measured=here if measured else None)
        machine = Machine(cluster=cluster, constants=CONSTANTS.gpus["H100"])
        replicas = axis_group(8, 1, 16, cluster.groups[0])
        closed, factors = concurrency(machine, replicas)
        seconds = float(closed(compute, exchange, nothing, nothing)[0])
        assert seconds == pytest.approx(float(factors.seconds(compute, exchange, nothing, nothing)[0]))
        return seconds

    fitted = interference_of("A100", 1, 8)
    assert fitted is not None and interference_of("H100", 1, 8) is None
    assert together("A100") == fitted.seconds(compute, exchange, nothing, nothing)[0] != pytest.approx(2.15)
    assert together("H100") == together("A100", measured=True) == pytest.approx(2.15)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--moe-shared-expert-overlap",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--num-layers-per-virtual-pipeline-stage 4",
    ],
)
def test_megatron_cores_own_layers_hide_no_all_to_all_behind_shared_experts(words: str) -> None:
    """The list of a run without overlap takes as long as the closed form; it had them beside each other, up to 4 % of a step."""
    given = [*JOB, "--moe-shared-expert-intermediate-size", "8192", *words.split()]
    options: Options = {"graphs": by_hand, "constants": CONSTANTS}
    cluster = shipped_cluster("H100", 32)
    listed = simulated(given, cluster, **options).simulation.step_seconds
    assert predict(given, cluster, **options).predicted.step_seconds == pytest.approx(listed, rel=2e-3)
