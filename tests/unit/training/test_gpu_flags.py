"""docs/gpu.md says of every flag for speed on GPUs that Megatron-LM turns on, or recommends, what a run does here."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

from moe_overlap.describe.readers.upstream_flags import WITHOUT_EFFECT, load_upstream_flags

PAGE = Path(__file__).parents[3] / "docs" / "gpu.md"
RECOMMENDED = (
    "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-router-dtype --moe-token-dispatcher-type "
    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute --moe-shared-expert-overlap --cross-entropy-loss-fusion "
    "--cuda-graph-impl --cuda-graph-scope --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--tp-comm-overlap --high-priority-stream-groups --use-nccl-ub --manual-gc --recompute-modules --fp8-recipe "
    "--attention-backend"
).split()
"""By the guide to MoE models and the recipes of Megatron-LM."""
SPEED = ("faster GPU kernels", "communication tuning")
"""How the groups of flags begin that change speed alone."""
ELSEWHERE = {
    "disable_gloo_process_groups": "checkpoints of another format",
    "use_gloo_process_groups": "groups for checkpoints of another format",
    "use_mamba_mem_eff_path": "another model",
}
ANSWERED_BY_FLAGS = ("--no-gradient-accumulation-fusion", "--no-overlap-p2p-communication")
"""On by default there, and flags here."""


def rows() -> list[tuple[list[str], str, str]]:
    """The table: flags, what Megatron-LM does, what a run does here."""
    section = PAGE.read_text().partition("## Megatron-LM's flags for speed on GPUs")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(--[\w-]+)`", flags), there, here) for flags, there, here in cells]


def test_every_flag_that_is_on_by_default_has_a_row() -> None:
    named = {load_upstream_flags()[flag].dest for flags, _, _ in rows() for flag in flags}
    speed = [group for group in WITHOUT_EFFECT if group.reason.startswith(SPEED)]
    assert len(speed) == len(SPEED)
    on = {
        flag.dest
        for name, flag in load_upstream_flags().items()
        if flag.kind == "StoreFalse" and flag.default == "True" and flag.in_core_0_16_1
        if name in ANSWERED_BY_FLAGS or any(fnmatch.fnmatch(name, p) for group in speed for p in group.patterns)
    }
    assert len(on) > 15 and on - named == ELSEWHERE.keys() & on


def test_every_recommended_flag_has_a_row() -> None:
    assert set(RECOMMENDED) <= {flag for flags, _, _ in rows() for flag in flags}


def test_every_row_answers() -> None:
    assert len(rows()) > 20 and all(flags and there and here for flags, there, here in rows())
    flags = [flag for names, _, _ in rows() for flag in names]
    assert len(flags) == len(set(flags))
