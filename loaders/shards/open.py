"""Open a data set in shards: tar files, and the columns of the index that were written with them.

`data.root`, a folder, web server or bucket, then holds:

    shards.json                       written last: settings, and the columns with their checksums
    train/000000.tar ..., val/...     the files of the samples, as WebDataset names them
    index/train/*.npy ..., .../val    columns of `loaders.index`, and where in the shards files lie
    pieces/train/000000.bin ...       the part of the columns that belongs to each complete shard

Remote columns are copied into `data.cache_dir` at the start, remote shards when they are needed.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from conf.credentials import without_credentials
from conf.errors import UserError
from conf.schema import DataConfig
from loaders.index import SPLITS, Index, read_description, read_fields
from loaders.shards.copies import Copies, copy_columns, room_for_copies
from loaders.shards.files import Shards
from loaders.shards.index import ShardIndex
from loaders.shards.storage import MissingError, Storage

FORMAT = 3  # increased when the index or the pieces change
DESCRIPTION = "shards.json"


def open_shards(data: DataConfig) -> tuple[Index, Index]:
    """Open the index of the training and of the validation split from the shards below `data.root`.

    Raises:
        UserError: the shards are missing, incomplete, damaged, packed with other settings or by
            another version, or there is no space for their copies.
        StorageError: their storage cannot be used.
    """
    storage, shown = Storage(data.root, data.retry_s), without_credentials(data.root)
    try:
        text = storage.read(DESCRIPTION)
    except MissingError as error:
        raise UserError(
            f"data.root={shown} holds no complete shards: {DESCRIPTION} is missing; write them by "
            f"python -m loaders.pack data={data.layout} data.root=FOLDER format=shards out={shown}"
        ) from error
    fix = "pack again into another place, or check data.root, and whether it asks for a login"
    about = read_description(text, FORMAT, data, f"data.root={shown}: {DESCRIPTION}", fix)
    fingerprint = hashlib.sha256(text).hexdigest()[:16]
    new_shards: Callable[[Path], Shards]
    new_shards, folder = partial(Shards, storage, fingerprint), Path(data.root, "index")
    if storage.scheme:
        cache = Path(data.cache_dir).absolute()
        folder = cache / f"index-{fingerprint}" / "index"
        copy_columns(storage, about["columns"], folder.parent)
        sizes = [size for split in SPLITS for size in new_shards(folder / split).sizes]
        room = room_for_copies(sizes, data, cache / "shards")
        new_shards = partial(Copies, storage, fingerprint, cache / "shards", room)
    train, val = (_open_split(folder / split, new_shards) for split in SPLITS)
    return train, val


def _open_split(columns: Path, new_shards: Callable[[Path], Shards]) -> Index:
    fields = read_fields(columns, "", partial(_open_split, columns, new_shards))
    return ShardIndex(**fields, shards=new_shards(columns))
