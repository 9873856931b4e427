"""Train a Mixture-of-Experts language model: `pretrain_moe.py --nproc-per-node N @examples/FILE.args [flags]`.

Flags are Megatron-LM's (`--help`). `--dry-run` stops before the first step. torch is imported only when training starts, so
mistakes in flags are reported immediately. With `--nproc-per-node` this process checks the command line and starts the ranks;
torchrun and srun can start them as well.

This command connects the training package and the runtime, which do not import each other: `main` parses and checks flags,
`train` starts and ends the process, `assemble` builds a training loop from plan, model, data, checkpoint and reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import io
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import megatron.training
from moe_overlap.commands.device_settings import nccl_blocks, settle_environment
from moe_overlap.commands.exits import (
    INTERRUPTED,
    LaunchFolder,
    end_process,
    end_with_launcher,
    flushed_output,
    leave,
    leave_to_signals,
    refusal_line,
    speak,
)
from moe_overlap.commands.missing import says_what_is_missing
from moe_overlap.commands.slurm_tasks import take_slurm_ranks
from moe_overlap.describe.cluster import GIB
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.files import printable, whole_number
from moe_overlap.describe.model import require_bounded_layers

if TYPE_CHECKING:
    import torch

    from megatron.training.cli.arguments import ParsedArguments
    from megatron.training.cli.config import Config
    from megatron.training.cli.launch import Launch
    from megatron.training.data.datasets import BatchSource
    from megatron.training.data.tokenizers import Tokenizer
    from megatron.training.job import Machinery, Reporting
    from megatron.training.training import TrainingLoop
    from moe_overlap.describe.model import ModelDescription
    from moe_overlap.plan.instructions import Instruction
    from moe_overlap.plan.lowering.rendezvous import Lists
    from moe_overlap.plan.lowering.residency import BlockLimits
    from moe_overlap.plan.plan import Plan
    from moe_overlap.runtime.build import Builders, Settings
    from moe_overlap.runtime.context import RunContext


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 for a failed run, 2 for a user's mistake."""
    rank = 0
    try:
        require_our_portion()
        from megatron.training.cli.launch import PROCESSES, require_launchable, split_launch, visible_gpus

        # With --nproc-per-node a task of srun starts the ranks of its node.
        if not any(argument.replace("_", "-").startswith(PROCESSES) for argument in argv):
            take_slurm_ranks(os.environ, visible_gpus)
        rank, world_size = place_among_ranks(os.environ)
        from megatron.training.checkpoint.arguments import with_checkpoint_arguments
        from megatron.training.cli.arguments import parse
        from megatron.training.cli.dry_run import dry_run
        from megatron.training.cli.rules.checkpoint import RESTARTS
        from megatron.training.cli.start import require_startable, this_machine
        from megatron.training.cli.validation import validate
        from megatron.training.plan_argument import with_plan

        launch, arguments = split_launch(argv, os.environ)
        world_size = launch.world_size if launch else world_size
        if launch is not None and launch.max_restarts:
            # As torch's agent sets it for the ranks, so that the checks here agree with those of the ranks.
            os.environ[RESTARTS] = str(launch.max_restarts)
        with flushed_output():
            parsed = with_plan(with_checkpoint_arguments(parse(arguments)), world_size)
            require_bounded_layers("--mtp-num-layers", parsed.config.model.mtp_num_layers)
            if parsed.dry_run:
                require_one_size(parsed.world_size, launch)
                page = io.StringIO()
                dry_run(parsed, launch.world_size if launch else parsed.world_size, page)
                # Values of flags may come from an untrusted file.
                lines = page.getvalue().removesuffix("\n").split("\n")
                print("\n".join(printable(line, len(line)) for line in lines))
                return 0
        validate(parsed.config, parsed.layout_world or world_size)
        require_startable(parsed, this_machine())
        if launch is None:
            return train(parsed, arguments)
        require_launchable(parsed, launch)
        from moe_overlap.commands.launcher import start_ranks

        return start_ranks(launch, arguments, parsed.config)
    except ConfigError as error:
        return leave(rank, f"error: {error}", 2)
    except OSError as error:
        return leave(rank, refusal_line(error), 2)


def place_among_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and number of ranks, from the launcher's variables.

    Raises:
        ConfigError: a variable of the launcher is no whole number, or out of range.
    """
    numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, least in numbers.items():
        text = environment.get(name, str(least))
        number = whole_number(text)
        if number is None or number < least:
            rule = f"must be a whole number from {least}"
            raise ConfigError(name, printable(text, 20), rule, "start by torchrun, which sets it, or unset it")
        numbers[name] = number
    port = environment.get("MASTER_PORT", "1")
    if not (port.isascii() and port.isdigit() and 0 < len(port) < 6 and int(port) < 2**16):
        rule = "is no port"
        raise ConfigError(
            "MASTER_PORT", printable(port, 20), rule, "start by torchrun, which sets it, or use 1 to 65535"
        )
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        rule = f"WORLD_SIZE says {numbers['WORLD_SIZE']} ranks, which count from 0"
        raise ConfigError("RANK", numbers["RANK"], rule, "start by torchrun, which sets both")
    return numbers["RANK"], numbers["WORLD_SIZE"]


def require_one_size(world_size: int | None, launch: Launch | None) -> None:
    """Refuse a dry run whose --world-size contradicts the launcher's flags."""
    if launch is not None and world_size not in (None, launch.world_size):
        rule = f"--nproc-per-node says {launch.world_size} processes in all"
        raise ConfigError("--world-size", world_size, rule, "drop one of them")


def require_our_portion() -> None:
    """Refuse another package's `megatron.training` before importing from it."""
    if getattr(megatron.training, "PORTION", None) != "moe-overlap":
        found_at = getattr(megatron.training, "__file__", "")
        raise ConfigError("megatron.training", found_at, "belongs to another package", "install megatron-core==0.16.1")


def require_usable_gpu() -> None:
    """Refuse a machine whose GPUs torch cannot use: its ranks would train on the CPU, or block ranks of other machines.

    CUDA_VISIBLE_DEVICES= selects the CPU explicitly.
    """
    import torch

    from megatron.training.cli.start import cuda_is_there

    is_requested = torch.version.cuda is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if is_requested and cuda_is_there() and not torch.cuda.is_available():
        rule = "torch cannot use them: see nvidia-smi for the driver, and for the fabric manager of an NVLink switch"
        fix = "repair or exclude the machine; CUDA_VISIBLE_DEVICES= trains on its CPU"
        raise ConfigError("the GPUs", f"of {socket.gethostname()}", rule, fix)


def train(parsed: ParsedArguments, argv: Sequence[str]) -> int:
    """Train, from the import of torch to the last evaluation; returns the exit status."""
    # Suppresses torch's repeated C++ messages about unreachable peers; its errors are raised anyway.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    from megatron.training import cpu_backend
    from megatron.training.cli.packages import require_importable_libraries, require_packages
    from megatron.training.cli.start import quiet_libraries

    end_with_launcher()
    require_packages(parsed.config)
    settle_environment(parsed.config, os.environ, has_unlike_stages=parsed.layout_world is not None)
    quiet_libraries()
    require_usable_gpu()
    require_importable_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()
    import torch
    import torch.distributed as dist

    from megatron.training.initialize import AnotherRankFailed, start_process
    from megatron.training.report.reports import announce_end
    from megatron.training.training import TrainingFailed
    from moe_overlap.commands.failures import Place, failure_line, kind_of_failure
    from moe_overlap.runtime.weight_grad.queue import DeferredBytesExceeded

    # torch's operators then sum in a fixed order; an operator that cannot raises an error with its name.
    torch.use_deterministic_algorithms(parsed.config.training.deterministic_mode)
    folder = LaunchFolder.of_this_process(os.environ)
    process, loop = start_process(parsed.config), None
    if folder is not None:
        folder.begin()
    try:
        loop = assemble(parsed, process.rank)
        if folder is not None:
            loop.on_activity = functools.partial(folder.note, process.rank)
        loop.run()
        announce_end(loop.job.reporting.log, argv, parsed.config, process.world_size, loop.reason)
        if folder is not None:
            folder.finish(process.rank)
    except TrainingFailed as error:
        return leave(process.rank, f"error: {error}", 1, is_shared=True)
    except ConfigError:
        raise
    except AnotherRankFailed as error:
        speak(f"error: {error} (rank {process.rank}, {loop.activity if loop else 'start'})", waits=True)
        return 1
    except DeferredBytesExceeded as error:
        speak(f"error: {error} (rank {process.rank}, {loop.activity if loop else 'start'})")
        return 1
    except Exception as error:
        # Every rank reports its own error: rank 0 may be the lost one, and ranks may have lost different peers.
        kind = kind_of_failure(error)
        in_step = loop is not None and loop.activity.startswith("step")
        place = Place(
            process.rank,
            loop.activity if loop else "start",
            loop.job.machinery.operation() if loop is not None and in_step else None,
        )
        speak(failure_line(error, kind, place), waits=kind == "peer")
        return 1
    # Not after a failure: NCCL would wait for collectives that this rank never joins, until its peers time out.
    dist.destroy_process_group()
    return 0


def memory_of_host() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def require_host_memory(plan: Plan, model: ModelDescription, source: str, rank: int, memory: int) -> None:
    """Refuse a plan whose ranks on this machine keep more weights and optimizer states in its memory than it has.

    Raises:
        ConfigError: with the stage and the state that need the most.
    """
    from moe_overlap.plan.lowering.optimizer_state import host_bytes

    together = int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size))
    node = rank // together
    indices = [plan.stage_of(other) for other in range(node * together, min((node + 1) * together, plan.world_size))]
    by_stage = {index: host_bytes(plan, index, model) for index in set(indices)}
    needed = sum(sum(by_stage[index].values()) for index in indices)
    index, what = max(((i, what) for i in by_stage for what in by_stage[i]), key=lambda key: by_stage[key[0]][key[1]])
    rule = f"needs {needed / GIB:.1f} GiB of host memory on node {node}, which has {memory / GIB:.1f}"
    require(needed <= memory, source, "", rule, f"lower offload.{what} of stages[{index}]")


def assemble(parsed: ParsedArguments, rank: int) -> TrainingLoop:
    """Build a run from its flags. Collective over the default process group.

    0. Check that every output can be written: a run that cannot save does not begin.
    1. Tokenizer and flags determine the model; flags, or --plan, the plan; the plan this rank's instructions.
    2. The plan determines the machinery: groups, model, optimizer, runner.
    3. Data, then the checkpoint: loading sets the machinery to the state in which the run continues.
    4. Reports.
    """
    import torch.distributed as dist

    from megatron.training.checkpoint.checkpointing import Checkpointer, Progress, model_fingerprint
    from megatron.training.checkpoint.padding import FIELD, config_for_rows, saved_rows
    from megatron.training.cli.rules.resume import DIGEST, ORDER, SAMPLES
    from megatron.training.cli.sizes import batch_sizes, describe_model, known_vocab_size
    from megatron.training.data.sources import tokenizer_of_run
    from megatron.training.initialize import device_of_this_process
    from megatron.training.job import LearningSchedule, TrainingJob
    from megatron.training.plan_flags import plan_of_run
    from megatron.training.plan_values import config_of_stage
    from megatron.training.report.outputs import prove_outputs
    from megatron.training.training import TrainingLoop
    from moe_overlap.plan.lowering.lower import lower, lower_together, lower_updates
    from moe_overlap.runtime.build import build_context

    config = parsed.config
    prove_outputs(config, rank)  # 0
    tokenizer = tokenizer_of_run(config.data)  # 1
    vocabulary = known_vocab_size(config) or tokenizer.vocab_size
    model = describe_model(config, vocabulary, parsed.name)
    plan = on_device(plan_of_run(config, model, dist.get_world_size()), config, device_of_this_process())
    rows = None if FIELD in parsed.written_fields() else saved_rows(config.checkpoint)
    padded = None if rows is None else config_for_rows(config, plan, vocabulary, rows)
    if padded is not None:
        # Only for the model: saving and resuming use the user's flags.
        model = describe_model(padded, vocabulary, parsed.name)
        plan = on_device(plan_of_run(padded, model, dist.get_world_size()), padded, device_of_this_process())
    if plan.transfers:
        config = config_of_stage(config, plan, plan.stage_of(rank))
    sizes = batch_sizes(config, plan.stages[plan.stage_of(rank)].data)

    if config.overlap.plan is not None:
        require_host_memory(plan, model, config.overlap.plan, rank, memory_of_host())
    # A plan that cannot be lowered is refused before anything is built.
    lists = lower_together(plan, model, rank, updates=False)
    lists_by_size = {(plan.global_batch_size, False): lists[rank]}

    def lowered(size: int, updates: bool) -> Sequence[Instruction]:
        if (size, updates) not in lists_by_size:
            lists_by_size[size, updates] = lower(plan.with_global_batch(size), model, rank, updates)
        return lists_by_size[size, updates]

    blocks = _nccl_blocks(config, plan, lists)
    total_steps = config.training.train_iters or sizes.steps(config.training.train_samples or 0)
    left_updates = lower_updates(plan, model, rank) if plan.is_decoupled else None
    schedule = LearningSchedule(total_steps, plan.global_batch_size, sizes, lowered, left_updates)
    context = build_context(plan, model, settings_of(config, plan, blocks), builders_of(config, model, plan))  # 2
    machinery = machinery_of(config, context, total_steps)
    batches = batches_of(config, context, tokenizer, total_steps)  # 3
    checkpoints = Checkpointer(
        config,
        machinery.chunks,
        machinery.optimizer,
        machinery.scheduler,
        context.groups.collection,
        plan,
        model_fingerprint(config, vocabulary),
        {SAMPLES: plan.global_batch_size, DIGEST: batches.digest, ORDER: batches.order},
        contextlib.nullcontext
        if context.weight_gathers is None and context.stores is None
        else context.optimizer.whole_weights,
    )
    progress = checkpoints.load() or Progress()
    reporting = reporting_of(parsed, context, rank, total_steps, batches.description)  # 4
    for note in checkpoints.notes:
        reporting.log.say("loaded", note)
    return TrainingLoop(TrainingJob(config, machinery, schedule, batches, checkpoints, reporting), progress)


def on_device(plan: Plan, config: Config, device: torch.device) -> Plan:
    """The plan to execute: a plan from flags is adapted to this device, a plan from a file is unchanged."""
    from moe_overlap.runtime.step import computes_later

    return plan if config.overlap.plan else dataclasses.replace(plan, host_runs_ahead=computes_later(device))


def settings_of(config: Config, plan: Plan, blocks: BlockLimits | None) -> Settings:
    """The training settings of the runtime that are not in the plan."""
    from megatron.training.plan_flags import gate_of_run
    from moe_overlap.runtime.build import Settings

    return Settings(
        seed=config.training.seed,
        gate=gate_of_run(config, plan),
        dispatcher=config.moe.moe_token_dispatcher_type,
        clip_grad=config.optimizer.clip_grad,
        counts_zero_gradients=config.logging.log_num_zeros_in_grad,
        timeout=datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes),
        captures_graphs=config.overlap.moe_overlap_cuda_graphs,
        block_limits=blocks,
    )


def _nccl_blocks(config: Config, plan: Plan, lists: Lists) -> BlockLimits | None:
    """The limits of NCCL's thread blocks on this GPU; None over gloo."""
    import torch

    from moe_overlap.plan.lowering.residency import communicators_of

    if not torch.cuda.is_available() or config.parallel.distributed_backend != "nccl":
        return None
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    communicators = communicators_of(lists, plan) if plan.runs_lists else None
    return nccl_blocks(config, os.environ, multiprocessors, plan, communicators)


def builders_of(config: Config, model: ModelDescription, plan: Plan) -> Builders:
    """The builders of the training package for a run's plan and flags."""
    from megatron.training.initialize import seed_everything
    from megatron.training.model.build import build_model
    from megatron.training.optimizer import make_optimizer, wrap_chunks
    from moe_overlap.runtime.build import Builders

    return Builders(
        seed=functools.partial(seed_everything, config.training.seed),
        model=lambda groups, adapt: build_model(config, model, plan, groups.collection, groups.stage, adapt),
        wrap=functools.partial(wrap_chunks, config, plan),
        optimizer=functools.partial(make_optimizer, config, plan),
    )


def machinery_of(config: Config, context: RunContext, total_steps: int) -> Machinery:
    """The runner of a context, its optimizer, and the learning-rate schedule."""
    from megatron.training.job import Machinery
    from megatron.training.optimizer import make_scheduler
    from moe_overlap.runtime.build import make_runner

    optimizer = context.optimizer.megatron
    return Machinery(
        runner=make_runner(context),
        chunks=context.chunks,
        optimizer=optimizer,
        scheduler=make_scheduler(config, optimizer, context.plan.global_batch_size, total_steps),
        parameter_norm=context.optimizer.parameter_norm,
        deferral_figures=context.deferral_figures,
        operation=lambda: context.recorder.operation,
        record_spans=context.recorder.ask,
    )


def batches_of(config: Config, context: RunContext, tokenizer: Tokenizer, total_steps: int) -> BatchSource:
    """The micro-batches of this rank, by its data rank and its context rank."""
    from megatron.training.data.datasets import BatchSource
    from megatron.training.initialize import device_of_this_process

    return BatchSource(
        config,
        tokenizer,
        sequence_length=context.plan.sequence_length,
        micro_batch_size=context.stage.micro_batch_size,
        total_steps=total_steps,
        global_batch_size=context.plan.global_batch_size,
        data_rank=context.groups.data_rank,
        data_size=context.groups.data_size,
        context_rank=context.groups.collection.cp.rank(),
        context_size=context.groups.collection.cp.size(),
        device=device_of_this_process(),
    )


def reporting_of(
    parsed: ParsedArguments, context: RunContext, rank: int, total_steps: int, data_description: str
) -> Reporting:
    """The run's opened log with its first lines, and the reports in addition to the steps."""

    from megatron.training.job import Reporting
    from megatron.training.report.metrics import MetricsLog
    from megatron.training.report.reports import Reports, announce, uses_expert_loads
    from moe_overlap.describe.model import training_flops_per_token
    from moe_overlap.plan import trace
    from moe_overlap.runtime.build import count_expert_loads
    from moe_overlap.runtime.spans import phase_seconds

    config, plan, model = parsed.config, context.plan, context.model
    log = MetricsLog(config.logging, rank, total_steps, asdict(config))
    announce(log, parsed, model, plan, data_description)
    loads = count_expert_loads(context) if uses_expert_loads(config) else None
    trace_path = Path(config.overlap.trace or "")
    return Reporting(
        log=log,
        reports=Reports(config.logging, log, phase_seconds, loads),
        covered_channels=context.recorder.covered,
        flops_per_token=training_flops_per_token(model, plan.sequence_length),
        write_trace=lambda spans: trace.write_ranks(trace_path, spans, about=trace.about_run(plan, model)),
    )


def run() -> NoReturn:
    """Entry point of `moe-train` and `pretrain_moe.py`: ends the process with the status of `main`."""
    leave_to_signals()
    try:
        with says_what_is_missing(answers_ctrl_c=False):
            status = main(sys.argv[1:])
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        status = INTERRUPTED
    end_process(status)
