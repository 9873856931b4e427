"""The processes of a plan search: this one, several of this host (`--jobs`), or one for each shard on any host (`--shard`).

Nothing of an answer depends on how many there are, but for the counts of layouts, the refusals and the frontier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_overlap.api import Options
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.expert_load import NATURAL, expert_load_text
from moe_overlap.describe.version import VERSION_LINE
from moe_overlap.plan.serialize import as_values, content_sha256
from moe_overlap.plan_search.shards import Refused, Shard, in_processes, merged, read_shards, save_shard
from moe_overlap.tuner.cost.hardware import shipped_constants
from moe_overlap.tuner.search.shared_bar import SharedBar
from moe_overlap.tuner.search.uniform import UniformSearch


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """The processes that search.

    Attributes:
        jobs: of this host.
        shard: the share of the layouts that this process searches; default all of them.
        folder: of the answers of all shards.
    """

    jobs: int = 1
    shard: Shard | None = None
    folder: Path = Path()

    @property
    def shares(self) -> int:
        """Shares of the layouts, each of which a process searches."""
        return self.jobs if self.shard is None else self.shard.count


def search_shards(
    search: Callable[[Shard, SharedBar | None], tuple[UniformSearch, Refused]],
    processes: Processes,
    job: Callable[[], str],
    keep: int,
) -> tuple[UniformSearch, Refused]:
    """The search over all layouts.

    Args:
        search: over a share of them, with what rules refuse; given the bar of the processes of this host.
        job: hash of everything that an answer depends on; asked for shards.
        keep: layouts that are ranked.
    Raises:
        ShardsMissingError: answers of other shards are not there yet.
        ConfigError: a file is of another search, or a process was killed.
    """
    if processes.shard is not None:
        sha256, shard = job(), processes.shard
        found, refusals = search(shard, None)
        # A share that was not searched to its end is missing still: Ctrl-C is no answer.
        if not found.is_interrupted:
            save_shard(processes.folder, shard, sha256, found, refusals)
        answers = read_shards(processes.folder, shard.count, sha256)
    else:
        bar = SharedBar(processes.jobs, keep) if processes.jobs > 1 else None
        answers = in_processes(lambda shard: search(shard, bar), processes.jobs)
    if len(answers) == 1:
        return answers[0]
    refused = dict.fromkeys(refusal for _, of_shard in answers for refusal in of_shard)
    return merged([found for found, _ in answers], keep), list(refused)


def job_sha256(asked: tuple[object, ...], cluster: Cluster, options: Options) -> str:
    """Hash of what the answer of a shard depends on.

    Args:
        asked: flags and settings, as JSON values.
    Raises:
        ConfigError: the file of expert loads cannot be read.
    """
    loads, constants = options.get("expert_load"), options.get("constants") or shipped_constants()
    return content_sha256(
        {
            "release": VERSION_LINE,
            "asked": asked,
            "cluster": as_values(cluster),
            "options": [options.get("precision"), options.get("software"), options.get("memory_margin")],
            "expert load": loads if loads in (None, NATURAL) else expert_load_text(loads),
            "constants": as_values(constants),
        }
    )
