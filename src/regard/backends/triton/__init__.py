"""The backend in Triton, for CUDA devices from compute capability 8.0 on.

In the order of reading: `jit_runtime` says where Triton runs, `score_tile` has what all kernels do with a tile of
scores, `triton_backend` which groups of methods there are.
"""
