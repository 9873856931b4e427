"""Gathers and reduce-scatters of unequal parts (experts under tensor parallelism) on gloo, against obvious ones."""

from __future__ import annotations

from tests.spawn import run


def exchange_unevenly() -> list[bool]:
    """Each rank: gathers and reduce-scatters of unequal parts, also empty ones, against obvious ones."""
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    rank, group = dist.get_rank(), dist.group.WORLD
    equal = []
    for sizes in ([3, 1], [0, 4], [2, 2], [5, 0]):
        everything = torch.arange(sum(sizes) * 3, dtype=torch.float).view(-1, 3)
        mine = everything.split(sizes)[rank].clone().requires_grad_()
        gathered = mappings.gather_from_sequence_parallel_region(mine, True, group, sizes)
        equal.append(torch.equal(gathered, everything))
        (gathered * (rank + 1)).sum().backward()
        equal.append(torch.equal(mine.grad, torch.full_like(mine, 3.0)))  # 1 + 2: both ranks used it

        whole = (everything * (rank + 1)).requires_grad_()
        reduced = mappings.reduce_scatter_to_sequence_parallel_region(whole, group, sizes)
        equal.append(torch.equal(reduced, everything.split(sizes)[rank] * 3))
        (reduced * (rank + 1)).sum().backward()
        factors = torch.cat([torch.full((size, 3), owner + 1.0) for owner, size in enumerate(sizes)])
        equal.append(torch.equal(whole.grad, factors))
    even = torch.ones(2, 3) * rank
    stock = mappings._gather_along_first_dim(even, group)
    equal.append(torch.equal(stock, torch.tensor([0.0, 0.0, 1.0, 1.0]).unsqueeze(1).expand(4, 3)))
    equal.append(torch.equal(mappings._reduce_scatter_along_first_dim(stock, group), stock.chunk(2)[rank] * 2))
    return equal


def test_uneven_exchanges_on_two_ranks() -> None:
    for answers in run(2, exchange_unevenly):
        assert answers == [True] * 18
