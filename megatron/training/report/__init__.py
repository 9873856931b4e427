"""Reports of a run about itself: metrics, timers, memory, TensorBoard and W&B."""
