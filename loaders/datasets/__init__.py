"""Batches of ordinary map-style Datasets, which the files of `loaders/own/` return."""

from loaders.datasets.loader import OwnLoader
