"""What a run says at its start and at its end."""

import json
import logging
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from loaders.targets import describe_target
from runtime.checkpoint import write_atomically
from runtime.folder import SUMMARY
from runtime.timing import verdict

if TYPE_CHECKING:
    from conf.schema import Config
    from runtime.run import Run

log = logging.getLogger(__name__)


def headline(run: "Run") -> str:
    """What is trained on what, in one line."""
    loader, ranks = run.loader, run.group.world_size
    size = sum(parameter.numel() for parameter in run.model.parameters())
    return (
        f"{loader.description}; {run.cfg.model.name} with {size:,} parameters; {run.cfg.epochs} epochs of "
        f"{len(loader)} steps of {run.cfg.global_batch_size} samples on {ranks} "
        f"rank{'s' if ranks > 1 else ''}, {loader.dropped_per_epoch} samples dropped per epoch; "
        f"{name(run.precision)} on {run.device}"
    )


def facts(run: "Run") -> dict[str, Any]:
    """What a model has to be told to be used, beside the configuration and its weights."""
    return {
        "classes": list(run.loader.classes),
        "target": describe_target(run.loader.target),
        "in_channels": run.loader.in_channels,
        "dtype": run.loader.index.dtype,
    }


def write_start(run: "Run") -> None:
    """Write `run.json`, which is there from the first step on: the facts, and what was set."""
    start = {"script": Path(sys.argv[0]).name, "settings": changed_settings(run.cfg)}
    text = json.dumps(start | facts(run), indent=2, ensure_ascii=False, default=str)
    (run.folder / "run.json").write_text(text + "\n")


def close(run: "Run") -> None:
    """Write `summary.json`, the row in TensorBoard's table of runs and the closing lines.

    A summary that is there already tells of a run that had nothing left to do now.
    """
    timing = run.timing
    summary: dict[str, Any] = {
        **run.metrics,
        "best": run.best_metrics,
        "best_metric": run.best_metric,
        "perf/images_per_s": timing.images_per_s,
        "perf/data_wait_share": timing.data_wait_share,
        "seconds": {part: round(seconds, 3) for part, seconds in timing.seconds.items()},
        "steps": run.step_number,
        "bad_steps": run.guard.num_bad_steps,
        "bad_samples": run.loader.num_bad_samples(),
        "world_size": run.group.world_size,
        "device": str(run.device),
        "precision": name(run.precision),
        "script": Path(sys.argv[0]).name,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
    }
    path = run.folder / SUMMARY
    if not path.exists():
        text = json.dumps(summary, indent=2) + "\n"
        write_atomically(path, lambda temporary: temporary.write_text(text))
    facts = {key: summary[key] for key in ("script", "world_size", "precision")}
    run.board.table(facts | changed_settings(run.cfg), run.metrics)
    run.board.close()

    total = sum(timing.seconds.values())
    log.info("time by part:")
    for part, seconds in timing.seconds.items():
        log.info("  %-12s %8.1f s  %4.0f %%", part, seconds, 100 * seconds / total)
    if timing.num_images:
        log.info("%s in training, %s", timing.speed(), verdict(timing.data_wait_share, run.cfg))
    log.info("best: %s", listed(run.best_metrics) or "no epoch was validated")
    log.info("TensorBoard logs and checkpoints: %s", run.folder)


def changed_settings(cfg: "Config") -> dict[str, float | str | bool]:
    """What was set on the command line, by key, but for the run's place."""
    if not HydraConfig.initialized():
        return {}
    keys = [override.split("=")[0].lstrip("+~") for override in HydraConfig.get().overrides.task]
    settings = {}
    for key in keys:
        value: Any = OmegaConf.select(cfg, key)  # type: ignore[arg-type]  # it is a DictConfig
        if OmegaConf.is_dict(value) or value is None:  # a group, such as data=cells
            value = HydraConfig.get().runtime.choices.get(key, value)
        if key not in ("output_dir", "name", "resume"):
            settings[key] = value if isinstance(value, int | float | bool) else str(value)
    return settings


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.4f}" for key, value in values.items())


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
