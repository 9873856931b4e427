"""The searches of tools/autotune.py for more than one plan: `--target both`, or several numbers of GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from moe_overlap.api import Options
from moe_overlap.commands.job_arguments import on_standard_error
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.asked import SearchSettings
from moe_overlap.plan_search.several import search_both, search_numbers
from moe_overlap.report.answer_files import put_away_others
from moe_overlap.report.prediction import prediction_text
from moe_overlap.report.scaling import scaling_json, scaling_lines
from moe_overlap.report.search import detail_lines
from moe_overlap.report.search_folder import write_answer
from moe_overlap.report.targets import UPSTREAM_FOLDER, both_json, both_lines


def tune_both(
    arguments: argparse.Namespace,
    words: Sequence[str],
    cluster: Cluster,
    settings: SearchSettings,
    given: Options,
    train_tokens: float | None,
    ended: Callable[[], None],
) -> int:
    """Search for both targets, write both answers and print the gain; `ended` is called behind the search."""
    both = search_both(words, cluster, settings, **given)
    ended()
    folder = Path(arguments.output)
    write_answer(folder / UPSTREAM_FOLDER, both.upstream, on_standard_error, train_tokens)
    files = write_answer(folder, both.here, on_standard_error, train_tokens)
    if arguments.json:
        print(json.dumps(both_json(both, train_tokens), indent=1))
        return 0
    print("\n".join(both_lines(both, folder, files, train_tokens)))
    for search in (both.upstream, both.here) if arguments.verbose else ():
        print(f"\n{search.target}: {search.chosen.name}\n{prediction_text(search.prediction, search.cluster)}")
        print("\n".join(detail_lines(search)))
    return 0


def tune_numbers(
    arguments: argparse.Namespace,
    words: Sequence[str],
    clusters: Sequence[Cluster],
    settings: SearchSettings,
    given: Options,
    train_tokens: float | None,
    ended: Callable[[], None],
) -> int:
    """Search for every number of GPUs, write every plan and print the table; `ended` is called behind the search."""
    if arguments.target == "both":
        rule = "several numbers of GPUs are compared for one target"
        raise ConfigError("--target", "both", rule, "give one number, or --target moe-overlap or megatron-lm")
    rows = search_numbers(words, clusters, settings, **given)
    ended()
    folder = Path(arguments.output)
    for row in rows:
        if row.search is not None:
            write_answer(folder / row.folder, row.search, on_standard_error, train_tokens)
        else:
            # Its folder may hold the answer of other flags, and the table says that there is none.
            put_away_others(folder / row.folder, (), on_standard_error)
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
