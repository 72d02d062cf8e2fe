"""Your own data, as ordinary map-style Datasets: `data=own data.name=NAME`.

Yours: `NAME.py` in this folder with a function `NAME`. It takes `cfg.data`
and returns the training and the validation Dataset and, if the task asks for it, the kind of the
targets (`loaders.targets`). An item is `(inputs, targets)`: tensors, numbers, texts, or dicts and
tuples of these. A Dataset may have a `collate_fn`, which makes a batch of a list of items, and a
`name_of`, which returns the name of a sample for messages and tables.

For `predict.py data.root=...`, a function `new_NAME` returns a Dataset of new samples, for
`split=test`, `test_NAME` one of the test split. With `data.fold`, `fold_NAME` replaces `NAME`.
"""
