"""The pinned versions fit each machine that docs/installation.md names."""

import re
import tomllib
from itertools import chain

import pytest
from packaging.requirements import Requirement

from tests.helpers import REPOSITORY

LINUX = {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux"}
MAC = {"sys_platform": "darwin", "os_name": "posix", "platform_system": "Darwin"}
MACHINES = {
    "Linux on x86-64": LINUX | {"platform_machine": "x86_64"},
    "Linux on Arm": LINUX | {"platform_machine": "aarch64"},
    "macOS": MAC | {"platform_machine": "arm64"},
}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", MACHINES)
def test_each_dependency_has_one_pinned_version(machine: str, python: str) -> None:
    there = MACHINES[machine] | {"python_version": python, "python_full_version": f"{python}.1"}

    def is_for(requirement: Requirement) -> bool:
        marker = requirement.marker
        return marker is None or marker.evaluate(there)

    text = (REPOSITORY / "requirements.txt").read_text()
    pins = [Requirement(line) for line in re.findall(r"^[\w-].*", text, re.MULTILINE)]
    pinned = [(pin.name, pin) for pin in pins if is_for(pin)]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = chain(project["dependencies"], *project["optional-dependencies"].values())
    requirements = [Requirement(text) for text in texts]
    wanted = [requirement for requirement in requirements if is_for(requirement)]
    for requirement in wanted:
        [version] = [pin.specifier for name, pin in pinned if name == requirement.name]
        assert requirement.specifier.contains(str(version).removeprefix("==")), requirement
    unwanted = {requirement.name for requirement in requirements} - {one.name for one in wanted}
    assert not unwanted & {name for name, _ in pinned}
