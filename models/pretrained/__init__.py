"""Weights that a model starts from: read from files and runs, fitted to it, and kept or trained."""

from models.pretrained.checkpoints import (
    BEST,
    FORMAT,
    MANIFEST,
    STATE,
    Shards,
    best_of,
    fingerprint,
    map_named,
    newest_first,
    read_state,
    read_weights,
    weights_in,
    with_shards,
)
from models.pretrained.finetune import (
    first_convolution,
    fitting_weights,
    freeze_as,
    head_of,
    initial_weights,
    is_in,
    zeros_for_head,
)
