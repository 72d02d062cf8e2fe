"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import json
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tifffile
import torch

from conf.mistakes import Mistake
from loaders import ahead, bucket, build_loaders, shard_index
from loaders.bucket import STALL_S
from loaders.check import check
from loaders.index import BadFileError
from loaders.layouts import build_index
from loaders.pack import pack
from loaders.pack_shards import LOSSLESS, Part, pack_shards, part_of
from loaders.shards import Shards
from loaders.storage import Folder, StorageError
from loaders.targets import Labels
from loaders.turns import TurnDataset, TurnSampler
from loaders.window import fetch_ahead, in_windows
from tests.helpers import checkpoint_of, fork, make_config, train
from tests.servers import WebServer, web_server
from tests.test_bad_data import make_photos
from tests.test_datasets import save, smooth
from tests.test_masks import IGNORED, scene

CPU, WHOLE = torch.device("cpu"), Part(1, 1)
WAYS = {
    "threads": ["loader=pytorch"],
    "workers": ["loader=pytorch", "loader.num_workers=2"],
    "dali": ["loader=dali"],
}


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """A web server that is asked again soon."""
    monkeypatch.setattr(bucket, "FIRST_PAUSE_S", 0.02)
    with web_server() as server:
        yield server


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory) -> dict[str, list[str]]:
    """Of each kind of targets a small data set, and the overrides that read it."""
    root = tmp_path_factory.mktemp("data")
    make_photos(root / "labels", 40)
    lines = {"several": ["path,label"], "numbers": ["path,age,size"]}
    for number in range(20):
        image = smooth(number, 50 + number % 4, 64)
        save(root / "images" / f"{number}.{('jpg', 'png', 'webp')[number % 3]}", image)
        name = f"{number}.{('jpg', 'png', 'webp')[number % 3]}"
        lines["several"].append(f"{name},{('cat;dog', 'dog', 'cow', ';')[number % 4]}")
        lines["numbers"].append(f"{name},{number / 4},{-number}")
        save(root / "pairs" / "input" / "a" / f"{number}.png", image)
        save(
            root / "pairs" / "target" / "a" / f"{number}.jpg", smooth(number + 1, *image.shape[:2])
        )
        picture, mask = scene(number)
        save(root / "masks" / "images" / f"{number}.png", picture)
        save(root / "masks" / "masks" / f"{number}.png", mask)
        folder = root / "cells" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 65536, (20, 22, 5), dtype=np.uint16)
        tifffile.imwrite(
            folder / f"{number}.tif", pixels, photometric="minisblack", planarconfig="contig"
        )
    for kind, rows in lines.items():
        (root / f"{kind}.csv").write_text("\n".join(rows))
    photo = ["data.resize=null", "data.crop=[40,40]", "data.random_crop=true", "data.hflip=0.5"]
    table = ["data=table", f"data.root={root / 'images'}", *photo]
    return {
        "labels": ["data=imagefolder", f"data.root={root / 'labels'}", *photo],
        "several": [*table, f"data.table={root / 'several.csv'}"],
        "numbers": [*table, f"data.table={root / 'numbers.csv'}", "data.label_columns=[age,size]"],
        "images": ["data=pairs", f"data.root={root / 'pairs'}", *photo],
        "masks": [
            "data=masks",
            f"data.root={root / 'masks'}",
            f"data.ignore_index={IGNORED}",
            *photo,
        ],
        "cells": [
            "data=cells",
            f"data.root={root / 'cells'}",
            "data.mean=[0.5]",
            "data.std=[0.25]",
        ],
    }


def options_of(overrides: list[str], tmp_path: Path, *more: str) -> list[str]:
    common = ["data.val_count=6", "global_batch_size=4", f"data.cache_dir={tmp_path / 'cache'}"]
    return [*overrides, *common, *more]


def packed(options: list[str], out: Path, shard_mb=0.02, part=WHOLE, quality=None) -> list[str]:
    """The options, with the data in shards."""
    pack_shards(make_config(*options).data, str(out), shard_mb, part, quality)
    return [*options, f"data.root={out}"]


def epoch_of(loader, epoch: int = 0) -> list[tuple[list[str], torch.Tensor, torch.Tensor]]:
    """Of each batch the files, inputs and targets."""
    loader.set_epoch(epoch)
    names = lambda: [Path(name).name for name in loader.names(loader.last_rows)]  # noqa: E731
    return [(names(), inputs.clone(), targets.clone()) for inputs, targets in loader]


def assert_equal(one: list, other: list) -> None:
    assert len(one) == len(other) > 0
    for (names, *tensors), (other_names, *others) in zip(one, other, strict=True):
        assert names == other_names
        assert all(map(torch.equal, tensors, others))


@pytest.mark.parametrize("kind", ["labels", "several", "numbers", "images", "masks", "cells"])
def test_shards_give_the_batches_that_the_files_gave(kind: str, data_sets, tmp_path: Path) -> None:
    """In the same order, to the bit, by every backend; a run may even go on from the one on the other."""
    options = options_of(data_sets[kind], tmp_path)
    sharded = packed(options, tmp_path / "shards")
    for way in ("threads", "dali"):
        files = build_loaders(make_config(*options, *WAYS[way]), CPU)
        shards = build_loaders(make_config(*sharded, *WAYS[way]), CPU)
        for one, other in zip(files, shards, strict=True):
            assert other.index.shards
            assert len(other.index.shards.starts) > 2 or other is shards[1]
            assert_equal(epoch_of(one, 1), epoch_of(other, 1))
        assert files[0].state_dict() == shards[0].state_dict()
    workers = build_loaders(make_config(*sharded, *WAYS["workers"]), CPU)[0]
    threads = build_loaders(make_config(*sharded, *WAYS["threads"]), CPU)[0]
    assert_equal(epoch_of(workers), epoch_of(threads))


def read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file
    return file.read()


def test_shards_are_tar_files_that_other_tools_read(data_sets, tmp_path: Path) -> None:
    """As WebDataset names them: what stands before the first dot is the sample's."""
    options = options_of(data_sets["labels"], tmp_path)
    index = build_index(make_config(*packed(options, tmp_path / "labels")).data)[0]
    seen = {}
    for path in sorted((tmp_path / "labels" / "train").iterdir()):
        assert path.stat().st_size < 60_000
        with tarfile.open(path) as tar:
            files = tar.getmembers()
            for image, label in zip(files[::2], files[1::2], strict=True):
                key = image.name.removesuffix(".jpg")
                assert label.name == f"{key}.cls"
                seen[int(key)] = read(tar, image.name), int(read(tar, label.name))
    assert sorted(seen) == list(range(len(index)))
    for sample, (content, number) in seen.items():
        source = Path(data_sets["labels"][1].partition("=")[2], index.files[0][sample])
        assert content == source.read_bytes() == bytes(index.content(sample, 0))
        assert isinstance(index.target, Labels)
        assert number == index.target.values[sample]
    for kind, endings, labels in [
        ("images", {"input.png", "target.jpg"}, {}),
        ("numbers", {"jpg", "png", "webp", "json"}, {"age": 1.75, "size": -7.0}),
        ("several", {"jpg", "png", "webp", "json"}, []),
    ]:
        index = build_index(
            make_config(*packed(options_of(data_sets[kind], tmp_path), tmp_path / kind)).data
        )[0]
        members: dict[str, bytes] = {}
        for path in (tmp_path / kind / "train").iterdir():
            with tarfile.open(path) as tar:
                members |= {name: read(tar, name) for name in tar.getnames()}
        assert {name.partition(".")[2] for name in members} == endings
        assert len(members) == 2 * len(index)
        if "json" in endings:
            [sample] = [i for i, name in enumerate(index.files[0]) if Path(name).stem == "7"]
            assert json.loads(members[f"{sample:09d}.json"]) == labels


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_parts_make_what_one_makes_however_often_they_are_killed(
    data_sets, tmp_path: Path, capsys
) -> None:
    options = options_of(data_sets["labels"], tmp_path)
    packed(options, tmp_path / "whole")
    out = tmp_path / "parts"
    packed(options, out, part=Part(3, 3))
    packed(options, out, part=Part(1, 3))
    with pytest.raises(Mistake, match="holds shards of other data or settings"):
        packed(options, out, shard_mb=0.0195)  # as many shards, but not of the same samples
    printed = capsys.readouterr().out
    assert "part 1/3 is whole; train/000001.tar of part 2/3 is not there yet" in printed
    with pytest.raises(
        FileNotFoundError, match=f"data.root={out} is not a folder|no .whole. shards"
    ):
        build_index(make_config(*options, f"data.root=file://{out}").data)
    # Killed between a shard and what says that it is whole, and while another was copied.
    (out / "pieces" / "train" / "000000.npy").unlink()
    (out / "train" / "000000.tar").write_bytes(b"another attempt's")
    (out / "train" / "000003.tar").unlink()
    packed(options, out, part=Part(2, 3))
    assert "train/000000.tar of part 1/3 is not there yet" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    packed(options, out)
    assert all_bytes(out) == all_bytes(tmp_path / "whole")
    kept = [path for path, time in times.items() if path.stat().st_mtime_ns == time]
    assert len(kept) == len(times) - 1
    packed(options, out, part=Part(2, 3))
    assert "is packed already" in capsys.readouterr().out
    with pytest.raises(Mistake, match="holds shards of other data or settings"):
        packed([*options, "data.val_count=7"], out)


def slurm(*values: int) -> dict[str, str]:
    names = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT"))
    return dict(zip(names, map(str, values), strict=True))


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        (None, {}, "1/1"),
        ("3/64", {"RANK": "1", "WORLD_SIZE": "2"}, "3/64"),
        (None, {"RANK": "1", "WORLD_SIZE": "2"}, "2/2"),
        (None, slurm(7, 5, 8, 1, 4), "3/4"),
        (None, slurm(9, 5, 10, 2, 3), "3/3"),
        *((wrong, {}, "") for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2")),
    ],
)  # fmt: skip
def test_which_part_a_process_writes(text, environment, part: str) -> None:
    if part:
        assert str(part_of(text, environment)) == part
    else:
        with pytest.raises(Mistake, match=f"part={text} is not possible"):
            part_of(text, environment)


def test_a_slurm_array_with_gaps_says_no_part() -> None:
    with pytest.raises(Mistake, match=r"gaps: 3 tasks from 1 to 7.*TASK_ID=5 .*part=3/64"):
        part_of(None, slurm(5, 1, 7, 1, 3))


def test_a_page_in_place_of_shards_is_told(tmp_path: Path, web: WebServer) -> None:
    web.files["photos/shards.json"] = b"<!DOCTYPE html><title>Log in</title>" + bytes([255])
    options = ["data=imagefolder", f"data.root={web.url}/photos", f"data.cache_dir={tmp_path}"]
    with pytest.raises(ValueError, match=r"shards.json is not JSON but begins with b'<!DOCTYPE"):
        build_index(make_config(*options).data)


@pytest.mark.parametrize("kind", ["labels", "images", "masks", "cells"])
def test_resized_shards_are_like_a_pack(kind: str, data_sets, tmp_path: Path) -> None:
    more = ["data.resize=30", "data.crop=[24,24]", "data.reduced_decoding=false"]
    options = options_of(data_sets[kind], tmp_path, *more)
    sharded = packed(options, tmp_path / "shards", quality=LOSSLESS)
    pack(make_config(*options).data, tmp_path / "pack")
    pack_options = [*options, "loader=packed", f"loader.pack={tmp_path / 'pack'}"]
    for one, other in zip(
        build_loaders(make_config(*pack_options), CPU),
        build_loaders(make_config(*sharded, "loader=pytorch"), CPU),
        strict=True,
    ):
        for (_, *tensors), (_, *others) in zip(epoch_of(one), epoch_of(other), strict=True):
            assert all(map(torch.equal, tensors, others))
    with pytest.raises(
        ValueError, match=r"packed with other settings: data.resize=32 \(there: 30\)"
    ):
        build_index(make_config(*sharded, "data.resize=32").data)


def test_resized_photos_become_jpegs(data_sets, tmp_path: Path) -> None:
    options = options_of(data_sets["labels"], tmp_path, "data.resize=32", "data.crop=[32,32]")
    sharded = packed(options, tmp_path / "shards", quality="95")
    with tarfile.open(tmp_path / "shards" / "train" / "000000.tar") as tar:
        assert tar.getnames()[0].endswith(".jpg")
    for way in ("threads", "dali"):
        one = build_loaders(make_config(*options, *WAYS[way]), CPU)[1]
        other = build_loaders(make_config(*sharded, *WAYS[way]), CPU)[1]
        for (_, inputs, _), (_, others, _) in zip(epoch_of(one), epoch_of(other), strict=True):
            assert (inputs - others).abs().mean() < 0.05


# Windows


def shards_of(counts: list[int]) -> Shards:
    """Shards of so many samples each, which lie in another order than the index's."""
    total = sum(counts)
    order = np.random.default_rng(0).permutation(total)
    return Shards(Folder("."), "train", (), order, np.cumsum([0, *counts]))


@pytest.mark.parametrize(
    ("counts", "window"),
    [([1], 1), ([5], 8), ([3, 1, 4, 1, 5, 9, 2, 6], 3), ([3, 1, 4, 1, 5, 9], 2), ([7] * 9, 1)],
)
def test_a_window_has_the_samples_of_few_shards_and_an_epoch_all_once(counts, window: int) -> None:
    shards, total = shards_of(counts), sum(counts)
    shard_of = np.repeat(np.arange(len(counts)), counts)[np.argsort(shards.order)]
    epochs = [in_windows(np.arange(total), shards, window, 7, epoch) for epoch in (0, 1)]
    for epoch, samples in enumerate(epochs):
        assert sorted(samples) == list(range(total))
        some = np.random.default_rng(1).integers(0, total, 10)
        assert (in_windows(some, shards, window, 7, epoch) == samples[some]).all()
        # Runs of positions, as long as the shards in them, which no two windows share.
        left = list(samples)
        while left:
            inside = list(dict.fromkeys(shard_of[left]))[:window]
            size = sum(counts[shard] for shard in inside)
            assert set(shard_of[left[:size]]) == set(inside)
            left = left[size:]
    if total > 10:
        assert (epochs[0] != epochs[1]).any()
        other_seed = in_windows(np.arange(total), shards, window, 8, 0)
        assert (epochs[0] != other_seed).any()


def test_windows_reach_all_orders_alike_often() -> None:
    """Two shards of two and one sample in one window: each of the six orders in a sixth of the epochs."""
    shards = shards_of([2, 1])
    orders = [tuple(in_windows(np.arange(3), shards, 2, 0, epoch)) for epoch in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert max(abs(count - 200) for count in counts) < 5 * np.sqrt(200)


def test_a_cache_fetches_the_next_window_while_one_is_used() -> None:
    class Cache(Folder):
        def __init__(self, root: str) -> None:
            super().__init__(root)
            self.fetched: set[str] = set()

        def begin(self, name: str, start: int, end: int) -> Future[bytes]:
            self.fetched.add(name)
            return Future()

    storage, sizes = Cache("."), [3, 1, 4, 1, 5]
    shards = replace(shards_of(sizes), storage=storage)
    order = in_windows(np.arange(14), shards, 2, 0, 0)
    shard_of = np.repeat(np.arange(5), sizes)[np.argsort(shards.order)][order]
    turns = list(dict.fromkeys(shard_of))
    second, third = sizes[turns[0]] + sizes[turns[1]], 14 - sizes[turns[4]]

    def named(numbers: np.ndarray) -> set[str]:
        return {f"train/{number:06d}.tar" for number in numbers}

    for position, fetched in [
        (0, set()),
        (second - 1, named(shard_of[second:third])),
        (second, set()),
        (third - 1, named(shard_of[third:])),
        (13, set()),
    ]:
        storage.fetched.clear()
        fetch_ahead(position, shards, 2, 0, 0)
        assert storage.fetched == fetched


def test_windows_need_shards(data_sets, tmp_path: Path) -> None:
    options = options_of(data_sets["labels"], tmp_path, "data.shuffle=window")
    with pytest.raises(ValueError, match="goes through shards, and .* has none"):
        build_loaders(make_config(*options), CPU)


# Promises


def shard_of(loader, sample: int) -> int:
    return int(loader.index.shards.spans[0]["shard"][sample])


def names_of(loader) -> list[str]:
    return [name for names, *_ in epoch_of(loader, loader.epoch) for name in names]


@pytest.mark.parametrize("shuffle", ["full", "window"])
@pytest.mark.parametrize("way", ["threads", "dali"])
def test_from_a_bad_server_every_sample_comes_once_on_any_ranks(
    way: str, shuffle: str, data_sets, tmp_path: Path, web: WebServer
) -> None:
    """One rank starts the epoch, two end it; every third request fails in one way or another."""
    options = options_of(data_sets["labels"], tmp_path, f"data.shuffle={shuffle}", *WAYS[way])
    options += ["data.shuffle_window=2", "data.retry_s=20"]
    local = packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    faults = ("reset", "500", "cut", "short", "503")
    remote = [*options, f"data.root={web.url}"]
    expected = epoch_of(build_loaders(make_config(*local), CPU)[0])
    web.fault = lambda path, number: faults[number % 5] if number % 3 == 0 else None
    begun = build_loaders(make_config(*remote), CPU)[0]
    seen = []
    for inputs, labels in begun:
        seen.append(([Path(n).name for n in begun.names(begun.last_rows)], inputs.clone(), labels))
        if len(seen) == 3:
            break
    assert_equal(seen, expected[:3])
    state = begun.state_dict()
    ranks = [build_loaders(make_config(*remote), CPU, rank, 2)[0] for rank in (0, 1)]
    for loader in ranks:
        loader.load_state_dict(state)
    halves = [epoch_of(loader) for loader in ranks]
    for (names, inputs, labels), *parts in zip(expected[3:], *halves, strict=True):
        for rank, (half, some_inputs, some_labels) in enumerate(parts):
            assert half == names[rank::2]
            assert torch.equal(some_inputs, inputs[rank::2])
            assert torch.equal(some_labels, labels[rank::2])
    assert len({name for names, *_ in expected for name in names}) == 32
    other = build_loaders(make_config(*remote, "data.shuffle_window=3"), CPU)[0]
    changes = begun.sampler.description() != other.sampler.description()
    assert changes == (shuffle == "window")


def test_a_cache_fetches_each_shard_once(data_sets, tmp_path: Path, web: WebServer) -> None:
    """For all ranks of a machine and all epochs."""
    options = options_of(data_sets["labels"], tmp_path, "loader=pytorch", "data.cache_gb=0.1")
    options += ["data.shuffle=window", "data.shuffle_window=2"]
    local = packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    expected = [epoch_of(build_loaders(make_config(*local), CPU)[0], epoch) for epoch in (0, 1)]
    for rank in (0, 1):
        loader = build_loaders(make_config(*options, f"data.root={web.url}"), CPU, rank, 2)[0]
        for epoch in (0, 1):
            for (names, *_), (other, *_) in zip(
                expected[epoch], epoch_of(loader, epoch), strict=True
            ):
                assert other == names[rank::2]
    gets = [path for method, path, _ in web.requests if method == "GET" and "/train/" in path]
    assert sorted(p for p in gets if p.endswith(".tar")) == [
        f"/train/{i:06d}.tar" for i in range(6)
    ]


@pytest.mark.parametrize(("size", "at_once"), [(1 << 20, 64), (1000, 3)])
def test_the_columns_of_an_index_come_at_once_but_never_more_than_fit(
    size: int, at_once: int, data_sets, tmp_path: Path, web: WebServer, monkeypatch
) -> None:
    monkeypatch.setattr(shard_index, "RANGE", size)
    monkeypatch.setattr(shard_index, "RANGES_AT_ONCE", at_once)
    options = options_of(data_sets["labels"], tmp_path)
    packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    expected = {name: web.files[name] for name in web.files if name.startswith("index/")}
    on_their_way, most = set[Future[bytes]](), []

    class Counted(bucket.Bucket):
        def begin(self, name: str, start: int, end: int) -> Future[bytes]:
            future = super().begin(name, start, end)
            on_their_way.add(future)
            most.append(len(on_their_way))
            result = future.result

            def counted_result(timeout: float | None = None) -> bytes:
                on_their_way.remove(future)
                return result(timeout)

            future.result = counted_result  # type: ignore[method-assign]
            return future

    monkeypatch.setattr(bucket, "Bucket", Counted)
    data = make_config(*options, f"data.root={web.url}").data
    shard_index.open_shards(data)
    [copies] = Path(data.cache_dir).glob("index-*/")
    assert {f"index/{k}": v for k, v in all_bytes(copies / "index").items()} == expected
    assert max(most) == min(at_once, len(expected))
    web.files["index/val/sizes.npy"] = b"x" + expected["index/val/sizes.npy"][1:]
    shutil.rmtree(copies)
    with pytest.raises(ValueError, match="index/val/sizes.npy is not the one that was packed"):
        shard_index.open_shards(data)
    assert not copies.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_shard_makes_bad_samples(way: str, data_sets, tmp_path: Path) -> None:
    """Told with the shard and the sample; skipped, as if the file itself was bad."""
    options = options_of(data_sets["labels"], tmp_path, *WAYS[way])
    sharded = packed(options, tmp_path / "shards")
    train = build_loaders(make_config(*sharded), CPU)[0]
    clean = names_of(train)
    bad = train.sampler.plan(np.array([5]))["sample"].item()
    assert train.index.shards
    shard, start, length, _ = train.index.shards.spans[0][bad].item()
    path = tmp_path / "shards" / "train" / f"{shard:06d}.tar"
    content = bytearray(path.read_bytes())
    content[start + length - 10] ^= 1  # which no decoder notices
    path.write_bytes(content)
    with pytest.raises(BadFileError) as error:
        names_of(build_loaders(make_config(*sharded), CPU)[0])
    assert str(error.value).startswith(f"{path}: {bad:09d} (")
    assert "its bytes are not those that were packed); mend it and pack the data again" in str(
        error.value
    )
    count, problems = check(make_config(*sharded).data)
    assert (count, list(problems)) == (40, [str(error.value).partition(" cannot")[0]])
    del error  # and with its traceback the loader, whose workers else take 5 s each to end
    skipping = build_loaders(make_config(*sharded, "data.on_error=skip"), CPU)[0]
    assert names_of(skipping) == [*clean[:5], clean[6], *clean[6:]]
    assert list(skipping.sampler.bad) == [bad]


@pytest.mark.parametrize("way", WAYS)
def test_a_storage_that_stays_away_is_no_bad_sample(way, data_sets, tmp_path, web) -> None:
    """What was read until then is handed out; of that, the last two batches come after it is known."""
    options = options_of(
        data_sets["labels"], tmp_path, *WAYS[way], "data.on_error=skip", "data.retry_s=0"
    )
    packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    train = build_loaders(make_config(*options, f"data.root={web.url}"), CPU)[0]
    samples = train.sampler.plan(np.arange(32))["sample"]
    away = shard_of(train, samples[25])
    first = next(at for at, sample in enumerate(samples) if shard_of(train, sample) == away)
    shard = f"train/{away:06d}.tar"
    web.fault = lambda path, number: "500" if path == shard else None
    known = []
    with pytest.raises(StorageError, match=f"{web.url}/{shard}: 500 .*tried 1 times"):
        for _ in train:
            known.append(train.failed is not None)
    assert len(known) == first // 4
    assert known == [*[False] * (len(known) - 2), *[True] * min(2, len(known))]
    assert not train.sampler.bad


def test_ranks_whose_bucket_stays_away_save_and_go_on_to_the_same_bits(
    data_sets, tmp_path: Path, web: WebServer
) -> None:
    options = options_of(data_sets["labels"], tmp_path, "model=small_cnn", "epochs=2", "device=cpu")
    options += ["data.retry_s=0", "log.images=0", "data.shuffle=window", "data.shuffle_window=1"]
    local = packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    train("train_ddp.py", tmp_path / "whole", *local)
    remote = [*options, f"data.root={web.url}"]
    # In the second epoch the shard of the batch in its middle is away.
    loader = build_loaders(make_config(*local), CPU)[0]
    shards = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        shards.append(
            [[shard_of(loader, sample) for sample in rows["sample"]] for rows in loader.sampler]
        )
    away = shards[1][4][0]
    first = next(number for number, batch in enumerate(shards[1]) if away in batch)
    before = sum(batch.count(away) for batch in shards[0])
    shard = f"train/{away:06d}.tar"
    web.fault = lambda path, number: "500" if path == shard and number >= before else None
    processes, prints = fork("train_ddp.py", tmp_path / "run", *remote)
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [1, 1]
    text = prints[0].read_text()
    assert "Traceback" not in text
    assert f"{web.url}/{shard}: 500 Internal Server Error, tried 1 times" in text
    step = checkpoint_of(tmp_path / "run")["step"]
    assert step == 8 + first
    assert f"saved at step {step}; go on with output_dir={tmp_path / 'run'} resume=auto" in text
    assert not (tmp_path / "run" / "requeue").exists()
    web.fault = lambda path, number: None
    train("train_ddp.py", tmp_path / "run", *remote, "resume=auto")
    one, other = (checkpoint_of(tmp_path / name)["model"] for name in ("whole", "run"))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("mb", "expected"), [(0.001, 20), (1, 3), (20, 1)])
def test_what_is_asked_for_ahead_is_bounded_in_samples_and_bytes(
    mb: float, expected: int, monkeypatch
) -> None:
    monkeypatch.setattr(ahead, "SAMPLES_AHEAD", 78)
    monkeypatch.setattr(ahead, "BYTES_AHEAD", 10_000_000)
    asked: list[int] = []
    headers = np.full(1000, int(mb * 1e6), [("num_bytes", "i8")])
    index = SimpleNamespace(
        files=("some",), headers=(headers,), is_remote=True, begin=lambda i, _: asked.append(i)
    )
    rows = np.zeros((250, 4), [("sample", "i8")])
    rows["sample"] = np.arange(1000).reshape(250, 4)
    batches = ahead.begun_ahead(rows, cast(Any, index), [0])
    for number, (batch, _) in enumerate(batches):
        assert batch["sample"].tolist() == rows[number]["sample"].tolist()
        assert len(asked) == min(1000, 4 * (number + expected))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_have_asked_a_server_for_all_before_its_first_answer(
    workers: int, data_sets, tmp_path: Path, web: WebServer
) -> None:
    """They give what threads read from disk: with a bad sample, from a row on, and after an epoch left early."""
    options = options_of(data_sets["labels"], tmp_path, "loader=pytorch", "data.on_error=skip")
    local = packed(options, tmp_path / "shards")
    expected, expected_val = build_loaders(make_config(*local), CPU)
    assert expected.index.shards
    shard, start, *_ = expected.index.shards.spans[0][7].item()
    with (tmp_path / "shards" / "train" / f"{shard:06d}.tar").open("r+b") as file:
        file.seek(start)
        file.write(b"bad")
    web.files = all_bytes(tmp_path / "shards")
    asked, missing, all_came = [], [], Event()

    def hold(path: str, number: int) -> None:
        if path.startswith("train/"):
            asked.append(path)
            if len(asked) == 32:
                all_came.set()
            if not all_came.wait(STALL_S - 2):
                missing.append(32 - len(asked))
                all_came.set()

    web.fault = hold
    remote = [*options, f"data.root={web.url}", f"loader.num_workers={workers}"]
    train, val = build_loaders(make_config(*remote, "loader.prefetch_factor=1"), CPU)
    assert_equal(epoch_of(train), epoch_of(expected))
    assert not missing
    assert list(train.sampler.bad) == list(expected.sampler.bad) == [7]
    assert_equal(epoch_of(val), epoch_of(expected_val))
    train.set_epoch(1)
    next(iter(train))
    state = train.state_dict() | {"epoch": 2, "position": 12}
    assert_equal(epoch_of(train, 3), epoch_of(expected, 3))
    train.load_state_dict(state)
    assert_equal(epoch_of(train, 2), epoch_of(expected, 2)[3:])


def test_each_worker_asks_for_its_next_batch_and_forgets_an_epoch_that_was_left(
    monkeypatch,
) -> None:
    monkeypatch.setattr(ahead, "SAMPLES_AHEAD", 0)

    batches = np.arange(30).view([("sample", "i8")]).reshape(10, 3)

    class Sampler:
        index = SimpleNamespace(headers=(), is_remote=True, begin=lambda sample, _: sample)
        __iter__ = batches.__iter__

    class Images:
        index, sizes = Sampler.index, (0,)

        def __getitems__(self, rows: np.ndarray, begun: ahead.Begun) -> list[Any]:
            return [content[0] for content in begun]

    for num_workers in (1, 2, 3, 20):
        workers = [TurnDataset(cast(Any, Images())) for _ in range(num_workers)]
        epoch = TurnSampler(cast(Any, Sampler()), num_workers)
        for turns in (islice(epoch, 4), epoch):
            for number, turn in enumerate(turns):
                worker = workers[number % num_workers]
                assert worker.__getitems__(turn) == batches[number]["sample"].tolist()
                following = number + num_workers
                assert list(worker.begun) == ([following] if following < 10 else [])
