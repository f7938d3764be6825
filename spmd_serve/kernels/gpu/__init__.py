"""The Triton and CUDA kernels. Imported by the functions of spmd_serve.kernels when their tensors are on a GPU."""
