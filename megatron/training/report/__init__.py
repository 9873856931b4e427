"""What a run says of itself: figures, timers, memory, boards."""
