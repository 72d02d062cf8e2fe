"""Commands beside training: `python -m tools.NAME --help`."""
