"""Several plan searches of one job: for both targets, or for several numbers of GPUs; they share what they capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Unpack

from moe_overlap.api import Options
from moe_overlap.describe.cluster import Cluster
from moe_overlap.describe.errors import ConfigError
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import TIE, BothTargets, ScalingRow
from moe_overlap.plan_search.search import search_plan
from moe_overlap.tuner.capture.cache import CaptureFiles, cache_folder
from moe_overlap.tuner.capture.library import Libraries

NOT_SEARCHED = "not searched: interrupted"


def search_both(
    arguments: Sequence[str], cluster: Cluster, settings: SearchSettings, **options: Unpack[Options]
) -> BothTargets:
    """The best plan for unmodified Megatron-LM and the best one for this runtime.

    Raises:
        ConfigError: as `search_plan`, for either target.
    """
    libraries = Libraries(CaptureFiles(cache_folder(), options.get("tell")))
    of_upstream = dataclasses.replace(settings, target="megatron-lm", has_baseline=False)
    upstream = search_plan(arguments, cluster, of_upstream, libraries, **options)
    of_this_runtime = dataclasses.replace(settings, target="moe-overlap")
    runtime = search_plan(arguments, cluster, of_this_runtime, libraries, **options)
    return BothTargets(upstream=upstream, runtime=runtime, tie=TIE)


def search_numbers(
    arguments: Sequence[str], clusters: Sequence[Cluster], settings: SearchSettings, **options: Unpack[Options]
) -> list[ScalingRow]:
    """The best plan for every one of these clusters; one without a plan has the reason.

    Ctrl-C ends the search that is running with its best plan so far, and leaves the larger clusters out.

    Args:
        clusters: of the same machines, the smallest first.
    Raises:
        ConfigError: none has a plan; the error has the reason of the largest.
    """
    libraries = Libraries(CaptureFiles(cache_folder(), options.get("tell")))
    rows: list[ScalingRow] = []
    is_interrupted = False
    refusal: ConfigError | None = None
    for cluster in clusters:
        if is_interrupted:
            rows.append(ScalingRow(cluster, None, NOT_SEARCHED))
            continue
        try:
            search = search_plan(arguments, cluster, settings, libraries, **options)
        except KeyboardInterrupt:
            if all(row.search is None for row in rows):
                raise
            rows.append(ScalingRow(cluster, None, NOT_SEARCHED))
            is_interrupted = True
            continue
        except ConfigError as error:
            refusal = error
            rows.append(ScalingRow(cluster, None, str(error)))
            continue
        rows.append(ScalingRow(cluster, search, ""))
        is_interrupted = search.is_interrupted
    if refusal is not None and all(row.search is None for row in rows):
        raise refusal
    return rows
