"""Checks of the configuration: ranges (declared with the keys), combinations, number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any

from conf.errors import UserError
from conf.schema import Config


def keys_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield each key of a configuration, such as `data.crop`, its field, and its value."""
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(value):
            yield from keys_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, value


def values_of(cfg: Config) -> dict[str, Any]:
    return {key: value for key, _, value in keys_of(cfg)}


def check_ranges(cfg: Config) -> None:
    """Raise UserError for a value that is out of its range, or an address with a password."""
    for key, field, value in keys_of(cfg):
        if "://" in str(value) and ("@" in str(value) or "?" in str(value)):
            raise UserError(
                f"{key} holds a user, password or query, which runs would store; leave it out, and "
                "set the credentials in the environment"
            )
        if value is None and field.default is None:
            continue
        allowed = field.metadata.get("allowed")
        if allowed and not allowed.contains(value):
            or_null = ", or null" if field.default is None else ""
            raise UserError(f"{key}={value} is not possible; use {allowed.description}{or_null}")


def check_effects(cfg: Config) -> None:
    """Raise UserError for a key that would do nothing: no choice of the run reads it."""
    task = cfg.task.name
    conditions = {
        f"data={cfg.data.layout}": True,
        f"data.shuffle={cfg.data.shuffle}": True,
        f"loader={cfg.loader.name}": True,
        "images": cfg.data.layout != "own",
        "classes": task not in ("regression", "restoration"),
        "one class per sample": task not in ("regression", "restoration", "multilabel"),
        "data.fold=NUMBER": cfg.data.fold is not None,
        "profile.steps=[SKIP,RECORD]": cfg.profile.steps is not None,
    }
    defaults = values_of(Config())
    for key, field, value in keys_of(cfg):
        of = field.metadata.get("of")
        if not of or value in (0, defaults[key]):
            continue
        if not any(conditions.get(condition) for condition in of.split(" or ")):
            raise UserError(f"{key}={value} does nothing without {of}; leave it out")


def check_combinations(cfg: Config) -> None:
    """Raise UserError for values that exclude each other."""
    options, data = cfg.optimizer, cfg.data
    warmup = options.warmup_epochs if options.warmup_steps is None else 0
    for name, value in (("warmup_epochs", warmup), ("head_epochs", options.head_epochs)):
        if value >= cfg.epochs:
            raise UserError(
                f"optimizer.{name}={value} is not less than epochs={cfg.epochs}; use fewer"
            )
    if any(value > data.value_range[1] for value in [*(data.mean or []), *(data.std or [])]):
        raise UserError(
            f"data.mean={data.mean} data.std={data.std} do not fit data.value_range="
            f"{data.value_range}; divide both by 255, or set data.value_range=[0,255]"
        )
    if data.random_crop and data.random_resized_crop is not None:
        raise UserError(
            "data.random_crop=true is not possible with data.random_resized_crop="
            f"{data.random_resized_crop}; set one of them to false or null"
        )
    if data.fold is not None and (data.fold >= data.num_folds or data.val_count is not None):
        raise UserError(
            f"data.fold={data.fold} is not possible with data.num_folds={data.num_folds} "
            f"data.val_count={data.val_count}; use 0 to {data.num_folds - 1}, without val_count"
        )
    if cfg.overwrite and cfg.resume is not None:
        raise UserError(
            f"overwrite=true would remove the checkpoint of resume={cfg.resume}; leave out one"
        )


def check_batch_size(global_batch_size: int, **counts: int) -> None:
    """Raise UserError if a batch cannot be divided by all `counts`, such as `world_size`."""
    num_parts = math.prod(counts.values())
    size, rest = divmod(global_batch_size, num_parts)
    if rest:
        by = " times ".join(f"{key}={count}" for key, count in counts.items() if count > 1)
        fits = [fit * num_parts for fit in (size, size + 1) if fit]
        raise UserError(
            f"global_batch_size={global_batch_size} is not divisible by {by}; "
            f"use {' or '.join(map(str, fits))}"
        )
