"""`python tools/benchmark_search.py [--json] [--only NAME …]`: the program is tests/validation/plan_quality.py.

It runs as a module, since tools import nothing of the tests.
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    runpy.run_module("tests.validation.plan_quality", run_name="__main__")
