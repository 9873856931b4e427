"""MoE training with overlapped communication, on megatron-core, and the tuner that plans it."""
