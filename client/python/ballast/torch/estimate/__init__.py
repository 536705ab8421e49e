"""Estimates what a job would take, before there is a job: `ballast.estimate()`, and the command `python -m ballast.torch.estimate`."""

from ballast.torch.estimate.job import Estimate, estimate

__all__ = ['Estimate', 'estimate']
