"""Benchmarks of the template: `python -m benchmarks` runs them on the machine at hand.

Each figure is a row of a CSV file (`records.py`), from which `tables.py` writes the tables of
docs/benchmarks.md.
"""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
