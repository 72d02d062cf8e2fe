"""Data sets in shards: tar files and their index, in a folder, on a web server or in a bucket."""

from loaders.shards.files import SPAN, Shards
from loaders.shards.index import ShardIndex
from loaders.shards.open import open_shards
from loaders.shards.pack import pack_shards, part_of, shard_options
from loaders.shards.split import LOSSLESS
from loaders.shards.storage import MissingError, Storage, StorageError
