"""Who may import whom, read from the source; and a foreign `megatron.training` in front of ours is told from it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("moe_overlap", "megatron.training", "pretrain_moe", "tools", "tests")
TUNER = ("moe_overlap.describe", "moe_overlap.plan", "moe_overlap.tuner")
SEARCH = ("moe_overlap.api", "moe_overlap.job", "moe_overlap.host_launches", "moe_overlap.plan_search")
ALLOWED = {
    "moe_overlap/describe": ("moe_overlap.describe",),
    "moe_overlap/plan": ("moe_overlap.describe", "moe_overlap.plan"),
    "megatron/training": ("moe_overlap.describe", "moe_overlap.plan", "megatron.training"),
    "moe_overlap/runtime": ("moe_overlap.describe", "moe_overlap.plan", "moe_overlap.runtime"),
    "moe_overlap/tuner": TUNER,
    "moe_overlap/tuner/profile/measure": ("moe_overlap.tuner.profile",),
    "moe_overlap/tuner/capture": (*TUNER, "megatron.training"),
    "moe_overlap/tuner/calibrate/fit": (*TUNER, "moe_overlap.job"),
    "moe_overlap/report": (*TUNER, "moe_overlap.plan_search.results", "moe_overlap.report"),
    "moe_overlap/plan_search": (*TUNER, *SEARCH, "megatron.training"),
    "moe_overlap/commands": ("moe_overlap", "megatron.training"),
    "tools": ("tools.bench", "moe_overlap", "megatron.training"),
}
"""Folder -> what its files may import of ours; a folder inside another has its own rule."""
DEEPEST = 32
"""Modules on the longest chain of imports; a change lowers it, or keeps it."""
STANDARD_LIBRARY_ONLY = ("moe_overlap/describe", "moe_overlap/plan")
WITHOUT_TORCH = ("moe_overlap/tuner", "moe_overlap/tuner/calibrate/fit")
"""Folders without torch and megatron-core; one inside has its own rule."""


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module a file imports, wherever the statement stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from a import b`: b may be a module of a.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden(folder: str, source: str) -> list[str]:
    found = []
    for name in imported(ast.parse(source), folder.replace("/", ".")):
        ours = any(name == root or name.startswith(f"{root}.") for root in OURS)
        allowed = any(name == root or name.startswith(f"{root}.") for root in ALLOWED[folder])
        outside = folder in STANDARD_LIBRARY_ONLY and name.partition(".")[0] not in sys.stdlib_module_names
        outside |= folder in WITHOUT_TORCH and name.partition(".")[0] in ("torch", "megatron")
        if not allowed and (ours or outside):
            found.append(name)
    return found


@pytest.mark.parametrize("folder", [folder for folder in ALLOWED if (ROOT / folder).is_dir()])
def test_import_rule(folder: str) -> None:
    inner = [ROOT / other for other in ALLOWED if other.startswith(f"{folder}/")]
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if not any(path.is_relative_to(i) for i in inner)]
    assert files
    found = {str(path.relative_to(ROOT)): forbidden(folder, path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("moe_overlap/describe", "import torch"),
        ("moe_overlap/describe", "from moe_overlap.plan import lower"),
        ("moe_overlap/plan", "def f():\n    import numpy"),
        ("moe_overlap/plan", "from megatron.core import parallel_state"),
        ("megatron/training", "from moe_overlap.runtime.spans import Span"),
        ("megatron/training", "from moe_overlap import tuner"),
        ("megatron/training", "import pretrain_moe"),
        ("tools", "from tools.first_run import go"),
        ("moe_overlap/runtime", "from megatron.training.cli.config import Config"),
        ("moe_overlap/runtime", "from megatron import training"),
        ("moe_overlap/runtime", "from ..tuner import search"),
        ("moe_overlap/tuner", "def f():\n    import torch"),
        ("moe_overlap/tuner", "from megatron.training.model.build import build_model"),
        ("moe_overlap/tuner/capture", "from moe_overlap.runtime.groups import build_groups"),
        ("moe_overlap/tuner/profile/measure", "from megatron.training.model.build import build_model"),
        ("moe_overlap/commands", "from tools.bench.bed import Bed"),
        ("moe_overlap/tuner", "from moe_overlap.api import predict"),
        ("moe_overlap/tuner", "from megatron.training.cli.config import Config"),
        ("moe_overlap/tuner", "from moe_overlap.job import read_job"),
        ("moe_overlap/tuner/calibrate/fit", "from tests.validation.table import main"),
        ("moe_overlap/tuner/calibrate/fit", "from moe_overlap.api import predict"),
        ("moe_overlap/tuner/calibrate/fit", "import torch"),
        ("moe_overlap/report", "from moe_overlap.api import predict"),
        ("moe_overlap/report", "from megatron.training.cli.arguments import expand_files"),
        ("moe_overlap/report", "from moe_overlap.runtime.spans import Recorder"),
    ],
)
def test_the_rule_can_be_broken(folder: str, line: str) -> None:
    assert forbidden(folder, line)


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("moe_overlap/plan", "import json, dataclasses\nfrom moe_overlap.describe.errors import ConfigError"),
        ("megatron/training", "import torch\nfrom megatron.core import parallel_state"),
        ("moe_overlap/tuner/profile/measure", "import torch"),
        ("moe_overlap/runtime", "import torch\nfrom megatron.core.transformer.moe.moe_layer import MoELayer"),
    ],
)
def test_what_the_rule_allows(folder: str, line: str) -> None:
    assert forbidden(folder, line) == []


FIT = "moe_overlap.tuner.calibrate.fit"


def test_no_product_code_imports_the_fit() -> None:
    """The fit reads rows as jobs and stands above job.py: an import of it by the tuner would close a circle."""
    importers = []
    for folder in ("moe_overlap", "megatron/training", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT)
            names = imported(ast.parse(path.read_text()), ".".join(place.parent.parts))
            if not place.is_relative_to(FIT.replace(".", "/")) and any(name.startswith(FIT) for name in names):
                importers.append(str(place))
    assert importers == []


BRIDGES = {f"moe_overlap/{name}.py" for name in ("api", "job", "plan_search/flags", "plan_search/task")}
"""The files outside of commands and `tuner/capture` that import both `megatron.training` and the tuner."""


def test_no_other_file_is_a_bridge() -> None:
    both = set()
    for path in sorted((ROOT / "moe_overlap").rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.is_relative_to("moe_overlap/commands") or place.is_relative_to("moe_overlap/tuner/capture"):
            continue
        names = list(imported(ast.parse(path.read_text()), ".".join(place.parent.parts)))
        if all(any(name.startswith(root) for name in names) for root in ("megatron.training", "moe_overlap.tuner")):
            both.add(str(place))
    assert both == BRIDGES


def flags_in(source: str) -> list[str]:
    """String literals that begin like a flag; one inside a sentence is no composed flag."""
    texts = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return [text for text in texts if isinstance(text, str) and re.match(r"\s*--[a-z]", text)]


def test_a_search_transforms_plans_and_composes_no_flags() -> None:
    assert flags_in('words = [*own, "--moe-overlap-range", f"--moe-gate {gate}"]') == [
        "--moe-overlap-range",
        "--moe-gate ",
    ]
    files = sorted((ROOT / "moe_overlap/tuner/search").rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): flags_in(path.read_text()) for path in files}
    assert {path: flags for path, flags in found.items() if flags} == {}


def modules() -> dict[str, Path]:
    """Every module of ours outside of tests, by its name."""
    paths = [path for folder in ("moe_overlap", "megatron/training", "tools") for path in (ROOT / folder).rglob("*.py")]
    names = {path: [*path.relative_to(ROOT).with_suffix("").parts] for path in [*paths, ROOT / "pretrain_moe.py"]}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports, at its top or later; not those of annotations alone."""
    paths = modules()
    graph = {}
    for module, path in paths.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        # `from module import name`: the module is imported unless the name is one itself.
        names = (name if name in paths else name.rpartition(".")[0] for name in imported(tree, package))
        graph[module] = {name for name in names if name in paths and name != module}
    return graph


def depths(graph: dict[str, set[str]]) -> dict[str, int]:
    """Modules on the longest chain of imports that begins at each; CycleError where some import each other."""
    lengths: dict[str, int] = {}
    for module in TopologicalSorter(graph).static_order():
        lengths[module] = 1 + max((lengths[name] for name in graph[module]), default=0)
    return lengths


def test_no_modules_import_each_other_and_chains_stay_short() -> None:
    assert depths({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": 3, "b": 2, "c": 1}
    with pytest.raises(CycleError):
        depths({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    lengths = depths(import_graph())
    assert len(lengths) > 300 and max(lengths.values()) <= DEEPEST, max(lengths, key=lengths.__getitem__)


def test_reports_are_a_leaf() -> None:
    importers = {
        module
        for module, names in import_graph().items()
        if any(name.startswith("moe_overlap.report") for name in names)
        and not module.startswith(("moe_overlap.report", "moe_overlap.commands.", "tools."))
    }
    assert importers == {"moe_overlap.results"}


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_nothing_reads_parallel_state() -> None:
    """The scratch buffer of initialize.py is the one exception."""
    uses = []
    for folder in ("megatron/training", "moe_overlap"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("parallel_state", "mpu"):
                    uses.append((path.name, node.attr))
    assert set(uses) == {
        ("initialize.py", "_GLOBAL_MEMORY_BUFFER"),
        ("initialize.py", "_set_global_memory_buffer"),
    }


AT_HOME = ("tools.bench.worker", "tools.bench.padded_ranks")
"""Modules that are started in the project's own folder (tools/bench/launch.py)."""


def started_modules(source: str) -> Iterator[tuple[str, bool]]:
    """Modules that a command line starts by name, and whether it keeps the working directory off their path."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
            words = [word.value if isinstance(word, ast.Constant) else None for word in node.elts]
            if "-m" in words:
                yield str(words[words.index("-m") + 1]), "-P" in words[: words.index("-m")]


def test_no_process_imports_from_the_folder_that_the_user_works_in() -> None:
    """Python looks for modules there first when it is started by `-m`: a torch.py in it would be executed."""
    assert list(started_modules('run([sys.executable, "-m", "a.b", "-P"])')) == [("a.b", False)]
    assert list(started_modules('run([sys.executable, "-P", "-m", "a.b"])')) == [("a.b", True)]
    found = set()
    for folder in ("moe_overlap", "megatron/training", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found |= {(module, safe) for module, safe in started_modules(path.read_text()) if module not in AT_HOME}
    assert {"moe_overlap.tuner.capture", "moe_overlap.tuner.profile.measure"} <= {module for module, _ in found}
    assert [module for module, safe in found if not safe] == []


FOREIGN = {
    "a package without our mark": {"__init__.py": "", "arguments.py": "def parse(argv):\n    raise SystemExit(99)\n"},
    "a later wheel's package": {"__init__.py": "from .training import pretrain\n", "training.py": "pretrain = 1\n"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=list(FOREIGN))
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_foreign_megatron_training_is_refused(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    # The script's own folder comes first on the path; behind -c nothing does.
    program = (
        f"import sys; sys.path.insert(1, {str(ROOT)!r}); import runpy; sys.argv = {['pretrain_moe.py', *words]!r}; "
    )
    program += f"runpy.run_path({str(ROOT / 'pretrain_moe.py')!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"error: megatron.training {folder / '__init__.py'}: belongs to another package; install megatron-core==0.16.1\n"
    )


def test_a_public_class_name_is_borne_once() -> None:
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
