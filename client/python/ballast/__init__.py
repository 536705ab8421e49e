"""Ballast: a training job's optimizer state outside the trainer. Start with ballast.torch."""

from ballast.errors import Error

__all__ = ['Error']
__version__ = '0.1.0'
