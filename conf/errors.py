"""The error that the user can fix, and its texts."""

import difflib
import re
import tomllib
import traceback
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path


class UserError(ValueError):
    """Error that the user can fix: its message names the key or file, the value and the fix."""


MEMORY = (
    "train_accumulate.py accumulate_steps=auto, train_recompute.py, train_amp.py, train_fsdp.py "
    "and a smaller global_batch_size need less"
)
ONE_SAMPLE = (
    "BatchNorm needs two samples at a time; raise global_batch_size, or lower accumulate_steps"
)

CAUSES = {
    "(Input|Wrong image) (height|width)|Kernel size can't|Output size is too small": (
        "the model does not take such images; set data.crop, and data.resize, to its size"
    ),
    r"(scalar |Input |d)type.*\b(Byte|unsigned char|[Dd]ouble|float64|\w+eTensor)\b": (
        "return inputs of float32 from the Dataset, such as image.float() / 255"
    ),
    "more than 1 value per channel": ONE_SAMPLE,
    "which did not receive grad": (
        "DDP needs a gradient of each; remove unused layers, or freeze them"
    ),
    "out of memory|Unable to allocate|DefaultCPUAllocator|std::bad_alloc": MEMORY,
    r"CU(BLAS|DNN|DA)_?\w*ALLOC_FAILED": MEMORY,
    "can't start new thread": "raise the limit (ulimit -v, ulimit -u), or lower loader.num_threads",
    "Too many open files": "raise the limit (ulimit -n 65536), or lower loader.num_workers",
    "shared memory": (
        "batches of workers do not fit into /dev/shm: enlarge it (docker run --shm-size=8g; "
        "Kubernetes: an emptyDir with medium: Memory), or set loader.num_workers=0"
    ),
    # The second one where its thread reads of a worker that was killed; servers reset connections.
    "DataLoader worker.*exited unexpectedly|Caught Connection.* in pin memory thread": (
        "most likely the machine has no more memory; lower loader.num_workers, "
        "loader.prefetch_factor or global_batch_size"
    ),
    "Can't pickle|Can't get local object": (
        "worker processes need a def of a module, or loader.num_workers=0"
    ),
    "surrogates not allowed": "a name is not UTF-8; rename it, or set PYTHONUTF8=1",
}
"""What a library's error says, as a regular expression, and what the user can do."""

PYTHONS_OWN = (f"{Path(traceback.__file__).parent}/", "<frozen ")
"""How names of files in Python's own library begin."""


def cause_of(error: Exception) -> str | None:
    """Return what a library's error says, where, and what to do, if it is one of `CAUSES`."""
    for line in str(error).splitlines():
        for sign, fix in CAUSES.items():
            if re.search(sign, line):
                return f"{line.strip(' .')}{place_of(error)}: {fix}"
    return None


def place_of(error: Exception) -> str:
    """Return the last place outside of libraries that an error passed, such as ` (mine.py:12)`."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and not frame.filename.startswith(PYTHONS_OWN):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def unknown_name(key: str, value: str, names: Iterable[str]) -> UserError:
    """Return the error for a value that is none of these names."""
    names = sorted(names)
    known = first_few(names, 20)
    return UserError(f"{key}={value} is unknown{nearest(value, names)}; use one of {known}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)`, or nothing if no name is similar."""
    names = list(names)
    close = [known for known in names if known.endswith(f".{name}")]  # `lr` for `optimizer.lr`
    close += difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def counted(number: int, name: str) -> str:
    """Return a number of things as text, such as `2 steps` or `1 class`."""
    plural = "" if number == 1 else "es" if name.endswith("s") else "s"
    return f"{number:,} {name}{plural}"


def first_few(names: Iterable[str], most: int = 6) -> str:
    """Return the first items and the number of the others, such as `a, b, c and 4 more`."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def told(error: Exception) -> str:
    """Return an error with its place, such as `ValueError: too small (mine.py:12)`."""
    reason = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {reason}{place_of(error)}"


def missing_package(name: str) -> str | None:
    """Return the line that tells how to install a package; None if it is there without the module
    `name`, which is a bug."""
    package = name.partition(".")[0]
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())
    for extra, requirements in project["project"]["optional-dependencies"].items():
        # Of nvidia, other libraries bring other modules: it may be there without DALI.
        if any(re.match(rf"{package}\b", requirement) for requirement in requirements):
            return f"the package {name} is not installed; install it with make setup EXTRAS={extra}"
    if find_spec(package) is not None:
        return None
    return f"the package {package} is not installed; install it with pip install {package}"
