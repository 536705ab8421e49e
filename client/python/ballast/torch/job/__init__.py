"""A training job as one rank has it: its session with the servers, its ranks, its parameters' names, and its checkpoints."""
