"""Images that `python -m loaders.pack` has decoded: loaded as by `loader=pytorch`."""

from loaders.backends.pytorch import PyTorchLoader


class PackedLoader(PyTorchLoader):
    """The same; `loaders.pack` opens the index of the decoded images."""
