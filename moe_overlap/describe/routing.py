"""How many copies of a token travel: to each of its experts, or once to each place where it has some."""

from __future__ import annotations


def expected_places(choices: int, places: int) -> float:
    """Expected number of different places that hold the experts of a token.

    Args:
        choices: experts of a token, spread evenly over the places, each drawn apart from the others.
        places: ranks or nodes that hold experts.
    """
    return places * (1.0 - (1.0 - 1.0 / places) ** choices)
