"""What the decoders of loader=dali print to standard error."""

import ctypes
import json
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from logging.handlers import BufferingHandler
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from loaders import build_loaders, decoder_lines
from loaders.decode import what_libjpeg_says
from tests.helpers import FORKSERVER, make_config
from tests.test_bad_data import make_photos, options_for

CPU = torch.device("cpu")


def damaged_photos(root: Path) -> Path:
    """18 photographs: half of the JPEGs lack a part of their scan, all PNGs have a profile cut short."""
    make_photos(root, 16)
    for path in sorted(root.rglob("*.jpg"))[::2]:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 3 // 4] + content[-2:])
    content = b"x\0\0" + zlib.compress(b"no profile")
    chunk = b"iCCP" + content
    chunk = struct.pack(">I", len(content)) + chunk + struct.pack(">I", zlib.crc32(chunk))
    for name in ("1.png", "2.png"):
        Image.new("RGB", (80, 60)).save(root / "a" / name)
        png = (root / "a" / name).read_bytes()
        (root / "a" / name).write_bytes(png[:33] + chunk + png[33:])
    return root


def logged_of(root: Path, *overrides: str, patience_s: float = 0) -> list[str]:
    """The warnings of an epoch of training and one of validation; of more until both kinds have come."""
    logged = BufferingHandler(1000)
    logged.setLevel(logging.WARNING)
    logging.getLogger("loaders").addHandler(logged)
    loaders = build_loaders(make_config(*options_for(root, root.parent, *overrides)), CPU)
    end = time.monotonic() + patience_s
    while True:
        for loader in loaders:
            for _ in loader:
                time.sleep(0.02)  # as a step takes
        lines = [record.getMessage() for record in logged.buffer]
        if {"libpng", "JPEG"} <= set(" ".join(lines).split()) or time.monotonic() > end:
            return lines


def read_and_die(terminal: str, root: Path, told: Path, reader: str) -> None:
    os.dup2(os.open(terminal, os.O_WRONLY | os.O_NOCTTY), 2)
    me = psutil.Process()
    logged_of(root, "loader=pytorch")
    before = len(me.children())
    first = logged_of(root, "loader=dali", f"loader.reader={reader}", patience_s=30)
    num_open = me.num_fds()
    again = logged_of(root, "loader=dali", f"loader.reader={reader}")
    assert len(me.children()) == 1
    answer = before, first, again, me.num_fds() - num_open, sys.stderr.isatty()
    told.write_text(json.dumps(answer))
    sys.stderr.write("\r50%")
    sys.stderr.flush()
    os.system("echo a child >&2")
    ctypes.CDLL("libstdc++.so.6")._ZSt20__throw_length_errorPKc(b"last words")


@pytest.mark.parametrize("reader", ["plan", "native"])
def test_each_kind_is_logged_once_and_all_else_arrives(reader: str, tmp_path: Path) -> None:
    root = damaged_photos(tmp_path / "photos")
    ours, theirs = pty.openpty()
    arguments = (os.ttyname(theirs), root, tmp_path / "told", reader)
    process = FORKSERVER.Process(target=read_and_die, args=arguments)
    process.start()
    process.join(60)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # when the last process has closed it
        while True:
            shown += os.read(ours, 1 << 16)
    os.close(ours)
    assert process.exitcode == -signal.SIGABRT, shown.decode()
    assert shown.startswith(b"\r50%a child\r\nterminate called after")
    assert shown.endswith(b"last words\r\n")
    before, first, again, leaked, is_terminal = json.loads((tmp_path / "told").read_text())
    assert before == 0  # nothing is started for loader=pytorch
    assert is_terminal
    assert leaked <= 0
    kinds = [re.sub(r"0x[0-9a-f]+|[0-9]+", "", line.partition(" says: ")[2]) for line in first]
    assert len(kinds) == len(set(kinds))
    (profile,) = (line for line in first if "libpng" in line)
    assert profile.startswith("photos: DALI's decoder says: libpng warning: iCCP: too short")
    corrupt = [line.partition(": DALI's")[0] for line in first if "Corrupt JPEG" in line]
    assert corrupt
    assert all(what_libjpeg_says(Path(path).read_bytes()) for path in corrupt)
    assert not [line for line in again if "libpng" in line]


def test_lines_are_told_apart_also_in_pieces() -> None:
    command = [sys.executable, "-I", "-S", decoder_lines.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        process.stdin.write(b"Continue? ")
        process.stdin.flush()
        assert os.read(process.stderr.fileno(), 99) == b"Continue? "  # at once, without a line end
        process.send_signal(signal.SIGTERM)
        for piece in (
            *(b"libpng warning: a", b"libpng warning: b", b"\n", b"\n", b"\n"),  # of two threads
            *(b"Corrupt JPEG data: 7 extra", b"neous\n", b"Corrupt JPEG data: 9 extraneous\n"),
            *(b"\x1b[0;31m[ERROR] \x1b[0m[libtiff_decoder] no\n", b"LZWDecode: ", b"no.\n"),
            *(b"f: Warning, tag 1.\n" * 9000, b"\xff\n", b"terminate", b" called\n", b"end"),
        ):
            process.stdin.write(piece)
            process.stdin.flush()
        process.stdin.close()
        assert process.stdout.read().decode().splitlines() == [
            *("libpng warning: a", "libpng warning: b", "Corrupt JPEG data: 7 extraneous"),
            *("[ERROR] [libtiff_decoder] no", "LZWDecode: no.", "f: Warning, tag 1."),
        ]
        assert process.stderr.read() == b"\xff\nterminate called\nend"
    assert process.returncode == 0
