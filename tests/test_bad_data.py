"""Files that cannot be decoded, and machines that run out of something."""

import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from conf.errors import UserError
from loaders.check import check
from loaders.image_loaders import build_loaders
from loaders.index import BadFileError, build_index
from loaders.limits import LimitError, limits_explained
from tests.helpers import (
    ENVIRONMENT,
    FORKSERVER,
    LIMIT_S,
    REPOSITORY,
    answers_to,
    make_config,
    refused,
    wait_for,
    workers_of,
)
from tests.images import WAYS, cut_short, make_photos, reading, replace_file

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


def test_a_file_damaged_after_indexing_is_named_with_one_reason_by_all_backends(tmp_path) -> None:
    root = make_photos(tmp_path / "photos", 16)
    options = options_for(root, "data.on_error=skip", "data.max_bad_samples=9")
    loaders = [build_loaders(make_config(*options, *WAYS[way]), CPU)[0] for way in WAYS]
    names = loaders[0].index.files[0]
    for name, (damage, _) in zip(names, DAMAGE, strict=False):
        damage(name)
    found = []
    for loader in loaders:
        list(loader)
        found.append(dict(sorted(loader.state_dict()["bad"][0].items())))
    assert found == [found[0]] * len(WAYS)
    assert [*map(int, found[0])] == [*range(len(DAMAGE))]
    for name, (_, reason), text in zip(names, DAMAGE, found[0].values(), strict=False):
        assert text.startswith(name)
        assert reason in text


@pytest.mark.parametrize("way", ["threads", "dali"])
def test_a_jpeg_cut_short_before_indexing_is_refused_whatever_part_is_used(way, tmp_path) -> None:
    """DALI alone would deliver the upper lines; bytes behind the end do no harm in either."""
    root = make_photos(tmp_path / "photos", 8)
    cfg = make_config(*options_for(root, *WAYS[way]))
    names = build_index(cfg.data)[0].files[0]
    for name in names[1:]:
        replace_file(name, Path(name).read_bytes() + b"behind the end")
    list(build_loaders(cfg, CPU)[0])
    cut_short(names[0])
    with pytest.raises(BadFileError, match=names[0]):
        list(build_loaders(cfg, CPU)[0])


@pytest.mark.parametrize("layout", ["imagefolder", "pairs"])
def test_files_with_bad_headers_are_skipped_too_and_counted(layout, tmp_path, caplog) -> None:
    root = make_photos(tmp_path / "photos" / "input", 20)
    overrides = options_for(root, "data.on_error=skip")
    if layout == "pairs":
        shutil.copytree(root, root.with_name("target"))
        overrides += ["data.layout=pairs", f"data.root={root.parent}"]
    bad = sorted(root.rglob("*.jpg"))[:3]
    for path in bad:
        path.write_bytes(HTML)
    if layout == "pairs":  # a pair of bad files counts once
        replace_file(str(bad[0]).replace("input", "target"), HTML)
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


def png_of(height: int, width: int) -> bytes:
    """A PNG of one colour, whose pixels are missing."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_files_that_are_no_images_or_far_too_large_are_refused_from_their_headers(tmp_path) -> None:
    root = make_photos(tmp_path / "photos", 6)
    (root / "a" / "bomb.png").write_bytes(png_of(40_000, 30_000))
    (root / "a" / "page.jpg").write_bytes(HTML)
    (root / "b" / "empty.jpg").write_bytes(b"")
    (root / "b" / "link.jpg").symlink_to(tmp_path / "nowhere.jpg")
    options = options_for(root, "data.on_error=raise")
    with refused(
        *("4 of 10", "bomb.png (40000x30000", "data.max_pixels=100000000"),
        *("page.jpg (not an image)", "empty.jpg (empty file)", "link.jpg (No such file"),
    ):
        build_index(make_config(*options).data)
    for name in ("a/page.jpg", "b/empty.jpg", "b/link.jpg"):
        (root / name).unlink()
    train, val = build_index(make_config(*options, "data.max_pixels=2_000_000_000").data)
    assert max(*train.sizes[:, 0], *val.sizes[:, 0]) == 40_000


def test_the_check_lists_everything_that_is_broken(tmp_path, monkeypatch) -> None:
    """And no file starts another program."""
    root, out, jobs = make_photos(tmp_path / "photos", 20), tmp_path / "out.json", tmp_path / "jobs"
    jobs.mkdir()
    overrides = options_for(root)
    command = ["-m", "loaders.check", *overrides, f"out={out}"]
    assert answers_to([command, ["-m", "loaders.check", "data=mnist_mini"]], jobs)[1][0] == 0
    assert json.loads(out.read_text()) == {"files": 20, "broken": []}

    (root / "b" / "bomb.png").write_bytes(png_of(40_000, 30_000))
    for number in range(13):
        (root / "a" / f"page {number}.jpg").write_bytes(HTML)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\n"
    (root / "a" / "page 1.jpg").write_bytes(postscript)
    no_utf8 = os.fsdecode(os.fsencode(root) + b"/c/caf\xe9.jpg")
    Path(no_utf8).touch()
    cut_short(str(root / "c" / "foto ä 2.jpg"))
    expected = {str(root / "a" / f"page {number}.jpg"): "not an image" for number in range(13)}
    expected |= {str(root / "b" / "bomb.png"): "data.max_pixels=100000000"}
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

    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert check(make_config(*overrides).data) == (35, found)
    assert not (tmp_path / "started").exists()


# What real processes show. The functions below run in processes of their own.


def in_process(result: Path, task: Callable[..., None], *arguments):
    """Start the task in a process; what it raises goes to the file `result`."""
    process = FORKSERVER.Process(target=_run_task, args=(result, task, *arguments))
    process.start()
    return process


def _run_task(result: Path, task: Callable[..., None], *arguments) -> None:
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    try:
        task(result, *arguments)
    except Exception as error:
        result.write_text(f"{type(error).__name__}: {error}")
        raise


def text_of(path: Path) -> str:
    """The file's content, as soon as it has any."""
    wait_for(lambda: path.exists() and path.read_text(), str(path))
    return path.read_text()


def run_out_of_file_handles(result: Path, options: list[str]) -> None:
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
    process = in_process(tmp_path / "result", run_out_of_file_handles, options)
    process.join(240)
    message = text_of(tmp_path / "result")
    for part in ("LimitError", "Too many open files", "ulimit -n 65536", "loader.num_workers"):
        assert part in message


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
    for part in ("LimitError", "--shm-size=8g", "loader.num_workers=0"):
        assert part in result.stderr


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("DataLoader worker (pid(s) 7) exited unexpectedly", "lower loader.num_workers"),
        ("[Errno 104] Connection reset by peer", "lower loader.num_workers"),
        (  # part: workers
            "unable to write to file </torch_1>: No space left: shared memory",
            "--shm-size",
        ),
        ("Too many open files. Communication with the workers is no longer possible.", "ulimit -n"),
    ],
)
def test_pytorchs_own_messages_are_recognised(text: str, advice: str) -> None:
    with pytest.raises(LimitError, match=advice), limits_explained(), limits_explained():
        raise RuntimeError(text)


def feed_in_steps(result: Path) -> None:
    """A batch; the file `go on` lets it finish. Each batch is too large for the workers' pipe."""
    options = ["loader.num_workers=2", "global_batch_size=2000", "loader.prefetch_factor=4"]
    loader, _ = build_loaders(make_config(*options), CPU)
    batches = iter(loader)
    next(batches)
    workers = [str(worker.pid) for worker in workers_of(psutil.Process())]
    result.with_name("workers").write_text(" ".join(workers))
    text_of(result.with_name("go on"))
    list(batches)
    list(loader)
    result.write_text("finished")
    time.sleep(LIMIT_S)


def test_workers_ignore_signals_that_are_not_theirs_and_end_with_the_training(tmp_path) -> None:
    process = in_process(tmp_path / "result", feed_in_steps)
    try:
        workers = [psutil.Process(int(pid)) for pid in text_of(tmp_path / "workers").split()]
        assert len(workers) == 2
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                worker.send_signal(number)
        (tmp_path / "go on").write_text("yes")
        assert text_of(tmp_path / "result") == "finished"
        assert all(worker.is_running() for worker in workers)
    finally:
        process.kill()
    assert not psutil.wait_procs(workers, timeout=LIMIT_S)[1]
