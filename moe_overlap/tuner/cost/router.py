"""Expected number of ranks or nodes that hold the experts of a token, for routers that first choose groups of experts; and from
it how often DeepEP and HybridEP send a token (`library_sends`).

A router without groups chooses among all experts; `model.expected_places` has the closed form. DeepSeek-V3's router scores groups
of neighbouring experts by their best members, allows a few groups, and chooses experts in those (`--moe-router-num-groups`,
`--moe-router-group-topk`), so that a token is sent to fewer nodes. The allowed groups hold a token's best experts, so its choices
are not independent. There is no closed form; the mean over sampled tokens is used.

Source: DeepSeek-V3, section 2.1.2 (node-limited routing), as megatron-core's `group_limited_topk` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from moe_overlap.describe.model import expected_places
from moe_overlap.tuner.cost.links import Group


@dataclass(frozen=True, slots=True)
class RouterGroups:
    """The groups of experts that a router chooses among first; a single group means no such choice."""

    count: int = 1
    allowed: int = 1
    """Groups that a token's experts may come from."""


TOKENS = 4096
"""Number of sampled tokens; the error of the mean is then 0.3 %."""


def reached_places(experts: int, choices: int, groups: RouterGroups, places: int) -> float:
    """Expected number of different places that hold the experts of a token, if all experts are equally popular.

    Args:
        experts: experts of a layer.
        choices: experts of a token.
        places: ranks or nodes, each with an equal share of consecutive experts.
    """
    if places <= 1 or groups.count <= groups.allowed or experts % places or experts % groups.count:
        return expected_places(choices, places)
    return _sampled(experts, choices, groups, places)


DISPATCH_LIBRARIES = ("deepep", "hybridep")


def library_sends(experts: int, choices: int, groups: RouterGroups, group: Group) -> tuple[float, float]:
    """How DeepEP and HybridEP send a token: the ranks that it is sent to, and the share of these sends that cross the network.

    A token is sent once to each of its ranks, but crosses the network once per block of ranks. A plain all-to-all sends it once
    for each of its experts.
    """
    ranks, blocks = (reached_places(experts, choices, groups, places) for places in (group.size, group.blocks))
    return ranks, blocks / ranks


@lru_cache(maxsize=256)
def _sampled(experts: int, choices: int, groups: RouterGroups, places: int) -> float:
    """The mean over tokens with random scores."""
    # A fixed seed, so that equal arguments give equal results in every process.
    scores_TGE = np.random.default_rng(0).random((TOKENS, groups.count, experts // groups.count))
    best_TG = np.sort(scores_TGE, axis=2)[:, :, -max(1, choices // groups.allowed) :].sum(axis=2)
    threshold_T1 = np.sort(best_TG, axis=1)[:, groups.count - groups.allowed, None]
    open_TE = np.where((best_TG >= threshold_T1)[:, :, None], scores_TGE, -1.0).reshape(TOKENS, experts)
    chosen_TK = np.argpartition(open_TE, experts - choices, axis=1)[:, experts - choices :]
    place_TK = np.sort(chosen_TK // (experts // places), axis=1)
    return 1.0 + float((np.diff(place_TK, axis=1) != 0).sum(axis=1).mean())
