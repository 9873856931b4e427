"""Datasets from files, blends, mock data and the built-in corpus; caches that survive a kill; batches of tensors."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.training.cli.config import DataConfig
from megatron.training.data import indexed
from megatron.training.data import sources as corpus
from megatron.training.data.datasets import BatchSampler, Dataset, _state, batches, build_datasets, unigram_entropy
from megatron.training.data.index_cache import _check_visible, build_with_cache
from megatron.training.data.indexed import indexed_dataset
from megatron.training.data.sources import DataSource, check_indexed_dataset
from megatron.training.data.tokenizers import ByteTokenizer, NullTokenizer
from megatron.training.data.watch import WatchedFiles
from moe_overlap.describe.errors import ConfigError

UNWATCHED = WatchedFiles([])


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one: megatron-core's blends ask for the rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 257) -> str:
    with indexed_dataset(str(prefix), vocab_size) as writer:
        for ids in documents:
            writer.add_document(ids)
    return str(prefix)


def numbered(prefix: Path, documents: int, value: int = 0) -> str:
    """Documents of 9 ids that show where a sample comes from."""
    return write(prefix, [[value] * 8 + [256] for _ in range(documents)])


def samples_of(dataset: Dataset | None) -> list[list[int]]:
    assert dataset is not None
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def sampler(total: int, consumed: int = 0) -> BatchSampler:
    return BatchSampler(
        total_samples=total, consumed_samples=consumed, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1
    )


def in_a_child_that_dies(work: Callable[[], None]) -> None:
    """Run `work` in a fork, which must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, numpy.uint16), (100_000, numpy.int32)])
def test_ids_survive_the_indexed_dataset(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    documents = [[1, 2, vocab_size - 1], [0], [], list(range(50))]
    dataset = IndexedDataset(write(tmp_path / "new" / "d", documents, vocab_size))
    assert [ids.tolist() for ids in dataset[0:3]] == [ids for ids in documents if ids]  # type: ignore[union-attr]
    assert dataset.index.dtype == dtype
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]


def test_a_failed_or_killed_writer_leaves_nothing_complete(tmp_path: Path) -> None:
    prefix = tmp_path / "d"

    def killed_while_writing() -> None:
        with indexed_dataset(str(prefix), 257) as writer:
            writer.add_document([1, 2, 3])
            os.kill(os.getpid(), signal.SIGKILL)

    def killed_while_publishing() -> None:
        def replace(self: Path, target: str) -> None:
            os.rename(self, target)  # noqa: PTH104
            os.kill(os.getpid(), signal.SIGKILL)

        Path.replace = replace  # type: ignore[assignment, method-assign]
        write(prefix, [[4, 5]])

    with pytest.raises(KeyError), indexed_dataset(str(prefix), 257) as writer:
        writer.add_document([1])
        raise KeyError
    assert not list(tmp_path.iterdir())
    for attempt in (killed_while_writing, killed_while_publishing):
        in_a_child_that_dies(attempt)
        with pytest.raises(ConfigError, match="does not exist"):
            check_indexed_dataset(str(prefix))
    write(prefix, [[7]])
    in_a_child_that_dies(killed_while_publishing)  # the new data must not be read with the old index
    with pytest.raises(ConfigError, match="does not exist"):
        check_indexed_dataset(str(prefix))


def test_parts_have_the_sizes_asked_for_and_share_no_document(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[i] * 8 + [256] for i in range(100)])
    flags = DataConfig(data_path=(prefix,), split="80,10,10", data_cache_path=str(tmp_path / "cache"))
    made = build_datasets(flags, ByteTokenizer(), sequence_length=16, seed=1, samples=(200, 20, 8))
    seen = [{i for s in samples_of(part) for i in s} - {256} for part in (made.train, made.valid, made.test)]
    assert len(made.train or ()) >= 200 and len(made.valid or ()) >= 20 and len(made.test or ()) >= 8
    assert seen[0] <= set(range(80)) and seen[1] <= set(range(80, 90)) and seen[2] <= set(range(90, 100))
    again = build_datasets(flags, ByteTokenizer(), sequence_length=16, seed=1, samples=(200, 20, 8))
    assert samples_of(again.train) == samples_of(made.train)
    other = build_datasets(flags, ByteTokenizer(), sequence_length=16, seed=2, samples=(200, 20, 0))
    assert samples_of(other.train) != samples_of(made.train)
    assert other.test is None
    assert "80/10/10 train/valid/test" in made.source


def test_a_rewritten_dataset_is_not_read_with_old_indices(tmp_path: Path) -> None:
    flags = DataConfig(data_path=(str(tmp_path / "d"),), split="1", data_cache_path=str(tmp_path / "cache"))
    for value in (1, 2):
        numbered(tmp_path / "d", 10 * value, value)
        made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))
        assert {i for s in samples_of(made.train) for i in s} == {value, 256}
        assert len(made.train or ()) == (10 * value * 9 - 1) // 8


def test_indices_of_earlier_releases_are_found() -> None:
    """The key of cached indices has the field names of earlier releases."""
    assert _state(DataSource()) == [{"whole": None, "parts": None}, []]


def test_a_kill_while_indices_are_written_harms_no_later_run(tmp_path: Path) -> None:
    numbered(tmp_path / "d", 20)
    flags = DataConfig(data_path=(str(tmp_path / "d"),), split="1", data_cache_path=str(tmp_path / "cache"))

    def killed_while_saving() -> None:
        def save(path: str, array: numpy.ndarray, **_: object) -> None:
            Path(path).write_bytes(b"half")
            if "shuffle" in path:
                os.kill(os.getpid(), signal.SIGKILL)

        numpy.save = save  # type: ignore[assignment]
        build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))

    in_a_child_that_dies(killed_while_saving)
    assert [path.suffix.startswith(".building-") for path in (tmp_path / "cache" / "indices").iterdir()] == [True]
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))
    assert len(samples_of(made.train)) >= 5
    assert sum(not p.suffix for p in (tmp_path / "cache" / "indices").iterdir()) == 1


def test_abandoned_indices_are_removed_after_a_day(tmp_path: Path) -> None:
    numbered(tmp_path / "d", 20)
    flags = DataConfig(data_path=(str(tmp_path / "d"),), split="1", data_cache_path=str(tmp_path / "cache"))
    old, fresh = (tmp_path / "cache" / "indices" / f"x.building-{age}" for age in ("old", "fresh"))
    for folder in (old, fresh):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))
    assert fresh.exists() and not old.exists()


def test_blend_weights(tmp_path: Path, one_rank: None) -> None:
    prefixes = [numbered(tmp_path / f"d{value}", 40, value) for value in (1, 2)]
    cache = str(tmp_path / "cache")
    flags = DataConfig(data_path=("3", prefixes[0], "1", prefixes[1]), split="9,1", data_cache_path=cache)
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(200, 4, 0))
    first = [1 in s for s in samples_of(made.train)[:200]]
    assert abs(sum(first) / 200 - 0.75) < 0.01
    assert 1 in samples_of(made.valid)[0]
    batch = next(batches(made.train, sampler(200), num_workers=0, seed=1, vocab_size=257, files=UNWATCHED))  # type: ignore[arg-type]
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}

    once = DataConfig(data_path=tuple(prefixes), split="1", data_cache_path=cache)
    made = build_datasets(once, ByteTokenizer(), sequence_length=8, seed=1, samples=(60, 0, 0))
    assert len(made.train or ()) == 60
    with pytest.raises(ConfigError, match=r"read once: \d+ train samples, the run needs 1000"):
        build_datasets(once, ByteTokenizer(), sequence_length=8, seed=1, samples=(1000, 0, 0))


def test_a_blend_for_each_part(tmp_path: Path, one_rank: None) -> None:
    prefixes = [numbered(tmp_path / f"d{value}", 40, value) for value in (1, 2, 3)]
    flags = DataConfig(
        train_data_path=("3", prefixes[0], "1", prefixes[1]),
        valid_data_path=(prefixes[2],),
        data_cache_path=str(tmp_path / "cache"),
    )
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(200, 4, 4))
    first = [1 in s for s in samples_of(made.train)[:200]]
    assert abs(sum(first) / 200 - 0.75) < 0.01 and not any(3 in s for s in samples_of(made.train))
    assert {i for s in samples_of(made.valid) for i in s} == {3, 256} and len(made.valid or ()) >= 4
    assert made.test is None  # it has no path
    assert made.source == f"train 3 {prefixes[0]} 1 {prefixes[1]}, valid {prefixes[2]}, ByteTokenizer"
    numbered(tmp_path / "d3", 80, 4)  # rewritten: old indices must not be read
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(200, 4, 4))
    assert {i for s in samples_of(made.valid) for i in s} == {4, 256} and len(made.valid or ()) == (80 * 9 - 1) // 8
    alone = DataConfig(valid_data_path=(prefixes[0],), data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="--train-data-path: is missing"):
        build_datasets(alone, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 5, 0))
    with pytest.raises(ConfigError, match="holds token id 256, the vocabulary has 100 ids"):
        build_datasets(flags, NullTokenizer(100), sequence_length=8, seed=1, samples=(5, 5, 0))


def test_mock_data(tmp_path: Path) -> None:
    flags = DataConfig(mock_data=True, split="99,1,0", data_cache_path=str(tmp_path), reset_attention_mask=True)
    made = build_datasets(flags, NullTokenizer(500), sequence_length=32, seed=1, samples=(100, 10, 10))
    assert made.train is not None and made.valid is not None and made.test is None
    assert len(made.train.indices) == 99_000 and len(made.valid.indices) == 1000
    batch = next(batches(made.train, sampler(100), num_workers=0, seed=1, vocab_size=500, files=UNWATCHED))
    assert batch["tokens"].shape == (2, 32) and batch["attention_mask"].shape == (2, 1, 32, 32)
    with pytest.raises(ConfigError, match="--mock-data: is set together with --data-path"):
        build_datasets(
            DataConfig(mock_data=True, data_path=("x",)), NullTokenizer(9), sequence_length=8, seed=1, samples=(1, 0, 0)
        )


def test_batches_resume_and_leave_the_global_generator_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[i, *range(30), 256] for i in range(60)])
    flags = DataConfig(
        data_path=(prefix,),
        split="1",
        data_cache_path=str(tmp_path),
        eod_mask_loss=True,
        reset_position_ids=True,
    )
    made = build_datasets(flags, ByteTokenizer(), sequence_length=24, seed=1, samples=(40, 0, 0)).train
    assert made is not None
    state = torch.get_rng_state()
    whole = list(batches(made, sampler(40), num_workers=0, seed=1, vocab_size=257, files=UNWATCHED))
    resumed = list(batches(made, sampler(40, 14), num_workers=0, seed=1, vocab_size=257, files=UNWATCHED))
    by_worker = list(batches(made, sampler(40, 14), num_workers=1, seed=1, vocab_size=257, files=UNWATCHED))
    assert torch.equal(state, torch.get_rng_state())
    assert len(whole) == 20 and len(resumed) == len(by_worker) == 13
    for expected, one, other in zip(whole[7:], resumed, by_worker, strict=True):
        for key, value in expected.items():
            assert torch.equal(value, one[key]) and torch.equal(value, other[key])
    tokens, labels = whole[0]["tokens"], whole[0]["labels"]
    assert tokens.dtype == labels.dtype == torch.int64 and whole[0]["loss_mask"].dtype == torch.float32
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert torch.equal(whole[0]["loss_mask"] == 0, tokens == 256)
    assert all((b["position_ids"][:, 1:][b["tokens"][:, :-1] == 256] == 0).all() for b in whole)


@pytest.mark.parametrize(
    ("documents", "split", "samples", "message"),
    [
        (3, "969,30,1", (5, 5, 0), r"--split 969,30,1: leaves no text of .*d \(3 documents\) for validation"),
        (1, "969,30,1", (5, 5, 0), r"\(1 document\) for validation; .* --txt-documents line .* --eval-iters 0$"),
        (3, "0,1,1", (5, 0, 0), "leaves nothing for training"),
    ],
)
def test_a_part_without_text(
    tmp_path: Path, documents: int, split: str, samples: tuple[int, int, int], message: str
) -> None:
    prefix = numbered(tmp_path / "d", documents)
    flags = DataConfig(data_path=(prefix,), split=split, data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=message):
        build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=samples)


def test_a_dataset_of_another_vocabulary(tmp_path: Path) -> None:
    prefix = numbered(tmp_path / "d", 9)
    flags = DataConfig(data_path=(prefix,), split="1", data_cache_path=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="holds token id 256, the vocabulary has 100 ids"):
        build_datasets(flags, NullTokenizer(100), sequence_length=8, seed=1, samples=(5, 0, 0))
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(6, 0, 0)).train
    with pytest.raises(ConfigError, match=f"{prefix}: holds token id 256"):
        next(batches(made, sampler(6), num_workers=0, seed=1, vocab_size=100, files=UNWATCHED))  # type: ignore[arg-type]


def test_a_batch_names_the_dataset_of_a_blend_that_is_of_another_vocabulary(tmp_path: Path, one_rank: None) -> None:
    for name, ids in (("low", 5), ("high", 200)):
        with indexed_dataset(str(tmp_path / name), 257) as writer:
            for _ in range(9):
                writer.add_document([ids] * 9)
    blend = ("1", str(tmp_path / "low"), "1", str(tmp_path / "high"))
    flags = DataConfig(data_path=blend, split="1", data_cache_path=str(tmp_path / "cache"))
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(6, 0, 0)).train
    with pytest.raises(
        ConfigError, match=f"--data-path {tmp_path}/high: holds token id 200, the vocabulary has 100 ids"
    ):
        for _ in batches(made, sampler(6), num_workers=0, seed=1, vocab_size=100, files=UNWATCHED):  # type: ignore[arg-type]
            pass


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = DataConfig(mock_data=True, data_cache_path=str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="--data-cache-path .*cannot be written"):
        build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))


def test_the_builtin_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "lib"
    for name in ("a.py", "b/c.py", "site-packages/d.py", "e.txt", "empty.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("" if name == "empty.py" else f"# {name} ä\n")
    (root / "latin.py").write_bytes(b"# coding: latin-1\n# \xe4\n")
    (root / "broken.py").write_bytes(b"# \xff\xff\n")
    texts = list(corpus.builtin_corpus_documents(root))
    assert sorted(texts) == ["# a.py ä\n", "# b/c.py ä\n", "# coding: latin-1\n# ä\n"]
    assert corpus.summarize_corpus(root).files == 3
    assert corpus.summarize_corpus(root).text_bytes == sum(len(t.encode()) for t in texts)

    monkeypatch.setattr(corpus, "standard_library_folder", lambda: root)
    flags = DataConfig(split="1", data_cache_path=str(tmp_path / "cache"))
    made = build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))
    assert "Python standard library, 3 files" in made.source
    (prefix,) = [str(p)[:-4] for p in (tmp_path / "cache").glob("*.idx")]
    dataset = IndexedDataset(prefix)  # kept: its arrays die with it
    assert [ByteTokenizer().detokenize(ids) for ids in dataset[0:3]] == texts  # type: ignore[union-attr]

    def must_not_write(*_: object) -> None:
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(indexed, "indexed_dataset", must_not_write)
        build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))
    Path(prefix + ".bin").write_bytes(b"torn")
    build_datasets(flags, ByteTokenizer(), sequence_length=8, seed=1, samples=(5, 0, 0))
    assert len(list((tmp_path / "cache").glob("*.idx"))) == 1


def test_two_jobs_prepare_the_corpus_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one never takes away what the faster one has published, and reads the same."""
    cache, published = tmp_path / "cache", list[str]()
    documents, rename, unlink = corpus.builtin_corpus_documents, Path.replace, Path.unlink
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("# text\n")
    monkeypatch.setattr(corpus, "standard_library_folder", lambda: tmp_path / "lib")

    def prepare() -> str:
        return indexed.prepare_builtin_corpus(cache, ByteTokenizer(), lambda work: work()).prefix

    def overtaken() -> Iterator[str]:
        """The second job begins and ends while the first one writes."""
        monkeypatch.setattr(indexed, "builtin_corpus_documents", documents)
        published.append(prepare())
        yield from documents()

    def still_there() -> None:
        for prefix in published:
            assert check_indexed_dataset(prefix).sequences == 1

    def watched_replace(path: Path, target: str) -> Path:
        done = rename(path, target)
        still_there()
        return done

    def watched_unlink(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        still_there()

    monkeypatch.setattr(Path, "replace", watched_replace)
    monkeypatch.setattr(Path, "unlink", watched_unlink)
    monkeypatch.setattr(indexed, "builtin_corpus_documents", overtaken)
    assert [prepare()] == published
    assert len(list(cache.iterdir())) == 2


def test_the_running_interpreter_has_a_corpus_worth_training_on() -> None:
    text_bytes = 0
    for text in corpus.builtin_corpus_documents():
        text_bytes += len(text)
        if text_bytes > 5e6:
            return
    pytest.fail(f"only {text_bytes} bytes of sources under {corpus.standard_library_folder()}")


def test_unigram_entropy(tmp_path: Path) -> None:
    assert unigram_entropy(numpy.array([0, 1, 2, 3] * 5)) == pytest.approx(math.log(4))
    assert unigram_entropy(numpy.array([7])) == 0
    prefix = write(tmp_path / "d", [[1, 2], [3], [4, 4, 4, 4]])
    flags = DataConfig(data_path=(prefix,), split="1", data_cache_path=str(tmp_path))
    made = build_datasets(flags, ByteTokenizer(), sequence_length=2, seed=1, samples=(50, 0, 0)).train
    expected = 3 / 7 * math.log(7) + 4 / 7 * math.log(7 / 4)
    assert unigram_entropy(made) == pytest.approx(expected)  # type: ignore[arg-type]
    assert unigram_entropy(made, max_tokens=2) == pytest.approx(math.log(2))  # type: ignore[arg-type]


def test_every_rank_must_see_the_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the same folder on every node"):
        _check_visible(tmp_path / "elsewhere")


def test_the_order_of_a_text_has_a_name(tmp_path: Path) -> None:
    """A longer run keeps the order within an epoch, and megatron-core shuffles anew for another number of epochs."""
    prefix = write(tmp_path / "d", [[number, *range(100, 149)] for number in range(40)])

    def order(samples: int, seed: int = 1) -> str:
        flags = DataConfig(data_path=(prefix,), data_cache_path=str(tmp_path / "cache"), split="1")
        return build_datasets(flags, ByteTokenizer(), sequence_length=32, seed=seed, samples=(samples, 0, 0)).order

    assert order(10) == order(60) != order(100)
    assert order(10, seed=2) != order(10)


def test_indices_of_a_slower_job_go_when_nobody_reads_them(tmp_path: Path) -> None:
    """Files that other machines have mapped are gone on NFS when they are deleted: all read those of the faster job first."""
    folder, read = tmp_path / "indices", list[tuple[str, list[str]]]()

    class Builder:
        config = SimpleNamespace(path_to_cache="")

        def build(self) -> list[None]:
            folder.mkdir(exist_ok=True)  # by another job, while this one builds
            (folder / "index").touch()
            (folder / "sums.json").write_text('{"index": [0, 0]}')
            read.append((self.config.path_to_cache, sorted(path.name for path in tmp_path.iterdir())))
            return [None]

    builder: Any = Builder()
    assert build_with_cache(builder, folder) == (None,)
    (own, _), (published, there) = read
    assert published == str(folder) and Path(own).name in there, "read while its own files are still there"
    assert [path.name for path in tmp_path.iterdir()] == ["indices"]
