"""One run at a time in a folder, and what a run may go on from."""

import copy as copying
import json
import os
import shutil
import signal
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conf.cli import explain
from conf.errors import UserError
from loaders import build_loaders
from loaders.targets import describe_target, target_of
from models import build_model
from runtime import Run, build_optimizer
from runtime.trained import read_trained
from tests.faults.helpers import (
    assert_same_state,
    join,
    run_to_end,
    script_with,
    send,
    slow,
    steps_saved,
    wait_for,
    wait_for_step,
)
from tests.helpers import (
    ENVIRONMENT,
    checkpoint_of,
    events_of,
    fork,
    make_config,
    scalars_of,
    train,
)


@pytest.fixture(scope="module")
def finished(options, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train("train.py", run, *options)
    return run


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", copy_function=shutil.copy))


def refused(run: Path, *overrides: str) -> str:
    """The one line that ends a run."""
    codes, [text] = run_to_end("train.py", run, *overrides)
    assert codes == [2], text
    assert "Traceback" not in text
    return text.splitlines()[-1]


def test_a_fresh_run_in_the_folder_of_an_earlier_one_is_refused(copy, options) -> None:
    before = sorted(path.name for path in copy.rglob("*"))
    line = refused(copy, *options)
    assert line.startswith(f"output_dir={copy} holds a run already; resume=auto goes on with it,")
    assert sorted(path.name for path in copy.rglob("*")) == before


def test_the_folder_of_a_run_that_failed_before_its_first_step_is_free(options, tmp_path) -> None:
    run = tmp_path / "run"
    failing = script_with(tmp_path / "s", "train.py", "raise RuntimeError('in a logger')")
    codes, _ = run_to_end("train.py", run, *options, folder=failing)
    assert codes == [1]
    train("train.py", run, *options, "max_steps=3")
    assert len(list(run.glob("events.*"))) == 1
    assert steps_saved(run) == [3]


def test_overwrite_removes_the_earlier_checkpoints_and_events_first(copy, options) -> None:
    train("train.py", copy, *options, "overwrite=true", "max_steps=3")
    assert steps_saved(copy) == [3]
    assert [step for step, _ in scalars_of(copy, "train/loss")] == [1, 2, 3]
    assert len(list(copy.glob("events.*"))) == 1
    assert set(events_of(copy).Tags()["images"]) == {
        "train/inputs",
        "val/predictions",
        "val/confusion",
    }


def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(options, tmp_path) -> None:
    script = "train_ddp.py"
    run, folder = tmp_path / "run", slow(tmp_path / "s", script, 0.5)
    options = [*options, "checkpoint.every_steps=1"]
    processes, _ = fork(script, run, *options, folder=folder)
    wait_for_step(run, 1)
    line = refused(run, *options, "resume=auto")
    assert line.startswith(f"output_dir={run} belongs to a run that is still going; ")
    for process in processes:
        send(process, signal.SIGKILL)
    join(processes)
    train("train.py", run, *options, "resume=auto", "max_steps=6")
    assert checkpoint_of(run)["step"] >= 6


def test_a_run_that_torchrun_restarts_waits_for_the_end_of_the_one_before(
    options, tmp_path, monkeypatch
) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    halted = f"while step == 3 and not os.path.exists('{go}'): time.sleep(0.1)"
    folder = script_with(tmp_path / "s", "train.py", halted)
    first, _ = fork("train.py", run, *options, folder=folder)
    wait_for(lambda: list(run.glob("events.*")), "the first step")
    codes, [refusal] = run_to_end("train.py", run, *options, "resume=auto")
    monkeypatch.setitem(ENVIRONMENT, "TORCHELASTIC_MAX_RESTARTS", "3")
    second, [prints] = fork("train.py", run, *options, "resume=auto")
    go.touch()
    assert join([*first, *second]) == [0, 0], prints.read_text()
    assert codes == [2]
    assert "belongs to a run that is still going" in refusal
    assert "nothing to do" in prints.read_text()


def test_another_optimizer_is_refused(copy, options) -> None:
    files = [copy / "config.yaml", copy / "run.json", copy / "summary.json"]
    before = [path.read_text() for path in files]
    line = refused(copy, *options, "resume=auto", "epochs=3", "optimizer=sgd")
    assert "optimizer.name: adamw then, sgd now" in line
    assert [path.read_text() for path in files] == before


def test_other_inputs_are_refused_unless_they_are_meant(copy, options) -> None:
    other = [*options, "resume=auto", "epochs=3", "data.mean=[0.5,0.5,0.5]"]
    line = refused(copy, *other)
    assert (
        "was made with other inputs (data.mean: [0.485, 0.456, 0.406] then, [0.5, 0.5, 0.5] now)"
        in line
    )
    text = train("train.py", copy, *other, "checkpoint.fresh_epoch=true")
    assert "settings that have changed: data.mean: [0.485, 0.456, 0.406] then" in text


def test_other_rates_are_listed_and_followed(copy, finished, options, tmp_path) -> None:
    other = ["optimizer.lr=0.001", "optimizer.weight_decay=0.5", "global_batch_size=16"]
    text = train("train.py", copy, *options, "resume=auto", "epochs=3", *other)
    line = next(line for line in text.splitlines() if line.startswith("settings that have changed"))
    assert "optimizer.lr: 0.003 then, 0.001 now" in line
    assert "optimizer.weight_decay: 0.01 then, 0.5 now" in line
    assert "global_batch_size: 8 then, 16 now" in line
    [group] = checkpoint_of(copy)["optimizer"]["param_groups"]
    assert (group["weight_decay"], group["initial_lr"]) == (0.5, 0.001)
    rates = [rate for _, rate in scalars_of(copy, "train/lr")][-4:]  # the last epoch, at 16 a step
    assert 0 < max(rates) < 0.001


def test_a_file_of_weights_is_no_checkpoint(finished, options, tmp_path) -> None:
    published = finished / "checkpoints" / "model.safetensors"
    plain, other = tmp_path / "plain.pt", tmp_path / "other.txt"
    torch.save(checkpoint_of(finished)["model"], plain)
    other.write_text("hello")
    for path in (published, plain, other):
        line = refused(tmp_path / "run", *options, f"resume={path}")
        assert line.startswith(f"resume={path}: ")
        assert "checkpoints/step-*.pt" in line


def test_a_run_that_never_saved_starts_anew_without_its_old_events(options, tmp_path) -> None:
    run = tmp_path / "run"
    processes, _ = fork("train.py", run, *options, folder=slow(tmp_path / "s", "train.py", 1.0))
    wait_for(lambda: list(run.glob("events.*")), "events")
    send(processes[0], signal.SIGKILL)
    join(processes)
    train("train.py", run, *options, "resume=auto")
    assert len(list(run.glob("events.*"))) == 1


def test_a_run_of_before_a_key_was_renamed_is_refused_with_the_new_name(copy) -> None:
    config = copy / "config.yaml"
    config.write_text(
        config.read_text().replace("optimizer:\n", "optimizer:\n  momentum: 0.9\n", 1)
    )
    with pytest.raises(UserError, match=r"optimizer\.kwargs\.momentum"):
        read_trained(copy, [])


def test_the_same_settings_go_on_with_the_same_bits(finished, options, tmp_path) -> None:
    run = tmp_path / "run"
    train("train.py", run, *options, "max_steps=5")
    text = train("train.py", run, *options, "resume=auto")
    assert "settings that have changed" not in text
    assert_same_state(run, finished)


class Code:
    """Makes a folder when it is unpickled, or read by a YAML loader that is not safe."""

    folder = ""

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


WRONG: tuple[Any, ...] = (
    None,
    -1,
    10**30,
    0.5,
    float("nan"),
    "x",
    "../x",
    [],
    {},
    [1, "x"],
    {"x": {}},
    Code(),
)


def with_wrong_value(tree: Any, random: Random) -> Any:
    """Nested values, of which one is wrong or missing."""
    if not isinstance(tree, dict | list) or not tree or random.random() < 0.3:
        return random.choice(WRONG)
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    key = random.choice(keys)
    changed = copying.copy(tree)
    changed[key] = with_wrong_value(tree[key], random)
    if random.random() < 0.1:
        del changed[key]
    return changed


def damage(file: Path, random: Random) -> None:
    """Change some bytes of a file of a run, or one value within it."""
    if random.random() < 0.3:
        content = bytearray(file.read_bytes())
        start = random.choice([0, random.randrange(len(content)), len(content) - 1])
        content[start : start + random.choice([0, 1, 8, 10**6])] = random.choice(
            [b"", b"\0", b"[", b"{", b'"', b"\xff" * 8, b"[" * 10_000, b"!!python/name:os.system "]
        )
        file.write_bytes(content)
    elif file.suffix == ".json":
        file.write_text(
            json.dumps(with_wrong_value(json.loads(file.read_text()), random), default=str)
        )
    elif file.suffix == ".yaml":
        file.write_text(yaml.dump(with_wrong_value(yaml.safe_load(file.read_text()), random)))
    elif file.suffix == ".pt":
        state = torch.load(file, weights_only=True)
        wrong = [state | {"loader": Code()}, state | {"format": 0}, state["model"], [state]]
        torch.save(random.choice(wrong), file)
    else:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        key = random.choice(list(metadata))
        metadata[key] = json.dumps(with_wrong_value(json.loads(metadata[key]), random), default=str)
        save_file(load_file(file), file, metadata)


def test_a_damaged_folder_of_a_run_ends_in_one_line_wherever_it_is_used(
    finished, options, tmp_path
) -> None:
    """Never in a traceback, never in code that runs, never in a file elsewhere."""
    random, cpu, run = Random(0), torch.device("cpu"), tmp_path / "run"
    Code.folder = str(tmp_path / "made")
    shutil.copytree(finished, run, copy_function=shutil.copy)
    checkpoints = run / "checkpoints"
    for name in ("step-00000008.pt", "last.pt", "best.pt"):
        (checkpoints / name).unlink()
    uses = {
        "predict": [run / "run.json", run / "config.yaml", checkpoints / "model.safetensors"],
        "resume": [checkpoints / "step-00000016.pt"],
        "model.weights": [checkpoints / "model.safetensors"],
    }
    cfg = make_config(*options, f"output_dir={tmp_path / 'other'}")
    loader, _ = build_loaders(cfg, cpu)
    model = build_model(cfg.model, 3, 2)
    optimizer, scheduler = build_optimizer(cfg, model, len(loader))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    outcomes: Counter[str] = Counter()
    for number in range(200):
        use = random.choice(list(uses))
        file = random.choice(uses[use])
        whole = file.read_bytes()
        damage(file, random)
        cfg.resume, cfg.model.weights = None, None
        outcome = "no error"
        try:
            if use == "predict":
                trained = read_trained(run, ["device=cpu"])
                assert trained.precision.is_floating_point
                target_of(describe_target(trained.target))
                trained.load_into(model)
            else:
                group, key = (cfg, use) if use == "resume" else (cfg.model, "weights")
                setattr(group, key, str(run))
                Run(cfg, cpu, state).resume()
        except Exception as error:
            outcome = explain(error) or traceback.format_exc()
        file.write_bytes(whole)
        if outcome != "no error":
            assert len(outcome.splitlines()) == 1, f"{number}: {use}, {file}: {outcome}"
            assert str(run) in outcome
        outcomes[f"{use}: {outcome == 'no error'}"] += 1
    assert len(outcomes) == 6, outcomes
    assert min(outcomes.values()) > 5, outcomes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]
