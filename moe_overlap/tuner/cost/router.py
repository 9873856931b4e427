"""How many places a token's experts stand in, where a router chooses among groups of experts first.

A router without groups draws its experts from all; `model.expected_places` has the closed form. DeepSeek-V3's scores groups of
neighbouring experts by their best members, keeps a few groups, and draws from those (`--moe-router-num-groups`,
`--moe-router-group-topk`), so that a token crosses to fewer nodes. The groups that are kept hold a token's best experts, thus
none of them stays empty for long: choices are not independent, and the mean is taken over sampled tokens.

Source: DeepSeek-V3, section 2.1.2 (node-limited routing), as megatron-core's `group_limited_topk` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moe_overlap.describe.model import expected_places


@dataclass(frozen=True, slots=True)
class RouterGroups:
    """The groups of experts that a router chooses among first; one group is no choice."""

    count: int = 1
    kept: int = 1
    """Groups that a token's experts may come from."""


TOKENS = 4096
"""Sampled tokens; the mean is then known to 0.3 %."""


def reached_places(experts: int, choices: int, groups: RouterGroups, places: int) -> float:
    """Expected number of different places that hold the experts of a token, if every expert is equally popular.

    Args:
        experts: of a layer.
        choices: experts of a token.
        places: ranks or nodes, each with an equal share of consecutive experts.
    """
    if places <= 1 or groups.count <= groups.kept or experts % places or experts % groups.count:
        return expected_places(choices, places)
    return _sampled(experts, choices, groups, places)


@lru_cache(maxsize=256)
def _sampled(experts: int, choices: int, groups: RouterGroups, places: int) -> float:
    """The mean over tokens with random scores."""
    # Seeded: equal questions have equal answers, in every process.
    scores_TGE = np.random.default_rng(0).random((TOKENS, groups.count, experts // groups.count))
    best_TG = np.sort(scores_TGE, axis=2)[:, :, -max(1, choices // groups.kept) :].sum(axis=2)
    threshold_T1 = np.sort(best_TG, axis=1)[:, groups.count - groups.kept, None]
    open_TE = np.where((best_TG >= threshold_T1)[:, :, None], scores_TGE, -1.0).reshape(TOKENS, experts)
    chosen_TK = np.argpartition(open_TE, experts - choices, axis=1)[:, experts - choices :]
    place_TK = np.sort(chosen_TK // (experts // places), axis=1)
    return 1.0 + float((np.diff(place_TK, axis=1) != 0).sum(axis=1).mean())
