"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import json
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.pack import pack
from loaders.shards import LOSSLESS, open_shards, pack_shards, part_of
from tests import images
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
from tests.images import Data, common, index_of, loaders_of, make_photos, photos_in, save_index
from tests.parts import rows_of
from tests.servers import WebServer, bytes_in


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Overrides that read 40 photos of three classes."""
    root = make_photos(tmp_path_factory.mktemp("data") / "photos", 40)
    return photos_in(root, "data.val_count=6", "data.random_crop=true", "data.hflip=0.5")


KINDS: dict[str, Callable[[Path], Data]] = {**images.KINDS, **dict(rows_of("KINDS"))}


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
    **dict(rows_of("IN_SHARDS")),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_shards_are_tar_files_that_other_tools_read(kind: str, tmp_path: Path) -> None:
    """As WebDataset names them: what stands before the first dot is the sample's."""
    data, options = data_of(kind, tmp_path)
    packed(options, tmp_path / "out")
    members = members_of(tmp_path / "out/train")
    samples = [name.partition(".")[0] for name in members]
    assert samples[::2] == samples[1::2]
    index, (ending, expected) = index_of(*options)[0], TARGETS[kind]
    for sample, path in enumerate(map(Path, index.files[0])):
        assert members.pop(f"{sample:09d}{path.suffix}") == path.read_bytes()
        target = members.pop(f"{sample:09d}.{ending}")
        assert json.loads(target) == expected(data.targets[path.name])
    assert not members


def test_parts_that_are_killed_make_what_one_makes(options, tmp_path: Path, capsys) -> None:
    packed(options, tmp_path / "whole")
    out = tmp_path / "parts"
    packed(options, out, part="3/3")
    packed(options, out, part="1/3")
    assert "train/000001.tar of part 2/3" in capsys.readouterr().out
    with refused("no complete shards"):
        open_shards(make_config(*options, f"data.root={out}").data)
    # Killed between a shard and its piece.
    (out / "train/000000.tar").write_bytes(b"another attempt's")
    (out / "pieces/train/000000.bin").unlink()
    packed(options, out, part="2/3")
    assert "train/000000.tar of part 1/3" in capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    packed(options, out)
    assert bytes_in(out) == bytes_in(tmp_path / "whole")
    kept = [path for path, time in times.items() if path.stat().st_mtime_ns == time]
    assert len(kept) == len(times) - 1
    packed(options, out, part="2/3")
    assert "is packed already" in capsys.readouterr().out
    from_shards = [*options, f"data.root={out}"]
    with refused(f"data.root={out} has no image files to pack"):
        packed(from_shards, tmp_path / "again")
    with refused(f"data.root={out} is not made of image files"):
        save_index(make_config(*from_shards).data, tmp_path / "index")
    # Of other data, and as many shards, but not of the same samples.
    for wrong, shard_mb in (([*options, "data.val_count=7"], 0.02), (options, 0.0195)):
        with refused(f"{out} holds shards of other data"):
            packed(wrong, out, shard_mb)


def test_which_part_a_process_writes() -> None:
    rank_2 = {"RANK": "1", "WORLD_SIZE": "2"}
    of_array = {"ID": "7", "MIN": "3", "STEP": "2", "COUNT": "4"}
    task = {f"SLURM_ARRAY_TASK_{name}": value for name, value in of_array.items()}
    assert part_of("", {}) == (1, 1)
    assert part_of("", rank_2) == (2, 2)
    assert part_of("", {"WORLD_SIZE": "2"}) == (1, 1)
    assert part_of("3/64", rank_2 | task) == (3, 64)
    assert part_of("", rank_2 | task) == (3, 4)
    with refused("part=3/2"):  # an array with gaps
        part_of("", task | {"SLURM_ARRAY_TASK_COUNT": "2"})
    for text in ("0/3", "4/3", "3", "a/b"):
        with refused(f"part={text} "):
            part_of(text, {})


# kind of data -> quality of its resized images in shards (None: all of it), endings of their names
ENCODED: dict[str, tuple[str | None, set[str]]] = {
    "cells of 16 bits": (None, {"tif", "cls"}),
    "cells of one channel": (None, {"tif", "cls"}),
    "photos": ("95", {"jpg", "cls"}),
    **dict(rows_of("RESIZED_IN_SHARDS")),
}


@pytest.mark.parametrize("kind", ENCODED)
def test_resized_shards_are_like_a_pack(kind: str, tmp_path: Path) -> None:
    quality, endings = ENCODED[kind]
    more = ["global_batch_size=4", "data.resize=30", "data.reduced_decoding=false"]
    _, options = data_of(kind, tmp_path, *more)
    save_index(make_config(*options).data, tmp_path / "index")  # of images that are not resized
    indexed = [*options, f"data.index={tmp_path / 'index'}"]
    packed(indexed, tmp_path / "shards", quality=quality or LOSSLESS)
    sharded = [*options, f"data.root={tmp_path / 'shards'}"]
    assert {n.partition(".")[2] for n in members_of(tmp_path / "shards/train")} == endings
    pack(make_config(*indexed).data, tmp_path / "pack")
    pack_options = [*options, "loader=packed", f"loader.pack={tmp_path / 'pack'}"]
    splits = (loaders_of(*some) for some in (pack_options, sharded))
    for one, other in zip(*splits, strict=True):
        for index in (one.index, other.index):
            assert np.array_equal(index.distinct_sizes, np.unique(index.sizes, axis=0))
        for batch, same in zip(one, other, strict=True):
            for tensor, found in zip(batch, same, strict=True):
                difference = (tensor.float() - found.float()).abs().mean()
                assert difference <= (0.05 if quality else 0)
    with refused("data.resize=32 (there: 30)"):
        loaders_of(*sharded, "data.resize=32")


@pytest.fixture(scope="module")
def shards(options: list[str], tmp_path_factory) -> Path:
    """A dozen shards."""
    packed(options, out := tmp_path_factory.mktemp("shards"), shard_mb=0.01)
    return out


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_has_the_samples_of_few_shards(window: int, options, shards: Path) -> None:
    options = [*options, f"data.root={shards}", "data.shuffle=window"]
    orders = []
    for seed in (0, 1):
        loader: Any = loaders_of(*options, f"data.shuffle_window={window}", f"seed={seed}")[0]
        left = loader.sampler.plan(np.arange(34))["sample"].tolist()
        assert sorted(left) == list(range(34))
        shard_of = loader.index.shards.spans[0]["shard"]
        orders.append(shard_of[left].tolist())
        # Runs of positions, as long as the shards in them, which no two windows share.
        while left:
            inside = list(dict.fromkeys(shard_of[left].tolist()))[:window]
            size = int(np.isin(shard_of, inside).sum())
            assert {*shard_of[left[:size]].tolist()} == {*inside}
            left = left[size:]
    assert orders[0] != orders[1]


def test_windows_are_of_shards_and_their_size_is_part_of_the_plan(options, shards: Path) -> None:
    more = [f"data.root={shards}", "data.shuffle=window"]
    one, other = (
        loaders_of(*options, *more, f"data.shuffle_window={size}")[0].state_dict()["plan"]
        for size in (2, 3)
    )
    assert one != other
    with refused("data.shuffle=window"):
        loaders_of(*options, "data.shuffle=window")


@pytest.fixture
def remote(options, shards: Path, web: WebServer, tmp_path: Path) -> list[str]:
    """Overrides that read them from a server, in windows of one, with a cache of their own."""
    web.files = bytes_in(shards)
    server = [f"data.root={web.url}", f"data.cache_dir={tmp_path / 'cache'}", "data.retry_s=0"]
    windows = ["data.shuffle=window", "data.shuffle_window=1"]
    return [*options, *server, *windows, "loader.num_threads=1"]


def without(options: list[str], *keys: str) -> list[str]:
    return [option for option in options if option.partition("=")[0] not in keys]


def from_folder(remote: list[str], shards: Path) -> list[str]:
    """The same of the shards in their folder."""
    return [*without(remote, "data.retry_s", "data.cache_gb"), f"data.root={shards}"]


def shard_of(loader, sample: int) -> int:
    return int(loader.index.shards.spans[0]["shard"][sample])


def fetched_shards(web: WebServer) -> list[str]:
    return [path[1:] for how, path, _ in web.requests if how == "GET" and path.endswith(".tar")]


def read_epoch(options: list[str], rank: int = 0, world_size: int = 1) -> list[list[str]]:
    """The files that one rank reads in an epoch and in the validation."""
    splits = loaders_of(*options, rank=rank, world_size=world_size)
    return [
        [loader.info.name_of(sample) for _ in loader for sample in loader.last_samples]
        for loader in splits
    ]


def test_processes_share_one_whole_copy_of_each_shard(remote, shards, tmp_path, web) -> None:
    remote, folder = [*remote, "data.cache_gb=1"], tmp_path / "cache" / "shards"
    expected = read_epoch(from_folder(remote, shards))
    web.latency_s = 0.02
    assert join([start_process(read_epoch, remote, rank, 2) for rank in (0, 1)]) == [0, 0]
    assert sorted(fetched_shards(web)) == sorted(n for n in web.files if n.endswith(".tar"))
    web.requests.clear()
    assert read_epoch(remote) == expected
    assert not fetched_shards(web)
    copies = sorted(folder.glob("*.tar"))
    for path in copies:  # as a process leaves them that is killed while they arrive
        path.with_name(f"{path.name}.partial").write_bytes(path.read_bytes()[:1000])
        path.unlink()
    assert read_epoch(remote) == expected
    assert sorted(folder.glob("*.tar")) == copies
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("page", [b"", b"short", b"<!DOCTYPE html><title>Busy</title>" * 10_000])
def test_a_damaged_copy_is_fetched_once_more_before_a_sample_is_blamed(
    page: bytes, remote, shards, tmp_path, web
) -> None:
    """Whether it was damaged on the disk or by a page in its place."""
    remote = [*remote, "data.cache_gb=1"]
    expected, whole = read_epoch(from_folder(remote, shards)), dict(web.files)
    read_epoch(remote)
    damaged = sorted((tmp_path / "cache" / "shards").glob("*train-00000[12].tar"))
    for path in damaged:
        path.write_bytes(page or path.read_bytes()[::-1])
    web.requests.clear()
    assert read_epoch(remote) == expected
    assert sorted(fetched_shards(web)) == ["train/000001.tar", "train/000002.tar"]

    name = "train/000001.tar"
    web.files[name] = page or whole[name][::-1]
    damaged[0].unlink()
    web.requests.clear()
    with refused(name, str(damaged[0])):
        read_epoch(remote)
    assert fetched_shards(web) == [name] * 2
    web.files = whole
    assert read_epoch(remote) == expected


def test_the_next_window_is_fetched_while_one_is_read(remote, shards, tmp_path, web) -> None:
    """And copies stay within their bound."""
    remote = [*remote, "global_batch_size=1"]
    local = loaders_of(*from_folder(remote, shards))[0]
    needed = [f"train/{shard_of(local, int(rows['sample'][0])):06d}.tar" for rows in local.sampler]
    order = list(dict.fromkeys(needed))
    largest = sorted(len(web.files[name]) for name in order)[-4:]
    loader = loaders_of(*remote)[0]
    assert not fetched_shards(web)

    def is_fetched() -> bool:
        return ahead <= {*fetched_shards(web)}

    for batch, _ in enumerate(loader.sampler):
        time.sleep(0.02)  # the resolution of a file system's clock
        ahead = {*order[: order.index(needed[batch]) + 2]}
        if needed[batch] in needed[:batch]:  # in the middle of a window of one shard
            wait_for(is_fetched, "the next window")
        assert {*fetched_shards(web)} <= ahead
        copies = list((tmp_path / "cache" / "shards").glob("*.tar"))
        assert sum(path.stat().st_size for path in copies) <= sum(largest) + 4 * (16 << 10)
    assert sorted(fetched_shards(web)) == sorted(order)
    assert len(copies) < len(order)


def test_a_cache_without_room_is_refused_at_start(remote, tmp_path, web, monkeypatch) -> None:
    with refused("data.cache_gb=0.0002", "data.shuffle=window"):
        loaders_of(*without(remote, "data.shuffle", "data.shuffle_window"), "data.cache_gb=0.0002")
    loaders_of(*remote, "data.cache_gb=0.0002")
    with refused("data.cache_gb=5e-05", "data.shuffle_window"):
        loaders_of(*remote, "data.cache_gb=0.00005")
    full = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with refused(f"data.cache_dir={tmp_path}"):
        loaders_of(*remote)
    assert not fetched_shards(web)


@pytest.mark.parametrize("name", ["index/val/sizes.npy", "shards.json"])
def test_what_is_not_the_file_that_was_packed_is_refused(name: str, remote, web) -> None:
    page = b"<!DOCTYPE html><title>Log in</title>" + bytes([255])
    web.files[name] = page if name.endswith("json") else web.files[name][:-1] + b"x"
    for _ in range(2):
        with refused(name):
            loaders_of(*remote)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", *rows_of("SCRIPTS")])
def test_a_run_whose_bucket_stays_away_ends_and_goes_on_from_its_checkpoint_to_the_same_bits(
    script: str, remote, shards: Path, tmp_path: Path, web: WebServer
) -> None:
    """And a storage that fails is no bad sample."""
    remote += ["epochs=2", "log.images=0", "checkpoint.every_steps=1"]
    remote += ["data.on_error=skip"]
    local = from_folder(remote, shards)
    train(script, tmp_path / "whole", *local)
    # The shard that the first epoch needs last is away.
    loader = loaders_of(*local)[0]
    *_, last = loader.sampler
    missing = f"train/{shard_of(loader, last['sample'][-1]):06d}.tar"
    web.fault = {missing: "500"}.get
    codes, texts = run_to_end(script, tmp_path / "run", *remote)
    assert codes == [1] * len(texts)
    assert f"{web.url}/{missing}: 500" in "".join(texts)
    saved = checkpoint_of(tmp_path / "run")
    assert 1 <= saved["step"] < len(loader)
    assert not any(saved["loader"]["bad"])
    assert not (tmp_path / "run" / "requeue").exists()
    web.fault = lambda path: None
    train(script, tmp_path / "run", *remote, "resume=auto")
    assert weights_differ_by(tmp_path / "whole", tmp_path / "run") == 0
