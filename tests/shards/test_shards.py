"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.shards import open_shards, pack_shards
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
from tests.images import Data, common, index_in, index_of, loaders_of, make_photos, photos_in
from tests.parts import rows_of
from tests.servers import WebServer, bytes_in


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Overrides that read 40 photos of three classes."""
    root = make_photos(tmp_path_factory.mktemp("data") / "photos", 40)
    return photos_in(root, "data.val_count=6", "data.random_crop=true", "data.hflip=0.5")


KINDS: dict[str, Callable[[Path], Data]] = {**images.KINDS, **dict(rows_of("KINDS"))}


def packed(options: list[str], out: Path, shard_mb: str = "0.02", shards: str = "") -> list[str]:
    """The options, with the data in shards."""
    pack_shards(make_config(*options).data, str(out), shard_mb, shards)
    return [*options, f"data.root={out}"]


def members_of(folder: Path) -> dict[str, bytes]:
    """Name and content of all that lies in the tar files of a folder, in their order."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.tar")):
        assert path.stat().st_size < 60_000
        with tarfile.open(path) as tar:
            found |= {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("kind", ["photos", "cells of 16 bits", *dict(rows_of("KINDS"))])
def test_shards_are_tar_files_that_other_tools_read(kind: str, tmp_path: Path) -> None:
    """As WebDataset names them: what stands before the first dot is the sample's."""
    data = KINDS[kind](tmp_path / "files")
    options = [*data.options, *common(tmp_path / "files")]
    packed(options, tmp_path / "out")
    members, source = members_of(tmp_path / "out/train"), index_of(*options)[0].source
    paths: Any = vars(source)["paths"]
    kinds = [""] if len(paths) == 1 else [".input", ".target"]
    samples = [name.partition(".")[0] for name in members]
    assert samples[:: len(paths)] == samples[len(paths) - 1 :: len(paths)]
    for sample in range(len(paths[0])):
        for side, name in zip(paths, kinds, strict=True):
            path = Path(side[sample])
            assert members.pop(f"{sample:09d}{name}{path.suffix}") == path.read_bytes()
    assert not members


def test_ranges_that_are_killed_make_what_one_command_makes(options, tmp_path, capsys) -> None:
    packed(options, tmp_path / "whole")
    expected, out = bytes_in(tmp_path / "whole"), tmp_path / "ranges"
    [count] = re.findall("has ([0-9]+) of", capsys.readouterr().out)
    from_shards = make_config(*packed(options, out, shards="0:1"), "data.cache_dir=cache").data
    packed(options, out, shards="3:")
    assert f"has {int(count) - 2} of {count} shards; missing: train/000001, train/000002" in (
        capsys.readouterr().out
    )
    with refused(f"lacks 2 of {count} shards", "train/000001", "shard_mb=0.02 shards=1:3"):
        open_shards(from_shards)
    # Killed between a shard and its columns, or in their midst.
    (out / "train/000000.tar").write_bytes(b"another attempt's")
    for name in ("index.json", "sizes.npy"):
        (out / "train/000000" / name).unlink()
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*.tar")}
    packed(options, out, shards=":3")
    assert bytes_in(out) == expected
    kept = [path for path, time in times.items() if path.stat().st_mtime_ns == time]
    assert len(kept) == len(times) - 1
    packed(options, out)
    assert f"has {count} of {count} shards\n" in capsys.readouterr().out
    # Of other data, and of shards that hold other samples.
    for wrong, shard_mb in (([*options, "data.val_count=7"], "0.02"), (options, "0.0195")):
        with refused(f"{out} holds shards of other data"):
            packed(wrong, out, shard_mb)


@pytest.mark.parametrize("shards", ["3", "99:", "2:2", "a:b", "0:1:2"])
def test_a_range_without_shards_is_refused(shards: str, options, tmp_path: Path) -> None:
    with refused(f"shards={shards} is not possible"):
        packed(options, tmp_path, shards=shards)


@pytest.mark.parametrize("shard_mb", ["0", "nan", "inf", "many"])
def test_a_size_that_is_none_is_refused(shard_mb: str, options, tmp_path: Path) -> None:
    with refused(f"shard_mb={shard_mb} is not possible"):
        packed(options, tmp_path, shard_mb)


def test_data_without_files_are_not_packed(tmp_path: Path) -> None:
    with refused("data=mnist_mini", "no image files"):
        packed([], tmp_path)


@pytest.fixture(scope="module")
def shards(options: list[str], tmp_path_factory) -> Path:
    """A dozen shards."""
    packed(options, out := tmp_path_factory.mktemp("shards"), shard_mb="0.01")
    return out


def test_what_is_listed_is_left_out(options, shards: Path, tmp_path: Path) -> None:
    """By the place that messages have, or the path of the file that was packed."""
    options = [*options, f"data.root={shards}", f"data.cache_dir={tmp_path}"]
    train, val = index_of(*options)
    listed = [train.source.place(3, 0), train.source.name(30), val.source.place(0, 0)]
    (tmp_path / "bad.txt").write_text("\n".join(listed))
    for index, left_out in zip((train, val), ([3, 30], [0]), strict=True):
        names = [index.source.name(n) for n in range(len(index)) if n not in left_out]
        found = index_of(*options, f"data.leave_out={tmp_path / 'bad.txt'}")[index is val]
        assert [found.source.name(n) for n in range(len(found))] == names
        for sample, name in enumerate(names):
            before = [index.source.name(n) for n in range(len(index))].index(name)
            assert found.source.content(sample, 0) == index.source.content(before, 0)
            assert found.target.values[sample] == index.target.values[before]


def test_a_bad_sample_is_replaced_from_its_shard(options, shards: Path, tmp_path: Path) -> None:
    """By the next one that is stored, and after the last one of the shard by its first."""
    shutil.copytree(shards, damaged := tmp_path / "shards")
    options = [*options, f"data.root={damaged}", f"data.cache_dir={tmp_path}"]
    tar = damaged / "train/000001.tar"
    with tarfile.open(tar) as file:
        members = [(int(member.name[:9]), member.offset_data) for member in file]
    stored = [sample for sample, _ in members]
    content = bytearray(tar.read_bytes())
    for _, offset in (members[0], members[1], members[-1]):
        content[offset + 40] ^= 1
    tar.write_bytes(content)
    substitutes = {stored[0]: stored[2], stored[1]: stored[2], stored[-1]: stored[2]}
    loader = loaders_of(*options, "data.on_error=skip", "global_batch_size=1")[0]
    planned = [int(rows["sample"][0]) for rows in loader.plan]
    read = [sample for _ in loader for sample in loader.last_samples]
    assert read == [substitutes.get(sample, sample) for sample in planned]
    assert {*loader.bad} == {*substitutes}
    with refused(f"{tar}: ", "not those packed"):
        list(loaders_of(*options)[0])


def test_a_shard_that_is_missing_ends_the_run(options, shards: Path, tmp_path: Path) -> None:
    """It is no bad sample."""
    shutil.copytree(shards, tmp_path / "shards")
    options = [*options, f"data.root={tmp_path / 'shards'}", f"data.cache_dir={tmp_path}"]
    train = loaders_of(*options, "data.on_error=skip")[0]
    (tmp_path / "shards/train/000001.tar").unlink()
    with refused(f"{tmp_path / 'shards/train/000001.tar'} cannot be read (No such file"):
        list(train)


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_has_the_samples_of_few_shards(window: int, options, shards: Path) -> None:
    options = [*options, f"data.root={shards}", "data.shuffle=window"]
    orders = []
    for seed in (0, 1):
        loader: Any = loaders_of(*options, f"data.shuffle_window={window}", f"seed={seed}")[0]
        left = loader.plan.rows(np.arange(34), 0)["sample"].tolist()
        assert sorted(left) == list(range(34))
        shard_of = vars(index_in(loader).source)["spans"][0]["shard"]
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
    return [*without(remote, "data.retry_s"), f"data.root={shards}"]


def shard_of(loader, sample: int) -> int:
    source: Any = index_in(loader).source
    return int(source.spans[0]["shard"][sample])


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
    remote = without(remote, "data.shuffle", "data.shuffle_window")
    expected = read_epoch(from_folder(remote, shards))
    web.latency_s = 0.02
    assert join([start_process(read_epoch, remote, rank, 2) for rank in (0, 1)]) == [0, 0]
    assert sorted(fetched_shards(web)) == sorted(n for n in web.files if n.endswith(".tar"))
    web.requests.clear()
    assert read_epoch(remote) == expected
    assert [path for _, path, _ in web.requests] == ["/shards.json"]  # the rest is there
    copies = sorted((tmp_path / "cache/shards").rglob("*.tar"))
    for path in copies:  # as a process leaves them that is killed while they arrive
        path.with_name(f"{path.name}.partial").write_bytes(path.read_bytes()[:1000])
        path.unlink()
    assert read_epoch(remote) == expected
    assert sorted((tmp_path / "cache/shards").rglob("*.tar")) == copies
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("page", [b"", b"short", b"<!DOCTYPE html><title>Busy</title>" * 10_000])
def test_a_damaged_copy_is_fetched_once_more_before_a_sample_is_blamed(
    page: bytes, remote, shards, tmp_path, web
) -> None:
    """Whether it was damaged on the disk or by a page in its place."""
    remote = without(remote, "data.shuffle", "data.shuffle_window")
    expected, whole = read_epoch(from_folder(remote, shards)), dict(web.files)
    read_epoch(remote)
    damaged = sorted((tmp_path / "cache/shards").rglob("train/00000[12].tar"))
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
    """And the copies of one go when the next but one begins."""
    remote = [*remote, "global_batch_size=1"]
    local = loaders_of(*from_folder(remote, shards))[0]
    needed = [f"{shard_of(local, int(rows['sample'][0])):06d}.tar" for rows in local.plan]
    order = list(dict.fromkeys(needed))
    loader = loaders_of(*remote)[0]
    assert not fetched_shards(web)
    for batch, _ in enumerate(loader.plan):
        window = order.index(needed[batch])
        ahead = {f"train/{name}" for name in order[: window + 2]}
        wait_for(lambda: ahead <= {*fetched_shards(web)}, "the next window")  # noqa: B023
        assert {*fetched_shards(web)} == ahead
        copies = {path.name for path in (tmp_path / "cache/shards").rglob("*.tar")}
        assert copies <= {*order[max(0, window - 1) : window + 2]}
    assert len(fetched_shards(web)) == len(order)


def test_a_worker_reads_what_was_removed_from_a_new_copy(remote, shards, tmp_path, web) -> None:
    index = index_of(*remote)[0]
    index.source.content(3, 0)
    for path in (tmp_path / "cache").rglob("*.tar"):
        path.unlink()
    names = [index.source.name(n) for n in range(len(index))]
    [same] = [index_of(*from_folder(remote, shards))[0]]
    for sample in range(len(names)):
        assert index.source.content(sample, 0) == same.source.content(sample, 0)


def test_a_cache_without_room_is_refused_at_start(remote, tmp_path, web, monkeypatch) -> None:
    splits = json.loads(web.files["shards.json"])["splits"].values()
    total = sum(sum(split["num_bytes"]) for split in splits)
    full = without(remote, "data.shuffle", "data.shuffle_window")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(0.6 * total)))
    with refused(f"data.cache_dir={tmp_path}", "data.shuffle=window"):
        loaders_of(*full)
    loaders_of(*remote)
    with refused(f"data.cache_dir={tmp_path}", "data.shuffle_window"):
        loaders_of(*remote, "data.shuffle_window=5")
    assert not fetched_shards(web)


PAGE = b"<!DOCTYPE html><title>Log in</title>" + bytes([255])


@pytest.mark.parametrize(
    "name", ["shards.json", *(f"val/000000/{name}" for name in ("index.json", "spans-0.npy"))]
)
def test_a_page_in_place_of_a_file_is_refused(name: str, remote, web) -> None:
    web.files[name] = PAGE
    for _ in range(2):
        with refused(f"{web.url}", name):
            loaders_of(*remote)


@pytest.mark.parametrize("name", ["sizes.npy", "values.npy", "names-0.npy"])
def test_columns_that_are_not_those_packed_are_refused(name: str, remote, web) -> None:
    content = web.files[f"val/000000/{name}"]
    web.files[f"val/000000/{name}"] = content[:-1] + bytes([content[-1] ^ 1])
    for _ in range(2):
        with refused(f"{web.url}/val: the columns of the shards are not those"):
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
    *_, last = loader.plan
    missing = f"train/{shard_of(loader, last['sample'][-1]):06d}.tar"
    web.fault = {missing: "500"}.get
    codes, texts = run_to_end(script, tmp_path / "run", *remote)
    assert codes == [1] * len(texts)
    assert f"{web.url}/{missing}: 500" in "".join(texts)
    saved = checkpoint_of(tmp_path / "run")
    assert 1 <= saved["step"] < len(loader)
    assert "replaced" not in "".join(texts)
    assert not (tmp_path / "run" / "requeue").exists()
    web.fault = lambda path: None
    train(script, tmp_path / "run", *remote, "resume=auto")
    assert weights_differ_by(tmp_path / "whole", tmp_path / "run") == 0
