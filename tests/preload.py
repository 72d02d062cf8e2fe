"""What processes of tests start with: the modules of training and what Hydra keeps of a first call.

They are forked from a process that has imported this module, which saves 5 s of a start of Python.
"""

import atexit
import gc
import importlib
from contextlib import suppress

from conf.cli import load_config

MODULES = (
    *("torch._dynamo", "torch.distributed.fsdp", "nvidia.dali.fn", "train", "runtime.distributed"),
    *("loaders.backends.pytorch", "loaders.backends", "loaders.shards"),
    *("runtime.loggers.tensorboard", "numpy.ma", "PIL.JpegImagePlugin", "PIL.GifImagePlugin"),
)

for name in MODULES:
    with suppress(ModuleNotFoundError):  # of a part that the project does not have
        importlib.import_module(name)
load_config([])
gc.freeze()  # so that no process visits all of it for garbage
atexit.register(gc.unfreeze)  # or nanobind reports leaks
