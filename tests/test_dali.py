"""What DALI refuses; test_contract.py has what it decodes."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from conf.errors import UserError
from tests.formats import XMP
from tests.helpers import refused
from tests.images import index_in, loaders_of, make_photos, paths_in, photos_in, save, smooth


def test_files_that_dali_cannot_read_right_are_refused_with_their_names(tmp_path: Path) -> None:
    options = photos_in(make_photos(tmp_path / "data", 12), "data.val_count=4", "loader=dali")
    loaders_of(*options)
    other = tmp_path / "data" / "a" / "0.png"
    save(other, smooth(0, 60, 80), format="GIF")
    with refused("1 file that DALI cannot read", str(other), "loader=pytorch"):
        loaders_of(*options)
    clear = Image.fromarray(np.full((60, 80, 4), 100, np.uint8))
    turned = clear.convert("RGB")
    for image, more in ((clear, {}), (turned, {"pnginfo": XMP})):
        image.save(other, "PNG", **more)
        with refused("1 file that DALI cannot read", str(other)):
            loaders_of(*options)
    (tmp_path / "bad.txt").write_text(f"{other}\n")
    train, val = loaders_of(*options, f"data.leave_out={tmp_path / 'bad.txt'}")
    assert str(other) not in paths_in(index_in(train)) + paths_in(index_in(val))
    with refused("data.on_error=skip", "data.leave_out"):
        loaders_of(*options, "data.on_error=skip")


MEMORY = "Error in MIXED operator\n\nencountered:\n\nCUDA runtime API error (2):\nout of memory"


@pytest.mark.parametrize("text", [MEMORY, ""])
def test_no_file_is_to_blame_for_a_full_gpu(text: str, tmp_path: Path) -> None:
    options = photos_in(make_photos(tmp_path / "data", 8), "data.val_count=2", "loader=dali")
    train: Any = loaders_of(*options)[0]
    train.batches.pipeline.outputs = mock.Mock(side_effect=RuntimeError(text))
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$") as error:
        list(train)
    assert not isinstance(error.value, UserError)
