from loaders.index.build import (
    SPLITS,
    holds_shards,
    import_shards,
    open_index,
    open_splits,
    read_description,
    settings_of,
    write_index,
)
from loaders.index.columns import (
    open_column,
    open_columns,
    read_fields,
    replaced_folder,
    save_columns,
    share,
    write_columns,
)
from loaders.index.counts import class_counts
from loaders.index.files import file_index, index_splits
from loaders.index.folders import IMAGE_ENDINGS, folders_in, images_below
from loaders.index.headers import ImageFiles, in_threads, one_process_at_a_time, read_headers
from loaders.index.index import BadFileError, Index, Stored
from loaders.index.memory import MemoryIndex
from loaders.index.paths import Paths
from loaders.index.splits import (
    check_no_split,
    split_by_seed,
    split_folders,
    used_splits,
)
