"""What a run is and what it reached: its first and last lines, and `config.yaml`, `run.json` and
`summary.json` in its folder."""

import json
import logging
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn

from conf.errors import counted
from conf.files import write_atomically
from conf.schema import Config
from loaders import Loader
from runtime.data_metadata import facts_of
from runtime.progress import Progress, metrics_text
from runtime.run_dir import SUMMARY
from runtime.timing import Timer, bottleneck, speed_text

log = logging.getLogger(__name__)


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
        self.cfg, self.loader, self.run_dir = cfg, loader, run_dir
        name = str(precision).removeprefix("torch.")
        self.about: dict[str, Any] = {
            "facts": facts_of(loader) | {"precision": name},
            "config": asdict(cfg),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }
        self.process: dict[str, Any] = {
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
        about = {
            "settings": self.changed,
            "script": self.process["script"],
            **self.about["facts"],
            "val_samples": info.num_val_samples,
            "versions": self.about["versions"],
        }
        write_json(self.run_dir / "run.json", about)
        for line in info.description:
            log.info(line)
        kwargs = {"arch": cfg.model.arch} if cfg.model.arch else {}
        arguments = ", ".join(f"{k}={v}" for k, v in (kwargs | dict(cfg.model.kwargs)).items())
        size = sum(parameter.numel() for parameter in model.parameters())
        log.info(
            "%s(%s) with %s parameters; %s on %s",
            cfg.model.name,
            arguments,
            f"{size:,}",
            self.process["precision"],
            device,
        )
        log.info(
            "%s of %s of %s on %s, %s dropped per epoch",
            counted(cfg.epochs, "epoch"),
            counted(len(self.loader), "step"),
            counted(cfg.global_batch_size, "sample"),
            counted(self.process["world_size"], "rank"),
            counted(info.num_dropped, "sample"),
        )

    def close(self, progress: Progress, step_number: int, timer: Timer) -> None:
        """Write `summary.json`, unless no step was made, and log the last lines."""
        speeds, seconds = timer.values(), timer.seconds
        summary = {
            **progress.metrics,
            "best": progress.best_metrics,
            "best_metric": progress.best_metric,
            "best_mode": progress.best_mode,
            "best_by_class": progress.best_by_class,
            "steps": step_number,
            **{"perf/images_per_s": 0.0, "perf/data_wait_share": 0.0},
            **speeds,
            "slowest_rank": timer.slow,
            "seconds": {phase: round(s, 3) for phase, s in seconds.items()},
            "device": str(timer.device),
            "versions": self.about["versions"],
            **self.process,
        }
        if not (self.run_dir / SUMMARY).exists():  # else there was nothing left to do
            write_json(self.run_dir / SUMMARY, summary)
        log.info("time by phase:")
        for phase, s in seconds.items():
            log.info("  %-12s %8.1f s  %4.0f %%", phase, s, 100 * s / sum(seconds.values()))
        if "perf/images_per_s" in speeds:
            bound, advice = bottleneck(speeds)
            log.info("%s in training, %s%s", speed_text(speeds), bound, advice)
        if timer.slow:
            log.info(
                "slowest: rank %d on %s, %.0f%% slower than others",
                timer.slow["rank"],
                timer.slow["host"],
                100 * timer.slow["slower_by"],
            )
        best = metrics_text(progress.best_metrics) or "no epoch was validated"
        log.info("best by %s: %s", progress.best_metric or "any metric", best)
        log.info("logs and checkpoints: %s", self.run_dir)


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
    return changed
