"""The irregular dispatcher on 2 and 4 processes: bitwise equal to the reference and to megatron-core's all-to-all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess import dispatch_runs
from tests.multiprocess.dispatch_runs import WIDTH, Case
from tests.spawn import ProcessFailed, run

TWO = [
    Case("k1", k=1),
    Case("k2"),
    Case("k3", k=3),
    Case("k4, 4 experts per rank", k=4, experts_per_rank=4),
    Case("1 expert per rank", k=1, experts_per_rank=1),
    Case("empty expert", pattern="empty expert"),
    Case("empty rank", pattern="empty rank"),
    Case("one expert", k=1, pattern="one expert"),
    Case("dropped", pattern="dropped"),
    Case("no tokens on rank 1", tokens=(5, 0)),
    Case("bf16 rows, fp32 probabilities", half_precision=True),
    Case("EP1", expert_ranks=1, experts_per_rank=4),
    Case("ETP2", expert_ranks=1, tensor_ranks=2, experts_per_rank=4),
    Case("ETP2, bf16, dropped", expert_ranks=1, tensor_ranks=2, half_precision=True, pattern="dropped"),
]
FOUR = [
    Case("EP4", expert_ranks=4, tokens=(3, 6, 0, 4)),
    Case("EP2 ETP2", tensor_ranks=2, tokens=(3, 6, 5, 4)),
    Case("EP2 ETP2, 1 expert, dropped", tensor_ranks=2, experts_per_rank=1, tokens=(3, 6, 0, 4), pattern="dropped"),
]


IN_FLIGHT = Case("in flight")
PASSES = 3


@pytest.fixture(scope="module")
def on_two() -> tuple[list[Any], list[Any]]:
    """Results by rank, then case; and the outputs of the passes in flight, by rank."""
    ran = [dispatch_runs.from_bytes(results) for results in run(2, _two)]
    return [results for results, _ in ran], [outputs for _, outputs in ran]


def _two() -> bytes:
    compared = dispatch_runs.compare(TWO, (1, 2, 8))
    return dispatch_runs.as_bytes((compared, dispatch_runs.several_in_flight(IN_FLIGHT, PASSES)))


@pytest.fixture(scope="module")
def on_four() -> tuple[list[Any], list[Any]]:
    """Results by rank, then case; and what the ranks saw when one stayed away."""
    ran = [dispatch_runs.from_bytes(results) for results in run(4, _four)]
    return [results for results, _ in ran], [lost for _, lost in ran]


def _four() -> bytes:
    compared = dispatch_runs.compare(FOUR, (2,))
    return dispatch_runs.as_bytes((compared, dispatch_runs.lose_a_peer(FOUR[0], "away", 2.0)))


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_paths_agree_on_two(on_two: tuple[list[Any], Any], case: Case) -> None:
    _check(case, [results[TWO.index(case)] for results in on_two[0]])


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_paths_agree_on_four(on_four: tuple[list[Any], Any], case: Case) -> None:
    _check(case, [results[FOUR.index(case)] for results in on_four[0]])


def _check(case: Case, by_rank: list[Any]) -> None:
    """Each path on each rank against the reference; a layout smaller than the world was run several times."""
    truth = _reference(case)
    for rank, results in enumerate(by_rank):
        expected = truth[rank % len(truth)]
        for name, path in results["paths"].items():
            where = f"{case.name}, {name}, rank {rank}"
            assert _equal(path.output, expected["output"]), where
            assert _equal(path.hidden_grad, expected["hidden_grad"]), where
            assert _equal(path.probs_grad, expected["probs_grad"]), where
            for mine, right in zip(path.weight_grads, expected["weight_grads"], strict=True):
                assert _equal(right.new_zeros(right.shape) if mine is None else mine, right), where
            if path.order is not None:
                assert _equal(path.order.rows, expected["rows"]), where
                assert _equal(path.order.probs, expected["probs"]), where
                assert path.order.per_expert.tolist() == expected["per_expert"], where
        assert results["numbers"]["wire"] == results["numbers"]["counted"] == _bytes(case, rank % len(truth))
        assert results["numbers"]["host_copies"] == 1


def _equal(left: Any, right: Any) -> bool:
    import torch

    return left.dtype == right.dtype and torch.equal(left, right)


def _reference(case: Case) -> list[dict[str, Any]]:
    import torch

    from tests.multiprocess import dispatch_reference as reference

    ranks = case.expert_ranks * case.tensor_ranks
    inputs = [dispatch_runs.make_inputs(case, rank) for rank in range(ranks)]
    hidden = [one.hidden.requires_grad_() for one in inputs]
    probs = [one.probs.requires_grad_() for one in inputs]
    maps = [one.map for one in inputs]
    weights = [
        [dispatch_runs.make_weight(case, expert, slice_).requires_grad_() for slice_ in range(case.tensor_ranks)]
        for expert in range(case.experts)
    ]
    experts = [
        [lambda rows, p, w=weight: dispatch_runs.apply_expert(rows, p, w) for weight in slices] for slices in weights
    ]
    outputs = reference.moe_layer(hidden, probs, maps, experts, case.expert_ranks, case.tensor_ranks)
    loss = sum((output * one.gradient).float().sum() for output, one in zip(outputs, inputs, strict=True))
    loss.backward()
    truth = []
    for rank in range(ranks):
        first = rank // case.tensor_ranks * case.experts_per_rank
        mine = range(first, first + case.experts_per_rank)
        pairs = [[(source, token, expert) for source, token in _rows(case, maps, expert)] for expert in mine]
        flat = [pair for piece in pairs for pair in piece]
        slices = [weights[expert][rank % case.tensor_ranks] for expert in mine]
        truth.append(
            {
                "output": outputs[rank].detach(),
                "hidden_grad": _or_zero(hidden[rank]),
                "probs_grad": _or_zero(probs[rank]),
                "weight_grads": [_or_zero(weight) for weight in slices],
                "per_expert": [len(piece) for piece in pairs],
                "rows": torch.stack([hidden[s][t].detach() for s, t, _ in flat]) if flat else hidden[0].detach()[:0],
                "probs": torch.stack([probs[s][t, e].detach() for s, t, e in flat]) if flat else torch.zeros(0),
            }
        )
    return truth


def _rows(case: Case, maps: list[Any], expert: int) -> list[tuple[int, int]]:
    from tests.multiprocess import dispatch_reference as reference

    return reference.expert_rows(maps, case.expert_ranks, case.tensor_ranks, expert)


def _or_zero(leaf: Any) -> Any:
    import torch

    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _bytes(case: Case, rank: int) -> int:
    """Bytes that one pass must send from one rank, forward and backward, counted from the maps."""
    ranks = case.expert_ranks * case.tensor_ranks
    size = 2 if case.half_precision else 4
    row, packed = WIDTH * size, WIDTH * size + 16  # a probability, in as many bytes as keep rows aligned
    maps = [dispatch_runs.make_inputs(case, source).map for source in range(ranks)]
    place, tensor = rank // case.tensor_ranks, rank % case.tensor_ranks

    def routed(source: int, target_place: int) -> int:
        first = target_place * case.experts_per_rank
        return int(maps[source][:, first : first + case.experts_per_rank].sum())

    others = [other for other in range(case.expert_ranks) if other != place]
    out = sum(routed(rank, other) for other in others)
    back = sum(routed(other * case.tensor_ranks + tensor, place) for other in others)
    exchanged = out * (packed + row) + back * (row + packed)
    counts = (ranks - 1) * case.experts_per_rank * 8
    received = [
        sum(routed(other * case.tensor_ranks + t, place) for other in range(case.expert_ranks))
        for t in range(case.tensor_ranks)
    ]
    mine, theirs = received[tensor], sum(received) - received[tensor]
    gathered = mine * (case.tensor_ranks - 1) * (packed + row) + theirs * (row + packed)
    return exchanged + counts + gathered


def test_several_passes_in_flight(on_two: tuple[Any, list[Any]]) -> None:
    from tests.multiprocess import dispatch_reference as reference

    case = IN_FLIGHT
    for number in range(PASSES):
        inputs = [dispatch_runs.make_inputs(case, rank + 10 * number) for rank in range(2)]
        experts = [
            [lambda rows, p, e=expert: dispatch_runs.apply_expert(rows, p, dispatch_runs.make_weight(case, e, 0))]
            for expert in range(case.experts)
        ]
        right = reference.moe_layer(
            [one.hidden for one in inputs], [one.probs for one in inputs], [one.map for one in inputs], experts, 2
        )
        for rank in range(2):
            assert _equal(on_two[1][rank][number], right[rank])


def test_killed_peer_ends_the_exchange() -> None:
    with pytest.raises(ProcessFailed) as failure:
        run(2, dispatch_runs.lose_a_peer, Case("killed"), "killed", 20.0)
    assert "L3.moe.dispatch: rank 0 could not complete its all-to-all with rank 1" in str(failure.value)
    assert "rank 1: ended without a report, exit code -9" in str(failure.value)


def test_peer_that_stays_away_is_named_on_every_rank(on_four: tuple[Any, list[Any]]) -> None:
    for rank, text in enumerate(on_four[1][:3]):
        assert text.startswith(f"L3.moe.dispatch: rank {rank} could not complete its all-to-all with rank ")
