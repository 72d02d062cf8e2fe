"""Benchmarks of the template: `python -m benchmarks` runs them on the machine at hand.

Each benchmark appends rows to its own CSV file (`records.py`). `report.py` draws figures and writes
tables from these files alone.
"""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
