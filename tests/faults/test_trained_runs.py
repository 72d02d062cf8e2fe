"""What predictions and exports read of a run."""

import shutil

import pytest
import torch
from omegaconf import OmegaConf

from conf.errors import UserError
from models import build_model
from runtime.trained import read_trained
from tests.processes import execute


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
    with pytest.raises(UserError, match=message) as error:
        read_trained(tmp_path / "run", [])
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["timm.checkpoint_path", "torchvision.weights"])
def test_a_file_of_weights_that_a_run_names_as_an_argument_of_its_model_is_not_read(
    name: str, finished, tmp_path
) -> None:
    """It may be of a stranger, and libraries may run what is in it."""
    library, _, key = name.partition(".")
    pytest.importorskip(library)
    run, file = shutil.copytree(finished, tmp_path / "run"), tmp_path / "weights.pt"
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.model.update(name=library, arch="resnet18", kwargs={})
    torch.save(build_model(cfg.model, 3, 2).state_dict(), file)
    cfg.model.kwargs = {key: str(file)}
    OmegaConf.save(cfg, run / "config.yaml")
    commands = [["predict.py", f"run={run}", "split=val", "out=p.csv"]]
    commands += [["export.py", f"run={run}", "format=safetensors", "out=e"]]
    for command in commands:
        text = execute(command, tmp_path / command[0], code=2)
        assert f"model.kwargs.{key}={file}" in text
        assert "Traceback" not in text
