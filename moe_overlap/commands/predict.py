"""Predict a training step before running it: seconds, throughput, and the memory of every stage.

    python tools/predict.py --megatron-args examples/mixtral-8x7b.args --gpu H100 --num-gpus 64

Reads Megatron flags and prints the answer in about ten lines; --verbose adds all figures, --json prints everything as JSON.
--trace FILE writes the simulated step, for ui.perfetto.dev and tools/compare_trace.py. torch is imported only to capture a layout
that is not cached.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_overlap.commands.exits import interruptible
from moe_overlap.commands.help_topics import parser_with_topics, topic
from moe_overlap.commands.job_arguments import (
    PRECISIONS,
    PRICES,
    EachOnce,
    add_job_arguments,
    add_margin_argument,
    add_routing_arguments,
    assumed_of,
    check_flags,
    cluster_of,
    expert_load_of,
    job_flags,
    known_flags,
    margin_of,
    name_of,
    notes_of,
    token_count,
)
from moe_overlap.describe.errors import ConfigError, require
from moe_overlap.describe.readers.hugging_face import NOT_MODELLED
from moe_overlap.describe.version import VERSION_LINE

if TYPE_CHECKING:
    from moe_overlap.api import Options
    from moe_overlap.describe.cluster import Cluster
    from moe_overlap.job import Job
    from moe_overlap.plan.plan import Plan


@interruptible
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for a user's mistake. A plan that does not fit is no mistake."""
    arguments = _parser().parse_args(argv)
    try:
        cluster = cluster_of(arguments)
        flags, notes = job_flags(arguments, is_predicted=True), notes_of(arguments, is_predicted=True)
        if arguments.plan is None:
            check_flags(flags, cluster.gpus, arguments.precision is not None)
        _require_plan_alone(arguments)
        options: Options = {
            "precision": arguments.precision,
            "software": arguments.software,
            "expert_load": expert_load_of(arguments),
            "plan": arguments.plan,
            "name": name_of(arguments),
            "memory_margin": margin_of(arguments),
            "tell": EachOnce(),
        }
        train_tokens = None if arguments.train_tokens is None else token_count(arguments.train_tokens)
        _answer(arguments, cluster, flags, notes, options, train_tokens)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _answer(
    arguments: argparse.Namespace,
    cluster: Cluster,
    flags: Sequence[str],
    notes: Sequence[str],
    options: Options,
    train_tokens: float | None,
) -> None:
    """Predict, and print the answer."""
    # Loading the cost model takes a second: `--help` and mistakes in the tool's own flags are answered before.
    from moe_overlap.api import predict_job
    from moe_overlap.report.answer import Answer, answer_lines, training_json
    from moe_overlap.report.prediction import prediction_json, prediction_text
    from moe_overlap.report.trace import write_trace
    from moe_overlap.tuner.cost.simulate.step import simulate_step

    predicted = predict_job(flags, cluster, options)
    plan, problem, prediction = predicted.problem.plan, predicted.problem, predicted.prediction
    assumed = (*assumed_of(arguments, is_predicted=True), *prediction.assumed, *notes)
    # The first is shown without --verbose: what the model has and no figure includes.
    assumed = tuple(sorted(assumed, key=lambda text: not text.startswith(NOT_MODELLED)))
    prediction = dataclasses.replace(prediction, assumed=assumed)
    step = simulate_step(plan, problem) if arguments.trace is not None else None
    if step is not None:
        write_trace(arguments.trace, step, "--trace")
    seconds = None if step is None else step.simulation.step_seconds
    train_tokens = train_tokens or implied_tokens(predicted.job, plan)
    if arguments.json:
        simulated = {} if seconds is None else {"simulated_step_seconds": seconds}
        values = prediction_json(prediction) | training_json(prediction, cluster, train_tokens) | simulated
        print(json.dumps(values, indent=1))
        return
    answer = Answer(
        plan=plan, prediction=prediction, cluster=cluster, train_tokens=train_tokens, leeway=predicted.leeway
    )
    print("\n".join(answer_lines(answer)))
    if arguments.verbose:
        print(f"\n{prediction_text(prediction, cluster)}")
    if seconds is not None:
        print(f"simulated: {seconds:.3f} s, with the overlap of the plan; {arguments.trace}")


def _require_plan_alone(arguments: argparse.Namespace) -> None:
    """Refuse an option whose batch, length or precision contradicts the file of `--plan`, which decides all three."""
    if arguments.plan is None:
        return
    from megatron.training.plan_argument import plan_of_flag

    plan = plan_of_flag(arguments.plan)
    for flag, value, planned in (
        ("--global-batch-size", arguments.global_batch_size, plan.global_batch_size),
        ("--seq-length", arguments.seq_length, plan.sequence_length),
        ("--precision", arguments.precision, plan.precision),
    ):
        fix = f"drop {flag}, or write another plan"
        require(value in (None, planned), flag, value, f"--plan {arguments.plan} decides it, and says {planned}", fix)


def implied_tokens(job: Job, plan: Plan) -> float | None:
    """Tokens of the full training; None if the flags have no length of the training."""
    training = job.config.training
    if training.train_samples is not None:
        return float(training.train_samples * plan.sequence_length)
    if training.train_iters is not None:
        return float(training.train_iters * plan.global_batch_size * plan.sequence_length)
    return None


NEEDED = ("--megatron-args", "--model", "--cluster", "--gpu", "--num-gpus", "--verbose")


def _parser() -> argparse.ArgumentParser:
    parser = parser_with_topics(__doc__, NEEDED, known_flags())
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    add_job_arguments(parser)
    job = topic(parser, "job")
    job.add_argument("--plan", metavar="FILE", help="a plan that decides in place of the flags")
    job.add_argument("--precision", choices=PRECISIONS, help="instead of the value in the flags")
    prices = topic(parser, "prices", PRICES)
    prices.add_argument(
        "--software", metavar="RELEASE", help="losses of a release, as 26.04; default the GPU's median release"
    )
    add_routing_arguments(prices)
    add_margin_argument(parser)
    answer = topic(parser, "answer", "what is printed and written")
    answer.add_argument("--train-tokens", metavar="N", help="tokens to train, as 300B; default: as in the flags")
    answer.add_argument("--verbose", action="store_true", help="every figure behind the answer")
    answer.add_argument("--json", action="store_true", help="everything, as JSON")
    answer.add_argument(
        "--trace", metavar="FILE", help="write a simulated step: one rank per stage, for ui.perfetto.dev"
    )
    return parser
