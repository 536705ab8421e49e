"""What a job is made with, for good: optimizer, its options, dtypes."""

from ballast import _native
from ballast.errors import Error
from ballast.torch.members import DTYPES
from ballast.torch.registration import placed


def of(optimizer):
    """The open job's; else the one that the parameters and groups ask for."""
    if optimizer._session is not None:
        return optimizer._options.optimizer
    spec = _native.Optimizer()
    spec.kind, spec.moments = optimizer._kind, optimizer._moments
    for group in optimizer.param_groups:
        for key, value in optimizer._spec(group).items():
            setattr(spec, key, value or getattr(spec, key))
    # Frozen ones too: they may want gradients later.
    dtypes = {parameter.dtype for _, _, parameter in placed(optimizer)}
    spec.gradient = spec.working = DTYPES.get(dtypes.pop(), 'f32') if len(dtypes) == 1 else 'f32'
    return spec


def check(optimizer, spec):
    """Refuses a group that wants what its job was not made for."""
    for g, group in enumerate(optimizer.param_groups):
        for key, value in optimizer._spec(group).items():
            if value == getattr(spec, key) or (key == 'momentum' and not value):  # a group without leaves its buffer as it is
                continue
            if key == 'momentum':
                raise Error(f"group {g} has momentum={group['momentum']!r}, and the job was made without momentum buffers, for all groups "
                            'had momentum=0: where a schedule raises it, make the job with momentum_buffer=True', 'BAD_SPEC')
            raise Error(f'group {g} has {key}={value!r}, and the job was made with {key}={getattr(spec, key)!r}: it is one for '
                        'all groups and for good', 'BAD_SPEC')
