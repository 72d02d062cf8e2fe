"""Several ranks with mixed precision, whose images DALI decodes."""

# The scale overflows at first: those steps are skipped.
FLOAT16 = ["amp.dtype=float16", "amp.init_scale=1e8"]
RESUMED = [("train_ddp_amp.py", ["loader=dali", *FLOAT16], 0)]
