"""`--gpu` in any case, the nearest names of an unknown GPU, and `--list-gpus` of the tools that predict and tune."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_overlap.commands import autotune, predict
from moe_overlap.describe.cluster import known_gpus, shipped_cluster
from moe_overlap.describe.errors import ConfigError


def test_a_gpu_is_known_in_any_case_by_name_and_by_alias() -> None:
    assert shipped_cluster("h100", 16) == shipped_cluster("H100", 16)
    assert shipped_cluster("a100-pcie", 8) == shipped_cluster("A100-PCIe", 8)
    lower = {name.lower() for name in known_gpus()}
    assert len(lower) == len(known_gpus()), "names that differ in their case alone are ambiguous"


def test_the_nearest_names_are_suggested_once() -> None:
    with pytest.raises(ConfigError) as error:
        shipped_cluster("gb2000", 8)
    assert str(error.value).startswith("--gpu gb2000: unknown GPU; did you mean GB200")
    with pytest.raises(ConfigError) as error:
        shipped_cluster("Voodoo", 8)
    assert str(error.value).startswith("--gpu Voodoo: unknown GPU; --list-gpus prints the known ones; ")


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("V100", "V100-16GB or V100-32GB"),
        ("mi300x", "MI355X, MI325X or B300"),
        ("a100-", "A100-80GB or A100-PCIe?"),
    ],
)
def test_a_beginning_names_its_variants(name: str, variants: str) -> None:
    with pytest.raises(ConfigError) as error:
        shipped_cluster(name, 8)
    assert f"did you mean {variants}" in str(error.value)


@pytest.mark.parametrize("main", [autotune.main, predict.main])
def test_the_list_is_printed_whatever_else_is_missing(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--list-gpus"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    names = {row["name"] for row in known_gpus().values()}
    assert {line.split("  ")[0] for line in lines[1 : lines.index("")]} == names
    assert lines[0].split() == "GPU bf16 fp8 fp4 GiB node NVLink network calibrated also called".split()
    assert next(line for line in lines if line.startswith("B200 ")).split()[1:5] == ["2250", "4500", "9000", "180"]
