"""A trained model in the folder of its run, for the scripts that use it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import Tensor, nn

from conf.cli import explain, to_config
from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from loaders.targets import Target, target_of
from models import build_model
from models.pretrained import read_weights, weights_in
from runtime.resume import differing_data, listed
from tasks import Task


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run, and what it was trained on."""

    cfg: Config  # with the overrides of the command line
    facts: dict[str, Any]  # what `run.json` says
    weights: dict[str, Tensor]
    weights_file: Path  # of the best weights, or the newest checkpoint if there are none

    @property
    def target(self) -> Target | None:
        """Kind of the targets, with the names of classes or numbers in the order of the outputs;
        None: own data did not describe them."""
        facts = self.facts["target"]
        return target_of(facts) if facts else None

    @property
    def in_channels(self) -> int:
        return self.facts["in_channels"]

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
        model = build_model(self.cfg.model, self.in_channels, task.num_outputs)
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            raise UserError(
                f"{self.weights_file} holds another model than model.name={self.cfg.model.name} "
                f"({str(error).splitlines()[-1].strip()}); "
                "do not change model.name and model.kwargs"
            ) from error
        return model


def read_trained(folder: Path, overrides: list[str]) -> TrainedRun:
    """Read the folder of a run, with overrides `key=value` and `loader=NAME`."""
    config, facts_file = folder / "config.yaml", folder / "run.json"
    if not (config.is_file() and facts_file.is_file()):
        raise UserError(
            f"run={folder} is not the folder of a run, which has config.yaml and run.json; "
            "python -m tools.runs lists the runs below outputs"
        )
    try:
        saved: Any = OmegaConf.load(file := config)
        # It could send a variable of this machine's environment to a server.
        if "${" in config.read_text():
            raise ValueError("no run writes ${...}")
        to_config(saved)
        facts = json.loads((file := facts_file).read_text())
    except Exception as error:  # damaged text raises errors of any type
        reason = explain(error) or (str(error) or repr(error)).splitlines()[0]
        raise UserError(
            f"{file} is damaged, or of another version of this repository ({reason}); "
            "take it from a copy of the run, or use that version"
        ) from error
    saved.merge_with({"model": {"freeze": None}, "data": {"mixup": 0.0, "cutmix": 0.0}})
    for override in OverridesParser.create().parse_overrides(overrides):
        key, text = override.key_or_group, override.input_line
        if override.is_sweep_override():
            raise UserError(
                f"{text} has several values; give one, a list in brackets, or text in quotes "
                f"within quotes: '{key}=\"VALUE\"'"
            )
        value = override.value()
        if key == "loader":
            key = "loader.name"
        is_group = key == "experiment" or OmegaConf.is_dict(OmegaConf.select(saved, key))
        if is_group and not isinstance(value, dict):
            raise UserError(
                f"{text}: the run has all keys already; change single ones, such as data.crop=null"
            )
        OmegaConf.update(saved, key, value)
    path = weights_in(folder)
    weights, of_weights = read_weights(str(path))
    return TrainedRun(to_config(saved), facts | of_weights, weights, path)
