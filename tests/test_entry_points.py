"""The entry points, started as a user starts them."""

import itertools
import re
import shutil

import pytest
import torch
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from models import build_model
from tests.helpers import (
    ENVIRONMENT,
    SCRIPTS,
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
    weights_differ_by,
)
from tests.torchrun import TWO_RANKS, torchrun, train_with_torchrun

SHORT = ["epochs=1", "optimizer.warmup_epochs=0", "max_steps=2", "data.crop=[16,16]"]
TWENTY_STEPS = [
    "model.kwargs.width=8",
    "model.kwargs.batch_norm=false",
    "max_steps=20",
    "log.every_steps=1",
    "data.crop=[24,24]",
    "data.random_crop=true",
]

SGD = ["optimizer=sgd", "optimizer.lr=0.01"]
FLOAT16 = ["amp.dtype=float16", "amp.init_scale=256"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Output folder of a run of 20 steps of an entry point, each made when first asked for."""
    folders = {}

    def folder_of(script: str, *overrides: str):
        key = (script, *overrides)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("runs") / "run"
            train(script, folders[key], *TWENTY_STEPS, *overrides)
        return folders[key]

    return folder_of


LOADERS = ["pytorch", "dali", "synthetic"]
RUNS = list(zip(SCRIPTS, itertools.cycle(LOADERS)))
RUNS += [("train.py", "dali")]  # part: dali


@pytest.mark.parametrize(("script", "loader"), RUNS)
def test_every_entry_point_and_every_loader_run(script: str, loader: str, tmp_path) -> None:
    output = tmp_path / "run"
    quickly = train_with_torchrun if has_ranks(script) else train
    printed = quickly(script, output, *SHORT, f"loader={loader}")
    assert f"TensorBoard logs and checkpoints: {output}" in printed
    names = {
        path.name for path in output.iterdir() if not path.name.startswith(("events", ".lock"))
    }
    assert names == {"checkpoints", "config.yaml", "run.json", "summary.json", "train.log"}
    summary = summary_of(output)
    assert summary["script"] == script
    num_ranks = 2 if has_ranks(script) else 1
    assert summary["world_size"] == num_ranks
    assert summary["steps"] == 2
    assert summary["bad_steps"] == 0
    assert summary["precision"] == ("bfloat16" if "amp" in script else "float32")
    parts = {"start_up", "other", "first_step", "data_wait", "compute", "validation", "saving"}
    assert set(summary["seconds"]) == parts
    seconds = summary["seconds"]
    train_s = seconds["data_wait"] + seconds["compute"]  # of the second step; rounded
    assert summary["perf/images_per_s"] == pytest.approx(64 / train_s, abs=100, rel=0.2)
    assert summary["perf/data_wait_share"] == pytest.approx(seconds["data_wait"] / train_s, abs=0.2)
    assert not any(key.startswith("module.") for key in checkpoint_of(output)["model"])

    ranks = f"{num_ranks} rank{'s' * (num_ranks - 1)}"
    _, model, steps = printed[printed.index("mnist_mini: ") :].splitlines()[:3]
    assert model.startswith("small_cnn(width=32, batch_norm=True) with")
    assert f" {NUM_PARAMETERS:,} parameters; {summary['precision']} on cpu" in model
    assert f" steps of 64 samples on {ranks}, " in steps
    if loader != "synthetic":
        assert summary["val/top1"] <= summary["val/top5"]
        is_low = "amp" in script
        for name, value in validated(published(output), SHORT).items():
            expected = pytest.approx(value, rel=0.02 if is_low else 1e-4, abs=0.01 * is_low)
            assert summary[name] == expected, name


NUM_PARAMETERS = sum(p.numel() for p in build_model(make_config().model, 1, 10).parameters())


def losses_of(folder) -> list[float]:
    scalars = scalars_of(folder, "train/loss")
    assert [step for step, _ in scalars] == list(range(1, 21))
    return [value for _, value in scalars]


def test_dali_trains_exactly_like_pytorch(runs) -> None:
    assert weights_differ_by(runs("train.py"), runs("train.py", "loader=dali")) < 1e-6


def test_data_parallel_is_the_baseline_without_two_gpus(runs) -> None:
    assert losses_of(runs("train_dp.py")) == losses_of(runs("train.py"))
    assert weights_differ_by(runs("train_dp.py"), runs("train.py")) == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="on the CPU, compiling needs g++")
def test_a_compiled_model_trains_like_the_plain_one(runs, tmp_path, monkeypatch) -> None:
    """In a group of one rank, as each would compile the same; and no batch is shorter, for which it
    would compile again."""
    # Without a pool of processes that each import torch.
    monkeypatch.setitem(ENVIRONMENT, "TORCHINDUCTOR_COMPILE_THREADS", "1")
    plain, compiled = runs("train.py", "global_batch_size=80"), tmp_path / "compiled"
    options = [*TWENTY_STEPS, "global_batch_size=80", "model.compile=true"]
    codes, texts = run_to_end("train_ddp.py", compiled, *options, num_ranks=1)
    assert codes == [0], texts
    assert losses_of(compiled) == pytest.approx(losses_of(plain), abs=1e-4)
    assert weights_differ_by(compiled, plain) < 1e-3  # and the names of the weights are the same


def test_amp_follows_the_baseline(runs) -> None:
    """bfloat16 has 8 bits of precision, float16 11: losses within 0.05 and 0.02 over 20 steps."""
    baseline, scales = losses_of(runs("train.py")), []
    for options, tolerance in ((["amp.dtype=bfloat16"], 0.05), (FLOAT16, 0.02)):
        run = runs("train_amp.py", *options)
        assert losses_of(run) == pytest.approx(baseline, abs=tolerance)
        assert losses_of(run) != baseline
        scales.append(checkpoint_of(run)["scaler"].get("scale"))
    assert scales == [None, 256]  # bfloat16 needs none
    assert "scaler" not in checkpoint_of(runs("train.py"))


QUICK = ["model.kwargs.width=4", "data.crop=[12,12]", "global_batch_size=1000", "log.images=0"]


def test_the_best_and_the_last_checkpoint_are_kept(tmp_path) -> None:
    """By a metric of which less is better; other tests have one of which more is."""
    folder, run = folder_with(tmp_path / "s", "train.py"), tmp_path / "run"
    script, line = folder / "train.py", "    task = build_task(cfg, train_loader)\n"
    text = script.read_text()
    assert line in text
    own = f"{line}    task.best_metric, task.best_mode = 'loss', 'min'\n"
    script.write_text(text.replace(line, own))
    options = ["train.py", *QUICK, f"output_dir={run}", "resume=auto"]
    run_all([[*options, f"epochs={epochs}"] for epochs in (2, 3)], tmp_path, folder=folder)
    values = [value for _, value in scalars_of(run, "val/loss")]
    assert len(values) == 3
    last, best, summary = checkpoint_of(run), checkpoint_of(run, "best.pt"), summary_of(run)
    assert summary["best"]["val/loss"] == pytest.approx(min(values))
    assert -last["run"]["best"] == last["run"]["best_metrics"]["val/loss"]
    assert (last["run"]["best_metric"], summary["best_mode"]) == ("val/loss", "min")
    assert (last["run"]["num_epochs"], last["loader"]["epoch"]) == (3, 2)
    assert last["config"]["epochs"] == 3
    assert best["run"]["metrics"] == last["run"]["best_metrics"]
    assert best["loader"]["epoch"] == values.index(min(values))


def test_a_run_stops_early_on_all_ranks_and_goes_on_with_more_patience(tmp_path) -> None:
    """Without learning, the first epoch stays the best one."""
    options = ["train_ddp.py", *QUICK, "model.kwargs.batch_norm=false", "optimizer.lr=1e-30"]
    options += ["epochs=9", "loader=synthetic", "resume=auto", f"output_dir={tmp_path / 'run'}"]
    commands = [[*options, f"early_stopping.patience={patience}"] for patience in (2, 2, 3)]
    *_, again, further = run_all(commands, tmp_path, 2)
    assert "nothing to do" in again
    assert "nothing to do" not in further
    assert len(scalars_of(tmp_path / "run", "val/loss")) == 4
    assert checkpoint_of(tmp_path / "run", "best.pt")["run"]["num_epochs"] == 1


def test_tensorboard_has_every_promised_tag(runs) -> None:
    output = runs("train.py")
    for tag in ("train/loss", "train/grad_norm", "train/lr"):
        assert [step for step, _ in scalars_of(output, tag)] == list(range(1, 21))
    for tag in ("perf/images_per_s", "perf/data_wait_share"):
        # The first step does not count.
        assert [step for step, _ in scalars_of(output, tag)] == list(range(2, 21))
    for tag in ("val/loss", "val/top1", "val/top5"):
        assert [step for step, _ in scalars_of(output, tag)] == [20]
    events = events_of(output)
    images = ["train/inputs"]
    images += ["val/predictions", "val/confusion"]  # part: pictures
    assert events.Tags()["images"] == images


def test_a_run_of_fewer_steps_than_a_log_point_logs_its_gradient_norm_and_no_images(runs) -> None:
    output = runs("train_ddp.py", "log.every_steps=100", "log.images=0", *SGD)
    assert [step for step, _ in scalars_of(output, "train/grad_norm")] == [20]
    assert events_of(output).Tags()["images"] == []


def test_the_table_of_runs_has_what_was_changed(runs) -> None:
    """And what a comparison needs: script, processes and precision."""
    output = runs("train_ddp.py", "log.every_steps=100", "log.images=0", *SGD)
    contents = events_of(output).PluginTagToContent("hparams")
    start_info = HParamsPluginData.FromString(contents["_hparams_/session_start_info"])
    values = {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in start_info.session_start_info.hparams.items()
    }
    assert values == {
        "script": "train_ddp.py",
        "world_size": 2,
        "precision": "float32",
        "model.kwargs.width": 8,
        "model.kwargs.batch_norm": False,
        "max_steps": 20,
        "log.every_steps": 100,
        "log.images": 0,
        "data.crop": "[24, 24]",
        "data.random_crop": True,
        "optimizer": "sgd",
        "optimizer.lr": 0.01,
    }
    experiment = HParamsPluginData.FromString(contents["_hparams_/experiment"])
    metrics = {info.name.tag for info in experiment.experiment.metric_infos}
    assert metrics == {"val/loss", "val/top1", "val/top5"}


def test_the_line_of_an_epoch_tells_training_and_validation(runs) -> None:
    output = runs("train.py")
    losses, summary = losses_of(output), summary_of(output)
    values = {"train/loss": sum(losses) / 20} | {
        f"val/{name}": summary[f"val/{name}"] for name in ("loss", "top1", "top5")
    }
    listed = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    assert f"INFO epoch 1 of 4: {listed}\n" in (output / "train.log").read_text()


TEN_STEPS_AN_EPOCH = [
    *("global_batch_size=1000", "log.every_steps=1", "loader=synthetic"),
    *("model.kwargs.width=2", "data.crop=[8,8]"),
]


def test_learning_rate_warms_up_and_decays_to_zero_over_the_epochs_that_a_run_has(tmp_path) -> None:
    """Also over more epochs than those of the run that it resumes; test_optimizer.py has others."""
    options = ["train.py", *TEN_STEPS_AN_EPOCH, "optimizer.lr=0.1", "optimizer.name=sgd"]
    rows = [("short", "epochs=2"), ("whole", "epochs=3"), ("more", "epochs=3")]
    commands = [[*options, epochs, f"output_dir={tmp_path / name}"] for name, epochs in rows]
    commands[-1].append(f"resume={tmp_path / 'short'}")
    run_all(commands, tmp_path)
    short, whole, more = (
        [rate for _, rate in scalars_of(tmp_path / name, "train/lr")]
        for name in ("short", "whole", "more")
    )
    for rates, num_steps in ((short, 20), (whole, 30)):
        assert len(rates) == num_steps
        assert max(rates) == rates[5] == pytest.approx(0.1)
        assert rates[5:] == sorted(rates[5:], reverse=True)
        assert rates[-1] < 0.002
    assert more == whole[20:]


def test_clipping_bounds_the_step_and_the_logged_norm_is_the_true_one(runs, tmp_path) -> None:
    free = [norm for _, norm in scalars_of(runs("train.py"), "train/grad_norm")]
    amp = scalars_of(runs("train_amp.py", *FLOAT16), "train/grad_norm")
    assert [norm for _, norm in amp[:3]] == pytest.approx(free[:3], rel=0.05)
    clipped = tmp_path / "run"
    limit, options = 1e-3, ["optimizer=sgd", "optimizer.kwargs={momentum:0,nesterov:false}"]
    options += [f"clip_grad_norm={limit}", "optimizer.weight_decay=0", "max_steps=2"]
    options += ["checkpoint.every_steps=1", "optimizer.warmup_epochs=0"]
    train("train.py", clipped, *TWENTY_STEPS, *options)
    norms = [norm for _, norm in scalars_of(clipped, "train/grad_norm")]
    assert norms[0] == pytest.approx(free[0], rel=1e-4)
    assert min(norms) > 10 * limit
    rate = scalars_of(clipped, "train/lr")[1][1]
    before, after = (checkpoint_of(clipped, f"step-{n:08d}.pt")["model"] for n in (1, 2))
    change = sum((after[key] - before[key]).double().square().sum() for key in after) ** 0.5
    assert change == pytest.approx(rate * limit, rel=0.01)


def test_ranks_share_one_folder_that_is_named_by_the_time(tmp_path) -> None:
    prints = tmp_path / "prints"
    folder = folder_with(tmp_path / "s", "train_ddp.py")
    process = torchrun([*TWO_RANKS, "train_ddp.py", *SHORT], folder, prints)
    process.join(240)
    assert process.exitcode == 0, prints.read_text()
    (run,) = (folder / "outputs" / "train_ddp").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run.name)
    assert (run / "summary.json").exists()


def test_multirun_gives_each_job_a_folder(tmp_path) -> None:
    folder = folder_with(tmp_path, "train.py")
    [printed] = run_all([["train.py", "-m", "seed=1,2", *SHORT]], tmp_path, folder=folder)
    (sweep,) = (folder / "outputs" / "train").iterdir()
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"0", "1"}
    weights = [checkpoint_of(sweep / job)["model"] for job in "01"]
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert printed.count("small_cnn(") == 2
    for job in "01":
        log = (sweep / job / "train.log").read_text()
        assert log.count("small_cnn(") == log.count("epoch 1 of 1:") == 1
