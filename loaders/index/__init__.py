from loaders.index.build import build_index, holds_shards, import_shards, open_splits
from loaders.index.columns import (
    SPLITS,
    StoredIndex,
    open_columns,
    read_description,
    settings_of,
    share,
    write_columns,
    write_index,
)
from loaders.index.counts import class_counts
from loaders.index.files import (
    Parts,
    check_no_split,
    file_index,
    index_splits,
    parts_of,
    read_headers,
    split_by_names,
    split_by_seed,
)
from loaders.index.folders import (
    IMAGE_ENDINGS,
    VALIDATION_SPLITS,
    folders_in,
    images_below,
    split_folders,
)
from loaders.index.header_cache import kept_headers
from loaders.index.headers import ImageFiles, in_threads
from loaders.index.index import BadFileError, Index
from loaders.index.paths import Paths
from loaders.index.read import read_image, read_raw_batch, read_resized, read_whole
from loaders.index.store import one_process_at_a_time, open_column, replaced_folder, save_columns
