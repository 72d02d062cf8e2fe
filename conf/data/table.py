"""Keys of `data=table` alone."""

from dataclasses import dataclass

from conf.groups import DataConfig
from conf.ranges import Allowed, key, one_of


@dataclass
class TableConfig(DataConfig):
    table: str | None = None
    """CSV or Parquet file with one line per sample. An optional column `split` holds `train`, `val`
    or `test`; without lines of `val`, those of `test` are used for validation."""

    path_column: str = "path"
    """Column with the images' paths, relative to `root`."""

    label_columns: list[str] = key(["label"], Allowed("one name or more, as [label]", bool))
    """Columns with the labels."""

    label_kind: str = key("auto", one_of("auto", "classes", "several", "numbers"))
    """`classes` (names or integers in one column), `several` (columns of 0 and 1, or one of
    names separated by `;`, a `;` alone for none), `numbers`, or `auto`: inferred from the cells."""
