"""The systems that are compared: how each starts, finds its state again, takes a step, and keeps what it needs to go on."""
