"""Lists of runs, and sweeps."""

from pathlib import Path

MISTAKES = [
    ("sweep.py script=~/nowhere.py", f"script={Path.home()}/nowhere.py"),
    ("sweep.py", "script="),
    ("sweep.py script=nowhere.py", "script=nowhere.py"),
    ("sweep.py script=train.py jobs=0", "jobs=0"),
    ("sweep.py script=train.py trials=two", "trials=two"),
    ("sweep.py script=train.py output_dir=a", "output_dir="),
    ("sweep.py script=train.py seed=[1", "seed=[1"),
    ("sweep.py script=train.py lr=interval(0,1) out=FOLDER", "lr=interval(0,1)"),
    ("runs.py nowhere", "nowhere is not a folder"),
    ("runs.py FOLDER/photos", "there are no runs below FOLDER/photos"),
    ("runs.py a b", "a b"),
    ("runs.py a by=loss", "by=loss"),
]
