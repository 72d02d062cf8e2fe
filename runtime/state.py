"""What a run saves, as plain values on the host, and back into the objects that have a state."""

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from conf.credentials import masked
from conf.errors import UserError
from conf.schema import Config, DataConfig
from loaders import Loader
from loaders.common import map_leaves, tensors_of
from runtime.facts import facts_of, refuse_differences
from runtime.group import SingleProcess
from runtime.progress import steps_done

log = logging.getLogger(__name__)

COMPARED = (
    *("model.", "optimizer.", "task.", "data.mean", "data.std", "data.value_range"),
    "amp.",
    "ema.",
    "data.reduced_decoding",
    *("global_batch_size", "clip_grad_norm"),
    "accumulate_steps",
)
"""Prefixes of the keys that affect the rest of the training, besides the plan of the data."""

MUST_MATCH = (
    *("model.name", "optimizer.name", "task.name"),
    # These decide the optimizer's groups of weights.
    "optimizer.decay_norms_and_biases",
    *("model.freeze", "optimizer.backbone_lr_scale", "optimizer.layer_decay"),
    "optimizer.kwargs.",  # with some, such as amsgrad, an optimizer keeps other values
)
"""Prefixes of those that a resume must not change."""

INPUT_KEYS = ("data.mean", "data.std", "data.value_range")
"""Keys that decide what inputs the weights are for; `checkpoint.fresh_epoch` may change them."""


def settings(cfg: Config) -> Any:
    """Return the configuration as nested dictionaries, as it is written to files."""
    return masked(asdict(cfg))


def on_host(state: Any, rank: int) -> Any:
    """Copy the tensors that a rank writes to the CPU, for a thread that writes nested values.

    Every rank writes its shards, rank 0 all other tensors.
    """

    def copied(value: Any) -> Any:
        is_written = isinstance(value, Tensor) and (rank == 0 or hasattr(value, "to_local"))
        return value.detach().to("cpu", copy=True) if is_written else value

    return map_leaves(copied, state)


def collect(
    cfg: Config, state: dict[str, Any], weights: dict[str, Tensor] | None, group: SingleProcess
) -> dict[str, Any]:
    """Return what `restore()` needs, on the host; every rank calls it.

    Args:
        cfg: configuration of this run.
        state: objects with a `state_dict()`, by name.
        weights: weights to publish in place of the model's.
        group: processes of the run.
    """
    saved = {name: owner.state_dict() for name, owner in state.items()}
    if weights is not None:
        saved["weights"] = weights
    saved = on_host(saved, group.rank)
    return saved | {"rng": group.gather(rng_state()), "config": settings(cfg)}


def num_bytes(state: Any) -> int:
    """Return the number of bytes of all tensors in nested values."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


def load_into(owner: Any, saved: Any, group: SingleProcess) -> None:
    """Load a `state_dict()` that any number of ranks have saved into the owner of such a state.

    Raises:
        RuntimeError: the owner is a module that the saved tensors do not fit.
    """
    if not isinstance(owner, Optimizer):
        own = owner.state_dict()
        saved = {name: group.shard_like(value, own.get(name)) for name, value in saved.items()}
    if isinstance(owner, Optimizer):
        parameters = [p for options in owner.param_groups for p in options["params"]]
        saved = saved | {
            # The configuration decides its options, the script its kernels, the schedule the rate.
            "param_groups": owner.state_dict()["param_groups"],
            "state": {
                number: {
                    name: _in_layout_of(parameters[number], value, group)
                    for name, value in values.items()
                }
                for number, values in saved["state"].items()
            },
        }
    owner.load_state_dict(saved)


def _in_layout_of(parameter: Tensor, value: Any, group: SingleProcess) -> Any:
    """Shard an optimizer's value like its parameter, and lay it out in memory like it.

    Fused optimizers confuse elements where the layouts differ, as after a change of channels_last.
    """
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    if hasattr(value, "to_local"):
        return value  # a shard has that layout already
    value = group.shard_like(value, parameter)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def restore(
    cfg: Config, state: dict[str, Any], saved: dict[str, Any], group: SingleProcess
) -> None:
    """Load a checkpoint into the objects of a run and into this rank's random generators.

    Args:
        cfg: configuration of this run.
        state: objects with a state, by name; one that the checkpoint lacks keeps its first state.
        saved: checkpoint that `read_checkpoint()` returned.
        group: processes of the run.

    Raises:
        UserError: the checkpoint is of another model, optimizer, task or inputs or of other
            classes, its plan differs, or other weights of the model were learning.
    """
    path, loader = saved["path"], state["loader"]
    refuse_differences(
        saved["facts"],
        facts_of(loader),
        path,
        "use that data again, or start another run from its weights, whose head starts fresh then",
    )
    saved = group.read_shards(saved, state["model"])
    try:
        load_into(state["model"], saved["model"], group)
    except RuntimeError as error:
        differing = _differing(cfg, saved).items()
        keys = [f"{key}={then}" for key, (then, _) in differing if key.startswith("model.")]
        raise UserError(
            f"{path} holds another model than model={cfg.model.name} "
            f"({str(error).splitlines()[-1].strip()}); resume with "
            f"{' '.join(keys) or 'the code of its run'}"
        ) from error
    _compare_settings(cfg, saved)
    loader.load_state_dict(_fitting_position(cfg, loader, saved))
    # The schedule follows from the rows, also where their number per step has changed.
    schedule = saved["scheduler"] | {"last_epoch": steps_done(loader)}
    for name, owner in state.items():
        if name in ("model", "loader"):
            continue
        if saved.get(name):
            load_into(owner, schedule if name == "scheduler" else saved[name], group)
        elif owner.state_dict():
            log.warning("%s holds no %s state: the %s starts fresh", path, name, name)
    if group.rank < len(saved["rng"]):
        rng = saved["rng"][group.rank]
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(rng["cuda"])


def _compare_settings(cfg: Config, saved: dict[str, Any]) -> None:
    """Refuse settings that the checkpoint does not fit, and log the others that have changed."""
    differing = {
        key: f"{key}: {then} then, {now} now" for key, (then, now) in _differing(cfg, saved).items()
    }
    wrong = [differing.pop(key) for key in [*differing] if key.startswith(MUST_MATCH)]
    if wrong:
        raise UserError(
            f"{saved['path']} was made with other settings ({'; '.join(wrong)}); undo these "
            "changes, or start another run from its weights"
        )
    wrong = [differing[key] for key in INPUT_KEYS if key in differing]
    if wrong and not cfg.checkpoint.fresh_epoch:
        raise UserError(
            f"{saved['path']} was made with other inputs ({'; '.join(wrong)}); undo these "
            "changes, or set checkpoint.fresh_epoch=true if they are intended"
        )
    if differing:
        log.warning("settings that have changed: %s", "; ".join(differing.values()))


def _differing(cfg: Config, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values (of the checkpoint, of this run) of the settings that differ."""
    now, then = _compared(settings(cfg)), _compared(saved["config"])
    return {
        key: (then.get(key), now.get(key))
        for key in now | then
        if then.get(key) != now.get(key)
        # Any other key that one of them lacks is one of another version.
        and (key.startswith("optimizer.kwargs.") or (key in now and key in then))
    }


def _compared(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by key, of keys that begin with those in `COMPARED`."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            values |= _compared(value, f"{prefix}{name}.")
        elif f"{prefix}{name}".startswith(COMPARED):
            values[prefix + name] = value
    return values


def _fitting_position(cfg: Config, loader: Loader, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's state of the loader; if it is of another plan of the data, refuse it
    or, with `fresh_epoch`, return the start of its epoch."""
    then, now = (state.get("plan", {}) for state in (saved["loader"], loader.state_dict()))
    # A setting that the script did not have then was as if it had its default.
    then = {f"data.{key}": str(default) for key, default in vars(DataConfig()).items()} | then
    differing = [
        f"{key}: {then.get(key)} then, {now[key]} now" for key in now if then.get(key) != now[key]
    ]
    if not differing:
        return saved["loader"]
    if not cfg.checkpoint.fresh_epoch:
        raise UserError(
            f"{saved['path']} was made with another plan of the data ({'; '.join(differing)}); "
            "undo these changes, or set checkpoint.fresh_epoch=true to restart the epoch with them"
        )
    epoch, position = saved["loader"]["epoch"], 0
    if saved["run"]["epoch_is_finished"]:
        position = len(loader) * cfg.global_batch_size
    else:
        log.warning("another plan of the data: epoch %d is restarted", epoch + 1)
    return {"epoch": epoch, "position": position, "plan": now}


def rng_state() -> dict[str, Tensor]:
    """Return the states of this process's random generators, by device."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
