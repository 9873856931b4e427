"""Which tests run beside which where pytest has several workers (pytest-xdist).

A unit of work is a file, so that the set-ups of its tests are made once; files that share more than a file are one unit. Tests
of one unit follow one another on one worker. Some units launch ranks, which keep more than one core busy and wait for each
other: while one of them is under way, other workers take units of a single process, as long as there are any. Long units are
taken before others, so that none of them is left to one worker at the end.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

TOGETHER = (
    # One run that all are compared with (end_to_end/conftest.py).
    (
        "tests/end_to_end/test_bad_commands.py",
        "tests/end_to_end/test_exits.py",
        "tests/end_to_end/test_kill.py",
        "tests/end_to_end/test_training.py",
    ),
    # Hosts and CPU groups are the machine's: one program takes away what another left (tools/bench/bed.py).
    (
        "tests/end_to_end/test_benchmark_overlap.py",
        "tests/end_to_end/test_boundary_on_links.py",
        "tests/end_to_end/test_first_run.py",
        "tests/unit/bench/test_bed.py",
    ),
)
"""Files that are one unit, which has the name of the first."""
LAUNCHING = ("tests/end_to_end/", "tests/faults/", "tests/multiprocess/")
"""Folders whose units launch ranks."""
LONGEST = tuple(
    f"tests/unit/{name}.py"
    for name in (
        "plan_search/test_overlapped_search",
        "plan_search/test_plan_search",
        "plan_search/test_upstream_states",
        "tuner/capture/test_capture_layouts",
        "tuner/cost/test_cost_corners",
        "tuner/cost/test_cost_listed_step",
        "tuner/search/test_overlap_tuning",
    )
)
"""Units of a single process that take about half a minute."""
_UNITS = {file: files[0] for files in TOGETHER for file in files}


class Workers(LoadScopeScheduling):
    """Hands units to workers: long ones first, else as collected; one launches ranks at a time, where that can be had."""

    def __init__(self, config: Any, log: Any = None) -> None:
        # By number of tests, xdist's default, the longest launches would come last and find one worker idle.
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _UNITS.get(file, file)

    def _assign_work_unit(self, node: Any) -> None:
        others = [units for other, units in self.assigned_work.items() if other is not node]
        under_way = [unit for units in others for unit, tests in units.items() if not all(tests.values())]
        launched = any(unit.startswith(LAUNCHING) for unit in under_way)
        fitting = (unit for unit in self.workqueue if unit.startswith(LAUNCHING) != launched)
        chosen = min(fitting, key=lambda unit: unit not in LONGEST, default=None)
        if chosen is not None:
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)
