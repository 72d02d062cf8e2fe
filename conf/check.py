"""Checks of the configuration: ranges (declared in schema.py), combinations, number of ranks."""

from dataclasses import fields, is_dataclass
from typing import Any

from conf.errors import UserError
from conf.schema import Config


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise UserError for a value that is out of its range.

    Args:
        config: `Config` or one of its groups.
        prefix: prefix of its keys in messages, such as `data.`.
    """
    for field in fields(config):
        value, allowed = getattr(config, field.name), field.metadata.get("allowed")
        is_optional = field.default is None
        if is_dataclass(value):
            check_ranges(value, f"{prefix}{field.name}.")
        elif allowed and not (is_optional and value is None) and not allowed.contains(value):
            raise UserError(
                f"{prefix}{field.name}={as_override(value)} is not possible; "
                f"use {allowed.description}{', or null' if is_optional else ''}"
            )


def as_override(value: Any) -> str:
    """Write a value as on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def check_combinations(cfg: Config) -> None:
    """Raise UserError for values that exclude each other."""
    data = cfg.data  # part: images
    loader = cfg.loader  # part: packed
    if cfg.optimizer.warmup_steps is None and cfg.optimizer.warmup_epochs >= cfg.epochs:
        raise UserError(
            f"optimizer.warmup_epochs={cfg.optimizer.warmup_epochs} is not less than "
            f"epochs={cfg.epochs}; use a smaller value"
        )
    if data.mean and data.std and len({len(data.mean), len(data.std), 1}) > 2:  # part: images
        raise UserError(
            f"data.mean={as_override(data.mean)} and data.std={as_override(data.std)} differ "
            "in length; use one number for each channel in both"
        )
    if loader.name == "packed" and loader.pack is None:  # part: packed
        raise UserError(
            "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR"
        )
    if "://" in data.root and data.index is not None:  # part: shards
        raise UserError(
            f"data.index={data.index} is an index of files; leave it out: shards have their own"
        )
    if cfg.overwrite and cfg.resume is not None:
        raise UserError(
            f"overwrite=true would remove the checkpoint of resume={cfg.resume}; leave out one"
        )


def check_batch_size(global_batch_size: int, world_size: int) -> None:  # part: ranks
    """Raise UserError if the processes of a run cannot share a batch equally."""
    per_rank, rest = divmod(global_batch_size, world_size)
    if rest:
        fits = [size for size in (per_rank * world_size, (per_rank + 1) * world_size) if size]
        raise UserError(
            f"global_batch_size={global_batch_size} is not divisible by world_size={world_size}; "
            f"use {' or '.join(map(str, fits))}"
        )


def check_micro_batches(cfg: Config, world_size: int) -> None:  # part: accumulate
    """Raise UserError if a rank's part of a batch cannot be divided into equal micro-batches."""
    per_rank = cfg.global_batch_size // world_size
    if per_rank % cfg.accumulate_steps:
        raise UserError(
            f"accumulate_steps={cfg.accumulate_steps} does not divide the {per_rank} samples that "
            f"each rank has of global_batch_size={cfg.global_batch_size}; use 1 or another divisor"
        )
