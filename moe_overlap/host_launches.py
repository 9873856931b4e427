"""Seconds that launching from the host adds to a step, and the step that CUDA graphs would leave.

The step is predicted again on a host that launches for nothing: the difference is what the device waits for launches, in a term
of its own that the breakdown has within computation. Where that is worth a look, it is predicted once more with the graphs that
the run may have and does not: of instruction lists this fork's own, of megatron-core's passes those of upstream, of attention
and the router or the dense MLP. Rules of upstream decide whether it may; the memory of upstream's graphs is not counted.
"""

from __future__ import annotations

from dataclasses import replace

from moe_overlap.plan.capabilities import GRAPHS_FLAG
from moe_overlap.plan.plan import Plan
from moe_overlap.tuner.capture.cache import Flags
from moe_overlap.tuner.cost.host import WORTH_A_LOOK, Launching
from moe_overlap.tuner.cost.prediction import estimate_plan, moves_states
from moe_overlap.tuner.problem import Problem
from moe_overlap.tuner.write.upstream_rules import is_upstream_plan
from moe_overlap.tuner.write.upstream_values import values_of


def launching_of(
    plan: Plan, problem: Problem, step_seconds: float, flags: Flags, replays_lists: bool = True
) -> Launching:
    """The seconds of a step that are due to launches.

    Args:
        problem: the run; it has the plan's parallel layout.
        step_seconds: predicted for the plan.
        flags: of the run, for what rules say of graphs beside them.
        replays_lists: whether lists are predicted with graphs, too; a search of overlap has done that.
    """
    machine = problem.machine
    if not machine.constants.host_seconds or problem.features.graphs == "full":
        return Launching(seconds=0.0)
    at_once = replace(machine, constants=replace(machine.constants, host_seconds=0.0))
    # Lists of states that move take seconds, and launches are the same share of their closed form.
    closed_seconds = estimate_plan(plan, problem).predicted.step_seconds if moves_states(plan) else step_seconds
    least = estimate_plan(plan, replace(problem, machine=at_once)).predicted.step_seconds
    # A simulated list may have another order without waits for the host: the closed form gives the share of launches.
    scale = step_seconds / closed_seconds
    seconds = scale * max(0.0, closed_seconds - least)
    if seconds < WORTH_A_LOOK * step_seconds:
        return Launching(seconds=seconds)
    graphs: tuple[str, ...] = (GRAPHS_FLAG,)
    if plan.follows_lists:
        graphed = problem.replaying(True)
        is_allowed = replays_lists and problem.listed.graphs_refusal is None and not problem.features.listed_graphs
    else:
        graphs_by_flag = _upstream_graphs(problem.model.num_experts > 0)
        graphs = tuple(word for name, values in graphs_by_flag.items() for word in (name, *values))
        graphed = replace(problem, features=replace(problem.features, graphs="partial"))
        is_allowed = problem.features.graphs == "none" and is_upstream_plan(
            plan, values_of({**flags, **graphs_by_flag})
        )
    if not is_allowed:
        return Launching(seconds=seconds)
    faster = estimate_plan(plan, graphed).predicted.step_seconds
    return Launching(seconds=seconds, graph_flags=graphs, graphed_seconds=scale * faster)


def _upstream_graphs(is_moe: bool) -> Flags:
    """The flags of Transformer Engine's graphs; shapes of experts depend on the routing."""
    scopes = ("attn", "moe_router") if is_moe else ("attn", "mlp")
    return {"--cuda-graph-impl": ("transformer_engine",), "--cuda-graph-scope": scopes}
