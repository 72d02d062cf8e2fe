"""Scripts merged by `tools.compose`."""

MISTAKES = [("-m tools.compose tpu", "unknown technique tpu; use some of ")]
