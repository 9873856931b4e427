"""All search spaces by name: those of the command line, and those that papers compare with."""

from __future__ import annotations

from moe_overlap.tuner.search.space import SEARCH_SPACES
from tools.bench.paper_spaces import PAPER_SPACES

SPACES = {name: row.any_target for name, row in SEARCH_SPACES.items()} | PAPER_SPACES
