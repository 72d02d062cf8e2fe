import os

# Two ranks or workers on few cores would otherwise fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
