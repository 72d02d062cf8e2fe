"""`loader.num_workers=auto`."""

from collections import Counter

import pytest
import torch

from loaders import build_loaders, tune
from tests.helpers import make_config, train

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch):
    """The settings that were measured, each at the speed that a test sets; nothing is really timed."""
    monkeypatch.setattr(tune, "cpus_per_rank", lambda: 4)
    calls: list[list[tuple[int, int]]] = []
    speeds: dict[tuple[int, int], float] = {}

    def measure(settings, *rest):
        calls.append(settings)
        return {setting: speeds.get(setting, 1.0) for setting in settings}

    monkeypatch.setattr(tune, "_measure", measure)
    return calls, speeds


def chosen(tmp_path, *overrides: str) -> tuple[int, int]:
    cfg = make_config("loader.num_workers=auto", f"data.cache_dir={tmp_path}", *overrides)
    loader = build_loaders(cfg, CPU)[0].cfg.loader
    assert cfg.loader.num_workers == "auto"  # what the user gave stays as it is
    return loader.num_workers, loader.num_threads


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["loader=pytorch"], [(0, 1), (0, 2), (0, 4), (1, 4), (2, 2), (4, 1)]),
        (["loader=pytorch", "loader.num_threads=3"], [(0, 3), (1, 3), (2, 3), (4, 3)]),
        (["loader=dali"], [(0, 1), (0, 2), (0, 4)]),
    ],
)
def test_the_fastest_setting_is_chosen(overrides, settings, measured, tmp_path) -> None:
    calls, speeds = measured
    speeds[settings[-1]] = 2.0
    assert chosen(tmp_path, *overrides) == settings[-1]
    assert calls == [settings]


def test_a_setting_is_as_fast_as_the_median_of_its_rounds(monkeypatch) -> None:
    """A setting's number of threads stands for its speed here, once ten times of it."""
    timed: Counter[float] = Counter()

    class Batches:
        def __init__(self, sampler, cfg, device) -> None:
            self.speed = float(cfg.loader.num_threads)

        def set_epoch(self, epoch: int) -> None: ...

        def __iter__(self):
            yield self.speed

    def speed(batches, seconds: float, least: int, device) -> float:
        speed = next(batches)
        timed[speed] += seconds > 0
        return speed * (10 if timed[speed] == 1 else 1)

    monkeypatch.setattr(tune, "_speed", speed)
    settings = [(0, 50), (0, 100)]
    found = tune._measure(settings, make_config(), Batches, lambda: None, CPU)  # type: ignore[arg-type,return-value]
    assert found == {(0, 50): 50, (0, 100): 100}
    assert timed == dict.fromkeys([50, 100], tune.ROUNDS)


def test_more_processes_must_be_worth_it(measured, tmp_path) -> None:
    _, speeds = measured
    speeds |= {(0, 4): 98.0, (2, 2): 100.0}
    assert chosen(tmp_path) == (0, 4)


def test_the_choice_is_kept_for_this_machine_and_data(measured, tmp_path) -> None:
    calls, speeds = measured
    speeds[2, 2] = 5.0
    assert chosen(tmp_path) == (2, 2)
    speeds[0, 4] = 50.0
    assert chosen(tmp_path, "seed=1") == (2, 2)
    assert len(calls) == 1
    assert chosen(tmp_path, "global_batch_size=128") == (0, 4)
    assert chosen(tmp_path, "data.resize=32") == (0, 4)
    assert len(calls) == 3
    kept = list(tmp_path.glob("parallelism-*.json"))
    assert len(kept) == 3
    for path in kept:
        path.write_text("{damaged")
    assert chosen(tmp_path) == (0, 4)
    assert len(calls) == 4


def test_synthetic_batches_need_no_measurement(measured, tmp_path) -> None:
    calls, _ = measured
    assert chosen(tmp_path, "loader=synthetic")[0] == 0
    assert not calls


@pytest.mark.parametrize("script", ["train.py", "train_ddp.py"])
def test_a_run_is_the_same_whether_it_measures_or_not(script: str, tmp_path, monkeypatch) -> None:
    """Also on two ranks, of which each measures for itself."""
    options = ["loader.num_workers=auto", f"data.cache_dir={tmp_path / 'cache'}", "max_steps=3"]
    losses = []
    for attempt in ("measured", "kept"):
        printed = train(script, tmp_path / attempt, *options, "log.every_steps=1")
        assert ("images/s by setting" in printed) == (attempt == "measured")
        assert "loader.num_workers=auto: loader.num_" in printed
        losses.append((tmp_path / attempt / "summary.json").read_text().split('"perf')[0])
    assert losses[0] == losses[1]
