"""Small fused operations, each a function over tensors: plain torch on the CPU (also the reference of its tests), a
Triton kernel of the same signature (in gpu/) on a GPU. They launch on the current stream, never synchronise, and
allocate by shape alone, so that they may be captured in a CUDA graph.
"""
