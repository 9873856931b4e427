"""Two ranks that start together with an empty cache read the same samples; a mistake of one is raised by both."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing import spawn

from megatron.training.cli.config import DataConfig
from megatron.training.data import sources as corpus
from megatron.training.data.datasets import Dataset, build_datasets
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.tokenizers import ByteTokenizer
from megatron.training.initialize import on_every_rank, on_first_rank
from moe_overlap.describe.errors import ConfigError


def message_of(work: object) -> str:
    try:
        work()  # type: ignore[operator]
    except (ConfigError, RuntimeError) as error:
        return str(error)
    return "no error"


def fail_on(rank: int, error: Exception) -> None:
    if dist.get_rank() == rank:
        raise error


def all_equal(value: object) -> bool:
    values: list[object] = [None, None]
    dist.all_gather_object(values, value)
    return values[0] == values[1]


def samples_of(dataset: Dataset | None, count: int) -> list[list[int]]:
    assert dataset is not None
    return [dataset[i]["tokens"].tolist() for i in range(count)]


def both_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    cache = f"{folder}/cache"

    library = Path(folder) / "library"
    corpus.standard_library_folder = lambda: library
    for _ in range(2):  # the second time from the cache
        made = build_datasets(
            DataConfig(split="8,2", data_cache_path=cache),
            ByteTokenizer(),
            sequence_length=32,
            seed=1,
            samples=(99, 9, 0),
        )
        assert "20 files" in made.source
        assert all_equal((samples_of(made.train, 99), samples_of(made.valid, 9), made.source))
    assert len(list(Path(cache).glob("*.idx"))) == 1 and not list(Path(cache).rglob("*partial*"))
    blend = DataConfig(data_path=("2", f"{folder}/a", "1", f"{folder}/b"), split="1", data_cache_path=cache)
    made = build_datasets(blend, ByteTokenizer(), sequence_length=8, seed=1, samples=(60, 0, 0))
    assert all_equal(samples_of(made.train, 60))
    assert not list(Path(cache).rglob("*.building-*"))

    mistake = ConfigError("--flag", 3, "rule", "fix")
    for guilty in (0, 1):
        assert message_of(lambda: on_every_rank(lambda: fail_on(guilty, mistake))) == str(mistake)  # noqa: B023
    assert message_of(lambda: on_first_rank(lambda: fail_on(0, mistake))) == str(mistake)
    told = message_of(lambda: on_first_rank(lambda: fail_on(0, RuntimeError("bug"))))
    assert told == ("bug" if rank == 0 else "another rank failed: RuntimeError: bug")
    assert on_first_rank(dist.get_rank) == 0 and on_every_rank(dist.get_rank) == rank
    # A file that only one node has: the other must not wait for it.
    one_node = DataConfig(
        data_path=(f"{folder}/{'ab'[rank] if rank else 'missing'}",), split="1", data_cache_path=cache
    )
    told = message_of(lambda: build_datasets(one_node, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0)))
    assert "missing.idx does not exist" in told
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / "library").mkdir(exist_ok=True)
        (tmp_path / "library" / f"{number}.py").write_text(f"# file {number}\n" * 30)
    for value, name in enumerate("ab"):
        with indexed_dataset(str(tmp_path / name), 257) as writer:
            for _ in range(50):
                writer.add_document([value] * 9)
    spawn(both_ranks, (str(tmp_path),), nprocs=2)
