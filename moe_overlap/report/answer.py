"""The answer about one plan in about ten lines, for predictions and searches alike; all details are in `--verbose`.

    plan        the plan in one sentence
    step        seconds, with the error and the interval of compared runs of this kind
    speed       tokens per second and GPU, MFU, the software release
    training    days and GPU-hours for a number of tokens
    memory      bytes that the fullest stage needs, against its GPU's capacity
    waiting     exposed communication by kind, the pipeline's bubble, and launches from the host
    beware      reasons why the figures may be wrong
    runner-up   the next best plan, with the terms of the breakdown that cost it most
    try next    advice

The search or the prediction fills in `Answer`; `answer_lines` formats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moe_overlap.describe.cluster import GIB, Cluster
from moe_overlap.describe.figures import VISIBLE_BYTES, difference
from moe_overlap.plan.capabilities import GRAPHS_FLAG
from moe_overlap.plan.overlap import Mechanism
from moe_overlap.plan.plan import Plan, StagePlan, states_of_stages
from moe_overlap.plan_search.results import TIE, Leeway
from moe_overlap.report.balance import balance_of
from moe_overlap.report.prediction import (
    alternative_memory,
    available_text,
    change_advice,
    change_name,
    figure,
    interval_text,
    missed_texts,
)
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.feasibility import overflow_counts
from moe_overlap.tuner.cost.host import WORTH_A_LOOK, Launching

SHOWN_RUNNERS_UP = 1
SHOWN_TERMS = 2
"""Terms of the breakdown in the line of a runner-up."""
SMALLEST_TERM = 0.001
"""Smallest difference of a term that is shown, as a share of the step."""
SMALLEST_SHARE = 0.0005
"""Smallest waiting time that is shown, as a share of the step."""
DAY_SECONDS, HOUR_SECONDS, MINUTE_SECONDS = 86400.0, 3600.0, 60.0
LAUNCHES = "waiting for kernel launches"
UNTRIED = "pretrain_moe.py of this project has not run on a GPU yet; run a few steps before you rely on the plan"
UNEQUAL = "waiting for the slowest stage"
OF_THIS_FORK = "this fork's overlap of all-to-alls (--target both compares it with Megatron-LM's)"
OTHER_LAYOUTS = "tools/autotune.py without --overlap-only, which searches other layouts, too"
LAYOUT_TERMS = (
    *("bubble", "exposed tensor", "exposed context", "exposed data", "exposed transfer", "exposed expert"),
    LAUNCHES,
)
"""Terms of a step that another layout may shorten."""
OVERLAPS: Mapping[Mechanism, str] = MappingProxyType(
    {
        "tutel": "capacity chunks",
        "partitioned": "partitions of a micro-batch",
        "cross_micro_batch": "two micro-batches at a time",
        "fused": "fused kernels",
    }
)
"""Mechanism -> its name in answers."""
_NAME_WIDTH = 12
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that was not chosen.

    Attributes:
        seconds: of its step; None without a prediction.
        why: the term that costs it most compared with the chosen plan, or the rule that refuses it.
        more_bytes: bytes that its fullest stage needs more than the chosen plan's; the reason if it is not slower.
        simulated_change: its simulated step over that of the chosen plan, minus 1; None where simulations agree with `seconds`.
    """

    name: str
    seconds: float | None
    why: str
    more_bytes: int = 0
    simulated_change: float | None = None


ANY = Leeway()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The data of an answer about a plan.

    Attributes:
        chosen: the sentence about the plan; default `plan_sentence`.
        train_tokens: tokens of the full training, from the user or the flags; None if unknown.
        runners_up: the best first; one is shown, all with --verbose.
        try_next: advice; empty: that of `suggestions`.
        is_upstream: whether the plan is for unmodified Megatron-LM, so that this fork's overlap is not a matching advice.
        is_searched: whether a search found the plan, so that decisions of the search are no advice.
        leeway: which advice applies to the job.
    """

    plan: Plan
    prediction: Prediction
    cluster: Cluster
    chosen: str = ""
    train_tokens: float | None = None
    runners_up: Sequence[RunnerUp] = ()
    try_next: Sequence[str] = ()
    is_upstream: bool = False
    is_searched: bool = False
    leeway: Leeway = ANY


def answer_lines(answer: Answer) -> list[str]:
    """The lines of an answer."""
    prediction = answer.prediction
    lines = [*figure_lines(answer), line("waiting", _waiting(answer)), *beware_lines(prediction)]
    lines += runner_up_lines(answer)[:SHOWN_RUNNERS_UP]
    suggested = suggestions(answer.plan, prediction, answer.is_upstream, answer.is_searched, answer.leeway)
    lines += [line("try next", text) for text in answer.try_next or suggested]
    return lines


def beware_lines(prediction: Prediction) -> list[str]:
    """The warnings about a prediction."""
    return [line("beware", text) for text in _beware(prediction)]


def unwritten_lines() -> list[str]:
    """The line of an answer that is only printed."""
    return [line("written", "nothing; --output DIR writes the flags, a script, the plan and a report")]


def untried_lines(plan: Plan) -> list[str]:
    """A warning about a plan of this runtime on GPUs; none for CPUs, on which it is tested."""
    return [line("beware", UNTRIED)] if plan.host_runs_ahead else []


def figure_lines(answer: Answer, name: str = "plan") -> list[str]:
    """The lines on the plan (labelled `name`), its step, the training if its tokens are known, and its memory."""
    return [
        line(name, answer.chosen or plan_sentence(answer.plan)),
        line("step", _step(answer)),
        line("speed", _speed(answer)),
        *([line("training", _training(answer))] if answer.train_tokens else []),
        line("memory", _memory(answer.prediction)),
    ]


def line(name: str, text: str) -> str:
    """A line of an answer: its name in the first column, then the text; an empty name continues the previous line."""
    return f"{name:<{_NAME_WIDTH}}{text}"


# What runs


def plan_sentence(plan: Plan) -> str:
    """A plan in one sentence: sizes whose product is the number of GPUs, micro-batches, states, recomputation, offloading and
    overlap."""
    stage = plan.stages[0]
    count, size = stage.gradient_accumulation_steps, stage.micro_batch_size
    batches = f"{count} micro-batch{'es' if count > 1 else ''} of {size} sample{'s' if size > 1 else ''}"
    level, *shares = states_of_stages(plan)
    parts = [*_sizes(plan, stage), batches, level, _recomputations(plan), *shares]
    overlap = _overlap(plan)
    parts += [f"overlap: {' and '.join(overlap)}"] if overlap else []
    unlike = len({(other.tensor, other.data) for other in plan.stages}) > 1
    return "; ".join(parts) + (" (stage 0; other stages differ)" if unlike else "")


def stages_sentence(plan: Plan) -> str:
    """The number of layers of every stage, and of fully recomputed ones, if any."""
    layers = f"{'+'.join(str(len(stage.layers)) for stage in plan.stages)} layers"
    again = [_layers_again(stage) for stage in plan.stages]
    return f"{layers}, {'+'.join(map(str, again))} of them recomputed" if any(again) else layers


def _layers_again(stage: StagePlan) -> int:
    """Number of fully recomputed layers of a stage."""
    recompute = stage.recompute
    if recompute.granularity == "uniform":
        return len(stage.layers)
    sizes = [last - first for first, last in stage.chunks]
    return sum(min(recompute.layers, size) for size in sizes) if recompute.granularity == "full" else 0


def _recomputations(plan: Plan) -> str:
    """The recomputation of each stage, in one phrase if all are equal."""
    phrases = list(dict.fromkeys(map(_recomputation, plan.stages)))
    if len(phrases) == 1:
        return phrases[0]
    is_full = all(stage.recompute.granularity != "selective" for stage in plan.stages)
    return (
        stages_sentence(plan) if is_full else "recomputation by stage: " + ", ".join(map(_recomputation, plan.stages))
    )


def _overlap(plan: Plan) -> list[str]:
    """The mechanisms by which a plan overlaps, with their names in answers."""
    layers = [layer for stage in plan.stages for layer in stage.overlap.layers]
    used = {layer.mechanism for layer in layers}
    if any(stage.overlap.micro_batches_in_flight > 1 for stage in plan.stages):
        used.add("cross_micro_batch")
    deferred = any(layer.weight_gradient_slots for layer in layers)
    return [word for name, word in OVERLAPS.items() if name in used] + (
        ["deferred weight gradients"] if deferred else []
    )


def _sizes(plan: Plan, stage: StagePlan) -> list[str]:
    """`64 GPUs = 4 pipeline stages × TP 2 × DP 8`, and how the experts are spread over the GPUs of a stage."""
    stages, chunks = len(plan.stages), len(stage.chunks)
    named = {"TP": stage.tensor, "CP": stage.context, "DP": stage.data}
    axes = [f"{name} {size}" for name, size in named.items() if size > 1] or ["DP 1"]
    virtual = f" of {chunks} chunks" if chunks > 1 else ""
    piped = [f"{stages} pipeline stages{virtual}"] if stages > 1 else []
    gpus = f"{plan.world_size} GPU{'s' if plan.world_size > 1 else ''}"
    if stages * stage.tensor * stage.context * stage.data == plan.world_size:
        sizes = [f"{gpus} = {' × '.join([*piped, *axes])}"]
    else:
        # Stages of unlike shape have different numbers of GPUs.
        sizes = [f"{gpus} in {stages} pipeline stages, the first of {' × '.join(axes)}"]
    if stage.expert * stage.expert_tensor == 1:
        return sizes
    of_experts = {"EP": stage.expert, "ETP": stage.expert_tensor}
    spread = " × ".join(f"{name} {size}" for name, size in of_experts.items() if size > 1)
    replicas = f" × {stage.expert_data} replicas" if stage.expert_data > 1 else ""
    return [*sizes, f"experts over {spread}{replicas}"]


def _recomputation(stage: StagePlan) -> str:
    recompute = stage.recompute
    if recompute.granularity == "none":
        return "no recomputation"
    if recompute.granularity == "selective":
        return f"recompute {', '.join(recompute.modules)}"
    if recompute.granularity == "uniform":
        return f"recompute every layer, {recompute.layers} at a time"
    return f"recompute {recompute.layers} of {max(last - first for first, last in stage.chunks)} layers a chunk"


# Figures


def _step(answer: Answer) -> str:
    prediction = answer.prediction
    step, expected = f"{prediction.predicted.step_seconds:.3f} s", prediction.expected_error
    if expected is None:
        return f"{step} on {devices(answer.cluster)}"
    compared = f"from {expected.rows} published runs of {expected.group}"
    return f"{step} ± {100 * expected.relative:.0f} % on average, {interval_text(prediction)} ({compared})"


def _speed(answer: Answer) -> str:
    prediction, software = answer.prediction, answer.prediction.software
    tokens = figure(prediction.predicted.tokens_per_second_per_gpu)
    rate = f"{tokens} tokens/s and {figure(prediction.predicted.model_tflops_per_gpu)} TFLOP/s per GPU"
    assumed = "assumed" if software.is_median else "as requested"
    release = f"; NVIDIA software release {software.release} {assumed}" if software.release else ""
    return f"{rate}, MFU {_share(prediction.mfu)} on {devices(answer.cluster)}{release}"


def devices(cluster: Cluster) -> str:
    """The GPUs of a cluster, such as `64 × H100`."""
    counts: dict[str, int] = {}
    for group in cluster.groups:
        counts[group.gpu.name] = counts.get(group.gpu.name, 0) + group.gpus
    return " and ".join(f"{count} × {name}" for name, count in counts.items())


def training_of(prediction: Prediction, cluster: Cluster, tokens: float) -> tuple[float, float]:
    """Seconds and GPU-hours of a training on `tokens` tokens."""
    seconds = tokens / (prediction.predicted.tokens_per_second_per_gpu * cluster.gpus)
    return seconds, seconds / HOUR_SECONDS * cluster.gpus


def training_json(prediction: Prediction, cluster: Cluster, tokens: float | None) -> dict[str, float]:
    """`training_of` as JSON; empty if the tokens are unknown."""
    if tokens is None:
        return {}
    seconds, hours = training_of(prediction, cluster, tokens)
    return {"train_tokens": tokens, "train_seconds": seconds, "train_gpu_hours": hours}


def _training(answer: Answer) -> str:
    assert answer.train_tokens is not None
    tokens = answer.train_tokens
    seconds, hours = training_of(answer.prediction, answer.cluster, tokens)
    units = ((DAY_SECONDS, "days"), (HOUR_SECONDS, "hours"), (MINUTE_SECONDS, "minutes"))
    unit, name = next((choice for choice in units if seconds >= choice[0]), (1.0, "seconds"))
    return f"{shown_tokens(tokens)} tokens in {seconds / unit:,.1f} {name}, {figure(hours)} GPU-hours"


def shown_tokens(tokens: float) -> str:
    """A number of tokens, such as `300 B`."""
    for unit, name in _UNITS:
        if tokens >= unit:
            return f"{tokens / unit:.3g} {name}"
    return f"{tokens:,.0f}"


def _gib(size: float) -> str:
    """Bytes in GiB with one decimal, or two below 1 GiB."""
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2f}"


def _memory(prediction: Prediction) -> str:
    fullest = prediction.fullest
    where = f"stage {fullest.stage}, the fullest, needs" if len(prediction.predicted.stages) > 1 else "a GPU needs"
    most = f"largest part: {fullest.category}, {_gib(fullest.category_bytes)}"
    needed = (
        f"{where} {_gib(fullest.needed_bytes)} GiB, at most {_gib(fullest.high_bytes)} ({prediction.memory.certainty})"
    )
    text = f"{prediction.memory_verdict}: {needed}, of {available_text(prediction)}; {most}"
    return text if len(prediction.overflow) < 2 else f"{text}; {_overflowing(prediction)}"


def _overflowing(prediction: Prediction) -> str:
    """`5 stages do not fit, 4 more may not`, by the quantiles of the memory margin."""
    surely, perhaps = overflow_counts(prediction.predicted.stages, prediction.available_bytes, prediction.memory)
    if not surely:
        return f"{perhaps} stages may not fit"
    fits = "1 stage does not fit" if surely == 1 else f"{surely} stages do not fit"
    return f"{fits}, {perhaps} more may not" if perhaps else fits


def _waiting(answer: Answer) -> str:
    prediction = answer.prediction
    seconds = prediction.predicted.step_seconds
    exposed = exposed_seconds(prediction.breakdown)
    total = f"{_share(sum(exposed.values()) / seconds)} of the step for communication"
    ordered = sorted(exposed.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {_share(part / seconds)}" for kind, part in ordered if part / seconds >= SMALLEST_SHARE)
    waited = prediction.breakdown.get("bubble_seconds", 0.0) / seconds
    bubble = f"; idle {_share(waited)} in the pipeline's bubble" if waited >= SMALLEST_SHARE else ""
    launched = prediction.launching.seconds / seconds if prediction.launching is not None else 0.0
    cause = "because the CPU launches kernels too slowly"
    launches = f"; idle {_share(launched)} {cause}" if launched >= SMALLEST_SHARE else ""
    balance = balance_of(answer.plan, prediction)
    slow = f"; {balance.sentence}" if balance.longer >= WORTH_A_LOOK else ""
    return f"{total}{f' ({kinds})' if kinds else ''}{bubble}{launches}{slow}"


def _share(part: float) -> str:
    return f"{100 * part:.1f} %"


def exposed_seconds(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Seconds of exposed communication, by kind."""
    return {
        term_words(name).removeprefix("exposed "): seconds
        for name, seconds in breakdown.items()
        if name.startswith("exposed_")
    }


def term_words(name: str) -> str:
    """A key of the breakdown as text: `exposed_expert_seconds` -> `exposed expert`."""
    return name.removesuffix("_seconds").replace("_", " ")


def _beware(prediction: Prediction) -> list[str]:
    texts = []
    if prediction.not_run:
        more = _more(prediction.not_run)
        texts.append(f"Megatron-LM with megatron-core 0.16.1 does not run this: {prediction.not_run[0]}{more}")
    texts += missed_texts(prediction)
    # The first reason, and the substitution of the user's release, if any.
    reasons = dict.fromkeys((*prediction.extrapolating[:1], *prediction.software.extrapolating))
    texts += [f"{reason}; expect larger errors" for reason in reasons]
    others = [reason for reason in prediction.extrapolating if reason not in reasons]
    if others:
        texts[-1] += _more((texts[-1], *others))
    if prediction.expected_error is None and not reasons:
        texts.append("error not known: no prediction for this machine has been compared with a step measured on it")
    if prediction.not_modelled:
        texts.append(f"not modelled: {', '.join(prediction.not_modelled)} (--verbose says what each changes)")
    if prediction.assumed:
        texts.append(f"assumed: {prediction.assumed[0]}{_more(prediction.assumed)}")
    texts += [f"computed early: {text}" for text in prediction.computed_early[:1]]
    return texts


def _more(sentences: Sequence[str]) -> str:
    """The number of sentences after the first, the only one that is shown."""
    return f" (and {len(sentences) - 1} more: --verbose)" if len(sentences) > 1 else ""


# Other plans


def runner_up(name: str, other: Prediction, chosen: Prediction) -> RunnerUp:
    """A predicted plan that was not chosen, with the terms that cost it most."""
    if not other.fits and chosen.fits:
        return RunnerUp(name, other.predicted.step_seconds, other.overflow[0])
    more = other.fullest.needed_bytes - chosen.fullest.needed_bytes
    return RunnerUp(name, other.predicted.step_seconds, cost_terms(other.breakdown, chosen.breakdown), more)


def cost_terms(other: Mapping[str, float], chosen: Mapping[str, float]) -> str:
    """The terms of the breakdown that cost another plan most, in seconds of a step, and the term that it saves most."""
    differences = {name: other.get(name, 0.0) - chosen.get(name, 0.0) for name in {**chosen, **other}}
    ordered = sorted(differences.items(), key=lambda item: -item[1])
    visible = SMALLEST_TERM * sum(chosen.values())
    dearer = [(name, seconds) for name, seconds in ordered[:SHOWN_TERMS] if seconds > visible]
    cheaper = [(name, seconds) for name, seconds in ordered[-1:] if seconds < -visible]
    if not dearer:
        return "no term costs it more"
    texts = [f"{term_words(name)} {difference(seconds)}" for name, seconds in dearer]
    saved = "".join(f", but {term_words(name)} {difference(seconds)}" for name, seconds in cheaper)
    return ", ".join(texts) + saved


def runner_up_lines(answer: Answer) -> list[str]:
    """The lines of all runners-up, the best first."""
    return [line("runner-up", _runner_up(other, answer)) for other in answer.runners_up]


def _runner_up(other: RunnerUp, answer: Answer) -> str:
    if other.seconds is None:
        return f"{other.name}: {other.why}"
    change = other.seconds / answer.prediction.predicted.step_seconds - 1
    # Plans of one job share most of the prediction's error, so a tie is much smaller than it.
    tie = ", a tie" if abs(change) <= TIE else ""
    # Among tied plans the one that needs the least memory is chosen.
    tells_memory = bool(tie) and change < 0 and other.more_bytes >= VISIBLE_BYTES
    more = f", needs {other.more_bytes / GIB:.1f} GiB more" if tells_memory else ""
    simulated = "" if other.simulated_change is None else f", {100 * other.simulated_change:+.1f} % as simulated"
    return f"{other.name}: {other.seconds:.3f} s ({100 * change:+.1f} %{simulated}{tie}{more}): {other.why}"


def suggestions(
    plan: Plan,
    prediction: Prediction,
    is_upstream: bool = False,
    is_searched: bool = False,
    leeway: Leeway = ANY,
) -> list[str]:
    """Advice for a plan: the predicted single change that gains most and fits; where none was predicted, what the largest waiting
    term suggests if it exceeds WORTH_A_LOOK.

    After a search the advice is limited to decisions that no search makes: the batch, and the software that runs the plan.
    """
    if prediction.remedy is not None:
        remedy = prediction.remedy
        cost = f"{remedy.step_seconds:.3f} s a step ({100 * remedy.slower_by:+.1f} %), up to {remedy.high_bytes / GIB:.1f} GiB"
        return [f"{change_name(remedy.change)}: then it fits, {cost}; {change_advice(remedy.change)}"]
    if prediction.tried:
        return [f"another layout: no single change makes it fit ({len(prediction.tried)} tried: --verbose)"]
    if prediction.alternatives and not is_searched:
        return [_best_alternative(prediction)]
    seconds = prediction.predicted.step_seconds
    terms = {f"exposed {kind}": part for kind, part in exposed_seconds(prediction.breakdown).items()}
    terms["bubble"] = prediction.breakdown.get("bubble_seconds", 0.0)
    balance = balance_of(plan, prediction)
    if balance.may_move and not is_searched:
        terms[UNEQUAL] = balance.waiting_seconds
    launching = prediction.launching
    if launching is not None:
        terms[LAUNCHES] = launching.seconds
    name = max(terms, key=lambda term: terms[term])
    if terms[name] < WORTH_A_LOOK * seconds:
        return []
    if is_searched:
        advice = _search_advice(launching, seconds, is_upstream, leeway)
    else:
        advice = _job_advice(plan, launching, seconds, is_upstream, leeway)
        advice[UNEQUAL] = balance.advice
    if is_searched and name not in advice:
        return []
    return [f"{advice.get(name, 'another layout')}, since {name} takes {_share(terms[name] / seconds)} of the step"]


def _search_advice(launching: Launching | None, seconds: float, is_upstream: bool, leeway: Leeway) -> dict[str, str]:
    """Term of a step of `seconds` -> advice on decisions that a search does not make."""
    if leeway.keeps_layout:
        advice = dict.fromkeys(LAYOUT_TERMS, OTHER_LAYOUTS)
    else:
        advice = dict.fromkeys(("bubble", "exposed data"), "a larger global batch, if the training allows it")
    if is_upstream and not leeway.no_overlap:
        advice["exposed expert"] = OF_THIS_FORK
    if graphs := _graphs_advice(launching, seconds, is_upstream):
        advice[LAUNCHES] = graphs
    return advice


def _job_advice(
    plan: Plan, launching: Launching | None, seconds: float, is_upstream: bool, leeway: Leeway
) -> dict[str, str]:
    """Term of a step of `seconds` -> advice on changes of the job."""
    stage, batch = plan.stages[0], "a larger global batch"
    if plan.is_listed:
        overlap = "tools/autotune.py, which compares overlaps of all-to-alls"
    elif leeway.no_overlap:
        overlap = f"an overlap of all-to-alls, which the flags rule out ({leeway.no_overlap})"
    else:
        overlap = OF_THIS_FORK if is_upstream else "tools/autotune.py --overlap-only, which overlaps all-to-alls"
    interleaves = len(stage.chunks) == 1 and leeway.may_interleave
    larger = "a larger micro-batch, if memory allows" if stage.gradient_accumulation_steps > 1 else batch
    return {
        "bubble": "model chunks on every stage (--num-virtual-stages-per-pipeline-rank 2), or more micro-batches"
        if interleaves
        else "more micro-batches or fewer stages",
        "exposed expert": overlap,
        "exposed tensor": "fewer tensor ranks, if memory allows",
        "exposed context": "fewer context ranks, if memory allows",
        "exposed data": " and ".join(leeway.data_flags) + (f", or {batch}" if leeway.data_flags else batch),
        "exposed transfer": "fewer stages, or larger micro-batches",
        LAUNCHES: _graphs_advice(launching, seconds, is_upstream) or larger,
    }


def _best_alternative(prediction: Prediction) -> str:
    """The predicted change that gains most and fits, or that none gains."""
    seconds = prediction.predicted.step_seconds
    best = next((change for change in prediction.alternatives if change.fits), None)
    if best is None or best.step_seconds > (1.0 - TIE) * seconds:
        count = len(prediction.alternatives)
        tried = f"no single change gains {100 * TIE:g} % ({count} tried: --verbose)"
        return f"{tried}; let tools/autotune.py search other layouts"
    gain = f"{100 * (best.step_seconds / seconds - 1):+.1f} %"
    return f"{best.name}: {best.step_seconds:.3f} s ({gain}), {alternative_memory(best)}; {best.flags}"


def _graphs_advice(launching: Launching | None, step_seconds: float, is_upstream: bool) -> str:
    """Advice for CUDA graphs with their predicted step; empty if they are unavailable or gain nothing."""
    if launching is None or launching.graphed_seconds is None or launching.graphed_seconds >= step_seconds:
        return ""
    ours = launching.graph_flags == (GRAPHS_FLAG,)
    limit = ", not yet run on hardware" if ours else "" if is_upstream else " on Megatron-LM, not on this fork"
    change = f"{100 * (launching.graphed_seconds / step_seconds - 1):+.1f} %{'' if ours else ', memory not counted'}"
    return f"{' '.join(launching.graph_flags)}: {launching.graphed_seconds:.3f} s a step ({change}){limit}"
