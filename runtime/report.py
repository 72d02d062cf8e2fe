"""Lines and files in which a run describes itself."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn

from conf.credentials import masked
from conf.files import write_atomically
from conf.schema import Config
from loaders import Loader
from runtime.timing import Timing, verdict


def opening_lines(
    cfg: Config, loader: Loader, model: nn.Module, place: str, world_size: int
) -> list[str]:
    """Return lines about the data, the model, its precision and device (`place`), and the steps."""
    size = sum(parameter.numel() for parameter in model.parameters())
    name = f"{cfg.model.name} {cfg.model.arch}" if cfg.model.arch else cfg.model.name
    arguments = ", ".join(f"{key}={value}" for key, value in cfg.model.kwargs.items())
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    return [
        *loader.info.description,
        f"{name}{f'({arguments})' if arguments else ''} with {size:,} parameters; {place}",
        f"{cfg.epochs} epochs of {len(loader)} steps of {cfg.global_batch_size} samples on "
        f"{ranks}, {loader.info.num_dropped} samples dropped per epoch",
    ]


def closing_lines(cfg: Config, timing: Timing, best: dict[str, float]) -> list[str]:
    """Return lines about the time of each part of a run, its speed and its best metrics."""
    total = sum(timing.seconds.values())
    lines = ["time by part:"]
    lines += [
        f"  {part:12} {seconds:8.1f} s  {100 * seconds / total:4.0f} %"
        for part, seconds in timing.seconds.items()
    ]
    if timing.num_images:
        lines.append(f"{timing.speed()} in training, {verdict(timing.data_wait_share, cfg)}")
    return [*lines, f"best: {listed(best) or 'no epoch was validated'}"]


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file, which replaces an earlier one atomically."""
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2, ensure_ascii=False, default=str) + "\n")


def write_settings(run_dir: Path, cfg: Config, facts: dict[str, Any]) -> None:
    """Write `config.yaml`, and `run.json` with these facts and the settings that were changed."""
    OmegaConf.save(settings(cfg), run_dir / "config.yaml")
    write_json(run_dir / "run.json", {"settings": changed_settings(cfg)} | facts)


def settings(cfg: Config) -> Any:
    """Return the configuration as nested dictionaries, as it is written to files."""
    values = asdict(cfg)
    values = masked(values)  # part: credentials
    return values


def changed_settings(cfg: Config) -> dict[str, float | str | bool]:
    """Return the values set on the command line, by key, except the run's folder and name."""
    if not HydraConfig.initialized():
        return {}
    typed = OmegaConf.structured(cfg)
    keys = [override.split("=")[0].lstrip("+~") for override in HydraConfig.get().overrides.task]
    settings = {}
    for key in keys:
        value: Any = OmegaConf.select(typed, key)
        if OmegaConf.is_dict(value) or value is None:  # a group, such as data=mnist_mini
            value = HydraConfig.get().runtime.choices.get(key, value)
        if key not in ("output_dir", "name", "resume"):
            settings[key] = value if isinstance(value, int | float | bool) else str(value)
    settings = masked(settings)  # part: credentials
    return settings


def changed_in(cfg: Config, groups: list[str]) -> list[str]:  # part: amp|ema|ranks
    """Return `key=value` of the values in these groups that are not the defaults."""
    changed = []
    for group in groups:
        config = getattr(cfg, group)
        for key, default in asdict(type(config)()).items():
            if (value := getattr(config, key)) != default:
                changed.append(f"{group}.{key}={value}")
    return changed


def listed(values: dict[str, float]) -> str:
    return ", ".join(f"{key} {value:.4f}" for key, value in values.items())


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
