"""The order of an epoch, a rank's share of it, its place in it and bad samples, for any data."""

from loaders.epoch.cpu_prefetch import transformed
from loaders.epoch.loader import EpochLoader
from loaders.epoch.permutation import random_permutation, stream_key, uniform
from loaders.epoch.prefetch import CudaPrefetcher
from loaders.epoch.sampler import ORDER, SAMPLE, BadFileError, EpochSampler
from loaders.epoch.workers import init_worker, worker_context

__all__ = [
    "ORDER",
    "SAMPLE",
    "BadFileError",
    "CudaPrefetcher",
    "EpochLoader",
    "EpochSampler",
    "init_worker",
    "random_permutation",
    "stream_key",
    "transformed",
    "uniform",
    "worker_context",
]
