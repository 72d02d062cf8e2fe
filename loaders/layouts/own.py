"""Your own Datasets, as `loaders.own_data` reads them."""

from loaders.own_data import OwnLoader

own = OwnLoader
