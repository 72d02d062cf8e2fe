"""Measurements of this template on your machine: `python -m benchmarks`.

Each module measures one thing and appends rows to a CSV file (`records.py`); `report.py` draws the
plots and writes the conclusions from those files alone.
"""
