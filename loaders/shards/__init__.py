"""Data sets in shards, in a folder, on a web server or in a bucket.

`data.root` holds:

    shards.json                        settings, and facts about each split
    train/000000.tar ..., val/...      the files of the samples, as WebDataset names them
    train/000000.npz ..., val/...      their sidecars: the columns of the samples of each tar file

The sidecars are joined to an index in `data.cache_dir`, where remote tar files are copied to when
they are needed.
"""

from loaders.shards.pack import pack_shards
from loaders.shards.source import open_shards
from loaders.shards.storage import Storage, StorageError
