"""Step time of the training loop against a bare loop around the same megatron-core modules.

`tools/benchmark_loop.py [--pairs 21] [--nproc-per-node 2] [--json] [flags of pretrain_moe.py]`

Both loops live in the same processes and take turns: stock layers, stock finalisation and one optimizer step on one side;
spans, named operators, layerwise optimizer and metrics on the other. The bare loop is also timed against itself, which is the
noise of the machine. Ratios are pair by pair; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_overlap.commands.exits import end_process

DEFAULT_JOB = ["@examples/tiny-mixtral-8x7b.args"]


def make_bare_step(parsed: Any, plan: Any, model: Any, groups: Any, feed: Any) -> Callable[[], None]:
    """One step as a user of megatron-core would write it: no spans, no metrics, nothing of ours but the model's sizes."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron.training.initialize import seed_everything
    from megatron.training.model.build import build_model
    from megatron.training.optimizer import make_optimizer, wrap_chunks

    config = parsed.config
    seed_everything(config.training.seed, groups.collection)
    modules = build_model(config, model, plan, groups.collection, groups.stage)
    chunks = wrap_chunks(config, plan, modules, groups.collection)
    optimizer = make_optimizer(config, plan, chunks, groups.collection)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    schedule = get_forward_backward_func(pp_size=1, vp_size=None)
    stage = plan.stages[groups.stage]

    def forward(batches: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(batches)
        output = chunk(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

        def loss(losses: Any) -> tuple[Any, Any]:
            mean = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
            return mean, mean.detach()

        return output, loss

    def step() -> None:
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        losses = schedule(
            forward_step_func=forward,
            data_iterator=feed,
            model=chunks[0],
            num_microbatches=stage.gradient_accumulation_steps,
            seq_length=plan.sequence_length,
            micro_batch_size=stage.micro_batch_size,
            pg_collection=groups.collection,
        )
        optimizer.step()
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean, group=groups.collection.dp_cp)

    return step


def measure(flags: Sequence[str], pairs: int) -> dict[str, list[float]]:
    """Measure in each process the ratios ours / bare and bare / bare, pair by pair, between barriers."""
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.sizes import describe_model
    from megatron.training.data.sources import tokenizer_of_run
    from megatron.training.initialize import start_process
    from megatron.training.plan_flags import plan_of_run
    from moe_overlap.commands import train as pretrain_moe
    from moe_overlap.runtime.groups import build_groups

    steps = str(4 * pairs + 8)
    parsed = parse(
        [*flags, "--train-iters", steps, "--eval-iters", "0", "--log-interval", "1000000", "--num-workers", "0"]
    )
    process = start_process(parsed.config)
    loop = pretrain_moe.assemble(parsed, process.rank)
    model = describe_model(parsed.config, tokenizer_of_run(parsed.config.data).vocab_size)
    plan = plan_of_run(parsed.config, model, dist.get_world_size())
    feed = loop.job.batches("train", 0)
    assert feed is not None
    bare = make_bare_step(parsed, plan, model, build_groups(plan), feed)
    iteration = 0

    def ours() -> None:
        nonlocal iteration
        iteration += 1
        loop.step(iteration, feed)

    def seconds(step: Callable[[], None]) -> float:
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(2):
        ours()
        bare()
    ratios: dict[str, list[float]] = {"ours / bare": [], "bare / bare": [], "bare seconds": []}
    for pair in range(pairs):
        order = (ours, bare, bare) if pair % 2 else (bare, ours, bare)
        times = [seconds(step) for step in order]
        ours_seconds, bare_seconds = (times[0], times[1]) if pair % 2 else (times[1], times[0])
        ratios["ours / bare"].append(ours_seconds / bare_seconds)
        ratios["bare / bare"].append(times[2] / bare_seconds)
        ratios["bare seconds"].append(bare_seconds)
    dist.destroy_process_group()
    return ratios


def main(argv: Sequence[str]) -> int:
    """Launch the processes, print minimum, median and maximum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args(argv)
    job = rest or DEFAULT_JOB
    if arguments.worker:
        ratios = measure(job, arguments.pairs)
        if os.environ["RANK"] == "0":
            arguments.worker.write_text(json.dumps(ratios))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "ratios.json")
        command = [
            sys.executable,
            "-P",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr=127.0.0.1",
            "--nproc-per-node",
            str(arguments.nproc_per_node),
        ]
        command += [__file__, "--pairs", str(arguments.pairs), "--worker", str(answer), *job]
        subprocess.run(command, check=True)
        ratios = json.loads(answer.read_text())
    if arguments.json:
        print(json.dumps(ratios))
        return 0
    for name, values in ratios.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{name:<14} min {low:.3f}  median {middle:.3f}  max {high:.3f}  ({len(values)} pairs)")
    return 0


if __name__ == "__main__":
    # Only the folder of a script is on its path: pretrain_moe.py is one folder up.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    end_process(main(sys.argv[1:]))
