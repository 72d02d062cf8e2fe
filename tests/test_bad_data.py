"""Files that cannot be decoded, and machines that run out of something."""

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from PIL import Image

from conf.cli import explain
from loaders.check import check
from loaders.index import BadFileError
from tests.formats import XMP, write_refused
from tests.helpers import REPOSITORY, make_config, refused
from tests.images import (
    index_in,
    index_of,
    loaders_of,
    make_photos,
    paths_in,
    photos_in,
    save,
    smooth,
    turned,
)
from tests.kinds import READERS
from tests.processes import execute
from tests.rows import rows

HTML = b"<html>404 not found</html>" * 20
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 60\n%%EndComments\n"


def cut_short(path: str) -> None:
    """Only the last lines are missing, which are far below every centre crop."""
    os.truncate(path, os.path.getsize(path) * 97 // 100)


@pytest.mark.parametrize("way", READERS)
def test_a_file_that_is_gone_ends_the_run_and_so_do_samples_that_are_all_bad(way, tmp_path) -> None:
    """A file may be back soon: no other sample takes its place."""
    skip = ["data.on_error=skip"] * (way != "dali")
    options = photos_in(make_photos(tmp_path / "photos", 16), "data.val_count=4", *skip)
    train, _ = loaders_of(*options, *READERS[way])
    *others, name = paths_in(index_in(train))
    Path(name).rename(tmp_path / "gone")
    with refused(name, "not open file" if way == "dali" else "No such file"):
        list(train)
    (tmp_path / "gone").rename(name)
    for path in (*others, name):
        cut_short(path)
    with refused("cannot decode" if way == "dali" else "12 bad samples in a row"):
        list(loaders_of(*options, *READERS[way])[0])
    for worker in multiprocessing.active_children():
        worker.kill()  # for each, collecting its loader would wait 5 s


def write_broken(folder: Path) -> dict[Path, str]:
    """Write files whose headers or pixels cannot be used: reasons, of TIFFs with what reads them.
    Opening some of them would wait for ever."""
    reasons = {name: "data=cells" for name in write_refused(folder) if name.endswith(".tif")}
    reasons |= {"pages.tif": "", "large.png": "110x100", "link.jpg": "No such file"}
    reasons |= dict.fromkeys(("pipe.png", "device.png", "link to a pipe.png"), "pipe, socket")
    save(folder / "large.png", smooth(0, 110, 100))
    os.mkfifo(folder / "pipe.png")
    links = {"device.png": "/dev/zero", "link to a pipe.png": f"{folder}/pipe.png"}
    for name, target in (links | {"link.jpg": "nowhere.jpg"}).items():
        (folder / name).symlink_to(target)
    for name, content in (("page", HTML), ("drawing", POSTSCRIPT), ("empty", b"")):
        (folder / f"{name}.jpg").write_bytes(content)
        reasons[f"{name}.jpg"] = "not an image" if content else "empty file"
    wrong = [path for path in folder.iterdir() if not path.name.startswith("foto")]
    return {path: reasons.get(path.name, "") for path in wrong}


def test_files_that_cannot_be_used_are_named_left_out_and_listed(tmp_path: Path) -> None:
    """By a run and by the check, which finds those whose headers are good, too. Of 20 photos one
    is cut."""
    root, out = make_photos(tmp_path / "photos", 20), tmp_path / "bad.txt"
    broken, options = write_broken(root / "a"), photos_in(root, "data.max_pixels=10_000")
    with refused(f"{len(broken)} of {20 + len(broken)}", "12 bits.tif"):
        index_of(*options)
    train, val = loaders_of(*options, "data.on_error=skip")
    left_out = index_in(train).left_out | index_in(val).left_out
    assert {Path(path) for path in left_out} == broken.keys()
    for path, reason in left_out.items():
        assert broken[Path(path)] in reason, path
    assert "data=cells" not in left_out[f"{root}/a/pages.tif"]
    assert "data.max_pixels=10000" in left_out[f"{root}/a/large.png"]
    assert sum(len(inputs) for inputs, _ in val) == len(index_in(val))
    counted = f"{len(index_in(train).left_out)} files left out"
    assert counted in str(train.info.description)
    larger = ["data.max_pixels=11_000", "data.on_error=skip"]
    assert sum(map(len, index_of(*options, *larger))) == 21

    cut, no_utf8 = root / "c" / "foto ä 2.jpg", os.fsencode(root) + b"/c/caf\xe9.jpg"
    cut_short(str(cut))
    Path(os.fsdecode(no_utf8)).touch()
    broken |= {cut: "truncated", Path(os.fsdecode(no_utf8)): "empty file"}
    command = ["-m", "loaders.check", *options, f"out={out}"]
    printed = execute(command, tmp_path / "check", code=1)
    listed = out.read_text(errors="surrogateescape").splitlines()
    assert {*map(Path, listed)} == broken.keys()
    assert f"decoded {20 + len(broken) - 1} files" in printed
    for file, reason in broken.items():
        place = str(file).replace("\udce9", r"\xe9")
        assert reason in next(line for line in printed.splitlines() if line.startswith(place))
    kept = index_of(*options, f"data.leave_out={out}")
    assert sum(map(len, kept)) == 19
    for file in broken:
        file.unlink()
    execute(command, tmp_path / "check")
    assert out.read_text() == ""


def test_a_jpeg_whose_data_end_before_its_end_marker_is_bad(tmp_path: Path) -> None:
    """Decoders fill the rest with one colour."""
    root, bad = make_photos(tmp_path / "photos", 8), set[str]()
    for mode in ("RGB", "L", "CMYK"):
        for kind in ({}, {"progressive": True}, {"restart_marker_blocks": 4}, {"exif": turned(6)}):
            path = root / "a" / f"{len(bad)}.jpg"
            bad.add(str(path))
            photo = Image.fromarray(smooth(len(bad), 300, 400)).convert(mode)
            photo.save(path, quality=90, **kind)
            content = path.read_bytes()
            path.write_bytes(content[: 9 * len(content) // 10] + b"\xff\xd9")
    options = photos_in(root, "data.val_count=6")
    assert check(make_config(*options).data)[1].keys() == bad
    for index in index_of(*options):
        for sample, (height, width) in enumerate(index.sizes.tolist()):
            if paths_in(index)[sample] in bad:
                whole = (0, 0, height, width)
                with pytest.raises(BadFileError, match="truncated"):
                    index.read_part(sample, 0, whole, (32, 32), True)


@pytest.mark.parametrize("loader", rows("loader=dali"))
def test_files_that_dali_cannot_read_right_are_refused_with_their_names(loader, tmp_path) -> None:
    options = photos_in(make_photos(tmp_path / "data", 12), "data.val_count=4", loader)
    loaders_of(*options)
    other = tmp_path / "data" / "a" / "0.png"
    save(other, smooth(0, 60, 80), format="GIF")
    with refused("1 file that DALI cannot read", str(other), "loader=pytorch"):
        loaders_of(*options)
    clear = Image.fromarray(np.full((60, 80, 4), 100, np.uint8))
    for image, more in ((clear, {}), (clear.convert("RGB"), {"pnginfo": XMP})):
        image.save(other, "PNG", **more)
        with refused("1 file that DALI cannot read", str(other)):
            loaders_of(*options)
    (tmp_path / "bad.txt").write_text(f"{other}\n")
    train, val = loaders_of(*options, f"data.leave_out={tmp_path / 'bad.txt'}")
    assert str(other) not in paths_in(index_in(train)) + paths_in(index_in(val))
    with refused("data.on_error=skip", "data.leave_out"):
        loaders_of(*options, "data.on_error=skip")


def test_links_are_followed_and_counted_but_for_those_that_lead_back(tmp_path: Path) -> None:
    root, other = make_photos(tmp_path / "photos", 8), make_photos(tmp_path / "other", 6)
    options = photos_in(root, "data.val_count=2")
    assert not any("links" in line for index in index_of(*options) for line in index.notes)
    (root / "d").symlink_to(other / "a")
    (root / "a" / "more").symlink_to(other / "b")
    (root / "b" / "one.jpg").symlink_to(next((other / "c").iterdir()))
    (root / "b" / "two.jpg").symlink_to(next((root / "c").iterdir()))  # leads to the data set
    train, val = index_of(*options)
    assert len(train) + len(val) == 8 + 2 + 2 + 1 + 1
    assert any(line.startswith("3 links") for line in train.notes)
    (root / "c" / "back").symlink_to(root)
    with refused(str(root / "c" / "back" / "c")):
        index_of(*options)
    (root / "c" / "back").unlink()
    (root / "a" / "to b").symlink_to(root / "b")
    (root / "b" / "to a").symlink_to(root / "a")
    with refused("to b"):
        index_of(*options)


def test_too_many_open_files_name_the_setting_and_are_not_the_files_fault(tmp_path: Path) -> None:
    options = photos_in(make_photos(tmp_path / "photos", 8), "data.on_error=skip")
    loader, _ = loaders_of(*options)
    list(loader)
    gc.collect()  # or it may close files meanwhile
    limits, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as error:
            list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n 65536" in str(explain(error.value))
    assert not loader.bad


IN_SMALL_MEMORY = """
from conf.cli import user_errors
from tests.images import loaders_of
with user_errors():
    list(loaders_of('global_batch_size=2000', 'loader.num_workers=1')[0])
"""


@pytest.mark.slow
def test_too_small_shared_memory_names_the_setting_and_does_not_hang() -> None:
    user = [] if os.geteuid() == 0 else ["-Ur"]
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["env", "unshare", *user, "--mount", "sh", "-c", mount, "sh", sys.executable, "-c"]
    if subprocess.run([*command, ""], capture_output=True).returncode:  # of env: no unshare
        pytest.skip("this machine does not allow a /dev/shm of one's own")
    found = subprocess.run([*command, IN_SMALL_MEMORY], cwd=REPOSITORY, stderr=PIPE, timeout=120)
    assert found.returncode == 2
    for part in (b"--shm-size=8g", b"loader.num_workers=0"):
        assert part in found.stderr
