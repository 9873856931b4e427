"""Train a Mixture-of-Experts language model: `torchrun --nproc-per-node N pretrain_moe.py @examples/FILE.args [flags]`.

Flags are Megatron-LM's (`--help`). `--dry-run` stops before the first step. torch is imported only when training starts.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import megatron.training
from moe_overlap.commands.exits import end_process, ends_with_its_reader, leave
from moe_overlap.describe.errors import ConfigError

if TYPE_CHECKING:
    from megatron.training.cli.arguments import ParsedArguments
    from megatron.training.cli.config import Config
    from megatron.training.training import TrainingLoop
    from moe_overlap.describe.model import ModelDescription
    from moe_overlap.plan.plan import Plan
    from moe_overlap.runtime.groups import StageGroups
    from moe_overlap.runtime.spans import SpanRecorder
    from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer
    from moe_overlap.runtime.step import StepRunner


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status: 0, 1 for a run that failed, 2 for a user's mistake."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        require_our_portion()
        from megatron.training.checkpoint.arguments import with_checkpoint_arguments
        from megatron.training.cli.arguments import parse
        from megatron.training.cli.dry_run import dry_run
        from megatron.training.cli.start import require_startable, this_machine
        from megatron.training.cli.validation import validate

        with ends_with_its_reader():
            parsed = with_checkpoint_arguments(parse(argv))
            if parsed.dry_run:
                dry_run(parsed, parsed.world_size, sys.stdout)
                return 0
        validate(parsed.config, int(os.environ.get("WORLD_SIZE", "1")))
        require_startable(parsed, this_machine())
        return train(parsed, argv)
    except ConfigError as error:
        return leave(rank, f"error: {error}", 2)


def require_our_portion() -> None:
    """Refuse another package's `megatron.training`, before anything is imported from it."""
    if getattr(megatron.training, "PORTION", None) != "moe-overlap":
        where = getattr(megatron.training, "__file__", "")
        raise ConfigError("megatron.training", where, "belongs to another package", "install megatron-core==0.16.1")


def train(parsed: ParsedArguments, argv: Sequence[str]) -> int:
    """Everything from the import of torch to the last evaluation."""
    from megatron.training import cpu_backend
    from megatron.training.cli.packages import require_packages
    from megatron.training.cli.start import quiet_libraries

    require_packages(parsed.config)
    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch.distributed as dist

    from megatron.training.initialize import start_process
    from megatron.training.report.reports import announce_end
    from megatron.training.training import TrainingFailed
    from moe_overlap.runtime.step import CommunicationFailed

    process = start_process(parsed.config)
    try:
        loop = assemble(parsed, process.rank)
        loop.run()
        announce_end(loop.job.log, argv, parsed.config, process.world_size, loop.reason)
    except TrainingFailed as error:
        return leave(process.rank, f"error: {error}", 1)
    except CommunicationFailed as error:
        # Each rank speaks for itself: rank 0 may be the one that is gone, and they do not all miss the same peer.
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


@dataclass(frozen=True, slots=True)
class Machinery:
    """What runs the steps of a run on this rank."""

    groups: StageGroups
    recorder: SpanRecorder
    chunks: Sequence[Any]
    optimizer: Any
    scheduler: Any
    layerwise: MegatronLayerwiseOptimizer
    runner: StepRunner
    deferred: Callable[[], dict[str, int]]


def build_machinery(config: Config, model: ModelDescription, plan: Plan, total_steps: int) -> Machinery:
    """Process groups, model, optimizer, and the runner that ties them to a plan's instructions. Collective."""
    from megatron.training.initialize import seed_everything
    from megatron.training.model.build import build_model, unwrap
    from megatron.training.optimizer import make_optimizer, make_scheduler, wrap_chunks
    from megatron.training.plan_flags import gate_of_run
    from moe_overlap.runtime.build import defer_planned_gradients, gate_and_dispatcher, gradient_marks, make_runner
    from moe_overlap.runtime.groups import build_groups
    from moe_overlap.runtime.megatron_core.moe_layer import adapt_layer
    from moe_overlap.runtime.routing.state import DrawClock
    from moe_overlap.runtime.spans import SpanRecorder
    from moe_overlap.runtime.state.optimizer import MegatronLayerwiseOptimizer
    from moe_overlap.runtime.weight_grad.queue import WeightGradQueue

    groups = build_groups(plan, datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes))
    stage = plan.stages[groups.stage]
    seed_everything(config.training.seed, groups.collection)
    recorder, clock = SpanRecorder(), DrawClock(config.training.seed)
    parts = gate_and_dispatcher(gate_of_run(config, plan), config.moe.moe_token_dispatcher_type, clock)
    adapt = adapt_layer(recorder, groups.collection, *parts)
    modules = build_model(config, model, plan, groups.collection, groups.stage, adapt)
    queue = WeightGradQueue(stage.overlap.max_deferred_bytes or None)
    deferred = defer_planned_gradients(modules, stage.overlap, queue)
    marks = gradient_marks(modules, stage.overlap)
    chunks = wrap_chunks(config, modules, groups.collection, marks, weight_gradients_come_later=deferred)
    optimizer = make_optimizer(config, chunks, groups.collection)
    scheduler = make_scheduler(config, optimizer, plan.global_batch_size, total_steps)
    layerwise = MegatronLayerwiseOptimizer(
        optimizer, chunks, config.optimizer.clip_grad, count_zeros=config.logging.log_num_zeros_in_grad
    )
    runner = make_runner(
        plan,
        chunks,
        [unwrap(chunk) for chunk in chunks],
        layerwise,
        groups,
        recorder,
        queue=queue,
        clock=clock,
        sequence_length=plan.sequence_length,
        micro_batch_size=stage.micro_batch_size,
    )
    figures = queue.figures if deferred else dict[str, int]
    return Machinery(groups, recorder, chunks, optimizer, scheduler, layerwise, runner, figures)


def assemble(parsed: ParsedArguments, rank: int) -> TrainingLoop:
    """A run from its flags: plan, machinery, data, checkpoint, reports. Collective over the default process group."""
    import torch.distributed as dist

    from megatron.training.checkpoint.checkpointing import Checkpointer, Progress, model_fingerprint
    from megatron.training.cli.sizes import batch_sizes, describe_model, known_vocab_size
    from megatron.training.data.datasets import BatchSource
    from megatron.training.data.sources import tokenizer_of_run
    from megatron.training.initialize import device_of_this_process
    from megatron.training.model.build import unwrap
    from megatron.training.plan_flags import plan_of_run, with_global_batch
    from megatron.training.report.metrics import MetricsLog
    from megatron.training.report.reports import Reports, announce, uses_expert_loads
    from megatron.training.training import Job, TrainingLoop
    from moe_overlap.describe.model import training_flops_per_token
    from moe_overlap.plan import trace
    from moe_overlap.plan.instructions import communication_seconds
    from moe_overlap.plan.lowering.lower import lower
    from moe_overlap.runtime.build import count_expert_loads
    from moe_overlap.runtime.spans import phase_seconds

    # What runs: tokenizer and flags give the model; flags, or --plan, give the plan; the plan gives this rank's instructions.
    config = parsed.config
    tokenizer = tokenizer_of_run(config.data)
    vocabulary = known_vocab_size(config) or tokenizer.vocab_size
    model = describe_model(config, vocabulary, parsed.name)
    plan = plan_of_run(config, model, dist.get_world_size())
    instructions = lower(plan, model, rank)
    sizes = batch_sizes(config, plan.stages[plan.stage_of(rank)].data)
    total_steps = config.training.train_iters or sizes.steps(config.training.train_samples or 0)

    # Who runs it, what it is fed, where it continues, what it reports.
    run = build_machinery(config, model, plan, total_steps)
    source = BatchSource(
        config,
        tokenizer,
        total_steps=total_steps,
        global_batch_size=plan.global_batch_size,
        data_rank=run.groups.data_rank,
        data_size=run.groups.data_size,
        context_rank=run.groups.collection.cp.rank(),
        context_size=run.groups.collection.cp.size(),
        device=device_of_this_process(),
    )
    fingerprint = model_fingerprint(config, vocabulary)
    checkpoints = Checkpointer(config, run.chunks, run.optimizer, run.scheduler, run.groups.collection, fingerprint)
    progress = checkpoints.load() or Progress()
    log = MetricsLog(config.logging, rank, total_steps, asdict(config))
    announce(log, parsed, model, dist.get_world_size(), source.description)
    for note in checkpoints.notes:
        log.say("loaded", note)
    counted = count_expert_loads([unwrap(chunk) for chunk in run.chunks], model) if uses_expert_loads(config) else None
    trace_path = Path((config.overlap.trace or "") + (f".rank{rank}" if rank else ""))
    job = Job(
        config=config,
        runner=run.runner,
        instructions=instructions,
        instructions_of=functools.cache(lambda size: lower(with_global_batch(plan, size), model, rank)),
        chunks=run.chunks,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        checkpoints=checkpoints,
        log=log,
        batches=source,
        measure=communication_seconds,
        covered=run.recorder.covered,
        write_trace=lambda measured: trace.write_trace(trace_path, measured, rank, trace.about_run(plan, model)),
        parameter_norm=run.layerwise.parameter_norm,
        deferred=run.deferred,
        reports=Reports(config.logging, log, phase_seconds, counted),
        global_batch_size=plan.global_batch_size,
        batch_sizes=sizes,
        total_steps=total_steps,
        flops_per_token=training_flops_per_token(model, plan.sequence_length),
    )
    return TrainingLoop(job, progress)


def run() -> NoReturn:
    """Entry point of `moe-train` and `pretrain_moe.py`: ends the process with the status of `main`."""
    end_process(main(sys.argv[1:]))
