"""What fds wants to reach on an H200, in one place: of a copy's bandwidth, and of others' time and memory."""

from __future__ import annotations

# kernels whose time is that of memory: of the bandwidth of a copy, at least
COPY_FORWARD = 0.90  # norms, losses over a vocabulary, fusions and updates
COPY_ELEMENTWISE = 0.90  # fusions, forward and backward
COPY_NORM_BACKWARD = 0.80

# of the time of another way to do the same, at most
ADAMW_BESIDE_FUSED = 0.95  # torch's fused AdamW
COMPILED = 0.90  # norms and cross-entropy, forward and backward, beside torch.compile
LINEAR_LOSS_TIME, LINEAR_LOSS_MEMORY = 0.60, 0.25  # beside all logits at once
LAYER_BESIDE_EAGER, LAYER_BESIDE_COMPILED = 0.70, 1.00  # a layer of BERT-large

# the whole training step of GPT-2 124M, of the time of the compiled torch loop, at most
STEP_BESIDE_COMPILED = 0.95
CAPTURED_BESIDE_COMPILED = 0.90  # replayed as one CUDA graph, 8 sequences

# bf16 matrix products without sparsity, by NVIDIA's datasheet of the H100 and H200 (SXM); MFU is of this
PEAK_FLOPS = 989e12
