"""Every fault of the table has its one line: cheap ones in every run, those that start ranks in slow ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults.fault import Fault
from tests.faults.table import FAULTS


def test_the_table_is_long_enough_and_names_each_fault_once() -> None:
    assert len(FAULTS) >= 98
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.price == "fast"], ids=lambda fault: fault.name)
def test_a_fault_inside_this_process(fault: Fault, tmp_path: Path) -> None:
    answer = fault.answer(tmp_path)
    assert fault.agrees(answer), f"{answer}\nexpected: {fault.line}"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.price == "slow"], ids=lambda fault: fault.name)
def test_a_fault_of_ranks(fault: Fault, tmp_path: Path) -> None:
    answer = fault.answer(tmp_path)
    assert fault.agrees(answer), f"{answer}\nexpected: {fault.line}"
