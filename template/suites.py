"""Make the core and one other project, by the day, and run their tests: `make test-projects`."""

import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from template.project import make_project

# what somebody would choose -> its parts
SETS = {
    "core": "core",
    "one GPU, classification": "amp torchvision timm colour mixing partial_decoding pictures runs",
    "two nodes, DDP, AMP and DALI": "ddp amp dali slurm",
    "segmentation": "masks segmentation unet spatial pictures predict",
    "deblurring": "pairs restoration nafnet pictures",
    "a billion samples from a bucket": "ddp amp shards",
    "own Datasets": "own amp",
}
PYTEST = ["-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "8", "--dist", "loadfile"]


def main() -> None:
    """Command line: parts, one set an argument; default: the core and the set of the day."""
    core, *others = SETS.values()
    sets = sys.argv[1:] or [core, others[date.today().toordinal() % len(others)]]
    for parts in sets:
        with tempfile.TemporaryDirectory() as temporary:
            print(make_project(Path(temporary, "project"), parts.split(), ""), parts, flush=True)
            command = [sys.executable, *PYTEST, "-m", "not slow"]
            subprocess.run(command, cwd=Path(temporary, "project"), check=True)


if __name__ == "__main__":
    main()
