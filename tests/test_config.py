"""The configuration is typed, documented and complete."""

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from conf import reference
from tests.helpers import REPOSITORY, make_config

GROUPS = sorted({path.parent.name for path in (REPOSITORY / "conf").glob("*/*.yaml")} - {"hydra"})


def test_every_key_is_documented_and_in_the_table() -> None:
    documented = {key for key, _, _ in reference.documented_keys()}
    flat = set(_leaves(OmegaConf.to_container(make_config(), resolve=False)))
    assert {key for key in flat if not key.startswith("model.kwargs.")} <= documented
    text = reference.TABLE.read_text()
    assert text == reference.with_table(text), "run python -m conf.reference"


def _leaves(tree, prefix: str = ""):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.hflop=1", "data.hflop"),
        ("epochs=many", "epochs=many"),
        ("clip_grad_norm=yes please", "clip_grad_norm"),
        ("optimizer.lr=fast", "optimizer.lr=fast"),
    ],
)
def test_a_wrong_key_or_type_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigCompositionException) as raised:
        make_config(override)
    assert message in f"{raised.value} {raised.value.__cause__}"


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_every_group_fits_the_schema(group: str) -> None:
    names = [path.stem for path in (REPOSITORY / "conf" / group).glob("*.yaml")]
    assert names
    for name in names:
        assert make_config(f"{group}={name}", "data.root=somewhere")
