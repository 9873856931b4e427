"""Weight gradients split off from the backward pass, queued, and computed where the list says."""
