"""Checks of the configuration: ranges (declared with the keys), combinations, number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from conf.errors import UserError, check_utf8
from conf.schema import NAMED_BY, Config, own_classes


def keys_of(group: Any = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield each key of a configuration, such as `data.crop`, and its field; of the class, those
    that all configurations have."""
    for field in fields(group):
        if is_dataclass(field.type):
            inner = field.type if isinstance(group, type) else getattr(group, field.name)
            yield from keys_of(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def owners_of_keys() -> dict[str, list[str]]:
    """Return the choices that have a key, such as `loader=packed`, by key; none if all have it."""
    owners: dict[str, list[str]] = {key: [] for key, _ in keys_of()}
    common = set(owners)
    for group in NAMED_BY:
        for name, node in own_classes(group).items():
            for key in {key for key, _ in keys_of(node, f"{group}.")} - common:
                owners.setdefault(key, []).append(f"{group}={name}")
    return owners


def changed_of(cfg: Config, names: list[str]) -> Iterator[str]:
    """Yield, as `key=value`, the settings of these keys or groups that are not the default."""
    for key, field in keys_of(cfg):
        value, default = attrgetter(key)(cfg), field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if {key, key.partition(".")[0]} & set(names) and value != default:
            yield f"{key}={value}"


def check_ranges(cfg: Config) -> None:
    """Raise UserError for a value that is out of its range."""
    for key, field in keys_of(cfg):
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


OF_IMAGES = (
    *("random_crop", "random_resized_crop", "hflip", "vflip", "colour_jitter", "randaugment"),
    *("rotation", "random_scale", "random_erasing", "mixup", "cutmix", "value_range"),
    *("max_pixels", "reduced_decoding", "leave_out", "shuffle", "shuffle_window"),
)
"""Keys of `data` that act on layouts of images alone."""


def check_effects(cfg: Config) -> None:
    """Raise UserError for keys of the data and the loader that would do nothing."""
    data, loader = cfg.data, cfg.loader
    is_own = data.layout == "own"
    is_local = "://" not in data.root
    has_workers = loader.name not in ("synthetic", "dali")
    needs: list[tuple[bool, list[str], str]] = [
        (is_own, [f"data.{key}" for key in OF_IMAGES], "a Dataset of your own has to do that"),
        (is_own, ["loader.num_threads"], "a Dataset of your own is read by loader.num_workers"),
        (data.fold is None, ["data.num_folds"], "it needs data.fold"),
        (data.shuffle != "window", ["data.shuffle_window"], "it needs data.shuffle=window"),
        (is_local, ["data.retry_s"], "it is for a data.root on a server"),
        (
            not has_workers and loader.num_workers != 0,
            ["loader.num_workers"],
            f"loader={loader.name} has no workers",
        ),
    ]
    for does_nothing, keys, why in needs:
        for setting in changed_of(cfg, keys) if does_nothing else ():
            raise UserError(f"{setting} does nothing: {why}; leave it out")


def check_combinations(cfg: Config) -> None:
    """Raise UserError for values that exclude each other."""
    if cfg.optimizer.warmup_steps is None and cfg.optimizer.warmup_epochs >= cfg.epochs:
        raise UserError(
            f"optimizer.warmup_epochs={cfg.optimizer.warmup_epochs} is not less than "
            f"epochs={cfg.epochs}; use a smaller value"
        )

    if cfg.optimizer.head_epochs >= cfg.epochs:
        raise UserError(
            f"optimizer.head_epochs={cfg.optimizer.head_epochs} is not less than "
            f"epochs={cfg.epochs}; use a smaller value, or model.freeze=backbone"
        )

    data, (low, high) = cfg.data, cfg.data.value_range
    outside = any(not low <= value <= high for value in data.mean or ())
    if outside or any(value > high - low for value in data.std or ()):
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
        given = f"data.num_folds={data.num_folds} data.val_count={data.val_count}"
        raise UserError(
            f"data.fold={data.fold} is not possible with {given}; use 0 to {data.num_folds - 1}, "
            "without val_count"
        )
    if cfg.profile.memory and cfg.profile.steps is None:
        raise UserError("profile.memory=true needs profile.steps=[SKIP,RECORD], such as [10,5]")
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
