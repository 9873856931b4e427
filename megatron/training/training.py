"""The training loop: steps, evaluation, saving, stopping.

The loop knows a step runner and its instruction lists (megatron/training/job.py); only figures of memory read the model. Every
rank must take the same decisions (a step's size, a save, an evaluation, an end), since all of them are collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron.training.checkpoint.checkpointing import Progress
from megatron.training.cli.config import Config
from megatron.training.job import TrainingJob
from megatron.training.messages import of_all_on_first
from megatron.training.report.metrics import StepMetrics
from megatron.training.report.outputs import Sink
from megatron.training.report.reports import (
    StorageTracker,
    elastic_tensors,
    held_tensors,
    resident_bytes,
    storages_on_host,
)
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan.instructions import Span, communication_seconds
from moe_overlap.plan.step import StepResult

_PROFILE_END_BYTES = 64
"""Bytes at the end of a profile that show whether it was written completely."""


class TrainingFailed(Exception):
    """A run that cannot go on: the loss or the gradients are not finite. Raised on every rank in the same step."""


class TrainingLoop:
    """Runs a job from `progress` to its last step or to an exit condition.

    Attributes:
        progress: steps and samples consumed so far.
        reason: why the loop ended before its last step; None if it has not.
        first_loss: loss of the first step this loop ran.
        activity: the loop's current activity: `start`, `step 3`, `save after step 3`, `evaluation after step 3`.
        on_activity: called with each activity when it begins.
    """

    def __init__(self, job: TrainingJob, progress: Progress) -> None:
        self.progress = progress
        self.reason: str | None = None
        self.first_loss: float | None = None
        self.activity = "start"
        self.on_activity: Callable[[str], None] = lambda activity: None
        self.job, self._config = job, job.config
        self._started = time.monotonic()
        self._saved_at = progress.iteration
        self._peak_bytes = 0
        self._peak_is_known = False  # known once a step has created the optimizer's state
        self._stopped_by_signal = False
        self._left_updates = False
        if job.config.training.exit_signal_handler:
            signal.signal(job.config.training.exit_signal, self._on_signal)

    def _enter(self, activity: str) -> None:
        self.activity = activity
        self.on_activity(activity)

    def run(self) -> None:
        """Train, save at the end, evaluate on held-out samples, close the log's files.

        Raises:
            TrainingFailed: loss or gradient norm is not finite.
            ConfigError: another job saves into the same folder, or the folder cannot be written.
        """
        training, job = self._config.training, self.job
        with contextlib.closing(job.reporting.log), job.checkpoints.claimed():
            spans: Sequence[Span] = ()
            try:
                if not training.skip_train:
                    spans = self._train()
            # A save in flight belongs to an earlier step and is sound. All ranks fail in the same step, so all wait for it here.
            except TrainingFailed:
                self._say_what_is_saved(wait=True)
                raise
            # The interval may have saved this step already.
            if self._saved_at != self.progress.iteration:
                self.save_now()
            self._say_what_is_saved(wait=True)
            self._last_reports(spans)
            if training.eval_iters and (self.progress.iteration >= job.schedule.total_steps or training.skip_train):
                self.evaluate("valid")
                self.evaluate("test")

    def _train(self) -> Sequence[Span]:
        """Execute the remaining steps; returns this rank's spans of the last one."""
        training, job, total_steps = self._config.training, self.job, self.job.schedule.total_steps
        feed = job.batches("train", self.progress.train_samples)
        assert feed is not None
        spans: Sequence[Span] = ()
        with _profiler(self._config, self.progress.iteration) as profiled:
            for iteration in range(self.progress.iteration + 1, total_steps + 1):
                spans = self.step(iteration, feed)
                profiled(iteration)
                self._say_what_is_saved(wait=False)
                # Before the save, as upstream: a run that resumes from it must not evaluate the same samples again.
                if training.eval_iters and _is_due(training.eval_interval, iteration) and iteration < total_steps:
                    self.evaluate("valid")
                if _is_due(self._config.checkpoint.save_interval, iteration):
                    self.save_now()
                # A persistent checkpoint of a step needs no second, non-persistent copy.
                elif _is_due(self._config.checkpoint.non_persistent_save_interval, iteration):
                    self.save_now(persistent=False)
                reason = self._exit_reason(iteration)
                if reason is not None:
                    self.reason = reason
                    break
        self._flush()
        return spans

    def _last_reports(self, spans: Sequence[Span]) -> None:
        """Write the last expert loads and the trace: after the final save, which a full disk must not prevent."""
        reporting, trace = self.job.reporting, self._config.overlap.trace
        reporting.reports.flush_loads(self.progress.iteration)
        if trace is not None and spans:
            sink = Sink("--trace", trace)

            def gather_and_write() -> None:
                by_rank = spans_of_all_ranks(spans)
                if by_rank is not None:
                    reporting.write_trace(by_rank)
                    reporting.log.say("trace", f"{trace}: {len(by_rank)} ranks, for ui.perfetto.dev")

            # Collective; only rank 0 writes.
            sink.attempt(gather_and_write)

    def step(self, iteration: int, feed: Iterator[dict[str, torch.Tensor]]) -> Sequence[Span]:
        """Execute, count and log one training step; returns this rank's spans.

        Raises:
            TrainingFailed: loss or gradient norm is not finite, and no dynamic loss scale handles it.
        """
        self._enter(f"step {iteration}")
        machinery, schedule = self.job.machinery, self.job.schedule
        # On a CPU the peak is tracked tensor by tensor, which is slow. The peak stays the same once the optimizer has its state.
        tracker = None if self._peak_is_known else self._memory_tracker()
        size = schedule.batch_sizes.at(self.progress.train_samples)
        instructions = schedule.lowered(size, self._left_updates)
        has_spans = machinery.record_spans(self._reads_spans(iteration))
        begin = time.perf_counter()
        with tracker or contextlib.nullcontext():
            result = machinery.runner.run(instructions, feed, iteration)
        seconds = time.perf_counter() - begin
        if tracker is not None:
            # The first list of a decoupled stage has no updates.
            self._peak_bytes = max(self._peak_bytes, tracker.peak_bytes)
            self._peak_is_known = result.updated and (self._left_updates or schedule.left_updates is None)
        self._left_updates = schedule.left_updates is not None
        # `result` is equal on every rank, so all stop here and none waits in the next step's collectives.
        if not result.updated and stops_at_nan(self._config):
            raise TrainingFailed(f"step {iteration}: not finite: loss {result.loss}, gradient norm {result.grad_norm}")
        self.first_loss = result.loss if self.first_loss is None else self.first_loss
        # Read before the scheduler changes it: the log shows the rate of this step.
        learning_rate = _learning_rate(machinery.optimizer.param_groups, self._config)
        if result.updated:
            machinery.scheduler.step(increment=size)
        samples, skipped = self.progress.train_samples + size, self.progress.skipped + (not result.updated)
        self.progress = replace(self.progress, iteration=iteration, train_samples=samples, skipped=skipped)
        self._report(result, size, seconds, learning_rate, has_spans)
        return result.spans

    def _reads_spans(self, iteration: int) -> bool:
        """Whether anything reads the spans of a step; any step may turn out to be the last, whose spans are the trace."""
        reporting = self.job.reporting
        return self._config.overlap.trace is not None or reporting.reports.has_timers or reporting.log.shows(iteration)

    def _flush(self) -> None:
        """Make the updates that the last step has left to the next one: what follows reads the weights."""
        if self._left_updates:
            assert self.job.schedule.left_updates is not None
            tracker = None if self._peak_is_known else self._memory_tracker()
            with tracker or contextlib.nullcontext():
                self.job.machinery.runner.flush(self.job.schedule.left_updates)
            if tracker is not None:
                self._peak_bytes, self._peak_is_known = max(self._peak_bytes, tracker.peak_bytes), True
            self._left_updates = False

    def _report(self, result: StepResult, samples: int, seconds: float, learning_rate: float, has_spans: bool) -> None:
        """Log the step that `progress` has just counted."""
        sequence_length = self._config.model.seq_length
        assert sequence_length is not None
        # As upstream, counts every computed token, even one whose loss is masked.
        tokens_per_second = samples * sequence_length / seconds
        iteration, reporting = self.progress.iteration, self.job.reporting
        communication, exposed = communication_seconds(result.spans) if has_spans else (None, None)
        peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._peak_bytes
        resident = resident_bytes()
        reporting.log.log(
            StepMetrics(
                step=iteration,
                loss=result.loss,
                step_seconds=seconds,
                tokens_per_second=tokens_per_second,
                grad_norm=result.grad_norm,
                learning_rate=learning_rate,
                comm_seconds=communication,
                exposed_comm_seconds=exposed,
                comm_covered=reporting.covered_channels,
                peak_bytes=peak_bytes,
                resident_bytes=resident,
                consumed_samples=self.progress.train_samples,
                optional=self._optional(result, tokens_per_second),
                predictions=result.predictions,
                deferred=self.job.machinery.deferral_figures(),
            ),
            {
                "batch-size": float(samples),
                **self._by_layer(result),
                **reporting.reports.curves(iteration, seconds, peak_bytes, result.spans),
            },
        )
        reporting.reports.after_step(iteration, peak_bytes, resident)

    def _by_layer(self, result: StepResult) -> dict[str, float]:
        """The boards' curves of the balancing losses of every layer, if the flags ask for them."""
        if not self._config.logging.moe_per_layer_logging:
            return {}
        pairs = ((name, layer_losses) for name, losses in result.balance.items() for layer_losses in losses.items())
        return {f"moe/{name}_layer_{layer}": loss for name, (layer, loss) in pairs}

    def _memory_tracker(self) -> StorageTracker | None:
        if torch.cuda.is_available():
            return None
        chunks = self.job.machinery.chunks
        held = held_tensors(chunks, self.job.machinery.optimizer)
        return StorageTracker(held, elastic_tensors(chunks), storages_on_host(chunks))

    def _optional(self, result: StepResult, tokens_per_second: float) -> dict[str, float]:
        logging = self._config.logging
        figures = {name: fmean(losses.values()) for name, losses in result.balance.items()}
        if logging.log_throughput:
            flops_per_second = self.job.reporting.flops_per_token * tokens_per_second
            figures["model_tflops_per_device"] = flops_per_second / dist.get_world_size() / 1e12
        if logging.log_params_norm:
            self._flush()
            figures["params_norm"] = self.job.machinery.parameter_norm()
        if self._config.precision.fp16:
            figures["loss_scale"] = float(self.job.machinery.optimizer.get_loss_scale())
            figures["skipped_iterations"] = float(self.progress.skipped)
        if logging.log_num_zeros_in_grad and result.zero_gradients is not None:
            figures["num_zeros_in_grad"] = float(result.zero_gradients)
        return figures

    def evaluate(self, split: str) -> None:
        """Mean loss over --eval-iters global batches of a split; nothing if the split has no samples.

        Raises:
            ConfigError: no token of these batches counts in the loss.
        """
        job, iterations = self.job, self._config.training.eval_iters
        size = self._config.training.eval_global_batch_size or job.schedule.global_batch_size
        consumed = self.progress.valid_samples if split == "valid" else 0
        feed = job.batches(split, consumed)
        if feed is None:
            return
        self._enter(f"evaluation after step {self.progress.iteration}")
        self._flush()
        loss = tokens = 0.0
        instructions = job.schedule.lowered(size, False)
        job.machinery.record_spans(False)
        for _ in range(iterations):
            result = job.machinery.runner.evaluate(instructions, feed, self.progress.iteration)
            # Weighted by tokens: batches may have different numbers of tokens that count.
            loss, tokens = loss + result.loss * result.tokens, tokens + result.tokens
        if not tokens:
            # For the whole evaluation: a single batch without such tokens has no weight in the mean.
            rule = f"no token of these batches of the {split} split counts in the loss"
            raise ConfigError(
                "--eval-iters", iterations, rule, "give the split other text, or evaluate more batches or 0"
            )
        if split == "valid":
            self.progress = replace(self.progress, valid_samples=consumed + iterations * size)
        notes = [f"start {self.first_loss:.4f}"] if self.first_loss is not None else []
        notes += [f"unigram entropy {entropy:.2f}" for entropy in [job.batches.unigram_entropy(split)] if entropy]
        note = f" ({', '.join(notes)})" if notes else ""
        job.reporting.log.log_evaluation(split, loss / tokens, self.progress.iteration, note)

    def save_now(self, persistent: bool = True) -> None:
        """Save the present state, whatever the intervals say; an asynchronous save starts when the previous one is complete."""
        if self._config.checkpoint.save is None:
            return
        self._enter(f"save after step {self.progress.iteration}")
        self._flush()
        self._say_what_is_saved(wait=True)
        # One save at a time: the previous one has ended, since the writers of both would share a process group.
        self.job.checkpoints.save(self.progress, persistent)
        if persistent:
            self._saved_at = self.progress.iteration
        if not self._config.checkpoint.async_save:
            self._say_what_is_saved(wait=True)

    def _say_what_is_saved(self, wait: bool) -> None:
        path = self.job.checkpoints.completed(wait)
        if path is not None:
            self.job.reporting.log.say("saved", str(path))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by_signal = True

    def _exit_reason(self, iteration: int) -> str | None:
        """Why to stop after this step; every rank gets the same answer."""
        training = self._config.training
        minutes = (time.monotonic() - self._started) / 60
        late = training.exit_duration_in_mins is not None and minutes >= training.exit_duration_in_mins
        if training.exit_signal_handler or training.exit_duration_in_mins is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            # Signals and clocks differ by rank; a rank that stopped by itself would block the others in their next collective.
            flags = torch.tensor([self._stopped_by_signal, late], dtype=torch.int, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            signalled, late = bool(flags[0]), bool(flags[1])
            if signalled:
                return f"signal {training.exit_signal}"
            if late:
                return f"--exit-duration-in-mins {training.exit_duration_in_mins}"
        if _is_due(training.exit_interval, iteration):
            return f"--exit-interval {training.exit_interval}"
        return None


def spans_of_all_ranks(spans: Sequence[Span]) -> dict[int, Sequence[Span]] | None:
    """The spans of a step by rank, on rank 0; None on the other ranks. Collective."""
    # Over NCCL the spans of all ranks would fill the first GPU's memory, so they travel between hosts. Not yet run on hardware.
    group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    rows = of_all_on_first([dataclasses.astuple(span) for span in spans], group)
    return None if rows is None else {rank: [_span(row) for row in of_rank] for rank, of_rank in enumerate(rows)}


def _span(row: Sequence[Any]) -> Span:
    *values, partition = row
    fields = dict(zip((field.name for field in dataclasses.fields(Span)), [*values, tuple(partition)], strict=True))
    return Span(**fields)


def stops_at_nan(config: Config) -> bool:
    """Whether a run ends if loss or gradients are not finite: with a dynamic loss scale it does not, as upstream."""
    dynamic = config.precision.fp16 and config.precision.loss_scale is None
    return config.training.check_for_nan_in_loss_and_grad and not dynamic


def _ends_as_json(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(-min(_PROFILE_END_BYTES, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")


def _learning_rate(groups: Sequence[Mapping[str, Any]], config: Config) -> float:
    """The learning rate of the layers; word embedding and output layer may have another one."""
    peak, decoupled = config.optimizer.lr, config.optimizer.decoupled_lr
    rates = [group["lr"] for group in groups if decoupled is None or group.get("max_lr") == peak]
    return max(rates or [group["lr"] for group in groups])


def _is_due(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


@contextlib.contextmanager
def _profiler(config: Config, done: int) -> Iterator[Callable[[int], None]]:
    """A torch profiler over --profile-step-start to --profile-step-end; yields a function to call after each step.

    The trace is written when the last of these steps is done, or when the run ends before that.

    Args:
        done: number of steps executed before.
    """
    logging = config.logging
    if not (logging.profile and logging.use_pytorch_profiler) or dist.get_rank() not in logging.profile_ranks:
        yield lambda iteration: None
        return
    path = Path(logging.tensorboard_dir or ".") / f"rank{dist.get_rank()}.pt.trace.json"
    sink = Sink("--use-pytorch-profiler", path)
    profiler = torch.profiler.profile(record_shapes=True)
    running = False

    def export() -> None:
        profiler.export_chrome_trace(str(path))
        # torch reports a failed write only on its C++ log, and raises nothing.
        if not _ends_as_json(path):
            raise OSError(errno.ENOSPC, "torch wrote no whole profile; is the disk full?")

    def write() -> None:
        sink.attempt(profiler.stop)
        sink.attempt(export)

    def after(iteration: int) -> None:
        nonlocal running
        due = logging.profile_step_start <= iteration + 1 < logging.profile_step_end
        if due and not running:
            sink.attempt(profiler.start)
        if running and not due:
            write()
        running = due

    after(done)
    try:
        yield after
    finally:
        if running:
            write()
