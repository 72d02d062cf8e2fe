"""The order of an epoch, a rank's share of it, its place in it and bad samples, for any data."""

from loaders.epoch.loader import Loader, prefetched, results, transformed
from loaders.epoch.order import ORDER, random_permutation, shuffled, stream_key, uniform
from loaders.epoch.sampler import SAMPLE, BadFileError, EpochSampler, LoadedBatch
from loaders.epoch.workers import worker_loader
