"""The entry points, started as a user starts them."""

import re
import shutil
from pathlib import Path

import pytest

from models import build_model
from tests.helpers import (
    ENVIRONMENT,
    REPOSITORY,
    answers_to,
    checkpoint_of,
    events_of,
    folder_with,
    has_ranks,
    make_config,
    published,
    run_all,
    run_to_end,
    scalars_of,
    summary_of,
    train,
    validated,
    values_of,
    weights_differ_by,
)
from tests.torchrun import TWO_RANKS, Torchrun

pytestmark = pytest.mark.slow

SHORT = ["epochs=1", "optimizer.warmup_epochs=0", "max_steps=2", "data.crop=[16,16]"]
SHORT += ["log.images=0"]
TWENTY_STEPS = ["model.kwargs.width=8", "model.kwargs.batch_norm=false", "max_steps=20"]
TWENTY_STEPS += ["data.crop=[24,24]", "data.random_crop=true", "global_batch_size=80"]
TWENTY_STEPS += ["log.every_steps=1"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """Output folder of a run of 20 steps of `train.py`."""
    run = tmp_path_factory.mktemp("runs") / "run"
    train("train.py", run, *TWENTY_STEPS)
    return run


@pytest.mark.parametrize(
    ("script", "loader"),
    [
        ("train.py", "loader=pytorch"),
        ("train_ddp.py", "loader=dali"),
        ("train_fsdp.py", "loader=synthetic"),
        ("train_amp.py", "loader=dali"),
    ],
)
def test_entry_points_run_with_each_loader(script: str, loader: str, tmp_path) -> None:
    output, is_low = tmp_path / "run", "amp" in script
    printed = train(script, output, *SHORT, loader, *["amp.dtype=bfloat16"] * is_low)
    assert f"logs and checkpoints: {output}" in printed
    assert "epoch 1/1" not in printed  # a progress bar, which is for terminals
    assert "best by val/top1: val/loss " in printed
    assert "images/s" not in printed  # samples may be none
    names = {path.name for path in output.glob("[!.e]*")}  # without events.*
    assert names == {"checkpoints", "config.yaml", "run.json", "summary.json", "train.log"}
    assert events_of(output).Tags()["images"] == []
    assert [step for step, _ in scalars_of(output, "train/grad_norm")] == [2]  # no log point before
    summary, num_ranks = summary_of(output), 1 + has_ranks(script)
    assert (summary["script"], summary["world_size"]) == (script, num_ranks)
    assert summary["steps"] == 2
    assert summary["precision"] == ("bfloat16" if is_low else "float32")
    by_class = summary["best_by_class"].values()
    hits = sum(row["support"] * row["recall"] for row in by_class if row["support"])
    top1 = hits / sum(row["support"] for row in by_class)
    assert top1 == pytest.approx(summary["best"]["val/top1"])
    seconds = summary["seconds"]
    parts = {"start_up", "other", "first_step", "data_wait", "compute", "validation", "saving"}
    assert seconds.keys() == parts
    train_s = seconds["data_wait"] + seconds["compute"]  # of the second step; rounded
    assert summary["perf/images_per_s"] == pytest.approx(64 / train_s, abs=100, rel=0.2)
    assert summary["perf/data_wait_share"] == pytest.approx(seconds["data_wait"] / train_s, abs=0.2)

    size = sum(p.numel() for p in build_model(make_config().model, 1, 10).parameters())
    lines = printed[printed.index("mnist_mini: ") :].splitlines()
    _, inputs, model, steps = [line for line in lines[:5] if "DALI decodes" not in line][:4]
    assert inputs == "inputs: 16x16, 1 channel: images of 28x28, 16x16 cut (32.7% of the area)"
    assert model.startswith("small_cnn(width=32, batch_norm=True) with")
    assert f" {size:,} parameters; {summary['precision']} on cpu" in model
    assert f" steps of 64 samples on {'2 ranks' if num_ranks == 2 else '1 rank'}, " in steps
    if "synthetic" not in loader:
        for name, value in validated(published(output), SHORT).items():
            expected = pytest.approx(value, rel=0.02 if is_low else 1e-4, abs=0.01 * is_low)
            assert summary[name] == expected, name


@pytest.mark.skipif(shutil.which("g++") is None, reason="on the CPU, compiling needs g++")
def test_a_compiled_model_trains_like_the_plain_one(plain, tmp_path, monkeypatch) -> None:
    """In a group of one rank, as each would compile the same; and no batch is shorter, for which it
    would compile again. A log point is the mean of its steps."""
    # Without a pool of processes that each import torch.
    monkeypatch.setitem(ENVIRONMENT, "TORCHINDUCTOR_COMPILE_THREADS", "1")
    compiled = tmp_path / "compiled"
    options = [*TWENTY_STEPS, "model.compile=true", "log.every_steps=2"]
    codes, texts = run_to_end("train_ddp.py", compiled, *options, num_ranks=1)
    assert codes == [0], texts
    losses = values_of(plain, "train/loss")
    means = [(one + other) / 2 for one, other in zip(losses[::2], losses[1::2], strict=True)]
    assert values_of(compiled, "train/loss") == pytest.approx(means, abs=1e-4)
    assert weights_differ_by(compiled, plain) < 1e-3  # and the names of the weights are the same


QUICK = ["model.kwargs.width=4", "data.crop=[12,12]", "global_batch_size=1000", "log.images=0"]


def test_with_more_epochs_a_run_goes_on_as_if_it_had_had_them(tmp_path) -> None:
    options = ["train.py", *QUICK, "log.every_steps=1", "resume=auto"]
    rows = [("whole", 3), ("run", 2), ("run", 3)]
    commands = [[*options, f"output_dir={tmp_path / run}", f"epochs={n}"] for run, n in rows]
    run_all(commands, tmp_path)
    rates = values_of(tmp_path / "whole", "train/lr")
    assert len(rates) == 30
    assert values_of(tmp_path / "run", "train/lr")[20:] == rates[20:]


def test_a_run_stops_early_on_all_ranks(tmp_path) -> None:
    """Without learning, the first epoch stays the best one."""
    options = [*QUICK, "model.kwargs.batch_norm=false", "optimizer.lr=1e-30", "loader=synthetic"]
    run = tmp_path / "run"
    printed = train("train_ddp.py", run, *options, "epochs=9", "early_stopping.patience=2")
    assert "early stopping: no better val/top1 in 2 validations" in printed
    assert "Warning" not in printed
    assert len(scalars_of(run, "val/loss")) == 3
    assert checkpoint_of(run, best=True)["progress"]["num_epochs"] == 1


def test_tensorboard_has_every_promised_tag_and_setting_and_the_line_of_an_epoch_its_means(
    plain,
) -> None:
    # Of speeds, the first step does not count.
    speeds = ("images_per_s", "data_wait_share")
    first = dict.fromkeys((f"perf/{name}" for name in speeds), 2)
    first |= dict.fromkeys(("train/loss", "train/grad_norm", "train/lr"), 1)
    first |= dict.fromkeys(("val/loss", "val/top1", "val/top5"), 20)
    for tag, step in first.items():
        assert [at for at, _ in scalars_of(plain, tag)] == list(range(step, 21)), tag
    images = ["train/inputs"]
    images += ["val/predictions", "val/confusion"]
    assert events_of(plain).Tags()["images"] == images

    contents = events_of(plain).PluginTagToContent("hparams")  # its table of runs
    names = ["script", "train.py", "world_size", "precision", "float32"]
    for name in names + [override.partition("=")[0] for override in TWENTY_STEPS]:
        assert name.encode() in contents["_hparams_/session_start_info"], name
    for metric in ("val/loss", "val/top1", "val/top5"):
        assert metric.encode() in contents["_hparams_/experiment"], metric

    values = {"train/epoch_loss": sum(values_of(plain, "train/loss")) / 20}
    [(step, loss)] = scalars_of(plain, "train/epoch_loss")
    assert (step, loss) == (20, pytest.approx(values["train/epoch_loss"]))
    values |= {name: summary_of(plain)[name] for name in ("val/loss", "val/top1", "val/top5")}
    listed = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    assert f"INFO epoch 1 of 4, step 20 of 125: {listed}\n" in (plain / "train.log").read_text()


def test_clipping_bounds_the_step_and_the_logged_norm_is_the_true_one(plain, tmp_path) -> None:
    clipped = tmp_path / "run"
    limit, options = 1e-3, ["optimizer=sgd", "optimizer.kwargs={momentum:0,nesterov:false}"]
    options += [f"clip_grad_norm={limit}", "optimizer.weight_decay=0", "max_steps=2"]
    options += ["checkpoint.every_steps=1", "optimizer.warmup_epochs=0"]
    train("train.py", clipped, *TWENTY_STEPS, *options)
    norms = values_of(clipped, "train/grad_norm")
    assert norms[0] == pytest.approx(values_of(plain, "train/grad_norm")[0], rel=1e-4)
    assert min(norms) > 10 * limit
    rate = values_of(clipped, "train/lr")[1]
    before, after = (checkpoint_of(clipped, n)["model"] for n in (1, 2))
    change = sum((after[key] - before[key]).double().square().sum() for key in after) ** 0.5
    assert change == pytest.approx(rate * limit, rel=0.01)


def test_workers_do_not_import_again_what_the_script_imports(tmp_path) -> None:
    folder = folder_with(tmp_path / "s", "train.py")
    (folder / "noted.py").write_text("print('noted', flush=True)\n")
    (folder / "train.py").write_text("import noted\n" + (folder / "train.py").read_text())
    printed = train("train.py", tmp_path / "run", *SHORT, "loader.num_workers=1", folder=folder)
    assert printed.count("noted\n") == 2  # by the training process and the fork server


def test_ranks_share_one_folder_that_is_named_by_the_time(tmp_path) -> None:
    folder = folder_with(tmp_path / "s", "train_ddp.py")
    command = [*TWO_RANKS, "train_ddp.py", *SHORT]
    with Torchrun(command, folder, tmp_path / "prints.txt") as torchrun:
        assert torchrun.wait() == 0, torchrun.text()
    (run,) = (folder / "outputs" / "train_ddp").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}", run.name)
    assert (run / "summary.json").exists()


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py", "train_ddp_amp.py"])
def test_a_script_of_several_processes_also_runs_as_one(script: str, plain, tmp_path) -> None:
    """With the weights of `train.py`."""
    commands = [[script, *TWENTY_STEPS, "amp.dtype=float32", f"output_dir={tmp_path / 'run'}"]]
    [printed] = run_all(commands, tmp_path)
    [said] = [line for line in printed.splitlines() if "torchrun" in line]
    assert said.endswith(f"one process; torchrun --nproc_per_node=2 {script} starts two")
    assert summary_of(tmp_path / "run")["world_size"] == 1
    assert weights_differ_by(tmp_path / "run", plain) == 0


TWO_KINDS = ["train.py", "train_ddp.py"]
"""For one process, and for several."""


@pytest.mark.parametrize(
    ("variable", "code"),
    [("WORLD_SIZE=2", 2), ("WORLD_SIZE=", 0), ("SLURM_NTASKS=8", 2), ("SLURM_NTASKS=1", 0)],
)
def test_processes_of_another_launcher_are_not_as_many_runs(
    variable, code, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, *variable.split("="))
    runs = [[script, *SHORT, f"output_dir={tmp_path / script}"] for script in TWO_KINDS]
    (one, _), (several, text) = answers_to(runs, tmp_path)
    assert (one, several) == (0, code), text
    assert (f"{variable}, but RANK is not set" in text) == (code == 2)


@pytest.mark.parametrize("script", TWO_KINDS)
def test_multirun_gives_each_job_a_folder(script: str, tmp_path) -> None:
    """And a process group of its own."""
    folder, name = folder_with(tmp_path, script), script.removesuffix(".py")
    [printed] = run_all([[script, "-m", "seed=1,2", *SHORT]], tmp_path, folder=folder)
    (sweep,) = (folder / "outputs" / name).iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}
    assert weights_differ_by(sweep / "0", sweep / "1") > 0
    assert printed.count("small_cnn(") == 2
    for job in "01":
        log = (sweep / job / "train.log").read_text()
        assert log.count("small_cnn(") == log.count("epoch 1 of 1, ") == 1


def test_an_int_is_a_square_crop(tmp_path) -> None:
    options = ["data.resize=30", "data.crop=24", "max_steps=1", "optimizer.warmup_epochs=0"]
    printed = train("train.py", tmp_path / "run", *options)
    assert "inputs: 24x24" in printed


def test_torchrun_is_told_that_a_script_has_one_process(tmp_path) -> None:
    command = [*TWO_RANKS, "train.py", f"output_dir={tmp_path / 'run'}"]
    with Torchrun(command, REPOSITORY, tmp_path / "prints") as torchrun:
        assert torchrun.wait() == 1
        text = torchrun.text()
    said, _, summary = text.partition("Root Cause")
    message = "torchrun has started 2; start it with python"
    assert (said.count(message), summary.count(message)) == (1, 1), text
    assert "exitcode  : 2" in text
