"""Shards hold what the files held, and every promise of the loaders holds on them, too."""

import re
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaders.layouts import open_index
from loaders.shards import open_shards, pack_shards
from tests.helpers import make_config, refused
from tests.images import index_in, index_of, loaders_of, make_photos, paths_in, photos_in
from tests.kinds import KINDS, common
from tests.processes import join, run_to_end, start_process, train, wait_for
from tests.results import checkpoint_of, weights_differ_by
from tests.rows import rows
from tests.shards.conftest import WebServer


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> list[str]:
    """Overrides that read 40 photos of three classes."""
    root = make_photos(tmp_path_factory.mktemp("data") / "photos", 40)
    return photos_in(root, "data.val_count=6", "data.random_crop=true", "data.hflip=0.5")


def bytes_in(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder, by its path from there."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def packed(options: list[str], out: Path, shard_mb: str = "0.02", shards: str = "") -> list[str]:
    """The options, with the data in shards."""
    data = make_config(*options).data
    pack_shards(data, open_index(data), str(out), shard_mb, shards)
    return [*options, f"data.root={out}"]


STORED = [
    "photos",
    *rows("masks", "pairs, targets twice as large", needs="data=pairs"),
    *rows("several labels", "numbers", needs="data=table"),
]


@pytest.mark.parametrize("kind", STORED)
def test_shards_are_tar_files_with_the_plan_of_the_files(kind: str, tmp_path: Path) -> None:
    """A run goes on with either. As WebDataset names members: what stands before the first dot is
    the sample's."""
    data = KINDS[kind](tmp_path / "files")
    options = [*data.options, *common(tmp_path / "files"), "data.crop=[24,32]"]
    of_files, of_shards = loaders_of(*options), loaders_of(*packed(options, tmp_path / "out"))
    for split, same in zip(of_files, of_shards, strict=True):
        assert same.state_dict()["plan"] == split.state_dict()["plan"]
    members: dict[str, bytes] = {}
    for path in sorted((tmp_path / "out/train").glob("*.tar")):
        assert path.stat().st_size < 60_000
        with tarfile.open(path) as tar:
            members |= {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    index = index_in(of_files[0])
    kinds = ["", ""] if len(index.sides) == 1 else [".input", ".target"]
    expected = {}
    for side in range(len(index.sides)):
        for sample, file in enumerate(paths_in(index, side)):
            name = f"{sample:09d}{kinds[side]}{Path(file).suffix}"
            expected[name] = Path(file).read_bytes()
    assert members == expected
    samples = [name.partition(".")[0] for name in members]
    assert len({*samples}) == sum(one != other for one, other in pairwise(["", *samples]))


def test_ranges_that_are_killed_make_what_one_command_makes(options, tmp_path, capsys) -> None:
    packed(options, tmp_path / "whole")
    expected, out = bytes_in(tmp_path / "whole"), tmp_path / "ranges"
    [count] = re.findall("has ([0-9]+) of", capsys.readouterr().out)
    from_shards = make_config(*packed(options, out, shards="0:1"), f"data.cache_dir={tmp_path}")
    packed(options, out, shards="3:")
    assert f"has {int(count) - 2} of {count} shards; missing: train/000001, train/000002" in (
        capsys.readouterr().out
    )
    with refused(f"{out}/train/000001.npz is missing"):
        open_shards(from_shards.data)
    # Killed between a shard and its sidecar.
    (out / "train/000000.tar").write_bytes(b"another attempt's")
    (out / "train/000000.npz").unlink()
    packed(options, out, shards=":3")
    assert bytes_in(out) == expected
    (tar := out / "train/000000.tar").unlink()  # which is no bad sample
    cfg = [*options, f"data.root={out}", f"data.cache_dir={tmp_path}", "data.on_error=skip"]
    with refused(f"{tar} cannot be read (No such file"):
        list(loaders_of(*cfg)[0])
    for wrong, shard_mb in (([*options, "data.val_count=7"], "0.02"), (options, "0.0195")):
        with refused(f"{out} holds shards of other data"):
            packed(wrong, out, shard_mb)


def test_options_that_are_not_possible_are_refused(options, tmp_path: Path) -> None:
    for shards in ("3", "99:", "2:2", "a:b"):
        with refused(f"shards={shards} is not possible"):
            packed(options, tmp_path, shards=shards)
    for shard_mb in ("0", "nan", "inf", "many"):
        with refused(f"shard_mb={shard_mb} is not possible"):
            packed(options, tmp_path, shard_mb)
    with refused("data=mnist_mini", "no image files"):
        packed([], tmp_path)


@pytest.fixture(scope="module")
def shards(options: list[str], tmp_path_factory) -> Path:
    """A dozen shards."""
    packed(options, out := tmp_path_factory.mktemp("shards"), shard_mb="0.01")
    return out


def test_what_is_listed_is_left_out(options, shards: Path, tmp_path: Path, caplog) -> None:
    """By the place that messages have, or the path of the file that was packed. Lines that do
    nothing are counted, of files, too."""
    caplog.set_level("INFO")
    for root in ([], [f"data.root={shards}", f"data.cache_dir={tmp_path}"]):
        train, val = index_of(*options, *root)
        listed = [train.place_of(3, 0), train.name_of(30), val.place_of(0, 0)]
        for more, told in ((["a/1.jpg", "2.jpg"], ["2 of 5 lines of data.leave_out="]), ([], [])):
            (tmp_path / "bad.txt").write_text("\n".join([*listed, *more]))
            caplog.clear()
            found = index_of(*options, *root, f"data.leave_out={tmp_path / 'bad.txt'}")
            assert len(caplog.messages) == len(told)
            assert "".join(told) in "".join(caplog.messages)
        for index, kept, left_out in zip((train, val), found, ([3, 30], [0]), strict=True):
            before = [number for number in range(len(index)) if number not in left_out]
            assert paths_in(kept) == [index.name_of(number) for number in before]
            contents = [kept.content(number, 0) for number in range(len(kept))]
            assert contents == [index.content(number, 0) for number in before]
            targets: Any = (kept.target.values, index.target.values)
            assert np.array_equal(targets[0], targets[1][before])


def shards_in(loader) -> np.ndarray:
    """(N,): the number of the shard of each sample."""
    return index_in(loader).columns["spans-0"]["shard"]


@pytest.mark.parametrize("window", [1, 3, 100])
def test_a_window_has_the_samples_of_few_shards(window: int, options, shards: Path) -> None:
    """And its size is part of the plan."""
    options = [*options, f"data.root={shards}", "data.shuffle=window"]
    orders, plans = [], []
    for seed in (0, 1):
        loader: Any = loaders_of(*options, f"data.shuffle_window={window}", f"seed={seed}")[0]
        plans.append(loader.state_dict()["plan"])
        left = loader.plan.rows(0, np.arange(34))["sample"].tolist()
        assert sorted(left) == list(range(34))
        shard_of = shards_in(loader)
        orders.append(shard_of[left].tolist())
        # Runs of positions, as long as the shards in them, which no two windows share.
        while left:
            inside = list(dict.fromkeys(shard_of[left].tolist()))[:window]
            size = int(np.isin(shard_of, inside).sum())
            assert {*shard_of[left[:size]].tolist()} == {*inside}
            left = left[size:]
    assert orders[0] != orders[1]
    other = loaders_of(*options, f"data.shuffle_window={window + 1}")[0]
    assert other.state_dict()["plan"] != plans[0]


@pytest.fixture
def remote(options, shards: Path, web: WebServer, tmp_path: Path) -> list[str]:
    """Overrides that read them from a server, with a cache of their own."""
    web.files = bytes_in(shards)
    server = [f"data.root={web.url}", f"data.cache_dir={tmp_path / 'cache'}", "data.retry_s=0"]
    return [*options, *server, "loader.num_threads=1"]


WINDOWS = ["data.shuffle=window", "data.shuffle_window=1"]


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
    expected = read_epoch([*remote, f"data.root={shards}"])
    web.latency_s = 0.02
    assert join([start_process(read_epoch, remote, rank, 2) for rank in (0, 1)]) == [0, 0]
    assert sorted(fetched_shards(web)) == sorted(n for n in web.files if n.endswith(".tar"))
    web.requests.clear()
    assert read_epoch(remote) == expected
    assert [path for _, path, _ in web.requests] == ["/shards.json"]  # the rest is there
    for path in (tmp_path / "cache/shards").rglob("*.tar"):
        # As a process leaves them that is killed while they arrive.
        path.with_suffix(".partial").write_bytes(path.read_bytes()[:1000])
        path.unlink()
    assert read_epoch(remote) == expected
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_the_next_window_is_fetched_while_one_is_read(remote, shards, tmp_path, web) -> None:
    """And the copies of one go when the next but one begins."""
    remote = [*remote, *WINDOWS, "global_batch_size=1"]
    local = loaders_of(*remote, f"data.root={shards}")[0]
    needed = [f"{shards_in(local)[rows['sample'][0]]:06d}.tar" for rows in local.plan]
    order = list(dict.fromkeys(needed))
    list(loaders_of(*remote, "loader=synthetic")[0])
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


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train.py", *rows("train_ddp.py")])
def test_a_run_whose_bucket_stays_away_can_go_on(script, remote, shards, tmp_path, web) -> None:
    """To the same bits, from its checkpoint. A storage that fails is no bad sample."""
    remote += [*WINDOWS, "epochs=2", "log.images=0", "checkpoint.every_steps=1"]
    remote += ["data.on_error=skip"]
    local = [*remote, f"data.root={shards}"]
    train(script, tmp_path / "whole", *local)
    # The shard that the first epoch needs last is away.
    loader = loaders_of(*local)[0]
    *_, last = loader.plan
    missing = f"train/{shards_in(loader)[last['sample'][-1]]:06d}.tar"
    web.fault = {missing: "500"}.get
    codes, texts = run_to_end(script, tmp_path / "run", *remote)
    assert codes == [1] * len(texts)
    assert f"{web.url}/{missing}: 500" in "".join(texts)
    saved = checkpoint_of(tmp_path / "run")
    assert 1 <= saved["step"] < len(loader)
    assert "replaced" not in "".join(texts)
    web.fault = lambda path: None
    train(script, tmp_path / "run", *remote, "resume=auto")
    assert weights_differ_by(tmp_path / "whole", tmp_path / "run") == 0
