"""Tests of what each technique promises: what it computes, what it saves, and what it sends."""

from tests.rows import rows

OPTIMIZERS: dict[str, list[str]] = dict(
    rows(
        ("sgd", ["optimizer=sgd", "optimizer.lr=0.02"]),
        ("adamw", ["optimizer=adamw"]),
        ("muon", ["optimizer.name=muon", "optimizer.layer_decay=0.7"]),
    )
)
FLOAT16 = "amp.dtype=float16"
PLAIN = ["model.kwargs.batch_norm=false"]
"""BatchNorm depends on the parts into which a batch is split."""
TEN = [*PLAIN, "amp.dtype=float32", "max_steps=10"]
"""Of a `train.py` with AMP merged into it, too."""
