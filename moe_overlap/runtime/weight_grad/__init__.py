"""Weight gradients as work of their own: split off from the backward pass, queued, run where the list says."""
