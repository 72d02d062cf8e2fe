"""What a run is and what it reached: its first and last lines, and `config.yaml`, `run.json` and
`summary.json` in its folder."""

import json
import logging
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn

from conf.credentials import masked
from conf.errors import counted
from conf.files import write_atomically
from conf.schema import Config
from loaders import Loader
from runtime.data_metadata import facts_of
from runtime.preemption import REQUEUE_MARKER
from runtime.progress import Progress, metrics_text
from runtime.resume import settings
from runtime.run_dir import SUMMARY
from runtime.speed import Speed, verdict

log = logging.getLogger(__name__)

VERSIONS = {"python": platform.python_version(), "torch": str(torch.__version__)}


class Summary:
    """Describes a run at its start and its end; rank 0 alone calls `open` and `close`.

    Attributes:
        about: what checkpoints hold besides the state: facts, configuration, versions.
        process: script, number of ranks and precision.
        changed: values set on the command line, by key.
    """

    def __init__(
        self,
        cfg: Config,
        loader: Loader,
        run_dir: Path,
        world_size: int,
        precision: torch.dtype,
    ) -> None:
        """Take facts about a run."""
        self.cfg, self.loader, self.run_dir = cfg, loader, run_dir
        name = str(precision).removeprefix("torch.")
        facts = facts_of(loader) | {"precision": name}
        self.about: dict[str, Any] = {"facts": facts, "config": settings(cfg), "versions": VERSIONS}
        self.world_size = world_size
        self.process: dict[str, float | str | bool] = {
            "script": Path(sys.argv[0]).name,
            "world_size": world_size,
            "precision": name,
        }
        self.changed = changed_settings(cfg)

    def open(self, model: nn.Module, device: torch.device) -> None:
        """Write `config.yaml` and `run.json`, and log the first lines."""
        cfg, info = self.cfg, self.loader.info
        (self.run_dir / SUMMARY).unlink(missing_ok=True)  # of what was reached before
        with write_atomically(self.run_dir / "config.yaml") as temporary:
            OmegaConf.save(self.about["config"], temporary)
        about = {"settings": self.changed, "script": self.process["script"]} | self.about["facts"]
        about |= {"val_samples": info.num_val_samples, "versions": VERSIONS}
        write_json(self.run_dir / "run.json", about)
        name = f"{cfg.model.name} {cfg.model.arch}" if cfg.model.arch else cfg.model.name
        arguments = ", ".join(f"{key}={value}" for key, value in cfg.model.kwargs.items())
        size = sum(parameter.numel() for parameter in model.parameters())
        for line in [
            *info.description,
            f"{name}{f'({arguments})' if arguments else ''} with {size:,} parameters; "
            f"{self.process['precision']} on {device}",
            f"{counted(cfg.epochs, 'epoch')} of {counted(len(self.loader), 'step')} of "
            f"{counted(cfg.global_batch_size, 'sample')} on "
            f"{counted(self.world_size, 'rank')}, "
            f"{counted(info.num_dropped, 'sample')} dropped per epoch",
        ]:
            log.info(line)

    def close(self, progress: Progress, counts: Mapping[str, object], speed: Speed) -> None:
        """Write `summary.json`, with `counts`, unless no step was made, and log the last lines."""
        (self.run_dir / REQUEUE_MARKER).unlink(missing_ok=True)
        device, seconds, slow = speed.timing.device, speed.timing.seconds, speed.slow
        speeds = {"perf/images_per_s": 0.0, "perf/data_wait_share": 0.0} | speed.values()
        if not (self.run_dir / SUMMARY).exists():  # else there was nothing left to do
            summary = {
                **progress.metrics,
                "best": progress.best_metrics,
                "best_metric": progress.best_metric,
                "best_mode": progress.best_mode,
                **counts,
                **speeds,
                **({"slowest_rank": slow._asdict()} if slow else {}),
                "seconds": {phase: round(s, 3) for phase, s in seconds.items()},
                "device": str(device),
                "versions": VERSIONS,
                **self.process,
            }
            if progress.best_by_class:
                summary["best_by_class"] = progress.best_by_class
            write_json(self.run_dir / SUMMARY, summary)
        log.info("time by phase:")
        for phase, s in seconds.items():
            log.info("  %-12s %8.1f s  %4.0f %%", phase, s, 100 * s / sum(seconds.values()))
        if speed.timing.num_images:
            advice = verdict(speeds, self.cfg, device)
            log.info("%s in training, %s", speed.timing.speed(), advice)
        if slow:
            log.info("%s", slow)
        if progress.best_metrics:
            best = metrics_text(progress.best_metrics)
            log.info("best by %s: %s", progress.best_metric, best)
        else:
            log.info("best: no epoch was validated")
        log.info("logs and checkpoints: %s", self.run_dir)


def log_that_nothing_is_left(cfg: Config, num_epochs: int, step_number: int) -> None:
    """Name the place where the run has ended, and the keys that ended it."""
    limits = {"epochs": cfg.epochs, "max_steps": cfg.max_steps}
    limits["early_stopping.patience"] = cfg.early_stopping.patience
    given = " ".join(f"{key}={limit}" for key, limit in limits.items() if limit is not None)
    place = f"epoch {num_epochs} (step {step_number})"
    log.info("nothing to do: the run has ended after %s; to train on, raise %s", place, given)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, which replaces an earlier one atomically."""
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False, default=str) + "\n")


def changed_settings(cfg: Config) -> dict[str, float | str | bool]:
    """Return the values set on the command line, by key, except the run's folder and name."""
    if not HydraConfig.initialized():
        return {}
    typed, hydra = OmegaConf.structured(cfg), HydraConfig.get()
    changed = {}
    for override in hydra.overrides.task:
        key = override.split("=")[0].lstrip("+~")
        value: Any = OmegaConf.select(typed, key)
        if OmegaConf.is_dict(value) or value is None:  # a group, such as data=mnist_mini
            value = hydra.runtime.choices.get(key, value)
        if key not in ("output_dir", "name", "resume"):
            changed[key] = value if isinstance(value, int | float | bool) else str(value)
    return masked(changed)
