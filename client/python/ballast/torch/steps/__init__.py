"""One step of a job, from gradients to parameters, and steps beside the loop or begun in backward."""
