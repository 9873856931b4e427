"""Profiles spread over lists."""

from __future__ import annotations

import pytest

from moe_overlap.plan.instructions import Instruction, Span
from moe_overlap.runtime.spans import SpanRecorder
from tools.bench.profile import apply_profile, mean_of_ranks, median_seconds
from tools.bench.timer_operators import ProcessorClock


def compute(name: str, *partition: int) -> Instruction:
    kind = "weight-gradient" if name.endswith(".dW") else "compute"
    return Instruction(id=0, kind=kind, name=name, stage=0, chunk=0, micro_batch=0, partition=partition)


PROFILE = {
    "L0.attention": 4.0,
    "L0.moe.experts": 8.0,
    "L0.moe.experts.backward": 9.0,
    "L0.moe.experts.fc1.dW": 5.0,
    "L0.moe.experts.fc2.dW": 3.0,
}


def test_weight_gradients_are_charged_where_the_list_has_them() -> None:
    whole = apply_profile(PROFILE, [compute("L0.moe.experts.backward")])
    assert whole.of(compute("L0.moe.experts.backward")) == 17.0
    apart = [compute("L0.moe.experts.backward"), compute("L0.moe.experts.fc1.dW")]
    seconds = apply_profile(PROFILE, apart)
    assert [seconds.of(i) for i in apart] == [12.0, 5.0]


def test_partitions_share_the_time() -> None:
    listed = [compute("L0.attention", p) for p in range(4)] + [compute("L0.moe.experts.fc2.dW", 0, 1)]
    seconds = apply_profile(PROFILE, listed)
    assert [seconds.of(i) for i in listed] == [1.0] * 4 + [3.0], "one weight gradient of both partitions is whole"
    assert apply_profile(PROFILE, [compute("L0.attention.recompute")]).of(compute("L0.attention.recompute")) == 4.0


def test_an_unmeasured_operator_is_an_error() -> None:
    with pytest.raises(KeyError, match="L7.attention"):
        apply_profile(PROFILE, [compute("L7.attention")])


def test_medians_of_spans() -> None:
    def step(*seconds: float) -> list[Span]:
        spans = [Span("a", "compute", 0, m, 0.0, s) for m, s in enumerate(seconds)]
        return [*spans, Span("a", "compute", 0, 0, 5.0, 6.0), Span("b", "ep", 0, 0, 0.0, 9.0)]

    medians = median_seconds([[*step(1.0, 4.0), Span("optimizer.L0", "compute", 0, 0, 0.0, 9.0)], step(2.0, 5.0)])
    assert medians == {"a": 3.5}, "pieces of a micro-batch are summed; communication and update are left out"
    assert mean_of_ranks([{"a": 1.0}, {"a": 2.0, "b": 4.0}]) == {"a": 1.5, "b": 4.0}, (
        "another stage has other operators"
    )


def test_a_profiling_clock_records_steps_like_any_other() -> None:
    recorder = SpanRecorder(ProcessorClock())
    for _ in range(2):
        recorder.start_step()
        recorder.computing(compute("L0.attention"))
        [span] = recorder.spans()
        assert span.name == "L0.attention" and 0.0 <= span.start <= span.end
