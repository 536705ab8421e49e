"""DeepSpeed's universal checkpoints: a job is saved as one, and made from one."""
