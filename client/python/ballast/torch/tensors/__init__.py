"""Parameters and gradients as this rank has them: placement, memory, copies on the host, and marks of who wrote to them."""
