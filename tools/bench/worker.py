"""One rank of the overlap benchmark: it assembles the runs of all variants, then executes steps of the variants in its orders.

Orders come as JSON lines, each gets one answer:

    {"do": "profile", "steps": N}                      real steps; processor seconds of every operator
    {"do": "use", "profile": {…}, "scale": X}          timer compute sleeps that long from now on
    {"do": "add", "variant": {…}, "sleeps": [[name, seconds], …]}    one more variant over timer compute, and its sleeps
    {"do": "step", "variant": …, "bytes_per_second": …, "scale": …, "trace": FILE or null}
    {"do": "operators", …}                             see measuring.py: seconds of operators,
    {"do": "links", "kind": …, "held_bytes": …}        seconds of a collective,
    {"do": "slowdown", "held_bytes": …}                slowdown of products during an all-to-all
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_overlap.commands.exits import end_process
from moe_overlap.describe.errors import ConfigError
from tools.bench.emulator import EgressClock
from tools.bench.profile import ORDERS, GivenSeconds, given_seconds, median_seconds
from tools.bench.variants import Variant

OVERLAP_CODE = (
    "moe_overlap.runtime.executor.execute",
    "moe_overlap.runtime.executor.bindings",
    "moe_overlap.runtime.dispatch",
)
"""Modules that processes of megatron-core's own variants must not import."""
ORDER_STEP, ORDER_PROFILE, ORDER_USE, ORDER_ADD = "step", "profile", "use", "add"


@dataclass(slots=True)
class WorkerRun:
    """An assembled variant: a StepRunner, its list and its micro-batches."""

    variant: Variant
    runner: Any
    instructions: Sequence[Any]
    feed: Iterator[Any]


class Rank:
    """The variants of one process.

    Args:
        job: flags of every variant.
        emulator: put every wire on an emulated link.
    """

    def __init__(self, job: Sequence[str], emulator: bool) -> None:
        self.job = list(job)
        self.clock = EgressClock(None) if emulator else None
        self.runs: dict[str, WorkerRun] = {}

    def answer(self, order: dict[str, Any]) -> Any:
        """Follow an order."""
        if self.clock is not None:
            self.clock.bytes_per_second = order["bytes_per_second"]
        if order["do"] == ORDER_STEP:
            return self.step(self.runs[order["variant"]], order["scale"], order.get("trace"))
        if order["do"] in ORDERS:
            from tools.bench import measuring  # imports overlap code, which not every process may have

            return measuring.answer(order, self.wires())
        raise ValueError(f"unknown order {order}")

    def wires(self) -> Any:
        """The wires of this rank, as `measuring.RankWires`."""
        raise NotImplementedError

    def step(self, run: WorkerRun, scale: float, trace: str | None = None) -> dict[str, float]:
        """Execute one step.

        Returns:
            Seconds. `step`: forward and backward; `whole`: with the update; `exposed`: communication that no computation covers;
            `exchanges`: sum of the spans of the all-to-alls.
        """
        import torch.distributed as dist

        from moe_overlap.plan.instructions import EXPERT, communication_seconds
        from moe_overlap.plan.trace import write_trace

        dist.barrier()
        begin = time.perf_counter()
        result = run.runner.run(run.instructions, run.feed, 0)
        seconds = time.perf_counter() - begin
        if trace is not None:
            rank = dist.get_rank()
            write_trace(Path(f"{trace}.rank{rank}" if rank else trace), result.spans, rank)
        update = min((span.start for span in result.spans if span.operator.is_update), default=seconds)
        # The norm waits for the last sends: their spans end in the update, which is not measured here.
        before = [span for span in result.spans if not span.operator.is_update]
        passes = [dataclasses.replace(span, end=min(span.end, update)) for span in before]
        exchanges = sum(span.end - span.start for span in passes if span.channel == EXPERT)
        return {
            "step": update,
            "whole": seconds,
            "exposed": communication_seconds(passes)[1],
            "exchanges": exchanges,
        }

    def parse(self, variant: Variant) -> Any:
        """Parse and validate the command line of a variant, which may name a plan."""
        import torch.distributed as dist

        from megatron.training.cli.arguments import parse
        from megatron.training.cli.validation import validate
        from megatron.training.plan_argument import with_plan

        parsed = with_plan(parse([*self.job, *variant.flags]), dist.get_world_size())
        validate(parsed.config, parsed.layout_world or dist.get_world_size())
        return parsed

    def assemble(self, variant: Variant) -> Any:
        """Assemble a variant's run as pretrain_moe.py does."""
        import torch.distributed as dist

        from moe_overlap.commands import train as pretrain_moe

        return pretrain_moe.assemble(self.parse(variant), dist.get_rank()).job


class RealRank(Rank):
    """A rank that executes every variant as pretrain_moe.py assembles it."""

    def __init__(self, job: Sequence[str], emulator: bool) -> None:
        super().__init__(job, emulator)
        self._wires: dict[str, list[Any]] = {}
        self._stages: dict[str, Any] = {}

    def add(self, variant: Variant) -> None:
        """Assemble a variant."""
        job = self.assemble(variant)
        runner = job.machinery.runner
        if variant.waits:
            runner = _waiting(runner)
        self._wires[variant.name] = [] if variant.plain else wires_of(job, runner)
        if not variant.plain:
            self._stages[variant.name] = runner.context.groups.collection.pp
        if self.clock is not None and not variant.plain:
            from tools.bench.emulator import emulate

            for wires in self._wires[variant.name]:
                emulate(wires, self.clock)
        self.runs[variant.name] = WorkerRun(variant, runner, job.schedule.instructions, job.batches("train", 0))

    def wires(self) -> Any:
        """The wires of the first variant that has any."""
        name = next(name for name, wires in self._wires.items() if wires)
        return _rank_wires(self._wires[name][0], self._stages[name])

    def step(self, run: WorkerRun, scale: float, trace: str | None = None) -> dict[str, float]:
        """Execute one step, with megatron-core's all-to-all replaced if the variant does so; its bytes are not counted."""
        from tools.bench.emulator import replaced

        wires = self._wires[run.variant.name]
        before = sum(wire.sent_bytes for wire in wires)
        with replaced(run.variant.receive_first, self.clock) if run.variant.plain else nullcontext():
            figures = super().step(run, scale, trace)
        return figures | {"sent_bytes": sum(wire.sent_bytes for wire in wires) - before}


class TimerRank(Rank):
    """A rank whose one assembled run follows the lists of all variants over timer compute.

    Args:
        profiled: the variant that is assembled and measured; its weight gradients are separate operators.
    """

    def __init__(self, job: Sequence[str], emulator: bool, profiled: Variant) -> None:
        from moe_overlap.runtime.dispatch.wire import AllToAll
        from moe_overlap.runtime.executor.execute import PlanExecutor
        from tools.bench.emulator import EmulatedExchange, GlooAllToAll, emulate
        from tools.bench.timer_operators import TimedExecutor

        super().__init__(job, emulator)
        self._profiled = profiled
        self._job = self.assemble(profiled)
        self._real = self._job.machinery.runner
        assert isinstance(self._real, PlanExecutor), f"the list of {profiled.name!r} is not followed by the executor"
        self._wires = self._real.dispatcher.wires
        replicas = self._real.context.groups.collection.dp_cp
        over_replicas = AllToAll(replicas)
        if self.clock is not None:
            emulate(self._wires, self.clock)
            over_replicas = EmulatedExchange(replicas, self.clock)
        self._point_to_point = self._wires.rows
        self._gloo = GlooAllToAll(self._wires.rows.group)
        sizes = self._sizes(profiled)
        self._executors = {
            waits: TimedExecutor.over(self._real, sizes, over_replicas, waits) for waits in (False, True)
        }
        self._list_seconds: dict[str, GivenSeconds] = {}

    def add(self, variant: Variant) -> None:
        """Lower a variant's plan."""
        import torch.distributed as dist

        from moe_overlap.plan.lowering.lower import lower
        from tools.bench.variants import with_reduction

        plan, model = self._plan(variant)
        instructions = with_reduction(lower(plan, model, dist.get_rank()), variant.reduction)
        executor = self._executors[variant.waits or variant.plain]
        self.runs[variant.name] = WorkerRun(variant, executor, instructions, itertools.repeat({}))

    def answer(self, order: dict[str, Any]) -> Any:
        """Also measure operators, adopt their times, and adopt variants with their own times."""
        if order["do"] == ORDER_PROFILE:
            return self._profile(order["steps"])
        if order["do"] == ORDER_USE:
            for executor in self._executors.values():
                executor.profile = order["profile"]
            return None
        if order["do"] == ORDER_ADD:
            variant = _variant(order["variant"])
            self.add(variant)
            self._list_seconds[variant.name] = given_seconds(order["sleeps"], self.runs[variant.name].instructions)
            return None
        return super().answer(order)

    def wires(self) -> Any:
        """The wires that all variants share."""
        return _rank_wires(self._wires, self._real.context.groups.collection.pp)

    def step(self, run: WorkerRun, scale: float, trace: str | None = None) -> dict[str, float]:
        """Execute one step of sleeps."""
        self._wires.rows = self._gloo if run.variant.plain else self._point_to_point
        run.runner.list_seconds, run.runner.scale = self._list_seconds.get(run.variant.name), scale
        before = self._wires.sent_bytes
        figures = super().step(run, scale, trace)
        return figures | {"sent_bytes": self._wires.sent_bytes - before}

    def _profile(self, steps: int) -> dict[str, float]:
        """Median processor seconds of every operator over real steps; the first one is left out."""
        from tools.bench.timer_operators import ProcessorClock

        feed = self._job.batches("train", 0)
        recorder = self._real.context.recorder
        clock, recorder.clock = recorder.clock, ProcessorClock()
        try:
            spans = [self._real.run(self._job.schedule.instructions, feed, 0).spans for _ in range(steps + 1)]
        finally:
            recorder.clock = clock
        return median_seconds(spans[1:])

    def _plan(self, variant: Variant) -> tuple[Any, Any]:
        import torch.distributed as dist

        from megatron.training.cli.sizes import describe_model, known_vocab_size
        from megatron.training.data.sources import tokenizer_of_run
        from megatron.training.plan_flags import plan_of_run
        from moe_overlap.plan.rules.stages import validate_plan
        from tools.bench.variants import reaching

        parsed = self.parse(variant)
        vocabulary = known_vocab_size(parsed.config) or tokenizer_of_run(parsed.config.data).vocab_size
        model = describe_model(parsed.config, vocabulary, parsed.name)
        plan = plan_of_run(parsed.config, model, dist.get_world_size())
        if variant.reach is not None:
            plan = reaching(plan, model, variant.reach)
            validate_plan(plan, model, variant.name)
        return plan, model

    def _sizes(self, variant: Variant) -> Any:
        import torch

        from moe_overlap.plan.sizes import ACTIVATION_BYTES, tokens_of_rank
        from tools.bench.timer_operators import Sizes

        plan, model = self._plan(variant)
        dtype = torch.float32 if ACTIVATION_BYTES[plan.precision] == 4 else torch.bfloat16
        tokens = tokens_of_rank(plan, plan.stages[0])
        return Sizes(tokens, model.num_experts, model.router_topk, model.hidden_size, dtype)


def _rank_wires(wires: Any, stages: Any) -> Any:
    from moe_overlap.runtime.dispatch.wire import AllToAll
    from tools.bench.measuring import RankWires

    return RankWires(wires.rows, wires.counts.all_to_all, AllToAll(stages))


def _waiting(runner: Any) -> Any:
    """The same run on an executor that waits for every all-to-all where it is started."""
    from moe_overlap.runtime.executor.execute import PlanExecutor

    assert isinstance(runner, PlanExecutor), "a variant that waits needs an instruction list"
    return PlanExecutor(runner.context, waits=True)


def wires_of(job: Any, runner: Any) -> list[Any]:
    """All wires of an assembled run."""
    from megatron.training.model.build import unwrap
    from moe_overlap.runtime.executor.execute import PlanExecutor

    if isinstance(runner, PlanExecutor):
        return [runner.dispatcher.wires]
    layers = [layer for chunk in job.machinery.chunks for layer in unwrap(chunk).decoder.layers]
    dispatchers = [layer.mlp.token_dispatcher for layer in layers if hasattr(layer.mlp, "token_dispatcher")]
    return [dispatcher.stages.wires for dispatcher in dispatchers]


def main(argv: Sequence[str]) -> int:
    """Assemble, report it, then follow orders until there are no more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", required=True, help="JSON: job, variants, profiled, timer, emulator")
    parser.add_argument("--reply-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    start = json.loads(arguments.start)
    with os.fdopen(arguments.reply_fd, "w", buffering=1) as replies:
        try:
            rank = _assemble(start)
            imported = sorted(name for name in sys.modules if name.startswith(OVERLAP_CODE))
            print(json.dumps({"overlap_code": imported}), file=replies)
            for line in sys.stdin:
                print(json.dumps(rank.answer(json.loads(line))), file=replies)
        except ConfigError as error:
            if os.environ["RANK"] == "0":
                print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def command_of(
    job: Sequence[str], chosen: Sequence[Variant], *, timer: bool, emulator: bool, profiled: Variant
) -> list[str]:
    """The command line of a rank; arguments as `Rank` and `TimerRank` take them."""
    variants = [dataclasses.asdict(variant) for variant in chosen]
    start = {"job": list(job), "variants": variants, "timer": timer, "emulator": emulator}
    start |= {"profiled": dataclasses.asdict(profiled)}
    return [sys.executable, "-m", "tools.bench.worker", "--start", json.dumps(start)]


def _assemble(start: dict[str, Any]) -> RealRank | TimerRank:
    from megatron.training import cpu_backend
    from megatron.training.cli.start import quiet_libraries

    quiet_libraries()
    if cpu_backend.is_needed():
        cpu_backend.install()

    from megatron.training.cli.arguments import parse
    from megatron.training.initialize import start_process

    chosen = [_variant(values) for values in start["variants"]]
    start_process(parse([*start["job"], *chosen[0].flags]).config)
    rank: RealRank | TimerRank
    if start["timer"]:
        rank = TimerRank(start["job"], start["emulator"], _variant(start["profiled"]))
    else:
        rank = RealRank(start["job"], start["emulator"])
    for variant in chosen:
        rank.add(variant)
    return rank


def _variant(values: dict[str, Any]) -> Variant:
    return Variant(**values | {"flags": tuple(values["flags"])})


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
