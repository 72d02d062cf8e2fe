"""Any techniques merge into a script that trains and resumes the runs of others."""

import itertools
import linecache
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from tests.helpers import REPOSITORY, folder_with, has_ranks
from tests.images import small_digits
from tests.processes import ENVIRONMENT, free_port, join, run_as_main, start_process
from tests.results import checkpoint_of, summary_of
from tools.compose import BASELINE, MARKER, compose, find_techniques, split, unmarked_lines


def allowed_sets() -> list[tuple[str, ...]]:
    """Return all sets of techniques that combine, each in alphabetical order."""
    excluded = find_techniques()
    counts = range(1, len(excluded) + 1)
    sets = itertools.chain(*(itertools.combinations(excluded, count) for count in counts))
    return [names for names in sets if not any(excluded[name] & {*names} for name in names)]


SETS = allowed_sets()
LARGEST = [names for names in SETS if not any(set(names) < set(others) for others in SETS)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the workshop takes long


def script_of(names: tuple[str, ...]) -> str:
    return f"train_{'_'.join(names)}.py"


# All pairs and the largest sets: first by one process, then by two ranks.
TRAINED = sorted(
    {script_of(names) for names in SETS if len(names) == 2 or names in LARGEST},
    key=lambda script: (has_ranks(script), "fsdp" in script, script),
)
CHAIN = [BASELINE, *TRAINED]
"""Each script resumes the run of the one before and takes two steps."""


class HostReads(TorchFunctionMode):
    """Ends a script whose step reads a tensor, for which the host would wait on a GPU.

    Allowed: reads of what always lies on the host (the ranks' requests), log points, and saves.
    """

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
    ALLOWED = ("pending_request", "log_point", "check")

    def __torch_function__(self, function, types, arguments=(), options=None):
        if getattr(function, "__name__", "") in self.READS:
            frames = {frame.name: frame for frame in traceback.extract_stack()}
            main = frames["main"]
            line = linecache.getline(main.filename, main.lineno or 0)
            is_step = main.filename.endswith(sys.argv[0]) and line.startswith(" " * 12)
            assert not is_step or frames.keys() & {*self.ALLOWED}, f"{function} in {line}"
        return function(*arguments, **(options or {}))


def run_in_turn(turns: list[tuple[list[str], dict[str, str], Path, Path]]) -> None:
    """Run scripts in this process, which imports what they need only once."""
    for turn in turns:
        with HostReads():
            run_as_main(*turn)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    """A folder like the repository with the scripts of all sets."""
    folder = folder_with(tmp_path_factory.mktemp("workshop"), BASELINE)
    for names in SETS:
        (folder / script_of(names)).write_text(compose(list(names)))
    return folder


@pytest.fixture(scope="module")
def runs(workshop: Path, tmp_path_factory) -> Path:
    """The folder with a run of two steps of each script in the chain."""
    options = [*small_digits(tmp_path_factory), "global_batch_size=8", "epochs=99"]
    options += ["log.images=0", "loader.num_workers=0", "optimizer.warmup_epochs=0"]
    folder = tmp_path_factory.mktemp("runs")
    turns: dict[int, list[list[Any]]] = {1: [[]], 2: [[], []]}
    for number, script in enumerate(CHAIN):
        command = [script, *options, f"output_dir={folder / script}", f"max_steps={2 * number + 2}"]
        command += ["accumulate_steps=2"] if "accumulate" in script else []
        command += [f"resume={folder / CHAIN[number - 1]}"] if number else []
        env = dict(ENVIRONMENT)
        if has_ranks(script):
            env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
        for rank, turn in enumerate(turns[1 + has_ranks(script)]):
            ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if has_ranks(script) else {}
            turn.append((command, env | ranks, folder / f"{script}-{rank}.txt", workshop))
    for several in turns.values():
        codes = join([start_process(run_in_turn, turn) for turn in several], timeout=800)
        assert not any(codes), [path.read_text()[-2000:] for path in folder.glob("*.txt")][-2:]
    return folder


def test_every_set_merges_into_a_sound_script_with_all_marked_lines(workshop: Path) -> None:
    baseline = split((workshop / BASELINE).read_text())[1]
    for names in SETS:
        text = (workshop / script_of(names)).read_text()
        assert unmarked_lines(baseline, split(text)[1]) == []
        for technique in names:
            part = (REPOSITORY / f"train_{technique}.py").read_text()
            marked = {line for line in part.splitlines() if line.strip().startswith(MARKER)}
            assert marked <= set(text.splitlines())
    # Imports are in the techniques' order.
    ruff = [sys.executable, "-m", "ruff", "check", "--ignore=I001"]
    options = [f"--config={REPOSITORY}/pyproject.toml", "--no-cache", "."]
    done = subprocess.run([*ruff, *options], cwd=workshop, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", TRAINED)
def test_a_set_trains_and_resumes_from_another_one(script: str, runs: Path) -> None:
    names = script.removesuffix(".py").split("_")[1:]
    run, number = runs / script, CHAIN.index(script)
    summary, log = summary_of(run), (run / "train.log").read_text()
    assert (summary["steps"], summary["script"]) == (2 * number + 2, script)
    assert summary["world_size"] == 1 + has_ranks(script)
    assert f"step {2 * number}" in next(x for x in log.splitlines() if "resumed from" in x)
    parts, before = checkpoint_of(run), CHAIN[number - 1]
    assert ("amp" in names) == ("scaler" in parts)
    assert ("ema" in names) == ("ema" in parts)
    is_fresh = "ema" in names and "ema" not in before
    assert ("the ema starts fresh" in log) == is_fresh
    assert not is_fresh or parts["ema"]["n_averaged"] == 2  # the first one is of its first step
    assert parts["model"].keys() == checkpoint_of(runs / BASELINE)["model"].keys()
