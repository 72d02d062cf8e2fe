"""Files that cannot be decoded, and machines that run out of something."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from conf.errors import UserError
from loaders.image_loaders import build_loaders
from loaders.index import BadFileError, build_index
from loaders.limits import LimitError
from tests.helpers import ENVIRONMENT, FORKSERVER, REPOSITORY, answers_to, make_config, refused
from tests.images import WAYS, cut_short, make_photos, reading, replace_file, save, smooth

CPU = torch.device("cpu")
HTML = b"<html>404 not found</html>" * 20


def options_for(root: Path, *overrides: str) -> list[str]:
    """Centre crops of 40x40 pixels, half of the samples for evaluation."""
    options = ["data=imagefolder", "data.resize=null", "data.crop=[40,40]", "data.val_fraction=0.5"]
    return [*reading(root), *options, "global_batch_size=4", *overrides]


def scramble(path: str) -> None:
    """Another content of the same size."""
    content = Path(path).read_bytes()
    replace_file(path, content[:300] + bytes(len(content) - 300))
    os.utime(path, (0, 0))


def rot(path: str) -> None:
    """As `scramble`, with the size and the time of before."""
    stat = os.stat(path)
    scramble(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE: list[tuple[Callable[[str], None], str]] = [
    (cut_short, "has changed since"),  # part: header_cache|dali
    (os.unlink, "No such file"),
    (scramble, "has changed since"),  # part: header_cache|dali
    (rot, "cannot be decoded"),
    (lambda path: replace_file(path, b""), "has changed since"),  # part: header_cache|dali
]


def test_a_damaged_file_is_named_with_one_reason_by_all_backends(tmp_path) -> None:
    """All but one are damaged after they are indexed."""
    root = make_photos(tmp_path / "photos", 16)
    options = options_for(root, "data.on_error=skip", "data.max_bad_samples=9")
    names = build_index(make_config(*options).data)[0].files[0]
    cut_short(names[len(DAMAGE)])  # DALI alone would deliver the upper lines
    loaders = [build_loaders(make_config(*options, *WAYS[way]), CPU)[0] for way in WAYS]
    for name, (damage, _) in zip(names, DAMAGE, strict=False):
        damage(name)
    found = []
    for loader in loaders:
        list(loader)
        found.append(dict(sorted(loader.state_dict()["bad"][0].items())))
    assert found == [found[0]] * len(WAYS)
    reasons = [*(reason for _, reason in DAMAGE), "truncated"]
    assert [*map(int, found[0])] == [*range(len(reasons))]
    for name, reason, text in zip(names, reasons, found[0].values(), strict=False):
        assert text.startswith(name)
        assert reason in text


def test_files_with_bad_headers_are_skipped_too_and_counted(tmp_path, caplog) -> None:
    root = make_photos(tmp_path / "photos", 20)
    overrides = options_for(root, "data.on_error=skip")
    bad = sorted(root.rglob("*.jpg"))[:3]
    for path in bad:
        path.write_bytes(HTML)
    train, val = build_loaders(make_config(*overrides), CPU)
    left_out = [*train.index.left_out, *val.index.left_out]
    assert sorted(left_out) == [str(path) for path in bad]
    assert len(train.index) + len(val.index) == 17
    assert sum(len(inputs) for inputs, _ in val) == len(val.index)
    assert sum(train.share_bad_samples(lambda bad: [bad]).values()) == 3
    assert all(str(path) in caplog.text for path in bad)
    with pytest.raises(BadFileError, match="data.max_bad_samples=0"):
        build_loaders(make_config(*overrides, "data.max_bad_samples=0"), CPU)
    with pytest.raises(UserError, match="3 of 20"):
        build_loaders(make_config(*overrides, "data.on_error=raise"), CPU)


def test_files_that_are_no_images_or_far_too_large_are_refused_from_their_headers(tmp_path) -> None:
    root = make_photos(tmp_path / "photos", 6)
    save(root / "a" / "large.png", smooth(0, 110, 100))
    (root / "a" / "page.jpg").write_bytes(HTML)
    (root / "b" / "empty.jpg").write_bytes(b"")
    (root / "b" / "link.jpg").symlink_to(tmp_path / "nowhere.jpg")
    planes = np.zeros((3, 50, 40), np.uint16)
    tifffile.imwrite(root / "b" / "planes.tif", planes, photometric="rgb", planarconfig="separate")
    options = options_for(root, "data.on_error=raise", "data.max_pixels=10_000")
    with refused(
        *("5 of 11", "large.png (110x100", "data.max_pixels=10000", "planes.tif (Pillow"),
        *("page.jpg (not an image)", "empty.jpg (empty file)", "link.jpg (No such file"),
    ):
        build_index(make_config(*options).data)
    for name in ("a/page.jpg", "b/empty.jpg", "b/link.jpg", "b/planes.tif"):
        (root / name).unlink()
    train, val = build_index(make_config(*options, "data.max_pixels=11_000").data)
    assert max(*train.sizes[:, 0], *val.sizes[:, 0]) == 110


def test_the_check_lists_everything_that_is_broken(tmp_path) -> None:
    root, out, jobs = make_photos(tmp_path / "photos", 20), tmp_path / "out.json", tmp_path / "jobs"
    jobs.mkdir()
    command = ["-m", "loaders.check", *options_for(root, "data.max_pixels=10_000"), f"out={out}"]
    assert answers_to([command], jobs)[0][0] == 0
    assert json.loads(out.read_text()) == {"files": 20, "broken": []}

    save(root / "b" / "large.png", smooth(0, 110, 100))
    for number in range(13):
        (root / "a" / f"page {number}.jpg").write_bytes(HTML)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\n"
    (root / "a" / "page 1.jpg").write_bytes(postscript)
    no_utf8 = os.fsdecode(os.fsencode(root) + b"/c/caf\xe9.jpg")
    Path(no_utf8).touch()
    cut_short(str(root / "c" / "foto ä 2.jpg"))
    expected = {str(root / "a" / f"page {number}.jpg"): "not an image" for number in range(13)}
    expected |= {str(root / "b" / "large.png"): "data.max_pixels=10000"}
    expected |= {no_utf8: "empty file", str(root / "c" / "foto ä 2.jpg"): "truncated"}
    [(code, printed)] = answers_to([command], jobs)
    assert code == 1
    report = json.loads(out.read_text())
    found = {entry["path"]: entry["reason"] for entry in report["broken"]}
    assert report["files"] == 35
    assert found.keys() == expected.keys()
    assert all(reason in found[path] for path, reason in expected.items())
    for path, reason in found.items():
        assert f"{path}: {reason}".replace("\udce9", r"\xe9") in printed


# What real processes show.


def run_out_of_file_handles(options: list[str]) -> None:
    train, _ = build_loaders(make_config(*options), CPU)
    if train.cfg.loader.num_workers == 0:
        list(train)  # the backend has opened what it needs for itself
    free = os.dup(0)
    os.close(free)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))
    try:
        list(train)
        raise AssertionError("an epoch was read without file handles")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        assert not train.sampler.bad


@pytest.mark.parametrize("way", WAYS)
def test_too_many_open_files_name_the_setting_and_are_not_the_files_fault(way, tmp_path) -> None:
    root = make_photos(tmp_path / "photos", 8)
    options = options_for(root, "data.on_error=skip", *WAYS[way])
    with ProcessPoolExecutor(1, FORKSERVER) as pool, pytest.raises(LimitError) as error:
        pool.submit(run_out_of_file_handles, options).result()
    for part in ("Too many open files", "ulimit -n 65536", "loader.num_workers"):
        assert part in str(error.value)


SMALL_SHARED_MEMORY = """
import torch
from conf.cli import load_config
from loaders.image_loaders import build_loaders

cfg = load_config(["global_batch_size=2000", "loader.num_workers=1"])
list(build_loaders(cfg, torch.device("cpu"))[0])
"""


def test_too_small_shared_memory_names_the_setting_and_does_not_hang() -> None:
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-Ur", "--mount"]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if (
        not shutil.which("unshare")
        or subprocess.run([*namespace, "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("this machine does not allow a /dev/shm of one's own")
    command = ["sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", SMALL_SHARED_MEMORY]
    options: Any = {"cwd": REPOSITORY, "env": {**os.environ, **ENVIRONMENT}, "timeout": 120}
    result = subprocess.run([*namespace, *command], capture_output=True, text=True, **options)
    assert result.returncode == 1
    for part in ("--shm-size=8g", "loader.num_workers=0"):
        assert part in result.stderr
