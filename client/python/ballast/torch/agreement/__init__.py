"""What ranks tell each other of a job: which rank has which parameters, and what must be the same on all."""
