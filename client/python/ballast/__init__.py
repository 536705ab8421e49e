"""Ballast: a training job's optimizer state outside the trainer. Start with ballast.torch."""

from ballast.errors import Error

__all__ = ['Error', 'drop', 'estimate', 'jobs']
__version__ = '0.1.0'


def estimate(params, **arguments):
    """See ballast.torch.estimate."""
    from ballast.torch.estimate import estimate as of_model  # torch takes its time to import
    return of_model(params, **arguments)


def jobs(directory=None):
    """Names of the jobs that the state server inside this process has. directory: as an optimizer's; a server is started there if
    none is running."""
    from ballast import embedded
    return embedded.jobs(directory)


def drop(name, directory=None):
    """Forgets a job of the state server inside this process, with all that it has in memory and on the disk. No optimizer of this
    process may use it. directory: as of jobs(). Jobs of named servers: `ballastctl drop`."""
    from ballast import embedded
    embedded.drop(name, directory)
