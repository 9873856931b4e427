"""Training with Transformer Engine's modules, by a stand-in for the package.

`engine_run(cases)` starts two ranks of this module, which import megatron-core with the stand-in; rank 0 writes what it found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.spawn import HANGS_SECONDS

RANKS, STEPS, MICRO_BATCHES = 2, 2, 2
MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2
    --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type irregular --moe-gate topk
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2 --mock-data
    --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-2 --min-lr 1e-3 --weight-decay 0.1 --eval-iters 0
    --num-workers 0 --log-interval 1000000 --make-vocab-size-divisible-by 512
"""


def engine_run(cases: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Two ranks train with the flags of each case; what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).parents[2])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        words = [sys.executable, "-m", "tests.multiprocess.engine_runs"]
        arguments = (folder, json.dumps(dict(cases)))
        ranks = [
            subprocess.Popen(
                [*words, str(rank), *arguments], cwd=root, env=environment, stderr=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        try:
            errors = [rank.communicate(timeout=HANGS_SECONDS)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
        return found


def main(rank: int, folder: str, cases: Mapping[str, str]) -> None:
    """One rank. megatron-core is imported here for the first time."""
    from tests.stand_ins import engine

    engine.install()
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    cpu_backend.install()
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    found = {}
    for name, flags in cases.items():
        try:
            found[name] = _train(flags)
        except Exception as error:
            error.add_note(f"in the case: {name}")
            raise
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _train(flags: str) -> dict[str, Any]:
    """A few steps, and an evaluation behind each."""
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands.train import assemble
    from tests.stand_ins.engine import Log

    Log.clear()
    parsed = parse(f"{MODEL} {flags}".split())
    validate(parsed.config, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()), _engine_is_used():
        job = assemble(parsed, dist.get_rank()).job
    runner, feed = job.machinery.runner, job.batches("train", 0)
    drained, operators = _drained(runner), _operators(runner)
    steps, evaluations, built = [], [], list(Log.built)
    for number in range(STEPS):
        result = runner.run(job.schedule.instructions, feed, number)
        job.machinery.scheduler.step(increment=job.schedule.global_batch_size)
        steps.append((result.loss, result.grad_norm))
        evaluations.append(runner.evaluate(job.schedule.instructions, job.batches("train", 0), number).loss)
    job.reporting.log.close()
    return {
        "runner": type(runner).__name__,
        "steps": steps,
        "evaluations": evaluations,
        "built": built,
        "drained": drained,
        "left_to_the_queue": _left_to_the_queue(job.machinery.chunks),
        "operators": operators,
        "calls": [dataclasses.asdict(call) for call in Log.calls],
        "contexts": len(Log.entered),
        "kinds_of_contexts": sorted({(recipe, kind, group is None) for recipe, kind, group in Log.entered}),
    }


@contextlib.contextmanager
def _engine_is_used() -> Iterator[None]:
    """Models are built as on a GPU: layers of Transformer Engine, experts in grouped products, gradients summed in them."""
    import pytest

    from megatron.training import optimizer
    from megatron.training.cli.start import StartMachine
    from megatron.training.model import build

    configuration = build.transformer_config

    def grouped(*arguments: Any) -> Any:
        config = configuration(*arguments)
        config.moe_grouped_gemm = True
        return config

    with pytest.MonkeyPatch.context() as patch:
        machine = StartMachine(cuda=True, packages=frozenset({"transformer_engine"}))
        patch.setattr(optimizer, "machine_of_process", lambda: machine)
        patch.setattr(build, "uses_transformer_engine", lambda: True)
        patch.setattr(build, "transformer_config", grouped)
        yield


def _operators(runner: Any) -> list[dict[str, Any]]:
    """Every compute instruction that the executor runs from now on: the contexts that opened inside, and the calls of modules."""
    from moe_overlap.runtime.executor.execute import PlanExecutor
    from tests.stand_ins.engine import FP8GlobalStateManager, Log

    found: list[dict[str, Any]] = []
    for chunk in runner._operators if isinstance(runner, PlanExecutor) else ():

        def recorded(instruction: Any, state: Any, compute: Any = chunk.compute) -> None:
            assert not FP8GlobalStateManager.contexts, "left open"
            before = len(Log.entered), len(Log.calls)
            compute(instruction, state)
            operator = instruction.operator
            found.append(
                {
                    "name": instruction.name,
                    "layer": operator.layer,
                    "phase": operator.phase.name,
                    "contexts": len(Log.entered) - before[0],
                    "calls": len(Log.calls) - before[1],
                }
            )

        chunk.compute = recorded
    return found


def _left_to_the_queue(chunks: Any) -> list[str]:
    """The products whose weight gradients the library puts aside."""
    from moe_overlap.runtime.weight_grad.delayed_linear import can_delay
    from moe_overlap.runtime.weight_grad.split_linear import products_of

    return sorted(name for chunk in chunks for name, module in products_of(chunk) if can_delay(module))


def _drained(runner: Any) -> dict[str, int]:
    """How many entries the runner's queue has run, by name; counted from now on."""
    from moe_overlap.runtime.executor.execute import PlanExecutor

    counts: dict[str, int] = {}
    if not isinstance(runner, PlanExecutor):
        return counts
    queue = runner.context.weight_gradients
    drain = queue.run

    def counted(name: str, *arguments: Any, **options: Any) -> int:
        entries = drain(name, *arguments, **options)
        counts[name] = counts.get(name, 0) + entries
        return entries

    queue.run = counted  # type: ignore[method-assign]
    return counts


if __name__ == "__main__":
    from moe_overlap.commands.exits import end_process

    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    end_process(
        0
    )  # as a rank of a run does: a group that is still referenced aborts the interpreter's teardown now and then
