"""Lists of runs, and sweeps."""

from pathlib import Path

MISTAKES = [
    ("-m tools.sweep script=~/nowhere.py", f"script={Path.home()}/nowhere.py"),
    ("-m tools.sweep", "script="),
    ("-m tools.sweep script=nowhere.py", "script=nowhere.py"),
    ("-m tools.sweep script=train.py jobs=0", "jobs=0"),
    ("-m tools.sweep script=train.py trials=two", "trials=two"),
    ("-m tools.sweep script=train.py output_dir=a", "output_dir="),
    ("-m tools.sweep script=train.py seed=[1", "seed=[1"),
    ("-m tools.sweep script=train.py lr=interval(0,1) out=FOLDER", "lr=interval(0,1)"),
    ("-m tools.runs nowhere", "nowhere is not a folder"),
    ("-m tools.runs FOLDER/photos", "there are no runs below FOLDER/photos"),
    ("-m tools.runs a b", "a b"),
    ("-m tools.runs a by=loss", "by=loss"),
]
