"""Folders that data sets are downloaded into."""

from pathlib import Path

from conf.errors import UserError


def refuse_to_fill(root: Path, *own: str) -> None:
    """Raise UserError if a download into `root` would mix with files other than the `own` ones."""
    others = (
        {path.name for path in root.iterdir()} - {*own, "download.lock"} if root.is_dir() else ()
    )
    if others:
        raise UserError(
            f"data.root={root} holds other files ({min(others)}), and nothing is downloaded into "
            f"{root}; set data.root to the data set's folder, or to a new one"
        )
