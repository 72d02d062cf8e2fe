"""Caltech-256: class folders, which are downloaded."""

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.columns import one_process_at_a_time
from loaders.index import Index
from loaders.layouts.imagefolder import class_folders

NAME = "256_ObjectCategories"
URL = f"https://data.caltech.edu/records/nyy15-4j048/files/{NAME}.tar"
MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"


def caltech256(data: DataConfig, splits: Collection[str]) -> dict[str, Index]:
    """Return the index of each of these splits that there is."""
    folder = Path(data.root, "caltech256", NAME)
    if not folder.is_dir():
        from torchvision.datasets.utils import download_and_extract_archive

        try:
            with one_process_at_a_time(folder), TemporaryDirectory(dir=folder.parent) as unpacked:
                if not folder.is_dir():  # another process may have unpacked it meanwhile
                    download_and_extract_archive(URL, folder.parent, unpacked, f"{NAME}.tar", MD5)
                    Path(unpacked, NAME).rename(folder)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"Caltech-256 is not in {data.root} and could not be downloaded ({error}); unpack "
                f"{NAME}.tar into {folder.parent}"
            ) from error
    return class_folders(data, splits, folder)
