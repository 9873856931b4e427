"""Tables of errors tell MoE from dense and forced from natural routing, and list the rows of small groups."""

from __future__ import annotations

import pandas as pd

from tests.validation.table import FEW_ROWS, GROUP, group_figures, summary

GROUPS = {("MoE", "forced"): FEW_ROWS, ("MoE", "natural"): FEW_ROWS - 1, ("dense", "-"): FEW_ROWS + 1}


def errors() -> pd.DataFrame:
    records = [
        {
            **dict(zip(GROUP, ("step s", "test", "H100", kind, routing), strict=True)),
            **dict.fromkeys(("model", "layout", "precision", "release"), ""),
            "row": f"{kind}.{routing}.{number}",
            "measured": 1.0 + number,
            "predicted": 1.1 + number,
            "error %": -30.0 if number == 0 else 10.0,
            "held": "yes",
        }
        for (kind, routing), count in GROUPS.items()
        for number in range(count)
    ]
    return pd.DataFrame(records)


def test_each_kind_and_routing_is_a_group_of_its_own() -> None:
    figures = group_figures(errors()).set_index(["kind", "routing"])
    assert dict(figures["n"]) == GROUPS
    natural = figures.loc["MoE", "natural"]
    assert (natural["mean |error| %"], natural["worst %"], natural["held"]) == (12.9, 30.0, "7/7")
    assert natural["bias %"] == 4.3


def test_rows_of_small_groups_are_listed_and_of_others_not() -> None:
    text = summary(errors())
    for (kind, routing), count in GROUPS.items():
        listed = [f"{kind}.{routing}.{number} " in text for number in range(count)]
        assert set(listed) == {count < FEW_ROWS}, (kind, routing)
    assert FEW_ROWS == 8
