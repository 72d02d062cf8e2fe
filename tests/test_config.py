"""The configuration is typed, documented and complete."""

from dataclasses import asdict

import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf import reference
from conf.cli import explain
from conf.errors import UserError
from tests.helpers import REPOSITORY, make_config

FILLED = ["data.root=somewhere", "model.name=small_cnn"]
FILLED += ["loader.pack=a_pack"]  # part: packed
GROUPS = sorted({path.parent.name for path in (REPOSITORY / "conf").glob("*/*.yaml")} - {"hydra"})


def test_every_key_is_documented_and_in_the_table() -> None:
    documented = {key for key, _, _ in reference.documented_keys(reference.SCHEMA.read_text())}
    flat = set(_leaves(asdict(make_config())))
    assert {key for key in flat if not key.startswith("model.kwargs.")} <= documented
    text = reference.TABLE.read_text()
    assert text == reference.with_table(text, reference.SCHEMA.read_text()), (
        "run python -m conf.reference"
    )


def _leaves(tree, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.hflop=1", "data.hflip"),
        ("+epoch=3", "epochs"),
        ("epochs=many", "many"),
        ("clip_grad_norm=yes please", "yes please"),
        ("optimizer.lr=fast", "fast"),
        ("data.root=http://host/data?key=a=b", "data.root"),
    ],
)
def test_a_wrong_key_or_type_is_named(override: str, message: str) -> None:
    with pytest.raises((UserError, HydraException, OmegaConfBaseException)) as raised:
        make_config(override)
    told = explain(raised.value)
    assert told is not None
    assert override.lstrip("+").partition("=")[0] in told
    assert message in told


def test_every_file_of_every_group_fits_the_schema() -> None:
    """Files of several groups at a time, but experiments, which choose of the others, by themselves."""
    folder = REPOSITORY / "conf"
    files = {
        group: sorted(path.stem for path in folder.glob(f"{group}/*.yaml")) for group in GROUPS
    }
    experiments = files.pop("experiment", [])
    assert all(files.values())
    for number in range(max(map(len, files.values()))):
        chosen = [f"{group}={names[number % len(names)]}" for group, names in files.items()]
        assert make_config(*chosen, *FILLED)
    for name in experiments:
        assert make_config(f"experiment={name}", *FILLED)
