"""Runs that go well: what they print and write, that they learn, and what must make no difference to the loss."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron.training.cli.arguments import parse
from megatron.training.cli.config import Config
from megatron.training.cli.sizes import describe_model
from megatron.training.plan_flags import plan_from_flags
from moe_overlap.api import problem_of
from moe_overlap.commands.compare import compare_losses
from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.describe.model import ModelDescription
from moe_overlap.plan.lowering.lower import lower
from moe_overlap.plan.plan import Plan
from moe_overlap.plan.trace import read_traces, write_ranks
from moe_overlap.tuner.calibrate.refine import refine
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.capture.graph import CapturedModel, Layout
from moe_overlap.tuner.cost.prediction import predict_plan
from tests.end_to_end.conftest import Undisturbed
from tests.end_to_end.program import SMALL, SMALL_ARGS, STEPS, alone
from tests.ranks import Ranks
from tests.spawn import run
from tests.unit.tuner.hand_made import captured_by_hand

FIELDS = {
    *(
        "step",
        "loss",
        "step_seconds",
        "tokens_per_second",
        "grad_norm",
        "comm_seconds",
        "exposed_comm_seconds",
        "peak_bytes",
    ),
    *("learning_rate", "comm_covered", "resident_bytes", "consumed_samples", "model_tflops_per_device"),
}
STEP_LINE = re.compile(
    r"step +(\d+)/40  loss \d\.\d{4}  grad \d+\.\d\d  lr \d\.\de[-+]\d\d +[\d.]+k? tok/s  \d+\.\d\d s"
    r"  comm \d+\.\d\d s, exposed \d+\.\d\d s \(\d+%\)  peak \d+ MiB  model_tflops_per_device \S+"
)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_console_tells_the_run_from_environment_to_next_command(undisturbed: Undisturbed) -> None:
    lines = undisturbed.ended.out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["environment", "corpus", "model", "layout"]
    steps = [line for line in lines if line.startswith("step ")]
    assert [int(match[1]) for match in map(STEP_LINE.fullmatch, steps) if match] == list(range(1, STEPS + 1)), steps
    evaluations = [line.split()[0] for line in lines[4:] if not line.startswith("step ")]
    assert evaluations == ["valid", "saved", "trace", "valid", "test", "next"]
    assert re.search(r"valid +loss \d\.\d{4} \(start \d\.\d{4}, unigram entropy \d\.\d\d\)", undisturbed.ended.out)
    # torch's profiler tells of its own start and stop; the program says nothing on stderr.
    assert [line for line in undisturbed.ended.err.splitlines() if "profiler" not in line] == []


def test_loss_falls_below_the_unigram_entropy_of_a_text(undisturbed: Undisturbed) -> None:
    losses = [row["loss"] for row in rows(undisturbed.losses)]
    assert sum(losses[-5:]) / 5 < losses[0] - 2.0


def test_json_lines_of_both_ranks(undisturbed: Undisturbed) -> None:
    mine, other = rows(undisturbed.losses), rows(Path(f"{undisturbed.losses}.rank1"))
    assert [row["step"] for row in mine] == [row["step"] for row in other] == list(range(1, STEPS + 1))
    assert all(set(row) == FIELDS for row in (*mine, *other))
    assert [row["loss"] for row in mine] == [row["loss"] for row in other]
    assert [row["consumed_samples"] for row in mine] == [8 * step for step in range(1, STEPS + 1)]
    for row in mine:
        assert 0 <= row["exposed_comm_seconds"] <= row["comm_seconds"] <= row["step_seconds"]
        assert row["tokens_per_second"] * row["step_seconds"] == pytest.approx(8 * 32)
        assert 0 < row["peak_bytes"] < row["resident_bytes"]


def test_trace_has_the_names_of_the_instruction_list(undisturbed: Undisturbed) -> None:
    config = parse(SMALL).config
    model = describe_model(config, 257, "small")
    plan = plan_from_flags(config, model, 2)
    (trace,) = undisturbed.folder.glob("trace.json*")
    assert f"trace        {trace}: 2 ranks" in undisturbed.ended.out
    events = json.loads(trace.read_text())["traceEvents"]
    for rank in range(2):
        measured = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == rank}
        planned = {instruction.name for instruction in lower(plan, model, rank)}
        assert measured == planned


def test_trace_refines_predictions_of_its_run(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The same trace, sixteen times as long, says that the machine is so much slower.

    Neither this machine's speed nor what else it runs counts: how near the refined prediction is to a step is a matter of
    recorded worlds whose prices are known (tests/unit/tuner/calibrate/test_refine.py).
    """

    def graphs(config: Config, model: ModelDescription, plan: Plan, flags: Flags) -> dict[int, CapturedModel]:
        return {0: captured_by_hand(model, Layout(tensor=1, context=1, expert=2, expert_tensor=1))}

    task = problem_of(SMALL, shipped_cluster("H100", 2), {"graphs": graphs})
    steps = []
    for stretch in (1.0, 16.0):
        write_stretched(undisturbed.folder / "trace.json", stretch, tmp_path / "trace.json")
        refined, found = refine(task, [tmp_path / "trace.json"])
        steps += found.steps
        assert predict_plan(task.plan, refined).predicted.step_seconds == found.steps[0].after_seconds
        assert all(fitted.measured_seconds for fitted in found.kinds)
    first, second = steps
    assert second.seconds == pytest.approx(16.0 * first.seconds, rel=1e-3)
    assert first.before_seconds == second.before_seconds
    assert second.after_seconds > 8.0 * first.after_seconds


def write_stretched(trace: Path, stretch: float, path: Path) -> None:
    """Write the trace of all ranks with every time multiplied."""
    files = read_traces(trace)
    spans = {
        rank: [dataclasses.replace(span, start=stretch * span.start, end=stretch * span.end) for span in of_rank]
        for file in files
        for rank, of_rank in file.spans.items()
    }
    write_ranks(path, spans, about=files[0].about)


def test_tensorboard_file_is_whole(undisturbed: Undisturbed) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(undisturbed.folder))
    board.Reload()
    losses = [row["loss"] for row in rows(undisturbed.losses)]
    assert [round(point.value, 4) for point in board.Scalars("lm loss")] == [round(loss, 4) for loss in losses]
    assert [point.step for point in board.Scalars("lm loss validation")] == [20, STEPS]
    assert [point.step for point in board.Scalars("lm loss test")] == [STEPS]


def test_torch_trace_is_written_though_the_run_ends_before_its_last_step(undisturbed: Undisturbed) -> None:
    (trace,) = undisturbed.folder.glob("*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("scaled_dot_product" in event["name"] for event in events)
    assert sum(event["name"].startswith("gloo:") for event in events) > 0


def test_same_seed_twice_is_bitwise_the_same(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The second time its ranks know their place from Slurm, as tasks of srun without torchrun do."""
    again = Ranks([*SMALL, "--log-json", str(tmp_path / "again.jsonl")], tmp_path, by_srun=True)
    assert [ended.status for ended in again.wait()] == [0, 0]
    assert compare_losses(["--bitwise", str(undisturbed.losses), str(tmp_path / "again.jsonl")]) == 0
    assert len(rows(tmp_path / "again.jsonl")) == STEPS


def test_single_process_needs_neither_torchrun_nor_port_and_upstreams_defaults_train(tmp_path: Path) -> None:
    """No flags but sizes: LayerNorm, GELU, learned positions, biases, tied embeddings, dropout 0.1."""
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    length = "--micro-batch-size 4 --train-iters 25 --lr 1e-2 --eval-iters 0 --num-workers 0"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ended = alone([*sizes.split(), *length.split(), "--log-json", str(tmp_path / "losses.jsonl")], port)
    assert (ended.status, ended.err) == (0, "")
    losses = [row["loss"] for row in rows(tmp_path / "losses.jsonl")]
    assert losses[-1] < losses[0] - 1.0


VARIANTS = {
    "four micro-batches of one": "--train-iters 6 --micro-batch-size 1",
    "one micro-batch of four": "--train-iters 6 --micro-batch-size 4",
    "sgd": "--train-iters 20 --optimizer sgd --lr 0.3",
    "samples": "--train-samples 83 --lr-decay-style linear --lr-warmup-samples 16",
    "exit interval": "--train-iters 20 --exit-interval 3",
    "out of time": "--train-iters 20 --exit-duration-in-mins 1",
}


def train_variants(folder: str) -> dict[str, tuple[str | None, list[dict[str, Any]]]]:
    """On each rank, in the same processes: name of a variant -> why it stopped early, its JSON lines."""
    import torch.distributed as dist

    from moe_overlap.commands import train as pretrain_moe

    rank, results = dist.get_rank(), {}
    without_dropout = [SMALL_ARGS, "--attention-dropout", "0", "--hidden-dropout", "0", "--log-interval", "100"]
    for name, words in VARIANTS.items():
        path = Path(folder) / name
        loop = pretrain_moe.assemble(parse([*without_dropout, *words.split(), "--log-json", str(path)]), rank)
        if name == "out of time" and rank == 1:
            loop._started -= 60.0
        loop.run()
        results[name] = (loop.reason, rows(path if rank == 0 else path.with_name(f"{name}.rank{rank}")))
    return results


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | None, list[dict[str, Any]]]]:
    first, second = run(2, train_variants, str(tmp_path_factory.mktemp("variants")))
    assert [(name, reason, len(lines)) for name, (reason, lines) in first.items()] == [
        (name, reason, len(lines)) for name, (reason, lines) in second.items()
    ]
    assert isinstance(first, dict)
    return first


def losses_of(variant: tuple[str | None, list[dict[str, Any]]]) -> list[float]:
    return [row["loss"] for row in variant[1]]


def test_gradient_accumulation_does_not_change_the_loss(variants: dict[str, Any]) -> None:
    accumulated = losses_of(variants["four micro-batches of one"])
    assert accumulated == pytest.approx(losses_of(variants["one micro-batch of four"]), rel=1e-5)
    assert len(accumulated) == 6 and accumulated[-1] < accumulated[0]


def test_sgd_learns(variants: dict[str, Any]) -> None:
    losses = losses_of(variants["sgd"])
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5


def test_train_samples_give_length_and_schedule(variants: dict[str, Any]) -> None:
    lines = variants["samples"][1]
    assert [row["consumed_samples"] for row in lines] == [8 * step for step in range(1, 11)]
    # Step k uses the rate at the samples consumed before it: up over 16 samples, then down to 0 at 83, which no step reaches.
    expected = [1e-2 * min(8 * done / 16, (83 - 8 * done) / 67) for done in range(10)]
    assert [row["learning_rate"] for row in lines] == pytest.approx(expected)


def test_run_stops_at_its_exit_conditions(variants: dict[str, Any]) -> None:
    assert variants["exit interval"][0] == "--exit-interval 3"
    assert len(variants["exit interval"][1]) == 3
    # The minute is over on rank 1 alone; both stop.
    assert variants["out of time"][0] == "--exit-duration-in-mins 1"
    assert len(variants["out of time"][1]) == 1
