"""Scripts merged by `compose.py`."""

MISTAKES = [("compose.py tpu", "unknown technique tpu; use some of ")]
