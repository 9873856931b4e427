"""Measure this machine, or the machines of a torchrun job: operators, collectives, copies, and what runs at the same time.

    python tools/profile_cluster.py --output here.json
    torchrun --standalone --nproc-per-node 2 tools/profile_cluster.py --output here.json --quick

Writes a cluster description for --cluster of tools/predict.py, and in the same folder its database (here.measured.jsonl). Entries
of the database are not measured again: a stopped run can be continued, and --megatron-args adds the operators of a configuration.
Links need torchrun with as many ranks as will train. On a CPU all ranks measure at the same time, because they share its caches
and memory. There, without --quick, on one machine with one thread per rank, two small jobs are trained for some steps, too: their
host time per step (tools/bench/machine.py) is added to every prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from moe_overlap.api import job_operators
from moe_overlap.commands.exits import end_process, interruptible
from moe_overlap.commands.help_topics import Parser
from moe_overlap.commands.train import place_among_ranks
from moe_overlap.describe.cluster import Cluster, load_cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.describe.files import new_file, whole_number
from moe_overlap.describe.version import VERSION_LINE
from moe_overlap.plan.serialize import as_values, read_record
from moe_overlap.tuner.profile.cluster_file import KINDS, measured_cluster, this_device
from moe_overlap.tuner.profile.database import Database, LinkKey, OperatorKey, can_be_measured, distinct
from moe_overlap.tuner.profile.lookup import DTYPE_BYTES, IN_STEP, link_grid, operator_grid

if TYPE_CHECKING:
    import torch.distributed as dist

Key = TypeVar("Key")
SECONDS_EACH = {"quick": 0.01, "thorough": 0.05}
HOST_COPY_BYTES = tuple(1 << power for power in range(16, 29, 3))


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process in the job."""

    rank: int
    world: int
    local_rank: int
    per_node: int

    @staticmethod
    def of_environment() -> Ranks:
        """The place from torchrun's variables; a single process without them.

        Raises:
            ConfigError: a variable of the launcher is no whole number, or out of range.
        """
        rank, world = place_among_ranks(os.environ)
        local, text = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("LOCAL_WORLD_SIZE", "1")
        per_node = whole_number(text)
        if per_node is None or not 1 <= per_node <= world:
            rule = f"must be a whole number from 1 to WORLD_SIZE, {world}"
            raise ConfigError("LOCAL_WORLD_SIZE", text, rule, "start by torchrun, which sets it, or unset it")
        return Ranks(rank, world, local, per_node)

    @property
    def nodes(self) -> int:
        """Number of machines of the job."""
        return self.world // self.per_node


def run(measure_host_time: Callable[[Database, Cluster], None] | None = None) -> NoReturn:
    """Entry point of `moe-profile` and `tools/profile_cluster.py`: ends the process with the status of `main`."""
    end_process(main(measure_host_time=measure_host_time))


@interruptible
def main(
    argv: Sequence[str] | None = None, measure_host_time: Callable[[Database, Cluster], None] | None = None
) -> int:
    """Run the command; 2 for a user's mistake, which only the first rank prints.

    Args:
        measure_host_time: trains two small jobs and adds the host's seconds per step to the database; None outside a source
            checkout, which has the jobs (the installed `moe-profile`).
    """
    arguments = _parser().parse_args(argv)
    try:
        ranks = Ranks.of_environment()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        output = Path(arguments.output)
        if output.suffix != ".json" or output.is_dir():
            raise ConfigError("--output", output, "is no cluster description", "name a .json file")
        device = this_device(arguments.device)
        extra = [
            key for path in arguments.megatron_args for key in job_operators([f"@{path}"], ranks.world, device.kind)
        ]
        path = output.with_suffix(".measured.jsonl")
        is_here = ranks.rank < ranks.per_node
        database = Database.open(path, device) if ranks.rank == 0 else Database(path, device, is_kept=is_here)
    except ConfigError as error:
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    steps = not arguments.quick and device.kind == "cpu" and device.threads == 1 and ranks.nodes == 1
    _measure(arguments, ranks, database, extra)
    if ranks.rank == 0:
        content = measured_cluster(Database.load(path), output.stem, ranks.nodes, ranks.per_node)
        with new_file(output) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if steps and IN_STEP not in (database := Database.load(path)).rates:
            if measure_host_time is None:
                line = "host time per step was not measured: run tools/profile_cluster.py of a source checkout"
                print(line, file=sys.stderr)
            else:
                print("training two small jobs", file=sys.stderr)
                measure_host_time(database, load_cluster(output))
        print(f"wrote {output} and {path.name}: {device}, {ranks.world} ranks")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=VERSION_LINE)
    parser.add_argument("--output", metavar="C.json", required=True, help="the cluster description")
    parser.add_argument("--device", choices=KINDS, help="default: the GPU if there is one")
    formats = "format of the operators; default float32 on a CPU, bfloat16 on a GPU"
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help=formats)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, shorter: about a minute on a CPU")
    add = "measure the operators of this configuration, too; may be repeated"
    parser.add_argument("--megatron-args", metavar="FILE", action="append", default=[], help=add)
    return parser


def _measure(arguments: argparse.Namespace, ranks: Ranks, database: Database, extra: list[OperatorKey]) -> None:
    """Fill the database; all ranks together."""
    import torch
    import torch.distributed as dist

    from moe_overlap.tuner.profile.measure.links import measure_rates
    from moe_overlap.tuner.profile.measure.operators import measure_operators

    # The names of collectives that all supported releases of torch have; the newest release deprecates some.
    warnings.simplefilter("ignore", FutureWarning)
    device = database.device
    if device.kind == "cuda":
        torch.cuda.set_device(ranks.local_rank)
    if ranks.world > 1:
        dist.init_process_group("nccl" if device.kind == "cuda" else "gloo", timeout=timedelta(minutes=30))
    seconds = SECONDS_EACH["quick" if arguments.quick else "thorough"]
    dtype = arguments.dtype or ("bfloat16" if device.kind == "cuda" else "float32")
    keys = distinct([*operator_grid(dtype, device.kind, arguments.quick), *filter(can_be_measured, extra)])
    # Only the first rank has read the database: it broadcasts the missing keys, and every rank measures a share.
    share = _missing(keys, database.operators, ranks)[ranks.rank :: ranks.world]
    bar = progress("operators", len(share), ranks.rank == 0)
    measure_operators(database, share, seconds, lambda _: bar())
    if ranks.nodes > 1:
        _take_over(database, ranks)
    if ranks.rank == 0:
        measure_rates(database, dtype, 10 * seconds)
    if ranks.world > 1:
        dist.barrier()
        _measure_links(arguments, ranks, database, seconds)
        dist.destroy_process_group()
    elif device.kind == "cuda":
        _measure_copies(database, seconds)


def _take_over(database: Database, ranks: Ranks) -> None:
    """Add to the first rank's database the measurements of ranks on other machines, which write no file."""
    from megatron.training.messages import of_all

    operators = {} if database.is_kept else database.operators
    measured = of_all([(as_values(key), measurement) for key, measurement in operators.items()])
    if ranks.rank == 0:
        for of_rank in measured:
            for key, measurement in of_rank:
                database.add_operator(read_record(OperatorKey, key, "another rank"), measurement)


def _missing(every: Sequence[Key], measured: Container[Key], ranks: Ranks) -> list[Key]:
    """The keys that are missing in the first rank's database.

    Args:
        every: all keys, equal on all ranks.
        measured: the keys in this rank's database.
    """
    from megatron.training.messages import from_first

    places = [place for place, key in enumerate(every) if key not in measured]
    return [every[place] for place in (from_first(places) if ranks.world > 1 else places)]


def _measure_links(arguments: argparse.Namespace, ranks: Ranks, database: Database, seconds: float) -> None:
    """Measure collectives inside a node, then between nodes with one rank of each; then an all-to-all concurrent with
    products."""
    import torch.distributed as dist

    from moe_overlap.tuner.profile.measure.links import COLLECTIVES, collective_seconds, slowdown_of_both

    kind = database.device.kind
    tiers: list[tuple[str, dist.ProcessGroup, int]] = []
    if ranks.per_node > 1:
        blocks = [list(range(first, first + ranks.per_node)) for first in range(0, ranks.world, ranks.per_node)]
        tiers.append(
            ("node", [dist.new_group(block) for block in blocks][ranks.rank // ranks.per_node], ranks.per_node)
        )
    if ranks.nodes > 1:
        columns = [list(range(first, ranks.world, ranks.per_node)) for first in range(ranks.per_node)]
        tiers.append(("network", [dist.new_group(column) for column in columns][ranks.local_rank], ranks.nodes))
    grid = [
        (key, group) for tier, group, size in tiers for key in link_grid(tier, size, COLLECTIVES, kind, arguments.quick)
    ]
    missing = set(_missing([key for key, _ in grid], database.links, ranks))
    bar = progress("links", len(missing), ranks.rank == 0)
    for key, group in grid:
        if key in missing:
            measurement = collective_seconds(key, group, kind, seconds)
            if ranks.rank == 0:
                database.add_link(key, measurement)
            bar()
    if _missing(("overlap_slowdown",), database.rates, ranks):
        exchanged, product = (1 << 20, 128) if kind == "cpu" else (1 << 26, 4096)
        slowdown = slowdown_of_both(tiers[0][1], kind, exchanged, product)
        if ranks.rank == 0:
            database.add_rate("overlap_slowdown", max(slowdown, 1e-6))
    if ranks.rank == 0 and kind == "cuda":
        _measure_copies(database, seconds)


def _measure_copies(database: Database, seconds: float) -> None:
    """Measure copies between GPU and host. Not run on hardware."""
    from moe_overlap.tuner.profile.measure.links import COPIES, copy_seconds

    for kind in COPIES:
        for size in HOST_COPY_BYTES:
            key = LinkKey(kind, "host", 1, size)
            if key not in database.links:
                database.add_link(key, copy_seconds(key, seconds))


def progress(name: str, total: int, shown: bool) -> Callable[[], None]:
    """A progress bar on stderr, advanced by one with each call; without a terminal a line per quarter."""
    done, width, terminal = 0, 30, sys.stderr.isatty()

    def step() -> None:
        nonlocal done
        done += 1
        if not shown:
            return
        if terminal:
            filled = "█" * (width * done // total)
            end = "\n" if done == total else ""
            print(f"\r{name:<10}{filled:<{width}} {done}/{total}", end=end, file=sys.stderr, flush=True)
        elif done == total or 4 * done // total > 4 * (done - 1) // total:
            print(f"{name} {done}/{total}", file=sys.stderr, flush=True)

    return step
