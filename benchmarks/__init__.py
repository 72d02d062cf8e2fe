"""Measurements of this template on your machine: `python -m benchmarks`.

Each measures one thing and appends rows to a CSV file (`records.py`); `report.py` draws the pictures and
writes the tables from those files alone.
"""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
