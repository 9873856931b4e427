"""The searches of tools/autotune.py for several plans: `--target both`, or several numbers of GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_overlap.api import Options
from moe_overlap.commands.job_arguments import folder_of_answer, on_standard_error
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import ScalingRow
from moe_overlap.plan_search.several import search_both, search_numbers
from moe_overlap.report.answer_files import put_away_others
from moe_overlap.report.prediction import prediction_text
from moe_overlap.report.scaling import scaling_json, scaling_lines
from moe_overlap.report.search import detail_lines
from moe_overlap.report.search_folder import write_answer
from moe_overlap.report.targets import UPSTREAM_FOLDER, both_json, both_lines


def tune_both(
    arguments: argparse.Namespace,
    argv: Sequence[str],
    cluster: Cluster,
    settings: SearchSettings,
    options: Options,
    train_tokens: float | None,
    ended: Callable[[], None],
) -> int:
    """Search for both targets, write both answers and print the gain; `ended` is called after the search."""
    both = search_both(argv, cluster, settings, **options)
    ended()
    folder, files = folder_of_answer(arguments), []
    if folder is not None:
        write_answer(folder / UPSTREAM_FOLDER, both.upstream, on_standard_error, train_tokens)
        files = write_answer(folder, both.runtime, on_standard_error, train_tokens)
    if arguments.json:
        print(json.dumps(both_json(both, train_tokens), indent=1))
        return 0
    print("\n".join(both_lines(both, folder, files, train_tokens)))
    for search in (both.upstream, both.runtime) if arguments.verbose else ():
        print(f"\n{search.target}: {search.chosen.name}\n{prediction_text(search.prediction, search.cluster)}")
        print("\n".join(detail_lines(search)))
    return 0


def tune_numbers(
    arguments: argparse.Namespace,
    argv: Sequence[str],
    clusters: Sequence[Cluster],
    settings: SearchSettings,
    options: Options,
    train_tokens: float | None,
    ended: Callable[[], None],
) -> int:
    """Search for every number of GPUs, write every plan and print the table; `ended` is called after the search."""
    if arguments.target == "both":
        rule = "several numbers of GPUs are compared for one target"
        raise ConfigError("--target", "both", rule, "give one number, or --target moe-overlap or megatron-lm")
    rows = search_numbers(argv, clusters, settings, **options)
    ended()
    folder = folder_of_answer(arguments)
    if folder is not None:
        _write_rows(rows, folder, train_tokens)
    if arguments.json:
        print(json.dumps(scaling_json(rows, train_tokens), indent=1))
        return 0
    print("\n".join(scaling_lines(rows, folder, train_tokens)))
    for row in rows if arguments.verbose else ():
        if row.search is not None:
            text = prediction_text(row.search.prediction, row.cluster)
            print(f"\n{row.cluster.gpus} GPUs: {row.search.chosen.name}\n{text}")
            print("\n".join(detail_lines(row.search)))
    return 0


def _write_rows(rows: Sequence[ScalingRow], folder: Path, train_tokens: float | None) -> None:
    """Write the plan of every number of GPUs to a folder of its own."""
    for row in rows:
        if row.search is not None:
            write_answer(folder / row.folder, row.search, on_standard_error, train_tokens)
        else:
            # There is no plan, but the folder may hold an earlier answer.
            put_away_others(folder / row.folder, (), on_standard_error)
