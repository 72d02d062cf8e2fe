"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import json
import shutil
import tarfile
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

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
from loaders.shards import LOSSLESS, Part, open_shards, pack_shards, part_of
from loaders.storage import StorageError
from loaders.targets import Labels
from tests.helpers import (
    checkpoint_of,
    join,
    make_config,
    refused,
    run_to_end,
    start_process,
    train,
    wait_for,
    weights_differ_by,
)
from tests.images import KINDS, Data, common, make_photos
from tests.servers import WebServer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Overrides that read 40 photos of three classes."""
    root = make_photos(tmp_path_factory.mktemp("data") / "photos", 40)
    return [
        *("data=imagefolder", f"data.root={root}", f"data.cache_dir={root.parent / 'cache'}"),
        *("data.val_count=6", "data.resize=null", "data.crop=[40,40]", "data.random_crop=true"),
        *("data.hflip=0.5", "global_batch_size=4"),
    ]


def data_of(kind: str, tmp_path: Path, *more: str) -> tuple[Data, list[str]]:
    """Data of another kind, and overrides that read it."""
    data = KINDS[kind](tmp_path / kind)
    return data, [*data.options, *common(tmp_path / kind), "data.crop=[24,24]", *more]


def packed(
    options: list[str], out: Path, shard_mb=0.02, part: str = "1/1", quality: str | None = None
) -> list[str]:
    """The options, with the data in shards."""
    pack_shards(make_config(*options).data, str(out), shard_mb, part_of(part, {}), quality)
    return [*options, f"data.root={out}"]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def members_of(folder: Path) -> dict[str, bytes]:
    """Name and content of all that lies in the tar files of a folder, in their order."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        assert path.stat().st_size < 60_000
        with tarfile.open(path) as tar:
            found |= {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    return found


# kind of data -> name of a target in a shard, and its content
TARGETS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "photos": ("cls", lambda label: int(label[-1])),
    "pairs": ("target.png", lambda image: None),
    "numbers": ("json", lambda number: {"label": float(number)}),
    "several labels": ("json", lambda cell: sorted(filter(None, cell.replace(" ", "").split(";")))),
}


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind in KINDS])
def test_shards_are_tar_files_that_other_tools_read(kind: str, tmp_path: Path) -> None:
    """As WebDataset names them: what stands before the first dot is the sample's."""
    data, options = data_of(kind, tmp_path)
    source = open_splits(make_config(*options).data)[0]
    index = open_splits(make_config(*packed(options, tmp_path / "out")).data)[0]
    members = members_of(tmp_path / "out/train")
    samples = [int(key) for key, _ in groupby(members, lambda name: name.partition(".")[0])]
    assert sorted(samples) == list(range(len(source)))
    (ending, expected), contents = TARGETS[kind], iter(members.items())
    for sample, (name, image), (label_name, label) in zip(samples, contents, contents, strict=True):
        path = Path(source.files[0][sample])
        own = "input.png" if kind == "pairs" else path.suffix[1:]
        assert [name, label_name] == [f"{sample:09d}.{own}", f"{sample:09d}.{ending}"]
        assert image == path.read_bytes() == bytes(read_bytes(index, sample, 0))
        if kind == "pairs":
            assert label == Path(source.files[1][sample]).read_bytes()
        else:
            assert json.loads(label) == expected(data.targets[path.name])


def test_parts_make_what_one_makes_however_often_they_are_killed(
    options, tmp_path: Path, capsys
) -> None:
    packed(options, tmp_path / "whole")
    out = tmp_path / "parts"
    packed(options, out, part="3/3")
    packed(options, out, part="1/3")
    assert "train/000001.tar of part 2/3" in capsys.readouterr().out
    with pytest.raises(UserError, match="no complete shards"):
        open_shards(make_config(*options, f"data.root={out}").data)
    # Killed between a shard and its piece, and while another shard was copied.
    (out / "train/000000.tar").write_bytes(b"another attempt's")
    (out / "train/000003.tar").unlink()
    for number in (0, 3):
        (out / f"pieces/train/00000{number}.bin").unlink()
    packed(options, out, part="2/3")
    assert "train/000000.tar of part 1/3" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    packed(options, out)
    assert all_bytes(out) == all_bytes(tmp_path / "whole")
    kept = [path for path, time in times.items() if path.stat().st_mtime_ns == time]
    assert len(kept) == len(times) - 1
    packed(options, out, part="2/3")
    assert "is packed already" in capsys.readouterr().out
    # Of other data, and as many shards, but not of the same samples.
    for wrong, shard_mb in (([*options, "data.val_count=7"], 0.02), (options, 0.0195)):
        with pytest.raises(UserError, match=f"{out} holds shards of other data"):
            packed(wrong, out, shard_mb)


def slurm(*values: int) -> dict[str, str]:
    names = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT"))
    return dict(zip(names, map(str, values), strict=True))


RANK_2 = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        (None, {}, Part(1, 1)),
        ("3/64", RANK_2, Part(3, 64)),
        (None, RANK_2, Part(2, 2)),
        (None, slurm(7, 5, 8, 1, 4), Part(3, 4)),
        (None, slurm(5, 1, 7, 1, 3), None),  # an array with gaps
        *((wrong, {}, None) for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2")),
    ],
)
def test_which_part_a_process_writes(text, environment, part: Part | None) -> None:
    if part:
        assert part_of(text, environment) == part
    else:
        with pytest.raises(UserError, match=f"part={text or '5/3'}"):
            part_of(text, environment)


# kind of data -> quality of its resized images in shards, and the endings of their names
ENCODED: dict[str, tuple[str, set[str]]] = {
    "masks": (LOSSLESS, {"input.png", "target.png"}),
    "cells of 16 bits": (LOSSLESS, {"tif", "cls"}),
    "photos": ("95", {"jpg", "cls"}),
}


@pytest.mark.parametrize("kind", [kind for kind in ENCODED if kind in KINDS])
def test_resized_shards_are_like_a_pack(kind: str, tmp_path: Path) -> None:
    quality, endings = ENCODED[kind]
    more = ["global_batch_size=4", "data.resize=30", "data.reduced_decoding=false"]
    _, options = data_of(kind, tmp_path, *more)
    sharded = packed(options, tmp_path / "shards", quality=quality)
    members = members_of(tmp_path / "shards/train")
    assert {name.partition(".")[2] for name in members} == endings
    pack(make_config(*options).data, tmp_path / "pack")
    pack_options = [*options, "loader=packed", f"loader.pack={tmp_path / 'pack'}"]
    splits = (build_loaders(make_config(*some), CPU) for some in (pack_options, sharded))
    for one, other in zip(*splits, strict=True):
        for batch, same in zip(one, other, strict=True):
            for tensor, found in zip(batch, same, strict=True):
                difference = (tensor.float() - found.float()).abs().mean()
                assert difference <= (0 if quality == LOSSLESS else 0.05)
    with pytest.raises(UserError, match=r"data.resize=32 \(there: 30\)"):
        open_splits(make_config(*sharded, "data.resize=32").data)


# Windows


def in_windows(counts: list[int], window: int, seed: int = 7, shuffle="window") -> PlanSampler:
    """A plan that reads shards of these sizes in windows; their samples are in another order."""
    total = sum(counts)
    order = np.random.default_rng(0).permutation(total)
    index = Index(
        name="some/train",
        sizes=np.full((total, 2), 30),
        channels=3,
        target=Labels(np.zeros(total, int), ("a",)),
        shards=Shards(ShardFiles(Path(), ()), "", (), order, np.cumsum([0, *counts])),
    )
    options = [f"data.shuffle={shuffle}", f"data.shuffle_window={window}", f"seed={seed}"]
    return PlanSampler(index, make_config(*options, "global_batch_size=1"), 0, 1, train=True)


def samples_of(sampler: PlanSampler, epoch: int) -> np.ndarray:
    sampler.set_epoch(epoch)
    return sampler.plan(np.arange(len(sampler.index)))["sample"]


@pytest.mark.parametrize(
    ("counts", "window"), [([1], 1), ([5], 8), ([3, 1, 4, 1, 5, 9, 2, 6], 3), ([7] * 9, 1)]
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


def test_windows_are_of_shards_and_their_size_is_part_of_the_plan(options) -> None:
    for shuffle, depends in (("window", True), ("full", False)):
        one, other = (in_windows([7] * 9, size, shuffle=shuffle).description() for size in (2, 3))
        assert (one != other) == depends
    with refused("data.shuffle=window"):
        build_loaders(make_config(*options, "data.shuffle=window"), CPU)


# Shards on a server


@pytest.fixture(scope="module")
def shards(options: list[str], tmp_path_factory) -> Path:
    """A dozen shards."""
    packed(options, out := tmp_path_factory.mktemp("shards"), shard_mb=0.01)
    return out


@pytest.fixture
def remote(options, shards: Path, web: WebServer, tmp_path: Path) -> list[str]:
    """Overrides that read them from a server, in windows of one, with a cache of their own."""
    web.serve(shards)
    server = [f"data.root={web.url}", f"data.cache_dir={tmp_path / 'cache'}", "data.retry_s=0"]
    windows = ["data.shuffle=window", "data.shuffle_window=1"]
    return [*options, *server, *windows, "loader.num_threads=1"]


def shard_of(loader, sample: int) -> int:
    return int(loader.index.shards.spans[0]["shard"][sample])


def fetched_shards(web: WebServer) -> list[str]:
    names = [path.lstrip("/") for method, path, _ in web.requests if method == "GET"]
    return [name for name in names if name.endswith(".tar")]


def are_fetched(web: WebServer, shards: set[str]) -> bool:
    return shards <= {*fetched_shards(web)}


def read_epoch(options: list[str], rank: int = 0, world_size: int = 1) -> list[list[str]]:
    """The files that one rank reads in an epoch and in the validation."""
    splits = build_loaders(make_config(*options), CPU, rank, world_size)
    return [
        [loader.info.name_of(sample) for _ in loader for sample in loader.last_samples]
        for loader in splits
    ]


def test_processes_share_one_copy_of_each_shard(remote, web: WebServer) -> None:
    remote = [*remote, "data.cache_gb=1"]
    web.latency_s = 0.02
    assert join([start_process(read_epoch, remote, rank, 2) for rank in (0, 1)]) == [0, 0]
    assert sorted(fetched_shards(web)) == sorted(n for n in web.files if n.endswith(".tar"))
    web.requests.clear()
    read_epoch(remote)
    assert not fetched_shards(web)


def test_the_next_window_is_fetched_while_one_is_read_and_copies_stay_within_their_bound(
    remote, shards: Path, tmp_path: Path, web: WebServer
) -> None:
    remote = [*remote, "global_batch_size=1"]
    local = build_loaders(make_config(*remote, f"data.root={shards}"), CPU)[0]
    needed = [f"train/{shard_of(local, int(rows['sample'][0])):06d}.tar" for rows in local.sampler]
    order = list(dict.fromkeys(needed))
    largest = sorted(len(web.files[name]) for name in order)[-4:]
    loader = build_loaders(make_config(*remote), CPU)[0]
    assert not fetched_shards(web)
    for batch, _ in enumerate(loader.sampler):
        time.sleep(0.02)  # the resolution of a file system's clock
        ahead = {*order[: order.index(needed[batch]) + 2]}
        if needed[batch] in needed[:batch]:  # in the middle of a window of one shard
            wait_for(partial(are_fetched, web, ahead), "the next window")
        assert {*fetched_shards(web)} <= ahead
        copies = list((tmp_path / "cache" / "shards").glob("*.tar"))
        assert sum(path.stat().st_size for path in copies) <= sum(largest) + 4 * (16 << 10)
    assert sorted(fetched_shards(web)) == sorted(order)
    assert len(copies) < len(order)


def test_half_a_copy_is_never_read(remote, shards: Path, tmp_path: Path, web: WebServer) -> None:
    remote, folder = [*remote, "data.cache_gb=1"], tmp_path / "cache" / "shards"
    expected = read_epoch([*remote, f"data.root={shards}"])
    assert read_epoch(remote) == expected
    copies = sorted(folder.glob("*.tar"))
    for path in copies:  # as a process leaves them that is killed while they arrive
        path.with_name(f"{path.name}.partial").write_bytes(path.read_bytes()[:1000])
        path.unlink()
    assert read_epoch(remote) == expected
    assert sorted(folder.glob("*.tar")) == copies
    assert not list(folder.glob("*.partial"))
    copies[0].unlink()
    web.fault = lambda path, number: "short" if path.endswith(".tar") else None
    with pytest.raises(StorageError, match=r"train/000000.tar .* bytes"):
        read_epoch(remote)
    assert not copies[0].exists()


def test_a_cache_without_room_is_refused_at_the_start(
    remote, tmp_path: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*more: str) -> None:
        build_loaders(make_config(*remote, *more), CPU)

    with refused("data.cache_gb=0.0002", "data.shuffle=window"):
        build("data.shuffle=full", "data.cache_gb=0.0002")
    build("data.cache_gb=0.0002")
    with refused("data.cache_gb=5e-05", "data.shuffle_window"):
        build("data.cache_gb=0.00005")
    full = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with refused(f"data.cache_dir={tmp_path}"):
        build()
    assert not fetched_shards(web)


@pytest.mark.parametrize("name", ["index/val/sizes.npy", "shards.json"])
def test_what_is_not_the_file_that_was_packed_is_refused(name: str, remote, web) -> None:
    page = b"<!DOCTYPE html><title>Log in</title>" + bytes([255])
    web.files[name] = page if name.endswith("json") else b"x" + web.files[name][1:]
    for _ in range(2):
        with pytest.raises(UserError, match=name):
            build_loaders(make_config(*remote), CPU)


def test_ranks_whose_bucket_stays_away_end_and_go_on_from_their_checkpoint_to_the_same_bits(
    remote, shards: Path, tmp_path: Path, web: WebServer
) -> None:
    """And a storage that fails is no bad sample."""
    remote += ["model=small_cnn", "epochs=2", "device=cpu", "log.images=0"]
    remote += ["checkpoint.every_steps=1"]
    remote += ["data.on_error=skip"]  # part: bad_samples
    local = [*remote, f"data.root={shards}"]
    train("train_ddp.py", tmp_path / "whole", *local)
    # The shard that the first epoch needs last is away.
    loader = build_loaders(make_config(*local), CPU)[0]
    *_, last = loader.sampler
    missing = f"train/{shard_of(loader, last['sample'][-1]):06d}.tar"
    web.fault = lambda path, number: "500" if path == missing else None
    codes, texts = run_to_end("train_ddp.py", tmp_path / "run", *remote)
    assert codes == [1, 1]
    assert f"{web.url}/{missing}: 500" in "".join(texts)
    saved = checkpoint_of(tmp_path / "run")
    assert 1 <= saved["step"] < len(loader)
    assert not any(saved["loader"]["bad"])  # part: bad_samples
    assert not (tmp_path / "run" / "requeue").exists()
    web.fault = lambda path, number: None
    train("train_ddp.py", tmp_path / "run", *remote, "resume=auto")
    assert weights_differ_by(tmp_path / "whole", tmp_path / "run") == 0
