"""The backend in Triton, for CUDA devices from compute capability 8.0 on.

In the order of reading: `jit_runtime` says where Triton runs, `score_tile` has what all kernels do with a tile of
scores, `triton_backend` which groups of methods there are.

The linear recurrence: `chunked_recurrence`, forward, and `recurrence_gradient`, backward, share `decayed_chunk`;
`recurrence_launch` calls them, and `recurrence_step` has one token.
"""
