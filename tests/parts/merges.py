"""Merges of several techniques, and those that do not combine."""

import pytest

MISTAKES = [
    ("-m tools.compose ddp amp fsdp", "ddp does not combine with fsdp"),
    ("-m tools.compose ddp ddp", "names ddp twice"),
    ("-m tools.compose ddp --onto FOLDER/latin1.py", "FOLDER/latin1.py"),
    ("-m tools.compose ddp --onto FOLDER/foreign.py", "FOLDER/foreign.py"),
]
RESUMED = [("train_accumulate_ema.py", ["accumulate_steps=4", "ema.decay=0.5"], 1)]
PREDICTING = ["train_ddp_amp_ema.py"]
LIKE_ONE_PROCESS = [
    ("train_ddp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
    ("train_fsdp_accumulate.py", "sgd", ["accumulate_steps=4"], 1e-5, 1e-4),
]
RECOMPUTED = [
    pytest.param(f"train_{techniques}.py", marks=pytest.mark.slow)
    for techniques in ("ddp", "fsdp", "amp_accumulate", "amp_ema_fsdp")
]
AVERAGES = [
    ("train_ema_fsdp.py", ["model.kwargs.batch_norm=false"]),
]
IN_EPOCHS_OF_STEPS = [("train_ddp_ema.py", ["ema.decay=0.5"])]
