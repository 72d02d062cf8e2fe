"""A trained model in the folder of its run, for the scripts that use it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from yaml import YAMLError

from conf.cli import explain, to_config
from conf.errors import UserError
from conf.schema import Config
from loaders import Loader
from loaders.targets import Target, target_of
from models.pretrained import read_weights, weights_in
from runtime.data_metadata import differences, facts_of, listed


@dataclass(frozen=True)
class TrainedRun:
    """The model of a run, and what it was trained on."""

    cfg: Config
    """Configuration of the run, with the overrides of the command line."""

    facts: dict[str, Any]
    """Description of the data, see `facts_of()`, and the `precision`."""

    weights: dict[str, Tensor]
    """Tensors by name."""

    weights_file: Path
    """File of the best weights, or the newest checkpoint if there are no best ones."""

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
        if found := differences(self.facts, facts_of(loader)):
            raise UserError(
                f"{self.weights_file} was trained on other data ({listed(found)}); "
                "use data with the same names in the same order, as the run has them"
            )

    def load_into(self, model: nn.Module) -> None:
        """Load the weights into a model that was built with `cfg`; raise UserError for another."""
        try:
            model.load_state_dict(self.weights)
        except RuntimeError as error:
            raise UserError(
                f"{self.weights_file} holds another model than model.name={self.cfg.model.name} "
                f"({str(error).splitlines()[-1].strip()}); "
                "do not change model.name and model.kwargs"
            ) from error


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
    overrides = [re.sub("^loader=", "loader.name=", override) for override in overrides]
    try:
        untrained = {"model": {"freeze": None}, "data": {"mixup": 0.0, "cutmix": 0.0}}
        changes = OmegaConf.merge(untrained, OmegaConf.from_dotlist(overrides))
        cfg = to_config(OmegaConf.merge(saved, changes))
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(
            f"{' '.join(overrides)} does not fit the configuration of run={folder}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    path = weights_in(folder)
    weights, of_weights = read_weights(str(path))
    return TrainedRun(cfg, facts | of_weights, weights, path)
