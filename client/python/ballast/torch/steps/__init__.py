"""One step of a job, from gradients to parameters; steps beside the loop, and steps that begin in backward."""
