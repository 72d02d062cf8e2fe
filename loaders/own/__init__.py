"""Your own data, as ordinary map-style Datasets: `data=own data.name=NAME`.

Yours: `NAME.py` in this folder with a function `NAME`. It takes `cfg.data` and the name of a split
(`train`, `val`, `test`, or `new` for `predict.py data.root=...`), and returns `OwnData` of it
(`loaders.own_data`), or None if there is no such split.
"""
