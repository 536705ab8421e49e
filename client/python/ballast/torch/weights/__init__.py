"""Checkpoints of weights in safetensors files: read tensor by tensor, and written in the same way."""
