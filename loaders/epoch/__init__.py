"""The order of an epoch, a rank's share of it, its place in it and bad samples, for any data."""

from loaders.epoch.loader import EpochLoader, LoadedBatch
from loaders.epoch.permutation import random_permutation, shuffled, stream_key, uniform
from loaders.epoch.prefetch import prefetched, transformed
from loaders.epoch.sampler import ORDER, SAMPLE, BadFileError, EpochSampler
from loaders.epoch.workers import worker_loader
