"""Data sets in shards: tar files with columns beside them, in a folder, on a web server or in a
bucket."""

from loaders.shards.open import open_shards
from loaders.shards.pack import pack_shards
from loaders.shards.storage import MissingError, Storage, StorageError
