"""Parameters, gradients and optimizer state of a rank, and the update at the end of a step."""
