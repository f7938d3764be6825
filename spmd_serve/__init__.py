"""A server for large language models in which PyTorch's own launcher is the whole distributed system."""

import os

__version__ = "0.1.0"

# How often a CPU thread of torch looks for its next piece of work before it sleeps; read when torch is loaded, hence here. By
# default it looks for some milliseconds, and where another process wants the core, the threads that have work wait for those
# that have none: a busy neighbour on two cores took a server from 380 to 3 tokens/s, now to 130. See kernels/README.md.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
