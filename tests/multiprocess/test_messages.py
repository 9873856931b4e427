"""Messages between ranks: values of unlike length arrive as they were sent, and nothing but JSON is sent."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.multiprocess.message_runs import asks_for_more_than_json, told
from tests.spawn import run

ROOT = Path(__file__).resolve().parents[2]
PICKLED = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"}


def test_values_arrive_as_they_were_sent() -> None:
    first, second = run(2, told)
    sent = [{"rank": r, "names": ["é"] * (5 * r), "seconds": 0.1 + r, "none": None} for r in range(2)]
    assert first == {"first": [sent[0], 1 << 60], "all": sent, "on first": sent}
    assert second == {"first": [sent[0], 1 << 60], "all": sent, "on first": None}


def test_an_object_is_no_message() -> None:
    assert "not JSON serializable" in run(1, asks_for_more_than_json)[0]


def test_nothing_of_ours_is_exchanged_as_a_pickle() -> None:
    """torch's collectives of objects unpickle what arrives."""
    for folder in ("moe_overlap", "megatron/training", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
            assert not names & PICKLED, path
