"""What each rank of test_messages.py is told."""

from __future__ import annotations

from typing import Any


def told() -> dict[str, Any]:
    import torch.distributed as dist

    from megatron.training.messages import from_first, of_all, of_all_on_first

    rank = dist.get_rank()
    own = {"rank": rank, "names": ["é"] * (5 * rank), "seconds": 0.1 + rank, "none": None}
    return {"first": from_first([own, 1 << 60]), "all": of_all(own), "on first": of_all_on_first(own)}


def asks_for_more_than_json() -> str:
    from megatron.training.messages import from_first

    try:
        from_first(object())
    except TypeError as error:
        return str(error)
    return ""
