"""Searched plans beside published ones, and measured layouts put in order: tools/benchmark_search.py [--json] [--only NAME …]

plans: every configuration of `PUBLISHED` is searched under `--target megatron-lm` with the precision and the features of its row,
    and compared with the published layout under the same prices. Both steps are predicted; what was measured of the published
    one stands beside them.
rankings: runs that were measured and differ in their layout alone (ranking.py): is the one that is predicted to be the fastest
    the best, or within `NEAR` of it? Further sets are all rows of one model, cluster, batch, sequence, precision and release.
flip: DeepSeek-V3 on 256 B200 as published with EP32 across nodes and with EP8 inside them, over the rate of the network.

Rows of natural routing are left out of `PUBLISHED`: a search takes recorded loads, and none were published. Reported are rows,
by MoE or dense and by GPU, and each group's worst row; there is no mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moe_overlap.describe.cluster import shipped_cluster
from moe_overlap.plan_search.request import SearchSettings
from moe_overlap.plan_search.results import TIE, PlanSearch
from moe_overlap.plan_search.search import search_plan
from moe_overlap.tuner.calibrate.fit.measured_runs import MeasuredRun, prepared_runs
from moe_overlap.tuner.calibrate.fit.published_rows import scored_rows
from moe_overlap.tuner.calibrate.fit.rows import MeasuredRow, measured_rows
from moe_overlap.tuner.capture.cache import cache_folder
from moe_overlap.tuner.cost.analytic import Prediction
from moe_overlap.tuner.cost.hardware import shipped_constants
from tests.validation.errors import spearman
from tests.validation.ranking import SETS, best_found, measured_cost, predicted_cost

NEAR = 0.03
"""What a picked layout may cost beyond the best one."""
SAME = 1e-9
"""Steps closer than this are one: the search finds the published layout itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """A configuration that is searched.

    Attributes:
        number: its row in measured.csv.gz.
        why: what it stands for.
    """

    name: str
    number: int
    why: str

    @property
    def space(self) -> str:
        """The search space that has what Megatron-LM was told of states: Megatron-FSDP and offloading are in a wider one."""
        flags = self.row.flags
        return "offload" if {"--use-megatron-fsdp", "--cpu-offloading-num-layers"} & set(flags) else "recompute"

    @property
    def row(self) -> MeasuredRow:
        """The row of its published layout, with the features that it is known to have."""
        return published_pair()[OVERLAPPED_NAME] if self.number == EP32 else row_of(self.number)


PUBLISHED = (
    Published("gpt-3.6b-a100", 897, "dense, A100, fp16: the set of vTrain with the most layouts"),
    Published("llama3-70b-h100", 167, "dense, H100, fp8: deep interleaving"),
    Published("nemotron4-15b-h100", 774, "dense, H100, bf16: a small model on many GPUs"),
    Published("llama3-70b-12l-b200", 18, "dense, B200, bf16: one node"),
    Published("llama3-70b-gb200", 163, "dense, GB200, fp8: FSDP was published"),
    Published("qwen3-30b-h100", 123, "MoE, H100, fp8: expert ranks across nodes"),
    Published("qwen3-30b-b200", 193, "MoE, B200, mxfp8: one node"),
    Published("gpt-oss-120b-h100", 191, "MoE, H100, bf16: a pipeline"),
    Published("qwen3-235b-b200", 201, "MoE, B200, mxfp8: a deep pipeline"),
    Published("deepseek-v3-b200", 247, "MoE, B200, mxfp8, MLA and MTP: the largest model"),
    Published("deepseek-v3-b200-overlapped", 183, "MoE, the same with the features of the published EP32"),
)
"""One row for each kind and GPU as far as the table has forced or no routing, smallest first."""
RANKINGS, FLIP = "rankings", "flip"
SECONDS = 300.0
"""After which a search ends with the best so far."""


def row_of(number: int) -> MeasuredRow:
    """A row of measured.csv.gz by its line."""
    return next(row for row in measured_rows() if row.number == number)


# Plans


def searched(published: Published, seconds: float = SECONDS) -> PlanSearch:
    """The search of a configuration."""
    row = published.row
    settings = SearchSettings(target="megatron-lm", space=published.space, seconds=seconds)
    cluster = shipped_cluster(row["gpu"], row.gpus)
    return search_plan(row.flags, cluster, settings, software=row["release"] or None)


def plan_record(published: Published, search: PlanSearch, cpu_seconds: float) -> dict[str, Any]:
    """A row of the table of plans."""
    row, baseline = published.row, search.baseline
    assert baseline is not None, f"{published.name} does not run on its own GPUs"
    found, was = search.prediction.predicted.step_seconds, baseline.predicted.step_seconds
    expected = search.prediction.expected_error
    interval = expected.relative if expected is not None else math.nan
    term, seconds = largest_term(search.prediction, baseline)
    return {
        "name": published.name,
        "kind": "MoE" if row.is_moe else "dense",
        "GPU": row.gpu_type,
        "GPUs": row.gpus,
        "precision": row["precision_class"],
        "published": layout_of(row),
        "measured s": round(row.seconds, 3),
        "published, predicted s": round(was, 3),
        "found": search.chosen.name,
        "found, predicted s": round(found, 3),
        "published / found": round(was / found, 3),
        "expected error %": round(100 * interval, 1),
        "check": verdict(found, was, baseline),
        "apart": "beyond" if abs(was / found - 1.0) > interval else "within",
        "term": term,
        "term s": round(seconds, 3),
        "status": search.uniform.solution.status.value,
        "CPU s": round(cpu_seconds, 1),
    }


def verdict(found: float, was: float, published: Prediction) -> str:
    """Whether the plan that is found is as fast as the published one, under our prices."""
    if found <= was * (1 + SAME):
        return "never worse"
    if not published.fits:
        return f"published one {published.memory_verdict}"
    # Of plans within TIE the search takes the one that needs less memory.
    return "tie" if found <= was * (1 + TIE) else "WORSE"


def largest_term(found: Prediction, was: Prediction) -> tuple[str, float]:
    """The term of the breakdown that differs most, and by how many seconds the published plan has more of it."""
    apart = {name: was.breakdown[name] - found.breakdown[name] for name in found.breakdown}
    sign = 1.0 if sum(apart.values()) >= 0 else -1.0
    name = max(apart, key=lambda name: sign * apart[name])
    return name.removesuffix("_seconds"), apart[name]


def layout_of(row: MeasuredRow) -> str:
    """Degrees of a published run."""
    return f"TP{row['tp']} PP{row['pp']} VP{row['vp'] or 1} CP{row['cp']} EP{row['ep'] or 1} m{row['micro_batch']}"


# Rankings


def ranking_frame() -> pd.DataFrame:
    """A row for each set of measured layouts."""
    sets = {known.name: known.rows() for known in SETS} | same_runs()
    wanted = {row.number: row for rows in sets.values() for row in rows}
    cases = dict(zip(wanted, prepared_runs(list(wanted.values()), cache_folder()), strict=True))
    return pd.DataFrame([ranking_record(name, [cases[row.number] for row in rows]) for name, rows in sets.items()])


def same_runs() -> dict[str, list[MeasuredRow]]:
    """Scored rows that differ in their layout alone, and are in no set of ranking.py."""
    known = {row.number for of_set in SETS for row in of_set.rows()}
    groups: dict[tuple[str, ...], list[MeasuredRow]] = defaultdict(list)
    for row in scored_rows():
        if row.is_time and row.number not in known:
            names = ("model", "n_gpus", "global_batch", "seq_len", "precision_class", "release")
            groups[row.gpu_type, *(row[name] for name in names)].append(row)
    return {
        f"{key[1][:24]}, {key[2]} {key[0]}, batch {key[3]}, {key[4]} tokens": rows
        for key, rows in groups.items()
        if len({layout_of(row) for row in rows}) > 1
    }


def ranking_record(name: str, cases: Sequence[MeasuredRun]) -> dict[str, Any]:
    """A set's best layout, the picked one, and what that costs."""
    constants = shipped_constants()
    runs: dict[tuple[str, ...], list[MeasuredRun]] = defaultdict(list)
    for case in cases:
        runs[tuple(case.row.flags)].append(case)
    measured = np.array([np.mean([measured_cost(case.row) for case in same]) for same in runs.values()])
    predicted = np.array([predicted_cost(same[0], constants) for same in runs.values()])
    layouts = [layout_of(same[0].row) for same in runs.values()]
    regret = best_found(measured, predicted)
    row = cases[0].row
    return {
        "set": name,
        "kind": "MoE" if row.is_moe else "dense",
        "GPU": row.gpu_type,
        "layouts": len(runs),
        "best, measured": layouts[int(measured.argmin())],
        "picked": layouts[int(predicted.argmin())],
        "regret %": round(100 * regret, 1),
        "check": "ok" if regret <= NEAR else "MISSED",
        "Spearman": round(spearman(predicted, measured), 3),
    }


# Flip

EP8, EP32 = 247, 183
OVERLAPPED_NAME = "EP32 PP8 VP2, overlapped"
OVERLAPPED = (
    "force-balanced routing, dropless; cuda_graph=transformer_engine, dispatcher=deepep, a2a_overlap=True, "
    "pp_layout=Et*4|(t*4|)*14tmL, etp=1; "
)
"""What a recipe of Megatron-Bridge with the layout of row `EP32` switches on (DEEPSEEK_V3_PRETRAIN_CONFIG_B200_FP8_MX_V2 in
scripts/performance/configs/deepseek/deepseek_workload_base_configs.py); the row says that its own flags are not resolved."""
EXPOSED = "force-balanced routing, dropless; dispatcher=hybridep, pp_layout=Et*4|(t*4|)*14tmL, etp=1; "
"""The features of row `EP8`: nothing hides the all-to-alls."""
NETWORK_GB_PER_S = (25.0, 40.0, 50.0, 60.0, 75.0, 100.0, 125.0, 150.0, 200.0, 300.0, 400.0)


def published_pair() -> dict[str, MeasuredRow]:
    """The two published layouts of DeepSeek-V3, the second one with and without the features that hide its all-to-alls."""
    row = row_of(EP32)

    def resolved(other_flags: str, recompute: str) -> MeasuredRow:
        fields = {**row.fields, "other_flags": other_flags, "recompute": recompute}
        return dataclasses.replace(row, fields=fields)

    return {
        "EP8 PP16": row_of(EP8),
        OVERLAPPED_NAME: resolved(OVERLAPPED, "selective:mla_up_proj,mlp"),
        "EP32 PP8 VP2, exposed": resolved(EXPOSED, "selective:mla_up_proj"),
    }


def predicted_pair() -> dict[str, MeasuredRun]:
    """Prepared."""
    rows = published_pair()
    return dict(zip(rows, prepared_runs(list(rows.values()), cache_folder()), strict=True))


def with_network(case: MeasuredRun, gb_per_s: float, release: str | None = None) -> MeasuredRun:
    """The run on a network of another rate, and under another release."""
    groups = tuple(dataclasses.replace(group, network_gb_per_s=gb_per_s) for group in case.cluster.groups)
    fields = case.row.fields if release is None else {**case.row.fields, "release": release}
    cluster = dataclasses.replace(case.cluster, groups=groups)
    return dataclasses.replace(case, row=dataclasses.replace(case.row, fields=fields), cluster=cluster)


def flip_frame(cases: dict[str, MeasuredRun]) -> pd.DataFrame:
    """Predicted seconds of a step by the network's rate for each GPU; one release for all."""
    release = cases["EP8 PP16"].row["release"]

    def step(case: MeasuredRun, rate: float) -> float:
        return with_network(case, rate, release).predict(shipped_constants()).predicted.step_seconds

    records = [
        {"network GB/s": rate, **{name: step(case, rate) for name, case in cases.items()}} for rate in NETWORK_GB_PER_S
    ]
    return pd.DataFrame(records)


def flip_rate(frame: pd.DataFrame, name: str) -> float:
    """The network's rate above which a layout is faster than EP8 inside the nodes; not a number where there is none."""
    rates, apart = frame["network GB/s"].to_numpy(), (frame[name] - frame["EP8 PP16"]).to_numpy()
    for low, high in zip(range(len(rates)), range(1, len(rates)), strict=False):
        if apart[low] > 0 >= apart[high]:
            return float(rates[low] + (rates[high] - rates[low]) * apart[low] / (apart[low] - apart[high]))
    return math.nan


def terms_frame(cases: dict[str, MeasuredRun]) -> pd.DataFrame:
    """The breakdown of each, and what was measured."""
    columns = {}
    for name, case in cases.items():
        prediction = case.predict(shipped_constants())
        terms = {term.removesuffix("_seconds"): seconds for term, seconds in prediction.breakdown.items()}
        step = prediction.predicted.step_seconds
        columns[name] = {**terms, "predicted step": step, "measured step": case.row.seconds}
    return pd.DataFrame(columns)


# The program


def main(argv: Sequence[str]) -> int:
    """Print tables, or JSON."""
    names = [published.name for published in PUBLISHED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but JSON")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[*names, RANKINGS, FLIP], help="may repeat")
    parser.add_argument("--time-limit", type=float, default=SECONDS, help="seconds of a search")
    arguments = parser.parse_args(argv)
    wanted = set(arguments.only or [*names, RANKINGS, FLIP])
    frames: dict[str, pd.DataFrame] = {}
    records = []
    for published in PUBLISHED:
        if published.name in wanted:
            begun = time.process_time()
            search = searched(published, arguments.time_limit)
            records.append(plan_record(published, search, time.process_time() - begun))
            print(f"{published.name}: {records[-1]['check']}", file=sys.stderr, flush=True)
    if records:
        frames["plans"] = pd.DataFrame(records).sort_values(["kind", "GPU", "name"])
        worst = frames["plans"].groupby(["kind", "GPU"])["published / found"].min()
        frames["worst of each group"] = worst.reset_index()
    if RANKINGS in wanted:
        frames[RANKINGS] = ranking_frame().sort_values(["kind", "GPU", "set"])
    if FLIP in wanted:
        cases = predicted_pair()
        frames["terms"] = terms_frame(cases).rename_axis("term").reset_index()
        frames[FLIP] = flip_frame(cases)
        flips = [{"layout": name, "faster above GB/s": flip_rate(frames[FLIP], name)} for name in list(cases)[1:]]
        frames["flip rates"] = pd.DataFrame(flips)
    if arguments.json:
        print(
            json.dumps({name: json.loads(frame.to_json(orient="records")) for name, frame in frames.items()}, indent=1)
        )
        return 0
    for name, frame in frames.items():
        print(f"{name}\n{frame.round(3).to_string(index=False)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
