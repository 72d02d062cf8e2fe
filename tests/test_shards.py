"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import json
import shutil
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch

from conf.errors import UserError
from loaders.image_loaders import build_loaders
from loaders.index import Index, ShardFiles, Shards
from loaders.open import open_splits
from loaders.pack import pack
from loaders.plan import PlanSampler
from loaders.read import read_bytes
from loaders.shards import LOSSLESS, Part, pack_shards, part_of
from loaders.storage import StorageError
from loaders.targets import Labels
from tests.helpers import FORKSERVER, checkpoint_of, fork, make_config, train
from tests.images import make_photos, save, smooth
from tests.servers import WebServer, web_server

CPU, WHOLE, SMALL_MB = torch.device("cpu"), Part(1, 1), 0.01
WAYS = {
    "threads": ["loader=pytorch"],
    "workers": ["loader=pytorch", "loader.num_workers=2"],
    "dali": ["loader=dali"],
}


@pytest.fixture
def web() -> Iterator[WebServer]:
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
        mask = np.full((50, 64), number % 3, np.uint8)
        save(root / "masks" / "images" / f"{number}.png", image[:50])
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
    names = lambda: [Path(loader.info.name_of(n)).name for n in loader.last_samples]  # noqa: E731
    return [(names(), inputs.clone(), targets.clone()) for inputs, targets in loader]


def assert_equal(one: list, other: list) -> None:
    assert len(one) == len(other) > 0
    for (names, *tensors), (other_names, *others) in zip(one, other, strict=True):
        assert names == other_names
        assert all(map(torch.equal, tensors, others))


def read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file
    return file.read()


def test_shards_are_tar_files_that_other_tools_read(data_sets, tmp_path: Path) -> None:
    """As WebDataset names them: what stands before the first dot is the sample's."""
    options = options_of(data_sets["labels"], tmp_path)
    index = open_splits(make_config(*packed(options, tmp_path / "labels")).data)[0]
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
        assert content == source.read_bytes() == bytes(read_bytes(index, sample, 0))
        assert isinstance(index.target, Labels)
        assert number == index.target.values[sample]
    for kind, endings, labels in [
        ("images", {"input.png", "target.jpg"}, {}),
        ("numbers", {"jpg", "png", "webp", "json"}, {"age": 1.75, "size": -7.0}),
        ("several", {"jpg", "png", "webp", "json"}, []),
    ]:
        index = open_splits(
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
    with pytest.raises(UserError, match="holds shards of other data or settings"):
        packed(options, out, shard_mb=0.0195)  # as many shards, but not of the same samples
    printed = capsys.readouterr().out
    assert "train/000001.tar of part 2/3" in printed
    with pytest.raises(UserError, match=f"data.root={out} is not a folder|no complete shards"):
        open_splits(make_config(*options, f"data.root=file://{out}").data)
    # Killed between a shard and its piece, and while another shard was copied.
    (out / "pieces" / "train" / "000000.bin").unlink()
    (out / "train" / "000000.tar").write_bytes(b"another attempt's")
    (out / "train" / "000003.tar").unlink()
    packed(options, out, part=Part(2, 3))
    assert "train/000000.tar of part 1/3" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    packed(options, out)
    assert all_bytes(out) == all_bytes(tmp_path / "whole")
    kept = [path for path, time in times.items() if path.stat().st_mtime_ns == time]
    assert len(kept) == len(times) - 1
    packed(options, out, part=Part(2, 3))
    assert "is packed already" in capsys.readouterr().out
    with pytest.raises(UserError, match="holds shards of other data or settings"):
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
        with pytest.raises(UserError, match=f"part={text} is not possible"):
            part_of(text, environment)


def test_a_slurm_array_with_gaps_says_no_part() -> None:
    with pytest.raises(UserError, match="part=5/3 is not possible"):
        part_of(None, slurm(5, 1, 7, 1, 3))


def test_a_page_in_place_of_shards_is_told(tmp_path: Path, web: WebServer) -> None:
    web.files["photos/shards.json"] = b"<!DOCTYPE html><title>Log in</title>" + bytes([255])
    options = ["data=imagefolder", f"data.root={web.url}/photos", f"data.cache_dir={tmp_path}"]
    with pytest.raises(ValueError, match=r"shards.json is not JSON but begins with b'<!DOCTYPE"):
        open_splits(make_config(*options).data)


@pytest.mark.parametrize("kind", ["images", "masks", "cells"])
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
    with pytest.raises(ValueError, match=r"other settings: data.resize=32 \(there: 30\)"):
        open_splits(make_config(*sharded, "data.resize=32").data)


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


def in_windows(counts: list[int], window: int, seed: int = 7) -> PlanSampler:
    """A plan that goes in windows through shards of so many samples, which lie in another order there."""
    total = sum(counts)
    order = np.random.default_rng(0).permutation(total)
    index = Index(
        name="some/train",
        sizes=np.full((total, 2), 30),
        channels=3,
        target=Labels(np.zeros(total, int), ("a",)),
        shards=Shards(ShardFiles(Path(), ()), "", (), order, np.cumsum([0, *counts])),
    )
    data = make_config("data.shuffle=window", f"data.shuffle_window={window}").data
    return PlanSampler(index, data, seed, 1, 0, 1, train=True)


def samples_of(sampler: PlanSampler, epoch: int) -> np.ndarray:
    sampler.set_epoch(epoch)
    return sampler.plan(np.arange(len(sampler.index)))["sample"]


@pytest.mark.parametrize(
    ("counts", "window"),
    [([1], 1), ([5], 8), ([3, 1, 4, 1, 5, 9, 2, 6], 3), ([3, 1, 4, 1, 5, 9], 2), ([7] * 9, 1)],
)
def test_a_window_has_the_samples_of_few_shards_and_an_epoch_all_once(counts, window: int) -> None:
    sampler, total = in_windows(counts, window), sum(counts)
    assert sampler.index.shards
    shard_of = np.repeat(np.arange(len(counts)), counts)[np.argsort(sampler.index.shards.order)]
    epochs = [samples_of(sampler, epoch) for epoch in (0, 1)]
    for epoch, samples in enumerate(epochs):
        assert sorted(samples) == list(range(total))
        some = np.random.default_rng(1).integers(0, total, 10)
        sampler.set_epoch(epoch)
        assert (sampler.plan(some)["sample"] == samples[some]).all()
        # Runs of positions, as long as the shards in them, which no two windows share.
        left = list(samples)
        while left:
            inside = list(dict.fromkeys(shard_of[left]))[:window]
            size = sum(counts[shard] for shard in inside)
            assert set(shard_of[left[:size]]) == set(inside)
            left = left[size:]
    if total > 10:
        assert (epochs[0] != epochs[1]).any()
        assert (epochs[0] != samples_of(in_windows(counts, window, seed=8), 0)).any()


def test_windows_reach_all_orders_alike_often() -> None:
    """Two shards of two and one sample in one window: each of the six orders in a sixth of the epochs."""
    sampler = in_windows([2, 1], 2, seed=0)
    orders = [tuple(samples_of(sampler, epoch).tolist()) for epoch in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert max(abs(count - 200) for count in counts) < 5 * np.sqrt(200)


def test_windows_need_shards(data_sets, tmp_path: Path) -> None:
    options = options_of(data_sets["labels"], tmp_path, "data.shuffle=window")
    with pytest.raises(ValueError, match="data.shuffle=window .* has none"):
        build_loaders(make_config(*options), CPU)


# Promises


def shard_of(loader, sample: int) -> int:
    return int(loader.index.shards.spans[0]["shard"][sample])


def names_of(loader) -> list[str]:
    return [name for names, *_ in epoch_of(loader, loader.epoch) for name in names]


@pytest.mark.parametrize(("way", "shuffle"), [("threads", "window"), ("dali", "full")])
def test_from_a_bad_server_every_sample_comes_once_on_any_ranks(
    way: str, shuffle: str, data_sets, tmp_path: Path, web: WebServer
) -> None:
    """One rank starts the epoch, two end it; every second request fails in one way or another."""
    options = options_of(data_sets["labels"], tmp_path, f"data.shuffle={shuffle}", *WAYS[way])
    options += ["data.shuffle_window=2", "data.retry_s=20"]
    local = packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    faults = ("reset", "500", "cut", "503")
    remote = [*options, f"data.root={web.url}"]
    expected = epoch_of(build_loaders(make_config(*local), CPU)[0])
    web.fault = lambda path, number: faults[number // 2 % 4] if number % 2 == 0 else None
    begun = build_loaders(make_config(*remote), CPU)[0]
    seen = []
    for inputs, labels in begun:
        seen.append(
            ([Path(begun.info.name_of(n)).name for n in begun.last_samples], inputs.clone(), labels)
        )
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


def remote_options(data_sets, tmp_path: Path, web: WebServer, *more: str) -> list[str]:
    """The options that read a dozen shards from a server, in windows of one."""
    options = options_of(data_sets["labels"], tmp_path, "loader=pytorch", "data.retry_s=0", *more)
    packed(options, tmp_path / "shards", SMALL_MB)
    web.files = all_bytes(tmp_path / "shards")
    windows = ["data.shuffle=window", "data.shuffle_window=1"]
    return [*options, *windows, f"data.root={web.url}"]


def fetched_shards(web: WebServer) -> list[str]:
    return [path for method, path, _ in web.requests if method == "GET" and path.endswith(".tar")]


def read_epochs(options: list[str], rank: int = 0, world_size: int = 1) -> list[list[str]]:
    """Of two epochs and the validation split the files that one rank reads."""
    train, val = build_loaders(make_config(*options), CPU, rank, world_size)
    train_epochs = [epoch_of(train, epoch) for epoch in (0, 1)]
    return [[n for names, *_ in e for n in names] for e in (*train_epochs, epoch_of(val))]


def test_processes_share_one_copy_of_each_shard(data_sets, tmp_path: Path, web: WebServer) -> None:
    options = remote_options(data_sets, tmp_path, web, "data.cache_gb=1")
    web.latency_s = 0.02
    processes = [FORKSERVER.Process(target=read_epochs, args=(options, r, 2)) for r in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    shards = [f"/{name}" for name in web.files if name.endswith(".tar")]
    assert sorted(fetched_shards(web)) == sorted(shards)
    web.requests.clear()
    read_epochs(options)
    assert not fetched_shards(web)


def test_the_next_window_is_fetched_while_one_is_read_and_copies_stay_within_their_bound(
    data_sets, tmp_path: Path, web: WebServer
) -> None:
    options = remote_options(data_sets, tmp_path, web)
    train = build_loaders(make_config(*options), CPU)[0]
    assert not fetched_shards(web)
    local = packed(options[:-3], tmp_path / "shards", SMALL_MB)
    shards = [
        [shard_of(train, sample) for sample in rows["sample"].tolist()]
        for rows in build_loaders(make_config(*local, *options[-3:-1]), CPU)[0].sampler
    ]
    turns = list(dict.fromkeys(shard for batch in shards for shard in batch))
    largest = sorted(len(web.files[f"train/{n:06d}.tar"]) for n in turns)[-4:]
    for batch, _ in enumerate(train.sampler):
        time.sleep(0.02)  # the resolution of a file system's clock
        names = fetched_shards(web)
        needed = turns.index(max(shards[batch], key=turns.index))
        allowed = turns[: needed + 2]
        assert set(names) <= {f"/train/{number:06d}.tar" for number in allowed}
        copies = list((tmp_path / "cache" / "shards").glob("*.tar"))
        assert sum(path.stat().st_size for path in copies) <= sum(largest) + 4 * (16 << 10)
    assert len(fetched_shards(web)) == len(turns)
    assert len(copies) < len(turns)


def test_half_a_copy_is_never_read(data_sets, tmp_path: Path, web: WebServer) -> None:
    options = remote_options(data_sets, tmp_path, web, "data.cache_gb=1")
    expected = read_epochs(options)
    copies = sorted((tmp_path / "cache" / "shards").glob("*.tar"))
    for path in copies:  # as a process leaves them that is killed while they arrive
        path.with_name(f"{path.name}.partial").write_bytes(path.read_bytes()[:1000])
        path.unlink()
    assert read_epochs(options) == expected
    assert sorted((tmp_path / "cache" / "shards").glob("*.tar")) == copies
    assert not list((tmp_path / "cache" / "shards").glob("*.partial"))
    copies[0].unlink()
    web.fault = lambda path, number: "short" if path.endswith(".tar") else None
    with pytest.raises(StorageError, match=r"train/000000.tar .* bytes"):
        read_epochs(options)
    assert not copies[0].exists()


def test_a_cache_without_room_is_refused_at_the_start(
    data_sets, tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = remote_options(data_sets, tmp_path, web)
    small = make_config(*options, "data.shuffle=full", "data.cache_gb=0.0002")
    with pytest.raises(UserError, match=r"data.cache_gb=0.0002.* use data.shuffle=window"):
        build_loaders(small, CPU)
    build_loaders(make_config(*options, "data.cache_gb=0.0002"), CPU)
    with pytest.raises(UserError, match=r"data.cache_gb=5e-05.*smaller data.shuffle_window"):
        build_loaders(make_config(*options, "data.cache_gb=0.00005"), CPU)
    full = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(UserError, match=rf"data.cache_dir={tmp_path}.*use another folder"):
        build_loaders(make_config(*options), CPU)
    assert not fetched_shards(web)


def test_columns_that_are_not_those_of_the_shards_are_refused(
    data_sets, tmp_path: Path, web: WebServer
) -> None:
    options = remote_options(data_sets, tmp_path, web)
    name = "index/val/sizes.npy"
    web.files[name] = b"x" + web.files[name][1:]
    for _ in range(2):
        with pytest.raises(UserError, match=f"{name} is not the file that was packed"):
            build_loaders(make_config(*options), CPU)


@pytest.mark.parametrize("way", WAYS)
def test_a_storage_that_stays_away_is_no_bad_sample(way, data_sets, tmp_path, web) -> None:
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
    with pytest.raises(StorageError, match=f"{web.url}/{shard}: 500 Internal Server Error"):
        for number, _ in enumerate(train):
            assert number < first // 4
    assert not train.sampler.bad


def test_ranks_whose_bucket_stays_away_end_and_go_on_from_their_checkpoint_to_the_same_bits(
    data_sets, tmp_path: Path, web: WebServer
) -> None:
    options = options_of(data_sets["labels"], tmp_path, "model=small_cnn", "epochs=2", "device=cpu")
    options += ["data.retry_s=0", "log.images=0", "data.shuffle=window", "data.shuffle_window=1"]
    options += ["checkpoint.every_steps=1"]
    local = packed(options, tmp_path / "shards")
    web.files = all_bytes(tmp_path / "shards")
    train("train_ddp.py", tmp_path / "whole", *local)
    remote = [*options, f"data.root={web.url}"]
    # The shard that the first epoch needs last is away.
    loader = build_loaders(make_config(*local), CPU)[0]
    batches = [[shard_of(loader, sample) for sample in rows["sample"]] for rows in loader.sampler]
    away = batches[-1][-1]
    first = next(number for number, batch in enumerate(batches) if away in batch)
    shard = f"train/{away:06d}.tar"
    web.fault = lambda path, number: "500" if path == shard else None
    processes, prints = fork("train_ddp.py", tmp_path / "run", *remote)
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [1, 1]
    text = "".join(path.read_text() for path in prints)
    assert f"{web.url}/{shard}: 500 Internal Server Error" in text
    assert 1 <= checkpoint_of(tmp_path / "run")["step"] <= first
    assert not (tmp_path / "run" / "requeue").exists()
    web.fault = lambda path, number: None
    train("train_ddp.py", tmp_path / "run", *remote, "resume=auto")
    one, other = (checkpoint_of(tmp_path / name)["model"] for name in ("whole", "run"))
    assert all(torch.equal(one[key], other[key]) for key in one)
