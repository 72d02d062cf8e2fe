"""Packs of decoded images."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from loaders.index import BadFileError
from loaders.pack import pack
from tests.helpers import make_config, refused
from tests.images import FOLDERS, index_of, loaders_of, make_photos, paths_in, reading, rot


def test_a_pack_is_whole_or_refused_and_so_are_other_settings_and_data(tmp_path: Path) -> None:
    root, out = make_photos(tmp_path / "photos", 12), tmp_path / "out"
    options = [*FOLDERS, *reading(root), "data.crop=[32,32]"]
    options += ["global_batch_size=4", "loader=packed", f"loader.pack={out}"]
    fitting, other, huge = ([*options, f"data.resize={x}"] for x in (40, 48, "[5000000,5000000]"))
    with refused(f"out={out}: ", " GB"):
        pack(make_config(*huge).data, out)
    last = Path(paths_in(index_of(*fitting)[0])[-1])
    content = shutil.copy2(last, tmp_path / "copy.jpg")
    rot(str(last))
    with pytest.raises(BadFileError):  # the command ends in the middle
        pack(make_config(*fitting).data, out)
    with refused("is missing", "loaders.pack"):
        loaders_of(*fitting)
    shutil.copy2(content, last)
    pack(make_config(*fitting).data, out)
    sizes = np.load(out / "train/sizes.npy")
    assert len(sizes) == len(index_of(*fitting)[0])
    assert len(np.load(out / "train/pixels-0.npy")) == 3 * sizes.prod(axis=1).sum()
    with refused("data.resize=48 (there: 40)"):
        loaders_of(*other)
    with refused("out=DIR"):
        pack(make_config(*other).data, out)
    with refused("data.fold=1 (there: None)"):
        loaders_of(*fitting, "data.fold=1")
    next(root.glob("a/*")).unlink()
    with refused("other files"):
        loaders_of(*fitting)
    shutil.rmtree(root)
    loaders_of(*fitting)
