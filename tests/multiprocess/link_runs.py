"""Runs of two processes on emulated links. Called in the processes of a launch."""

from __future__ import annotations

from typing import Any

RATE, LATENCY, NOW = 1000.0, 0.25, 100.0
WIDTH = 4
ROWS = ((3, 5), (2, 7))
"""Rows rank r sends to each rank."""


def exchanges() -> dict[str, Any]:
    """Two all-to-alls under way at once, waited for in reverse, on a clock that stands still."""
    import torch
    import torch.distributed as dist

    from tools.bench.emulator import EgressClock, EmulatedExchange

    me = dist.get_rank()
    clock = EgressClock(RATE, LATENCY, now=lambda: NOW)
    moments: list[float] = []
    exchange = EmulatedExchange(dist.group.WORLD, clock, until=moments.append)
    sent, received = list(ROWS[me]), [rows[me] for rows in ROWS]
    rows = torch.full((sum(sent), WIDTH), float(me))
    first = exchange.start(rows, sent, received, tag=3, name="first")
    second = exchange.start(rows + 10, sent, received, tag=4, name="second")
    arrived = [second.wait(), first.wait()]
    assert torch.equal(first.wait(), arrived[1]), "waiting again gives the same"
    return {
        "moments": moments,
        "sent_bytes": clock.sent_bytes,
        "busy_seconds": clock.busy_seconds,
        "arrived": [tensor[:, 0].tolist() for tensor in arrived],
    }


def whole_exchange() -> list[bool]:
    """megatron-core's all-to-all and what replaces it give the same rows; gradients included."""
    import numpy
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.mappings import all_to_all

    from tools.bench.emulator import EgressClock, GlooAllToAll, replaced

    me = dist.get_rank()
    sent, received = list(ROWS[me]), [rows[me] for rows in ROWS]

    def run() -> list[Any]:
        rows = torch.arange(sum(sent) * WIDTH, dtype=torch.float32).view(-1, WIDTH).add(100 * me).requires_grad_()
        output = all_to_all(dist.group.WORLD, rows, numpy.array(received), numpy.array(sent))  # as its dispatcher does
        (output * output).sum().backward()
        return [output.detach(), rows.grad]

    original = dist.all_to_all_single
    expected = run()
    clock = EgressClock(1e9)
    same = []
    for receive_first, link in ((True, None), (True, clock), (False, clock), (False, None)):
        with replaced(receive_first, link):
            same.append(all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True)))
    same.append(dist.all_to_all_single is original)
    off_rank = sum(sent) - sent[me] + sum(received) - received[me]
    same.append(clock.sent_bytes == 2 * 4 * WIDTH * off_rank)
    rows = torch.arange(sum(sent) * WIDTH, dtype=torch.float32).view(-1, WIDTH).add(100 * me)
    wire = GlooAllToAll(dist.group.WORLD)
    same.append(torch.equal(wire.start(rows, sent, received, tag=0, name="rows").wait(), expected[0]))
    same.append(wire.sent_bytes == 4 * WIDTH * (sum(sent) - sent[me]))
    return same
