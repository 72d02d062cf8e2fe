"""Caltech-256: class folders, which are downloaded."""

import shutil
from collections.abc import Collection
from pathlib import Path

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.headers import one_process_at_a_time
from loaders.index import Index
from loaders.layouts.imagefolder import class_folders

NAME = "256_ObjectCategories"
URL = f"https://data.caltech.edu/records/nyy15-4j048/files/{NAME}.tar"
MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"


def caltech256(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    folder = Path(data.root, "caltech256", NAME)
    if not folder.is_dir():
        try:
            with one_process_at_a_time(Path(data.root) / "download"):
                if not folder.is_dir():  # another process may have unpacked it meanwhile
                    _unpack(folder)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"Caltech-256 is not in {data.root} and could not be downloaded ({error}); unpack "
                f"{NAME}.tar into {folder.parent}"
            ) from error
    return class_folders(data, splits, folder)


def _unpack(folder: Path) -> None:
    """Unpack the archive, downloading it if it is missing; `folder` exists only once complete."""
    from torchvision.datasets.utils import download_and_extract_archive

    unfinished = folder.with_name("download.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was stopped
    download_and_extract_archive(URL, folder.parent, unfinished, f"{NAME}.tar", MD5)
    (unfinished / NAME).rename(folder)
    unfinished.rmdir()
