"""A server for large language models in which PyTorch's own launcher is the whole distributed system."""

__version__ = "0.1.0"
