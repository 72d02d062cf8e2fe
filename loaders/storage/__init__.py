"""Storages: files under one root, which is a folder, a web server or a bucket."""

from conf.credentials import MASK
from conf.errors import UserError
from conf.schema import DataConfig
from loaders.storage.base import MissingError, Storage, StorageError


def open_storage(root: str, data: DataConfig, stall_s: float = 10.0) -> Storage:
    """Open the storage that a root names.

    Args:
        root: a folder, or an `http://`, `https://`, `s3://` or `gs://` address.
        data: the configuration; `retry_s` is used.
        stall_s: seconds without a byte after which an attempt fails and the next one begins.

    Raises:
        UserError: another scheme, missing credentials, or a package that is not installed.
    """
    if "://" not in root:
        return Storage(root)
    if MASK in root:
        raise UserError(
            f"{root}: user, password and query of an address are not stored with a run; set "
            "data.root with them again"
        )
    from loaders.storage.bucket import Bucket

    return Bucket(root, data.retry_s, stall_s)
