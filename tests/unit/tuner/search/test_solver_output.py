"""Tests that what C code prints while a solver runs does not stand in an answer."""

from __future__ import annotations

import ctypes

import pytest

from moe_overlap.tuner.search.solver_output import output_among_errors


def test_lines_of_c_code_are_no_part_of_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with output_among_errors():
        ctypes.CDLL(None).puts(b"a debug line")
    print('{"seconds": 1}')
    said = capfd.readouterr()
    assert said.out == '{"seconds": 1}\n' and said.err == "a debug line\n"


def test_a_failure_gives_the_output_back(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), output_among_errors():
        raise RuntimeError
    print("an answer")
    assert capfd.readouterr().out == "an answer\n"
