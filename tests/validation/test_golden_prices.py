"""Prices are what they were: `python -m tests.validation.golden_prices --renew` shows what changed, and freezes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.validation import golden_prices
from tests.validation.golden_prices import CASES, FILE, Case, differences, golden, main, prices


def test_every_case_is_frozen_and_no_two_are_alike() -> None:
    frozen = golden()
    assert list(frozen) == list(CASES) and len(CASES) >= 20
    assert len({json.dumps(terms) for terms in frozen.values()}) == len(CASES)
    seconds = {name: [value for term, value in terms.items() if "_seconds" in term] for name, terms in frozen.items()}
    assert all(min(values) >= 0 for values in seconds.values())


@pytest.mark.parametrize("name", CASES)
def test_prices_are_what_they_were(name: str) -> None:
    changed = list(differences(name, golden()[name], prices(CASES[name])))
    assert not changed, "\n".join([*changed, "renew with python -m tests.validation.golden_prices --renew"])


def test_every_term_that_a_price_has_is_spent_somewhere() -> None:
    """A term that is nothing in every case is frozen nowhere."""
    terms: dict[str, float] = {}
    for case in golden().values():
        for term, value in case.items():
            kind = term.partition(" ")[2].partition(" ")[2] if term.startswith("stage ") else term
            terms[kind] = max(value, terms.get(kind, 0.0))
    assert {term for term, most in terms.items() if most == 0} == set()


def test_renewing_says_what_changed_and_is_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {name: CASES[name] for name in ("dense, ZeRO-0", "MoE, ZeRO-1")}
    written = {name: golden()[name] for name in few}
    monkeypatch.setattr(golden_prices, "CASES", few)
    monkeypatch.setattr(golden_prices, "FILE", tmp_path / "prices.json")
    changed = {**written, "dense, ZeRO-0": {**written["dense, ZeRO-0"], "optimizer_seconds": 1.0}}
    (tmp_path / "prices.json").write_text(json.dumps(changed))
    assert main([]) == 1
    assert capsys.readouterr().out.startswith("dense, ZeRO-0: optimizer_seconds: 1 -> ")
    assert main(["--renew"]) == 0 and main([]) == 0
    assert capsys.readouterr().out.endswith("no price differs\n")
    assert (tmp_path / "prices.json").read_text() == json.dumps(written, indent=1) + "\n"
    assert FILE.read_text() == json.dumps(golden_of(FILE), indent=1) + "\n"


def golden_of(path: Path) -> dict[str, dict[str, float]]:
    content: dict[str, dict[str, float]] = json.loads(path.read_text())
    return content


def test_a_difference_below_a_millionth_is_none() -> None:
    assert list(differences("a", {"x": 1.0, "y": 0.0}, {"x": 1.0 + 9e-7, "y": 0.0})) == []
    assert list(differences("a", {"x": 1.0, "gone": 2.0}, {"x": 1.0 + 3e-6, "new": 3.0})) == [
        "a: x: 1 -> 1 (+0.00%)",
        "a: gone: 2 -> absent",
        "a: new: absent -> 3",
    ]
    assert isinstance(next(iter(CASES.values())), Case)
