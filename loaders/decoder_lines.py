"""What DALI's decoders print: the first line of each kind is for the log, the others are left out.

They print through C's `stderr` and C++'s `cerr`. Both lead to a process that outlives this one, runs this
file and passes all else on, a crash's last words too. What writes to the descriptor itself is untouched: Python,
its faulthandler, glibc, other processes.
"""

import ctypes
import os
import re
import signal
import sys
from contextlib import suppress
from functools import cache
from select import select
from subprocess import PIPE, Popen
from typing import IO, Any

OF_DECODERS = re.compile(
    rb"(\x1b\[[\d;]*m)?\[(ERROR|WARNING)\] (\x1b\[0m)?\[\w+\] |\[ ?(ERROR|WARN):\d+@"  # nvImageCodec, OpenCV
    rb"|libpng (error|warning): |\w+: Warning, |(_?TIFF|LZ|ZIP|O?JPEG|PackBits|Fax|LERC|ZSTD|WEBP)\w+: "
    rb"|Corrupt JPEG|Premature end of |Not a JPEG|(Empty i|I)nput file |Warning: unknown JFIF|Unknown Adobe"
    rb"|(Inconsistent|Invalid|Unsupported|Bogus) (SOS|JPEG|marker|Huffman|D[AHQ][CT]|sampling|progress)"
)
LINE_END = re.compile(rb"\n|(?<=[^\n])(?=libpng (?:error|warning): )")
COLOUR, NUMBER = re.compile(rb"\x1b\[[\d;]*m"), re.compile(rb"0x[\da-f]+|\d+")
MOST_KINDS, LONGEST_LINE = 100, 400  # together less than a pipe holds: nobody has to read it


@cache
def listen() -> IO[bytes] | None:
    """Take the lines from now on; where to `read()` them, or None: they cannot be had and are printed."""
    libc, command = ctypes.CDLL(None), [sys.executable, "-I", "-S", __file__]
    try:
        libcpp = ctypes.CDLL("libstdc++.so.6")
        new_buffer = libcpp._ZN9__gnu_cxx18stdio_sync_filebufIcSt11char_traitsIcEEC1EP8_IO_FILE
        set_buffer = libcpp._ZNSt9basic_iosIcSt11char_traitsIcEE5rdbufEPSt15basic_streambufIcS1_E
        cerr = ctypes.addressof(ctypes.c_char.in_dll(libcpp, "_ZSt4cerr"))
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
        # In a session of its own: a signal to all processes of the training is none for it.
        process: Any = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, start_new_session=True)
        ours = os.dup(process.stdin.fileno())  # which `stream` keeps
    except (OSError, AttributeError, ValueError):
        return None
    process.stdin.close()
    libc.fdopen.restype = libc.malloc.restype = ctypes.c_void_p
    stream, buffer = ctypes.c_void_p(libc.fdopen(ours, b"w")), ctypes.c_void_p(libc.malloc(256))
    libc.setbuf(stream, None)
    stderr.value = stream.value
    # std::cerr.rdbuf(new stdio_sync_filebuf(stream)); an ostream is a pointer and, behind it, its ios.
    new_buffer(buffer, stream)
    set_buffer(ctypes.c_void_p(cerr + ctypes.sizeof(ctypes.c_void_p)), buffer)
    os.set_blocking(process.stdout.fileno(), False)
    return process.stdout


def read(lines: IO[bytes] | None) -> list[str]:
    """Those that `listen()` returned and that have come since the last call."""
    return ((lines and lines.read(1 << 16)) or b"").decode(errors="replace").splitlines()


def pass_on() -> None:
    """From input to standard error; of decoders' lines that differ in numbers alone the first to output."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when its input does
    kinds: set[bytes] = set()
    data, rest, was_decoder = b"\n", b"", False
    while data:
        if rest and not select([0], [], [], 0.05)[0]:  # it may be a question
            _write(2, rest)
            rest = b""
        data = os.read(0, 1 << 16)
        *lines, rest = LINE_END.split(rest + data)
        for line in lines:
            # libpng writes the end of a line by itself, and another thread's line may come before it.
            was_decoder = OF_DECODERS.match(line) is not None or (was_decoder and not line)
            if not was_decoder:
                _write(2, line + b"\n")
            elif line and (kind := NUMBER.sub(b"", line)) not in kinds and len(kinds) < MOST_KINDS:
                kinds.add(kind)
                _write(1, COLOUR.sub(b"", line)[:LONGEST_LINE] + b"\n")
    _write(2, rest)


def _write(descriptor: int, data: bytes) -> None:
    with suppress(OSError):  # nobody reads it any more
        os.write(descriptor, data)


if __name__ == "__main__":
    pass_on()
