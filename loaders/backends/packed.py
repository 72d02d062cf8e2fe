"""Images that `python -m loaders.pack` has decoded: read as by `loader=pytorch`."""

from loaders.backends.pytorch import pytorch_loader

packed_loader = pytorch_loader
