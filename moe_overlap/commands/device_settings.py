"""Settings of a GPU that CUDA, cuBLAS and NCCL read from the environment when they start: from flags, with stated defaults.

    setting                         flag                               default
    hardware queues of streams      --moe-overlap-device-connections   CUDA_DEVICE_MAX_CONNECTIONS, else 32 for lists
    thread blocks beside others     --moe-overlap-nccl-ctas            NCCL_MAX_CTAS, else as many as fit (residency.py)
    kernels loaded at the start     none                               CUDA_MODULE_LOADING, else EAGER for lists of a pipeline
    memory in growing segments      none                               PYTORCH_ALLOC_CONF, else expandable_segments:True for lists
    sums in a fixed order           --deterministic-mode               off
    ring attention's transfers      none                               NVTE_BATCH_MHA_P2P_COMM, else in pairs for context ranks

A variable that contradicts its flag is an error; it is never overwritten. Lists finish with any number of queues
(plan/lowering/residency.py), but with few of them streams delay each other.

By default CUDA loads a kernel at its first launch, and may first wait until the device has finished all queued work (CUDA
Programming Guide, 4.7, Lazy Loading: Potential Hazards). A queued transfer may wait for a later launch of this rank, so a
pipeline could deadlock in any step with a new number of rows, which selects a new kernel. A single stage cannot: its ranks launch
the same communication in the same order. Not run on hardware.

Every stream has a pool of memory of its own. In segments of fixed size what one pool cannot use is lost to the others, and where
memory runs out torch gives free segments back to CUDA, which waits for the device: the same hazard. Segments that grow lose less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from moe_overlap.describe.errors import ConfigError, one_of
from moe_overlap.describe.files import whole_number
from moe_overlap.plan.lowering.residency import BlockLimits, Communicators, block_limits
from moe_overlap.plan.plan import Plan, Transfer

if TYPE_CHECKING:
    from megatron.training.cli.config import Config

CONNECTIONS, CONNECTIONS_FLAG = "CUDA_DEVICE_MAX_CONNECTIONS", "--moe-overlap-device-connections"
MOST_CONNECTIONS = 32
"""Most hardware queues of CUDA, so that streams of a list share as few as possible. CUDA's default is 8."""
LOADING, AT_START = "CUDA_MODULE_LOADING", "EAGER"
ALLOCATOR, GROWING = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
FORMER_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The name that torch still reads where the other is unset."""
CTAS, CTAS_FLAG = "NCCL_MAX_CTAS", "--moe-overlap-nccl-ctas"
RING, IN_PAIRS = "NVTE_BATCH_MHA_P2P_COMM", "1"
"""Whether Transformer Engine starts a send and a receive of keys and values together. Communicators that exist from the start, as
ours do, run the operations of a group one after the other: a ring that starts them apart would take twice as long."""
IN_ORDER: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Variable of --deterministic-mode -> values with which cuBLAS, NCCL and Transformer Engine sum in a fixed order; the first is
the default. Sources: torch's notes on reproducibility, `validate_args` of Megatron-LM."""


def settle_environment(config: Config, environment: MutableMapping[str, str], has_unlike_stages: bool = False) -> None:
    """Set the environment variables that the flags decide, before CUDA starts.

    Args:
        has_unlike_stages: whether a plan has stages of unlike shape; the configuration describes only the first.
    Raises:
        ConfigError: a variable contradicts its flag, or --deterministic-mode.
    """
    # Not at the top: train.py first checks that `megatron.training` is this project's.
    from megatron.training.cli.rules.moe import may_follow_lists

    connections = config.overlap.moe_overlap_device_connections
    if connections is not None:
        setting = _number(environment, CONNECTIONS, MOST_CONNECTIONS, f"set {connections} or unset it")
        _require_agreement(CONNECTIONS, setting, CONNECTIONS_FLAG, connections)
        environment[CONNECTIONS] = str(connections)
    elif may_follow_lists(config):
        environment.setdefault(CONNECTIONS, str(MOST_CONNECTIONS))
    if may_follow_lists(config) and FORMER_ALLOCATOR not in environment:
        environment.setdefault(ALLOCATOR, GROWING)
    if may_follow_lists(config) and (config.parallel.pipeline_model_parallel_size > 1 or has_unlike_stages):
        environment.setdefault(LOADING, AT_START)
    if config.parallel.context_parallel_size > 1 or has_unlike_stages:
        environment.setdefault(RING, IN_PAIRS)
    if not config.training.deterministic_mode:
        return
    for name, values in IN_ORDER.items():
        current = environment.setdefault(name, values[0])
        if current not in values:
            raise ConfigError(
                name, current, "--deterministic-mode does not go with it", f"set {one_of(values)} or unset it"
            )


def nccl_blocks(
    config: Config,
    environment: Mapping[str, str],
    multiprocessors: int,
    plan: Plan,
    communicators: Communicators | None,
) -> BlockLimits | None:
    """Limits on thread blocks of concurrent NCCL kernels; None: NCCL decides.

    Args:
        communicators: of the run's instruction lists, whose deadlock check assumes that all kernels are resident together;
            None if megatron-core's schedules run the step.
    Raises:
        ConfigError: flag and environment contradict each other, or the kernels of a rank do not fit its multiprocessors together.
    """
    flag, variable = config.overlap.moe_overlap_nccl_ctas, _number(environment, CTAS, 64, "unset it")
    _require_agreement(CTAS, variable, CTAS_FLAG, flag)
    chosen = flag or variable
    if communicators is None:
        return None if chosen is None else BlockLimits(chosen, chosen)
    fitting = block_limits(multiprocessors, communicators)
    if fitting is None:
        raise _too_many(plan, communicators, multiprocessors)
    if chosen is None:
        return fitting
    limits = BlockLimits(chosen, chosen)
    held = communicators.blocks(limits)
    if held > multiprocessors:
        rule = f"{communicators.number} kernels hold {held} thread blocks then, of {multiprocessors} multiprocessors"
        fix = f"use 1 to {min(fitting.point_to_point, fitting.collective)}"
        raise ConfigError(CTAS if flag is None else CTAS_FLAG, chosen, rule, fix)
    return limits


def _too_many(plan: Plan, communicators: Communicators, multiprocessors: int) -> ConfigError:
    """The error for too many communicators on a rank; it names the boundary with most peers."""
    rule = f"{communicators.number} communicators of a rank are under way together on {multiprocessors} multiprocessors"
    if not plan.transfers:
        return ConfigError("--pipeline-model-parallel-size", len(plan.stages), rule, "use one stage or a larger GPU")

    def most_peers(transfer: Transfer) -> int:
        pairs = {(tile.source, tile.target) for tile in transfer.tiles}
        return max(Counter(rank for pair in pairs for rank in pair).values())

    worst = max(range(len(plan.transfers)), key=lambda n: most_peers(plan.transfers[n]))
    return ConfigError(f"plan.json transfers[{worst}]", "", rule, "use stages whose numbers of data ranks differ less")


def _number(environment: Mapping[str, str], name: str, most: int, fix: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    number = whole_number(text)
    if number is None or not 1 <= number <= most:
        raise ConfigError(name, text, f"must be a number from 1 to {most}", fix)
    return number


def _require_agreement(name: str, variable: int | None, flag: str, flag_value: int | None) -> None:
    if None not in (variable, flag_value) and variable != flag_value:
        raise ConfigError(name, variable, f"{flag} says {flag_value}", "unset the variable or drop the flag")
