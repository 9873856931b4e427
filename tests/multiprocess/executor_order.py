"""Checks of one step of the executor against its instruction list. Called in the processes of a launch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from moe_overlap.plan.instructions import Instruction, Span, channel_group, operator_spans
from moe_overlap.plan.lowering.deferral import early_gradients
from moe_overlap.plan.operators import parse_operator
from moe_overlap.plan.sizes import deferred_bytes
from tests.multiprocess.recorded_order import MODEL

Done = tuple[str, int | None, int | None, tuple[int, ...]]
"""Name, chunk, micro-batch and partition."""
QUERY_GROUPS = "--group-query-attention --num-query-groups 2"
IRREGULAR = "--moe-token-dispatcher-type irregular --moe-gate topk --micro-batch-size 4 --global-batch-size 16"


def check_rows(rows: dict[str, str], updates: Sequence[str]) -> dict[str, dict[str, Any]]:
    """One step of every row, as it is and with the executor broken in several ways.

    Args:
        updates: rows that also run with broken updates.
    Returns:
        name -> what was found: `order` and `waits` of the executor itself, how many waits were looked at, loss and gradient norm,
        how many weight gradients the list computes `early`, which held other bytes than the list was made for, and whether each
        broken executor was noticed.
    """
    return {name: _check(flags, name in updates) for name, flags in rows.items()}


def _check(flags: str, breaks_update: bool) -> dict[str, Any]:
    from moe_overlap.runtime.executor.execute import PlanExecutor

    # Latent attention has no query groups.
    model = MODEL.replace(QUERY_GROUPS, "") if "--multi-latent-attention" in flags else MODEL
    job = _assembled(f"{model} {IRREGULAR} {flags}")
    feed = job.batches("train", 0)
    runner, instructions = job.machinery.runner, job.schedule.instructions
    assert isinstance(runner, PlanExecutor)
    held = _held_bytes(runner.context.weight_gradients)
    result = runner.run(instructions, feed, 0)
    spans = result.spans
    hasty_waits, looked_at = waited_too_early(spans, instructions)
    found: dict[str, Any] = {
        "order": different_order(spans, instructions),
        "waits": hasty_waits,
        "looked at": looked_at,
    }
    found["numbers"] = (result.loss, result.grad_norm)
    found["early"] = len(early_gradients(instructions))
    found["bytes"] = _unexpected_bytes(held, runner.context, instructions)

    waiting = PlanExecutor(runner.context, waits=True).run(instructions, feed, 1).spans
    found["a wait behind every all-to-all is noticed"] = bool(waited_too_early(waiting, instructions)[0])

    for name, broken in broken_updates().items() if breaks_update else ():
        executor = PlanExecutor(runner.context)
        executor._update = broken(runner.context)
        found[f"{name} is noticed"] = bool(different_order(executor.run(instructions, feed, 1).spans, instructions))

    queue = runner.context.weight_gradients
    if any(i.kind == "weight-gradient" for i in instructions) and not found["early"]:
        queue.run = lambda *_, **__: queue.run_all()  # type: ignore[method-assign,assignment]
        hasty = runner.run(instructions, feed, 2).spans
        found["a first slot that runs everything is noticed"] = bool(different_order(hasty, instructions))
    return found


def broken_updates() -> dict[str, type]:
    """Name -> an update with that fault, which the checks inside the runtime do not see."""
    from moe_overlap.runtime.state.update import StepUpdate, UpdateState

    class Forgetful(StepUpdate):
        def _publish(self, instruction: Instruction, state: UpdateState) -> None:
            state.is_published = True

    class Late(StepUpdate):
        """The weights of the first group move before the gradients are complete."""

        completing: Instruction | None = None

        def _complete_gradients(self, instruction: Instruction, state: UpdateState) -> None:
            self.completing, state.is_reduced = instruction, True

        def _step_group(self, instruction: Instruction, state: UpdateState) -> None:
            super()._step_group(instruction, state)
            if self.completing is not None:
                super()._complete_gradients(self.completing, state)
                self.completing = None

    class Swapping(StepUpdate):
        """Two groups step in the other order."""

        first: Instruction | None = None
        swapped = False

        def _step_group(self, instruction: Instruction, state: UpdateState) -> None:
            if self.first is None:
                self.first = instruction
                return
            super()._step_group(instruction, state)
            if not self.swapped:
                super()._step_group(self.first, state)
                self.swapped = True

    return {"a gather left out": Forgetful, "a step before the reduction": Late, "a swap of two steps": Swapping}


def check_refusals(flags: str) -> dict[str, str]:
    """Lists whose update is not whole -> what the executor says to them; empty where it runs them."""
    from moe_overlap.plan.operators import OperatorKind

    job = _assembled(f"{MODEL} {IRREGULAR} {flags}")
    feed = job.batches("train", 0)
    instructions = list(job.schedule.instructions)
    places: dict[OperatorKind, int] = {}
    for place, instruction in enumerate(instructions):
        if instruction.operator.is_update:
            places.setdefault(instruction.operator.kind, place)
    lists = {f"without {kind}": [i for n, i in enumerate(instructions) if n != place] for kind, place in places.items()}
    norm, step = places[OperatorKind.NORM], places[OperatorKind.OPTIMIZER]
    early = instructions.copy()
    early.insert(norm, early.pop(step))
    lists["a step before the norm"] = early
    copied = dataclasses.replace(instructions[step], kind="copy", name="offload.head.weights")
    lists["a copy"] = [*instructions, copied]
    found = {}
    for name, broken in lists.items():
        try:
            job.machinery.runner.run(broken, feed, 0)
            found[name] = ""
        except (AssertionError, ValueError) as error:
            found[name] = str(error)
    return found


def _held_bytes(queue: Any) -> dict[tuple[str, int], dict[int, int]]:
    """Weight gradients that are put into a queue from now on: name and operator -> address and bytes of each storage it holds."""
    held: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    put = queue.put

    def put_and_note(name: str, compute: Any, tensors: Any, **options: Any) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            held[name, queue._operator][storage.data_ptr()] = storage.nbytes()
        put(name, compute, tensors, **options)

    queue.put = put_and_note
    return held


def _unexpected_bytes(
    held: dict[tuple[str, int], dict[int, int]], context: Any, instructions: Sequence[Instruction]
) -> list[str]:
    """Weight gradients that held more than the list allows for, or less than a quarter: it allows for twice the routed rows."""
    partitions = Counter()
    for i in instructions:
        if i.kind == "weight-gradient" and i.micro_batch == 0:
            partitions[i.name] += len(i.partition) or 1
    found = []
    for (name, _), storages in held.items():
        size = sum(storages.values())
        whole = deferred_bytes(parse_operator(name), context.plan, context.stage, context.model)
        if not whole / partitions[name] / 4 <= size <= whole / partitions[name]:
            found.append(f"{name} {size} of {whole / partitions[name]}")
    return found


def _assembled(flags: str) -> Any:
    import torch.distributed as dist

    from megatron.training.cli.arguments import parse
    from megatron.training.cli.validation import validate
    from moe_overlap.commands.train import assemble

    parsed = parse(flags.split())
    validate(parsed.config, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()):
        return assemble(parsed, dist.get_rank()).job


def different_order(spans: Sequence[Span], instructions: Sequence[Instruction]) -> dict[str, str]:
    """Channel -> the first place where the recorded order is not the list's, partition by partition."""
    recorded, listed = defaultdict(list), defaultdict(list)
    spans = operator_spans(spans)
    for span in spans:
        recorded[span.channel].append((span.name, span.chunk, span.micro_batch, span.partition))
    for i in instructions:
        listed[i.channel_group].append((i.name, i.chunk or 0, i.micro_batch or 0, i.partition))
    for steps in (recorded, listed):
        # The update belongs to no micro-batch; a span has the number that was current.
        steps["dp"] = [(name, 0, 0, partition) for name, _, _, partition in steps["dp"]]
        steps["compute"] = [
            (n, 0, 0, p) if n.startswith("optimizer.") else (n, c, m, p) for n, c, m, p in steps["compute"]
        ]
    # Across channels, too: a step of the optimizer is ordered behind collectives.
    recorded["update"] = [(span.name, 0, 0, ()) for span in spans if span.operator.is_update]
    listed["update"] = [(i.name, 0, 0, ()) for i in instructions if i.operator.is_update]
    found = {}
    for channel in sorted(recorded.keys() | listed.keys()):
        ours, theirs = recorded[channel], listed[channel]
        if ours != theirs:
            place = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
            found[channel] = f"{place}: {ours[place : place + 2]}, listed {theirs[place : place + 2]}"
    return found


def waited_too_early(spans: Sequence[Span], instructions: Sequence[Instruction]) -> tuple[list[str], int]:
    """Communications that ended before something began that stands in front of whoever waits for them.

    Returns:
        Their names, and how many communications have something in front of their first waiter.
    """
    waiting: dict[tuple[str, Done], list[Span]] = defaultdict(list)
    for span in operator_spans(spans):
        waiting[span.channel, (span.name, span.chunk, span.micro_batch, span.partition)].append(span)
    times: list[Span | None] = []
    for i in instructions:
        queue = waiting[channel_group(i.channel), (i.name, i.chunk or 0, i.micro_batch or 0, i.partition)]
        times.append(queue.pop(0) if i.micro_batch is not None and queue else None)
    found, looked_at = [], 0
    for place, communication in enumerate(instructions):
        span = times[place]
        if communication.kind not in ("collective", "point-to-point") or span is None:
            continue
        until = _first_waiter(instructions, place)
        between = [times[n] for n in range(place + 1, until) if instructions[n].kind in ("compute", "weight-gradient")]
        last = between[-1] if between else None
        if last is not None:
            looked_at += 1
            if span.end <= last.start:
                found.append(f"{communication}")
    return found, looked_at


def _first_waiter(instructions: Sequence[Instruction], place: int) -> int:
    """Place of the first instruction that waits for a communication or, as a channel runs in order, for a later one of it."""
    channel = instructions[place].channel
    same = {i.id for i in instructions[place:] if i.channel == channel}
    return next(
        (n for n in range(place + 1, len(instructions)) if same & set(instructions[n].after)), len(instructions)
    )
