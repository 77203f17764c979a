"""The backend in Triton, for CUDA devices from compute capability 8.0 on.

In the order of reading: `jit_runtime` says where Triton runs; `kernel_arguments` is what kernels get, `device_tiles`
and `kernel_bias` make it from a mask and a bias, `score_tile` is what all kernels do with a tile of scores. Flash
attention is `flash_forward`, `row_terms` and `flash_backward`, with `dropout_hashes`; sparsemax and entmax are the
same with `row_thresholds` and `threshold_terms`. `launch_settings` has their tiles and warps, `flash_launches` launches
them, `fused_attention` is the group of methods, and `threshold_attention` that of the two.

Listed keys: `listed_tile` is what `gathered_forward` and `gathered_backward` share, `gathered_launches` is the group of
methods, and launches them.

The pass for lenses is `lens_sums`, of which `lens_cells` and `lens_topk` are parts; `lens_requests` and
`lens_arguments` make what it gets from the forms that lenses ask for, and `lens_pass_launch` is the group of methods.

The linear recurrence: `chunked_recurrence`, forward, and `recurrence_gradient`, backward, share `decayed_chunk`;
`recurrence_launch` calls them, and `recurrence_step` has one token.

Few queries: `merged_parts` has the kernels, `split_keys` says how many keys each program reads, and launches them.

Additive scores: `additive_scores` computes tiles of them, `additive_forward` and `additive_backward` go over the tiles,
with `score_gradients` as flash attention, `additive_launches` launches them, `additive_attention` is the group.

`triton_backend` says which groups there are.
"""
