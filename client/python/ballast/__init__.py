"""Ballast: a training job's optimizer state outside the trainer. Start with ballast.torch."""

from ballast.errors import Error

__all__ = ['Error', 'estimate']
__version__ = '0.1.0'


def estimate(params, **arguments):
    """See ballast.torch.estimate."""
    from ballast.torch.estimate import estimate as of_model  # torch takes its time to import
    return of_model(params, **arguments)
