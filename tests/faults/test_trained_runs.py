"""What predictions and exports read of a run."""

import shutil
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from conf.schema import ModelConfig
from models import build_model
from runtime.trained import read_trained
from tests.helpers import refused


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config.yaml", b"optimizer:", b"optimizer:\n  momentum: 0.9", "optimizer.kwargs"),
        ("config.yaml", b"epochs: 2", b"epochs: !!python/name:os.system", "damaged"),
        ("checkpoints/model.safetensors", b"{", b"[", "model.safetensors"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_one_line(
    name: str, old: bytes, new: bytes, message: str, finished, tmp_path
) -> None:
    path = shutil.copytree(finished, tmp_path / "run") / name
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with refused(message, str(path)) as error:
        read_trained(tmp_path / "run", [])
    assert len(str(error.value).splitlines()) == 1


def test_an_override_that_a_run_cannot_have_is_named_with_what_to_do(finished) -> None:
    for override in ("data=mnist_mini", "+model=timm", "experiment=mnist", "model.kwargs=8"):
        with refused(override, "change single ones"):
            read_trained(finished, [override])
    changed = ["loader=threads", "model={freeze: backbone}", "data.crop=[8,9]", "data.root='a,b'"]
    cfg = read_trained(finished, [*changed, "model.kwargs.batch_norm=false"]).cfg
    assert (cfg.loader.name, cfg.model.freeze) == ("threads", "backbone")
    assert cfg.model.kwargs == {"width": 8, "batch_norm": False}  # the latter was not set
    assert (cfg.data.crop, cfg.data.root) == ([8, 9], "a,b")


@pytest.mark.parametrize("name", ["timm.checkpoint_path", "torchvision.weights"])
def test_a_file_of_weights_that_a_run_names_as_an_argument_of_its_model_is_not_read(
    name: str, finished, tmp_path
) -> None:
    """It may be of a stranger, and libraries may run what is in it."""
    library, _, key = name.partition(".")
    pytest.importorskip(library)
    run, kwargs = shutil.copytree(finished, tmp_path / "run"), {key: "weights.pt"}
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.model.update(name=library, arch="resnet18", kwargs=kwargs)
    OmegaConf.save(cfg, run / "config.yaml")
    with refused(f"model.kwargs.{key}=weights.pt"):
        read_trained(run, []).build_model(Mock(num_outputs=2))
    hidden = ModelConfig(name=library, kwargs={"arch": "resnet18", **kwargs})
    with refused(f"model.kwargs.{key}=weights.pt"):
        build_model(hidden, 3, 2)
