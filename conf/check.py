"""Checks of the configuration: ranges (declared in schema.py), combinations, number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from conf.errors import UserError, check_utf8
from conf.schema import Config


def keys_of(group: Any = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield each key of the configuration, such as `data.crop`, and its field."""
    for field in fields(group):
        if is_dataclass(field.type):
            yield from keys_of(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def changed_in(cfg: Config, groups: list[str]) -> Iterator[str]:
    """Yield, as `key=value`, the settings of these groups that are not the default."""
    for key, field in keys_of():
        value = attrgetter(key)(cfg)
        if key.partition(".")[0] in groups and value != field.default:
            yield f"{key}={value}"


def check_ranges(cfg: Config) -> None:
    """Raise UserError for a value that is out of its range."""
    for key, field in keys_of():
        value, allowed = attrgetter(key)(cfg), field.metadata.get("allowed")
        if isinstance(value, str):
            check_utf8(key, value)
        if isinstance(value, str) and value.startswith("~/"):
            raise UserError(
                f"{key}={value}: write {Path(value).expanduser()}; ~ is for command lines"
            )
        is_optional = field.default is None
        if allowed and not (is_optional and value is None) and not allowed.contains(value):
            raise UserError(
                f"{key}={value} is not possible; "
                f"use {allowed.description}{', or null' if is_optional else ''}"
            )


def check_combinations(cfg: Config) -> None:
    """Raise UserError for values that exclude each other."""
    if cfg.optimizer.warmup_steps is None and cfg.optimizer.warmup_epochs >= cfg.epochs:
        raise UserError(
            f"optimizer.warmup_epochs={cfg.optimizer.warmup_epochs} is not less than "
            f"epochs={cfg.epochs}; use a smaller value"
        )
    # part: images
    data, (low, high) = cfg.data, cfg.data.value_range
    outside = any(not low <= value <= high for value in data.mean or ())
    if outside or any(value > high - low for value in data.std or ()):
        raise UserError(
            f"data.mean={data.mean} data.std={data.std} do not fit data.value_range="
            f"{data.value_range}; divide both by 255, or set data.value_range=[0,255]"
        )

    if cfg.loader.name == "packed" and cfg.loader.pack is None:  # part: packed
        raise UserError(
            "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR"
        )
    if "://" in cfg.data.root and cfg.data.index is not None:  # part: shards
        raise UserError(
            f"data.index={cfg.data.index} is an index of files; leave it out: shards have their own"
        )
    if cfg.overwrite and cfg.resume is not None:
        raise UserError(
            f"overwrite=true would remove the checkpoint of resume={cfg.resume}; leave out one"
        )


def check_batch_size(global_batch_size: int, **counts: int) -> None:
    """Raise UserError if a batch cannot be divided into equal parts.

    Args:
        global_batch_size: samples of the batch.
        counts: numbers by key whose product is the number of parts, such as `world_size`.
    """
    num_parts = math.prod(counts.values())
    size, rest = divmod(global_batch_size, num_parts)
    if rest:
        by = " times ".join(f"{key}={count}" for key, count in counts.items() if count > 1)
        fits = [fit * num_parts for fit in (size, size + 1) if fit]
        raise UserError(
            f"global_batch_size={global_batch_size} is not divisible by {by}; "
            f"use {' or '.join(map(str, fits))}"
        )
