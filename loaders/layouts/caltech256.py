"""Caltech-256: class folders, which are downloaded."""

import shutil
from pathlib import Path

from conf.errors import UserError
from conf.schema import DataConfig
from loaders.index import Index, one_process_at_a_time
from loaders.layouts.imagefolder import class_folders

CALTECH256 = "caltech256/256_ObjectCategories"
CALTECH256_URL = "https://data.caltech.edu/records/nyy15-4j048/files"
CALTECH256_MD5 = "67b4f42ca05d46448c6bb8ecd2220f6d"


def caltech256(data: DataConfig) -> tuple[Index, Index]:
    folder = Path(data.root, CALTECH256)
    if not folder.is_dir():
        try:
            with one_process_at_a_time(Path(data.root) / "download"):
                if not folder.is_dir():  # another process may have unpacked it meanwhile
                    _unpack_caltech256(folder)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"Caltech-256 is not in {data.root} and could not be downloaded ({error}); unpack "
                f"256_ObjectCategories.tar into {folder.parent}"
            ) from error
    return class_folders(data, folder)


def _unpack_caltech256(folder: Path) -> None:
    """Unpack the archive, downloading it if it is missing; `folder` exists only once complete."""
    from torchvision.datasets.utils import download_and_extract_archive

    unfinished = folder.with_name("download.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was stopped
    archive = f"{folder.name}.tar"
    download_and_extract_archive(
        f"{CALTECH256_URL}/{archive}", folder.parent, unfinished, archive, CALTECH256_MD5
    )
    (unfinished / folder.name).rename(folder)
    unfinished.rmdir()
