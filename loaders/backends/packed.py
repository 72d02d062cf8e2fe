"""Images that `python -m loaders.pack` has decoded: loaded as by `loader=pytorch`."""

from pathlib import Path

from conf.errors import UserError
from conf.loader.packed import PackedConfig
from conf.schema import Config
from loaders.backends.pytorch import PyTorchLoader
from loaders.index import SPLITS, Index, open_columns, open_splits, read_description
from loaders.pack import FIX, FORMAT


class PackedLoader(PyTorchLoader):
    """The same, of the index in a pack."""


def open_indexes(cfg: Config) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split of the pack `loader.pack`.

    Raises:
        UserError: the pack is missing, not finished, or made with other settings or other data.
    """
    assert isinstance(cfg.loader, PackedConfig)
    if cfg.loader.pack is None:
        raise UserError(
            "loader=packed needs loader.pack=DIR, made by python -m loaders.pack ... out=DIR"
        )
    folder = Path(cfg.loader.pack)
    where = folder / "pack.json"
    if not where.is_file():
        raise UserError(
            f"loader.pack={folder} is not a finished pack; write or finish it with python -m "
            f"loaders.pack data={cfg.data.layout} data.root={cfg.data.root} out={folder}"
        )
    made = read_description(where.read_bytes(), FORMAT, cfg.data, str(where), FIX)
    # The original files may be deleted, but not replaced by others.
    if any(Path(cfg.data.root).glob("*")):
        for index, split in zip(open_splits(cfg.data), SPLITS, strict=True):
            if index.fingerprint != made["splits"][split]["fingerprint"]:
                raise UserError(
                    f"{folder} was made from other files than {cfg.data.root}/{split} has; {FIX}"
                )
    train, val = (open_columns(folder / split) for split in SPLITS)
    return train, val
