"""The parts of a run's state as plain values on the host, and back into the parts."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from runtime.group import Alone

if TYPE_CHECKING:
    from conf.schema import Config

log = logging.getLogger(__name__)

# What decides how training goes on, beside the plan of the data: keys and groups of the configuration.
COMPARED = (
    *("model", "optimizer", "task", "amp", "ema", "data.mean", "data.std", "data.value_range"),
    *("data.reduced_decoding", "global_batch_size", "accumulate_steps", "clip_grad_norm"),
)
NEVER_OTHER = ("model.name", "optimizer.name", "task.name")
"""With another value of these, a checkpoint cannot be right."""
OF_THE_INPUTS = ("data.mean", "data.std", "data.value_range")
"""With another value of these, the weights are for other inputs."""


def on_host(state: Any, group: Alone) -> Any:
    """A copy of nested values that training does not change any more; its tensors are whole.

    Every rank calls this; on ranks other than 0 tensors become None.
    """
    if isinstance(state, Tensor):
        whole = group.whole(state.detach())
        return whole.to("cpu", copy=True) if group.rank == 0 else None
    if isinstance(state, dict):
        return {key: on_host(value, group) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_host(value, group) for value in state)
    return state


def load_into(part: Any, saved: Any, group: Alone) -> None:
    """Load what `on_host` made of a part's `state_dict()`, on any ranks, into a part like it.

    Raises:
        RuntimeError: the part is a module that the saved tensors do not fit.
    """
    if isinstance(part, nn.Module):
        own = part.state_dict()
        saved = {
            name: group.part_like(value, own[name]) if name in own else value
            for name, value in saved.items()
        }
    if isinstance(part, Optimizer):
        parameters = [p for options in part.param_groups for p in options["params"]]
        saved = saved | {
            # Its options are the configuration's, and how it computes the script's; the schedule sets
            # the rate.
            "param_groups": part.state_dict()["param_groups"],
            "state": {
                number: {
                    name: _in_layout_of(parameters[number], value, group)
                    for name, value in values.items()
                }
                for number, values in saved["state"].items()
            },
        }
    part.load_state_dict(saved)


def _in_layout_of(parameter: Tensor, value: Any, group: Alone) -> Any:
    """An optimizer's value for a parameter, split over the ranks and laid out in memory like it.

    Fused optimizers mix up elements where the layouts differ, such as after a change of channels_last.
    """
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    room = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return room.copy_(group.part_like(value, parameter))


def tensors_in(state: Any) -> list[Tensor]:
    """All tensors of nested values, in the order in which they are met."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in tensors_in(value)]
    return [state] if isinstance(state, Tensor) else []


def restore(cfg: "Config", state: dict[str, Any], saved: dict[str, Any], group: Alone) -> None:
    """Load a checkpoint into the parts of a run's state and into this rank's random generators.

    Args:
        cfg: for what differs, and what is to be done then.
        state: the parts by name; one that the checkpoint lacks starts fresh, an average at the weights.
        saved: what `read_checkpoint()` returned; it is changed.
        group: the processes of the run.

    Raises:
        ValueError: the checkpoint is of another model, optimizer, task or inputs, its plan differs, or
            other weights of the model were learning.
    """
    try:
        load_into(state["model"], saved["model"], group)
    except RuntimeError as error:
        raise ValueError(
            f"{saved['path']} holds another model than model={cfg.model.name} "
            f"({str(error).splitlines()[-1].strip()}); resume with the configuration of its run: "
            f"{saved['config']['model']}"
        ) from error
    _compare_settings(cfg, saved)
    loader = state["loader"]
    _fit_to_plan(cfg, loader, saved)
    loader.load_state_dict(saved["loader"])
    # The schedule follows from the rows, also where their number per step has changed.
    saved["scheduler"]["last_epoch"] = loader.epoch * len(loader) + loader.batches_done
    for name, part in state.items():
        if name in ("model", "loader"):
            continue
        if saved.get(name):
            if isinstance(part, Optimizer):
                _check_same_groups(part, saved[name], saved["path"])
            load_into(part, saved[name], group)
        elif part.state_dict():
            log.warning("%s holds no %s state: the %s starts fresh", saved["path"], name, name)
            if isinstance(part, AveragedModel):
                load_into(part.module, saved["model"], group)
    if group.rank < len(saved["rng"]):
        _set_rng_state(saved["rng"][group.rank])


def _compare_settings(cfg: "Config", saved: dict[str, Any]) -> None:
    """Refuse settings that the checkpoint does not fit, and list those that are other ones from now on."""
    now, then = _settings(OmegaConf.to_container(cfg, resolve=True)), _settings(saved["config"])
    differing = {
        key: f"{key}: {then[key]} then, {now[key]} now"
        for key in now
        if key in then and then[key] != now[key]
    }
    wrong = [differing.pop(key) for key in NEVER_OTHER if key in differing]
    if wrong:
        raise ValueError(
            f"{saved['path']} was made with other settings ({'; '.join(wrong)}); go back to these, or "
            "start anew with resume=null in another output_dir"
        )
    wrong = [differing[key] for key in OF_THE_INPUTS if key in differing]
    if wrong and not cfg.checkpoint.fresh_epoch:
        raise ValueError(
            f"{saved['path']} was made with other inputs ({'; '.join(wrong)}); go back to these, or set "
            "checkpoint.fresh_epoch=true if other inputs are meant"
        )
    if differing:
        log.warning("settings are other ones from here on: %s", "; ".join(differing.values()))


def _settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """The values to be compared, by key."""
    if isinstance(config, dict):
        values: dict[str, Any] = {}
        for key, value in config.items():
            values |= _settings(value, f"{prefix}.{key}" if prefix else key)
        return values
    is_compared = any(prefix == key or prefix.startswith(f"{key}.") for key in COMPARED)
    return {prefix: config} if is_compared else {}


def _check_same_groups(optimizer: Optimizer, saved: dict[str, Any], path: str) -> None:
    now, then = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if now != then:
        raise ValueError(
            f"{path} was made while other weights were learning (in groups of {then}, now of {now}): resume "
            "with its run's model.freeze and optimizer.backbone_lr_scale, or start another run from it with "
            "model.weights"
        )


def _fit_to_plan(cfg: "Config", loader: Any, saved: dict[str, Any]) -> None:
    """Refuse a checkpoint whose plan of the data differs, or start its epoch anew if that is asked for."""
    then, now = saved["loader"]["plan"], loader.state_dict()["plan"]
    differing = [
        f"{key}: {then.get(key)} then, {now[key]} now" for key in now if then.get(key) != now[key]
    ]
    if not differing:
        return
    if not cfg.checkpoint.fresh_epoch:
        raise ValueError(
            f"{saved['path']} was made with another plan of the data ({'; '.join(differing)}); go "
            "back to that, or set checkpoint.fresh_epoch=true to start its epoch anew with this plan"
        )
    epoch, position = saved["loader"]["epoch"], 0
    if saved["run"]["epoch_is_finished"]:
        position = len(loader) * cfg.global_batch_size
    else:
        log.warning("another plan of the data: epoch %d starts anew", epoch + 1)
    saved["loader"] = {"epoch": epoch, "position": position, "plan": now}


def rng_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
