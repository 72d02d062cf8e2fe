"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import json
import shutil
import tarfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
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
from tests.images import KINDS, common, make_photos
from tests.servers import WebServer, web_server

CPU, WHOLE, SMALL_MB = torch.device("cpu"), Part(1, 1), 0.01
WAYS = {
    "threads": ["loader=pytorch"],
    "workers": ["loader=pytorch", "loader.num_workers=1"],
    "dali": ["loader=dali"],
}


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """40 photos of three classes."""
    return make_photos(tmp_path_factory.mktemp("data") / "photos", 40)


@pytest.fixture
def options(root: Path, tmp_path: Path) -> list[str]:
    """Overrides that read them."""
    return [
        *("data=imagefolder", f"data.root={root}", "data.val_count=6", "global_batch_size=4"),
        *("data.resize=null", "data.crop=[40,40]", "data.random_crop=true", "data.hflip=0.5"),
        f"data.cache_dir={tmp_path / 'cache'}",
    ]


def options_of(kind: str, tmp_path: Path, *more: str) -> list[str]:
    """Write data of another kind; overrides that read it."""
    folder = tmp_path / kind
    data = KINDS[kind](folder)
    return [*data.options, *common(folder), "data.crop=[24,24]", "global_batch_size=4", *more]


def packed(options: list[str], out: Path, shard_mb=0.02, part=WHOLE, quality=None) -> list[str]:
    """The options, with the data in shards."""
    pack_shards(make_config(*options).data, str(out), shard_mb, part, quality)
    return [*options, f"data.root={out}"]


def batches_of(loader) -> Iterator[tuple[list[str], torch.Tensor, torch.Tensor]]:
    """Yield the files, inputs and targets of each batch."""
    for inputs, targets in loader:
        names = [Path(loader.info.name_of(sample)).name for sample in loader.last_samples]
        yield names, inputs.clone(), targets.clone()


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def members_of(folder: Path) -> dict[str, bytes]:
    """Name and content of all that lies in the tar files of a folder, in their order."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        with tarfile.open(path) as tar:
            found |= {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    return found


def test_shards_are_tar_files_that_other_tools_read(options, root: Path, tmp_path: Path) -> None:
    """As WebDataset names them: what stands before the first dot is the sample's."""
    index = open_splits(make_config(*packed(options, tmp_path / "labels")).data)[0]
    assert all(path.stat().st_size < 60_000 for path in (tmp_path / "labels/train").iterdir())
    members = members_of(tmp_path / "labels" / "train")
    assert len(members) == 2 * len(index)
    assert isinstance(index.target, Labels)
    for image, label in zip([*members][::2], [*members][1::2], strict=True):
        key = image.removesuffix(".jpg")
        assert label == f"{key}.cls"
        source = root / index.files[0][int(key)]
        assert members[image] == source.read_bytes() == bytes(read_bytes(index, int(key), 0))
        assert int(members[label]) == index.target.values[int(key)]


@pytest.mark.parametrize(
    ("kind", "endings", "labels"),
    [
        ("pairs", {"input.png", "target.png"}, None),
        ("numbers", {"png", "json"}, {"label": 17.25}),
        ("several labels", {"png", "json"}, ["dog"]),
    ],
)
def test_targets_of_all_kinds_lie_beside_their_inputs(kind, endings, labels, tmp_path) -> None:
    index = open_splits(make_config(*packed(options_of(kind, tmp_path), tmp_path / "out")).data)[0]
    members = members_of(tmp_path / "out" / "train")
    assert {name.partition(".")[2] for name in members} == endings
    assert len(members) == 2 * len(index)
    if labels:
        [sample] = [i for i, name in enumerate(index.files[0]) if Path(name).stem == "17"]
        assert json.loads(members[f"{sample:09d}.json"]) == labels


def test_parts_make_what_one_makes_however_often_they_are_killed(
    options, tmp_path: Path, capsys
) -> None:
    packed(options, tmp_path / "whole")
    out = tmp_path / "parts"
    packed(options, out, part=Part(3, 3))
    packed(options, out, part=Part(1, 3))
    with pytest.raises(UserError, match="holds shards of other data or settings"):
        packed(options, out, shard_mb=0.0195)  # as many shards, but not of the same samples
    assert "train/000001.tar of part 2/3" in capsys.readouterr().out
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


RANK_2 = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        (None, {}, "1/1"),
        ("3/64", RANK_2, "3/64"),
        (None, RANK_2, "2/2"),
        (None, slurm(7, 5, 8, 1, 4), "3/4"),
        (None, slurm(9, 5, 10, 2, 3), "3/3"),
        (None, slurm(5, 1, 7, 1, 3), ""),  # an array with gaps
        *((wrong, {}, "") for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2")),
    ],
)
def test_which_part_a_process_writes(text, environment, part: str) -> None:
    if part:
        assert str(part_of(text, environment)) == part
    else:
        with pytest.raises(UserError, match=f"part={text or '5/3'} is not possible"):
            part_of(text, environment)


def test_a_page_in_place_of_shards_is_named(options, web: WebServer) -> None:
    web.files["photos/shards.json"] = b"<!DOCTYPE html><title>Log in</title>" + bytes([255])
    with pytest.raises(UserError, match=r"shards.json .*b'<!DOCTYPE"):
        open_splits(make_config(*options, f"data.root={web.url}/photos").data)


@pytest.mark.parametrize("kind", ["pairs", "masks", "cells of 16 bits"])
def test_resized_shards_are_like_a_pack(kind: str, tmp_path: Path) -> None:
    options = options_of(kind, tmp_path, "data.resize=30", "data.reduced_decoding=false")
    sharded = packed(options, tmp_path / "shards", quality=LOSSLESS)
    pack(make_config(*options).data, tmp_path / "pack")
    pack_options = [*options, "loader=packed", f"loader.pack={tmp_path / 'pack'}"]
    splits = (build_loaders(make_config(*some), CPU) for some in (pack_options, sharded))
    for one, other in zip(*splits, strict=True):
        for tensors, others in zip(one, other, strict=True):
            assert all(map(torch.equal, tensors, others))
    with pytest.raises(UserError, match=r"data.resize=32 \(there: 30\)"):
        open_splits(make_config(*sharded, "data.resize=32").data)


def test_resized_photos_become_jpegs(options, tmp_path: Path) -> None:
    options = [*options, "data.resize=32", "data.crop=[32,32]"]
    sharded = packed(options, tmp_path / "shards", quality="95")
    assert {name.partition(".")[2] for name in members_of(tmp_path / "shards/val")} == {
        "jpg",
        "cls",
    }
    both = (build_loaders(make_config(*some), CPU)[1] for some in (options, sharded))
    for (inputs, _), (others, _) in zip(*both, strict=True):
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


def test_windows_need_shards(options) -> None:
    with pytest.raises(UserError, match="data.shuffle=window"):
        build_loaders(make_config(*options, "data.shuffle=window"), CPU)


# Shards on a server


@pytest.fixture
def remote(options, tmp_path: Path, web: WebServer) -> list[str]:
    """Overrides that read a dozen shards from a server, in windows of one."""
    packed(options, tmp_path / "shards", SMALL_MB)
    web.files = all_bytes(tmp_path / "shards")
    windows = ["data.shuffle=window", "data.shuffle_window=1"]
    return [*options, *windows, f"data.root={web.url}", "data.retry_s=0", "loader.num_threads=1"]


def shard_of(loader, sample: int) -> int:
    return int(loader.index.shards.spans[0]["shard"][sample])


def fetched_shards(web: WebServer) -> list[str]:
    return [path for method, path, _ in web.requests if method == "GET" and path.endswith(".tar")]


def read_epoch(options: list[str], rank: int = 0, world_size: int = 1) -> list[list[str]]:
    """The files that one rank reads in an epoch and in the validation."""
    splits = build_loaders(make_config(*options), CPU, rank, world_size)
    return [[name for names, *_ in batches_of(loader) for name in names] for loader in splits]


def test_from_a_bad_server_every_sample_comes_once_on_any_ranks(remote, tmp_path, web) -> None:
    """One rank starts the epoch, two end it; every second request fails in one way or another."""
    remote = [*remote, "data.shuffle_window=2", "data.retry_s=20"]
    local = build_loaders(make_config(*remote, f"data.root={tmp_path / 'shards'}"), CPU)[0]
    expected = list(batches_of(local))
    assert len({name for names, *_ in expected for name in names}) == 32
    faults = ("reset", "500", "cut", "503")
    web.fault = lambda path, number: faults[number // 2 % 4] if number % 2 == 0 else None
    begun = build_loaders(make_config(*remote), CPU)[0]
    begun_batches = list(islice(batches_of(begun), 3))
    ranks = [build_loaders(make_config(*remote), CPU, rank, 2)[0] for rank in (0, 1)]
    for loader in ranks:
        loader.load_state_dict(begun.state_dict())
    parts = [[batch] for batch in begun_batches] + list(zip(*map(batches_of, ranks), strict=True))
    for (names, *tensors), found in zip(expected, parts, strict=True):
        for rank, (some_names, *some) in enumerate(found):
            assert some_names == names[rank :: len(found)]
            for part, tensor in zip(some, tensors, strict=True):
                assert torch.equal(part, tensor[rank :: len(found)])
    for window, shuffle, changes in ((3, "window", True), (3, "full", False)):
        more = [f"data.shuffle={shuffle}", f"data.shuffle_window={window}"]
        one, other = (
            build_loaders(make_config(*remote, *some), CPU)[0].sampler.description()
            for some in (more[:1], more)
        )
        assert (one != other) == changes


def test_processes_share_one_copy_of_each_shard(remote, web: WebServer) -> None:
    remote = [*remote, "data.cache_gb=1"]
    web.latency_s = 0.02
    processes = [FORKSERVER.Process(target=read_epoch, args=(remote, r, 2)) for r in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    shards = [f"/{name}" for name in web.files if name.endswith(".tar")]
    assert sorted(fetched_shards(web)) == sorted(shards)
    web.requests.clear()
    read_epoch(remote)
    assert not fetched_shards(web)


def test_the_next_window_is_fetched_while_one_is_read_and_copies_stay_within_their_bound(
    remote, tmp_path: Path, web: WebServer
) -> None:
    train = build_loaders(make_config(*remote), CPU)[0]
    assert not fetched_shards(web)
    local = build_loaders(make_config(*remote, f"data.root={tmp_path / 'shards'}"), CPU)[0]
    shards = [[shard_of(train, n) for n in rows["sample"].tolist()] for rows in local.sampler]
    turns = list(dict.fromkeys(shard for batch in shards for shard in batch))
    largest = sorted(len(web.files[f"train/{n:06d}.tar"]) for n in turns)[-4:]
    for batch, _ in enumerate(train.sampler):
        time.sleep(0.02)  # the resolution of a file system's clock
        names = fetched_shards(web)
        needed = turns.index(max(shards[batch], key=turns.index))
        assert set(names) <= {f"/train/{number:06d}.tar" for number in turns[: needed + 2]}
        copies = list((tmp_path / "cache" / "shards").glob("*.tar"))
        assert sum(path.stat().st_size for path in copies) <= sum(largest) + 4 * (16 << 10)
    assert len(fetched_shards(web)) == len(turns)
    assert len(copies) < len(turns)


def test_half_a_copy_is_never_read(remote, tmp_path: Path, web: WebServer) -> None:
    remote = [*remote, "data.cache_gb=1"]
    expected = read_epoch(remote)
    copies = sorted((tmp_path / "cache" / "shards").glob("*.tar"))
    for path in copies:  # as a process leaves them that is killed while they arrive
        path.with_name(f"{path.name}.partial").write_bytes(path.read_bytes()[:1000])
        path.unlink()
    assert read_epoch(remote) == expected
    assert sorted((tmp_path / "cache" / "shards").glob("*.tar")) == copies
    assert not list((tmp_path / "cache" / "shards").glob("*.partial"))
    copies[0].unlink()
    web.fault = lambda path, number: "short" if path.endswith(".tar") else None
    with pytest.raises(StorageError, match=r"train/000000.tar .* bytes"):
        read_epoch(remote)
    assert not copies[0].exists()


def test_a_cache_without_room_is_refused_at_the_start(
    remote, tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*more: str, named: str) -> None:
        with pytest.raises(UserError, match=named):
            build_loaders(make_config(*remote, *more), CPU)

    refused("data.shuffle=full", "data.cache_gb=0.0002", named="data.cache_gb.*data.shuffle=window")
    build_loaders(make_config(*remote, "data.cache_gb=0.0002"), CPU)
    refused("data.cache_gb=0.00005", named="data.cache_gb=5e-05.*data.shuffle_window")
    full = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    refused(named=f"data.cache_dir={tmp_path}")
    assert not fetched_shards(web)


def test_columns_that_are_not_those_of_the_shards_are_refused(remote, web: WebServer) -> None:
    name = "index/val/sizes.npy"
    web.files[name] = b"x" + web.files[name][1:]
    for _ in range(2):
        with pytest.raises(UserError, match=name):
            build_loaders(make_config(*remote), CPU)


@pytest.mark.parametrize("way", WAYS)
def test_a_storage_that_stays_away_is_no_bad_sample(way, remote, web) -> None:
    options = [*remote, *WAYS[way], "data.on_error=skip", "data.shuffle=full"]
    train = build_loaders(make_config(*options), CPU)[0]
    samples = train.sampler.plan(np.arange(32))["sample"]
    shards = [shard_of(train, sample) for sample in samples]
    away = shards[25]
    shard = f"train/{away:06d}.tar"
    web.fault = lambda path, number: "500" if path == shard else None
    with pytest.raises(StorageError, match=f"{web.url}/{shard}: 500"):
        for number, _ in enumerate(train):
            assert number < shards.index(away) // 4
    assert not train.sampler.bad


def test_ranks_whose_bucket_stays_away_end_and_go_on_from_their_checkpoint_to_the_same_bits(
    remote, tmp_path: Path, web: WebServer
) -> None:
    remote += ["model=small_cnn", "epochs=2", "device=cpu", "log.images=0"]
    remote += ["checkpoint.every_steps=1"]
    local = [*remote, f"data.root={tmp_path / 'shards'}"]
    train("train_ddp.py", tmp_path / "whole", *local)
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
    assert f"{web.url}/{shard}: 500" in "".join(path.read_text() for path in prints)
    assert 1 <= checkpoint_of(tmp_path / "run")["step"] <= first
    assert not (tmp_path / "run" / "requeue").exists()
    web.fault = lambda path, number: None
    train("train_ddp.py", tmp_path / "run", *remote, "resume=auto")
    one, other = (checkpoint_of(tmp_path / name)["model"] for name in ("whole", "run"))
    assert all(torch.equal(one[key], other[key]) for key in one)
