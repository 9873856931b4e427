"""Training with and without products that add their weight gradients themselves. Called in the processes of a launch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiprocess.deferral_runs import MODERN, UNTIED, train

OFF = "--no-gradient-accumulation-fusion"


def train_both(cases: dict[str, str]) -> dict[str, dict[str, Any]]:
    """For each case: losses and norms of four steps without and with fusion, and how many products the kernel added."""
    from tests.stand_ins.claim import claim_kernel

    found = {}
    for name, flags in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            calls = claim_kernel(patch)
            words = f"{MODERN} {UNTIED} --moe-token-dispatcher-type irregular {flags}"
            plain = train(f"{words} {OFF}").steps
            unasked = len(calls)
            found[name] = {"plain": plain, "fused": train(words).steps, "unasked": unasked, "calls": len(calls)}
    return found
