from loaders.index.build import (
    SPLITS,
    build_index,
    holds_shards,
    import_shards,
    open_splits,
    read_description,
    settings_of,
    write_index,
)
from loaders.index.columns import (
    StoredIndex,
    open_column,
    open_columns,
    replaced_folder,
    save_columns,
    share,
    write_columns,
)
from loaders.index.counts import class_counts
from loaders.index.files import file_index, index_splits
from loaders.index.folders import IMAGE_ENDINGS, folders_in, images_below
from loaders.index.headers import ImageFiles, in_threads, one_process_at_a_time, read_headers
from loaders.index.index import BadFileError, Index, Paths
from loaders.index.read import read_image, read_raw_batch, read_resized, read_whole
from loaders.index.splits import (
    Parts,
    check_no_split,
    held_out_split,
    parts_of,
    split_by_seed,
    split_folders,
)
