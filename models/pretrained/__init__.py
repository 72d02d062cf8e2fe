"""Weights that a model starts from: read from files and runs, fitted to it, and kept or trained."""

from models.pretrained.finetune import (
    first_convolution,
    fitting_weights,
    freeze_as,
    head_of,
    initial_weights,
    is_in,
    zeros_for_head,
)
from models.pretrained.weights import load_tensors, read_weights, weights_in
