"""A trained model in the folder of its run, for the scripts that use it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from conf.cli import explain, to_config
from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from loaders.targets import Target, target_of
from models import build_model
from runtime.checkpoint_files import read_weights, weights_in
from runtime.resume import differing_data, listed, load_model
from tasks import Task


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run, and what it was trained on."""

    cfg: Config  # with the overrides of the command line
    facts: dict[str, Any]  # what its weights say about its data
    weights: dict[str, Tensor]
    weights_file: Path  # of the best weights, or the newest checkpoint if there are none

    @property
    def target(self) -> Target | None:
        """Kind of the targets, with the names of classes or numbers in the order of the outputs;
        None: own data did not describe them."""
        facts = self.facts["target"]
        return target_of(facts) if facts else None

    @property
    def precision(self) -> torch.dtype:
        """Dtype that the run computed in."""
        return getattr(torch, self.facts["precision"])

    def check_data(self, loader: Loader) -> None:
        """Raise UserError if the data has other classes or channels than the run's."""
        if found := differing_data(self.facts, loader):
            raise UserError(
                f"{self.weights_file} was trained on other data ({listed(found)}); "
                "use data with the same names in the same order, as the run has them"
            )

    def build_model(self, task: Task) -> nn.Module:
        """Build the model for a task and load the weights; raise UserError if they do not fit."""
        model = build_model(self.cfg.model, self.facts["in_channels"], task.num_outputs)
        fix = "do not change model.name and model.kwargs"
        load_model(model, self.weights, self.weights_file, fix)
        return model


def read_trained(folder: Path, overrides: list[str]) -> TrainedRun:
    """Read the folder of a run, with overrides `key=value` and `loader=NAME`."""
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"run={folder} is not the folder of a run, which has a config.yaml; "
            "python -m tools.runs lists the runs below outputs"
        )
    try:
        saved: Any = OmegaConf.load(config)
        # It could send a variable of this machine's environment to a server.
        if "${" in config.read_text():
            raise ValueError("no run writes ${...}")
        to_config(saved)
    except Exception as error:  # damaged text raises errors of any type
        reason = explain(error) or (str(error) or repr(error)).splitlines()[0]
        raise UserError(
            f"{config} is damaged, or of another version of this repository ({reason}); "
            "take it from a copy of the run, or use that version"
        ) from error
    changes = ["model.freeze=null", "data.mixup=0", "data.cutmix=0"]  # of training alone
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        is_group = key == "experiment" or OmegaConf.is_dict(OmegaConf.select(saved, key))
        if key == "loader" and not value.startswith("{"):
            override = f"loader.name={value}"
        elif is_group and not value.startswith("{"):
            raise UserError(
                f"{override}: the run has all keys already; change single ones, such as "
                "data.crop=null"
            )
        elif ".kwargs." in key:
            override = f"++{override.lstrip('+')}"  # the run may lack it
        changes.append(override)
    with initialize_config_dir(str(folder.absolute()), version_base="1.3"):
        cfg = to_config(compose("config", changes))
    path = weights_in(folder)
    weights, facts = read_weights(str(path))
    if not facts:
        raise UserError(
            f"{path} does not say which data its model was trained on; take the file from a copy "
            "of the run"
        )
    return TrainedRun(cfg, facts, weights, path)
