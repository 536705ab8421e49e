"""One step of a job, from gradients to parameters, and the trainer's memory that the servers read and write meanwhile."""
