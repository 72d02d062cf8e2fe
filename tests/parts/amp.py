"""Mixed precision, in which the norms of gradients differ most."""

# The scale overflows at first: those steps are skipped.
RESUMED = [("train_amp.py", ["amp.dtype=float16", "amp.init_scale=1e8"], 0)]
LIKE_ONE_PROCESS = [
    ("train_amp.py", "sgd", ["amp.dtype=float32"], 1e-12, 1e-12),
    ("train_amp.py", "sgd", ["amp.dtype=bfloat16"], 2e-2, 0.1),
    ("train_amp.py", "sgd", ["amp.dtype=float16", "amp.init_scale=256"], 2e-2, 0.1),
]
