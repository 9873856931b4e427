"""What a run reports about itself: metrics, timers, memory, TensorBoard and W&B."""
