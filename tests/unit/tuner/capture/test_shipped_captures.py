"""Captures that come with a wheel are read behind the cache, by their versions where torch is not installed; else one line."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest

from moe_overlap.describe.errors import ConfigError
from moe_overlap.tuner.capture import cache
from moe_overlap.tuner.capture import request as requests
from moe_overlap.tuner.capture.cache import CaptureFiles, cache_folder, save_captured
from tests.unit.tuner.capture.capture_cases import MOE, request
from tests.unit.tuner.capture.test_capture_files import captured
from tools import write_captures

FAR = (("torch", "9.9"), ("megatron-core", "0.99"))


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name in ("versions", "_shipped_versions"):
        monkeypatch.setattr(requests, name, getattr(requests, name).__wrapped__)


def test_a_shipped_capture_answers_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    for module in (requests, cache):
        monkeypatch.setattr(module, "SHIPPED", shipped)
    here = request(MOE).sha256()
    without_torch(monkeypatch)
    files = CaptureFiles(tmp_path / "cache")
    with pytest.raises(ConfigError) as caught:
        files.captures([request(MOE)])
    assert str(caught.value) == (
        "the model: no recording of its operators under this layout is shipped, and recording them needs torch and "
        "megatron-core; pip install 'megatron-moe-overlap[train]'"
    )
    shipped.mkdir()
    (shipped / requests.VERSIONS).write_text(json.dumps(dict(FAR)))
    key = request(MOE).sha256()
    assert requests.versions() == FAR and key != here
    save_captured(captured(key), shipped / f"{key}.json")
    assert files.captures([request(MOE)]) == [captured(key)]
    assert not (tmp_path / "cache").exists()
    # What the user's own machine recorded comes first.
    own = dataclasses.replace(captured(key), versions=FAR)
    save_captured(own, tmp_path / "cache" / f"{key}.json")
    assert CaptureFiles(tmp_path / "cache").captures([request(MOE)]) == [own]


def test_shipped_captures_are_replaced_when_all_models_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails leaves the earlier ones; while models are recorded these are out of sight, so that none answers."""
    shipped = tmp_path / "shipped"
    monkeypatch.setattr(write_captures, "SHIPPED", shipped)
    monkeypatch.setenv("XDG_CACHE_HOME", "")

    def record(name: str) -> None:
        assert not shipped.exists()
        if name == "wrong":
            raise RuntimeError(name)
        cache_folder().mkdir(parents=True, exist_ok=True)
        (cache_folder() / f"{name}.json").write_text(name)

    monkeypatch.setattr(write_captures, "record", record)
    assert write_captures.main(["first"]) == 0
    with pytest.raises(RuntimeError):
        write_captures.main(["second", "wrong"])
    assert {path.name for path in shipped.iterdir()} == {"first.json", requests.VERSIONS}
    assert write_captures.main(["second"]) == 0
    assert {path.name for path in shipped.iterdir()} == {"second.json", requests.VERSIONS}
    assert [*tmp_path.iterdir()] == [shipped]
