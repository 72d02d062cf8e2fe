"""A run that has trained a model, as it is found in its folder by the scripts that use the model."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import safe_open
from torch import Tensor, nn
from yaml import YAMLError

from conf.mistakes import Mistake
from conf.schema import Config
from loaders.targets import Target, target_of
from models.weights import read_weights, weights_in

FACTS = ("target", "in_channels", "dtype", "precision")


@dataclass(frozen=True)
class Trained:
    """What the folder of a run says of its model."""

    cfg: Config
    """The run's configuration, with what the command line has changed."""

    target: Target
    """What it was trained on: the kind, and the names of classes or numbers in the order of its outputs."""

    in_channels: int
    """Of the images that the model takes."""

    dtype: str
    """`uint8` or `uint16`: of the images' pixels."""

    precision: torch.dtype
    """What the run computed in."""

    weights_file: Path
    """The best weights, or the newest checkpoint if there are no best ones."""

    def load_into(self, model: nn.Module) -> None:
        """Give a model that was built with `cfg` the weights.

        Raises:
            ValueError: it is another model than the run's.
        """
        try:
            model.load_state_dict(self.weights())
        except RuntimeError as error:
            raise ValueError(
                f"{self.weights_file} holds another model than model.name={self.cfg.model.name} "
                f"({str(error).splitlines()[-1].strip()}); leave model.name and model.kwargs as they were"
            ) from error

    def weights(self) -> dict[str, Tensor]:
        return read_weights(str(self.weights_file), self.cfg.model.name)


def read_trained(folder: Path, overrides: list[str]) -> Trained:
    """Read the folder of a run.

    Args:
        folder: its `output_dir`.
        overrides: `key=value`, as on the command line of a training script; of the groups, `loader=NAME`
            alone can be chosen.

    Raises:
        FileNotFoundError: there is no run, or it has no weights yet.
        ValueError: an override names no key, or has a wrong type.
    """
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(
            f"run={folder} is not the folder of a run: there is no {folder / 'config.yaml'}; "
            "python runs.py lists the runs below outputs"
        )
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(
            f"run={folder} has no run.json, which names its classes: it was made by an earlier version; "
            "resume the run for a step, which writes it"
        )
    overrides = [
        override.replace("loader=", "loader.name=", 1)
        if override.startswith("loader=")
        else override
        for override in overrides
    ]
    try:
        cfg: Any = OmegaConf.merge(
            OmegaConf.structured(Config),
            OmegaConf.load(folder / "config.yaml"),
            # The run's own weights are loaded, and nothing learns.
            {"model": {"weights": None, "freeze": None}, "data": {"mixup": 0.0, "cutmix": 0.0}},
            OmegaConf.from_dotlist(overrides),
        )
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(
            f"{' '.join(overrides)} does not fit the configuration of run={folder}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    facts = json.loads((folder / "run.json").read_text())
    path = weights_in(folder)
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            facts |= {key: json.loads(text) for key, text in metadata.items() if key in FACTS}
    else:
        facts |= torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("facts", {})
    return Trained(
        cfg=cast(Config, cfg),
        target=target_of(facts["target"]),
        in_channels=facts["in_channels"],
        dtype=facts["dtype"],
        precision=getattr(torch, facts.get("precision", "float32")),
        weights_file=path,
    )


def command_line(usage: str | None, **options: str | None) -> tuple[dict[str, str], list[str]]:
    """The arguments `key=value` whose keys are among the options, and all others.

    Args:
        usage: is shown if `--help` is asked for.
        options: by key, their defaults; None: has to be given.

    Raises:
        Mistake: an argument is none, or one is missing.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage)
        sys.exit()
    script, given = Path(sys.argv[0]).name, dict(options)
    others = []
    for argument in sys.argv[1:]:
        key, equals, value = argument.partition("=")
        if not equals or argument.startswith("-"):
            raise Mistake(
                f"{argument} is no argument of the form key=value; python {script} --help lists them"
            )
        if key in given:
            given[key] = value
        else:
            others.append(argument)
    missing = [key for key, value in given.items() if value is None]
    if missing:
        keys = " and ".join(f"{key}=" for key in missing)
        raise Mistake(f"{keys} missing; python {script} --help shows examples")
    return {key: str(value) for key, value in given.items()}, others
