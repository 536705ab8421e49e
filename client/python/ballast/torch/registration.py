"""Which parameters of an optimizer register with its job, and as what."""

from ballast import _native
from ballast.errors import Error
from ballast.torch.members import Member, check_parameter
from ballast.torch.naming import UnitsBySize, positional_name, unit_of


def placed(optimizer):
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group['params']):
            yield g, i, parameter


def name_of(optimizer, g, i, parameter):
    name = optimizer._names[g][i] if i < len(optimizer._names[g]) else None
    return positional_name(g, i, parameter.shape) if name is None else name


def new_tensors(optimizer, trained=()):
    """Parameters that have a gradient or want one, or have a name of `trained`, and are not in the job yet: (member, parameter,
    _native.Tensor)."""
    there = {id(member.parameter): member for member in optimizer._members}
    names = {member.name for member in optimizer._members}
    by_size = UnitsBySize()
    found = []
    for g, i, parameter in placed(optimizer):
        name = optimizer._names[g][i] if i < len(optimizer._names[g]) else None
        unit = unit_of(name) if name is not None else by_size.next(parameter.numel())
        name = name_of(optimizer, g, i, parameter)
        known = there.get(id(parameter))
        if known is not None and known.group != g:
            raise Error(f"parameter '{known.name}' has moved from group {known.group} to {g}: a job's tensors stay in "
                        'their groups', 'BAD_SPEC')
        # torch updates what has a gradient, frozen or not.
        if known is not None or not (parameter.requires_grad or parameter.grad is not None or name in trained):
            continue
        if parameter.numel() == 0:
            continue  # nothing to train; servers have no empty tensors
        check_parameter(name, parameter)
        if name in names:
            raise Error(f"there are two parameters '{name}', or one took the place of another after the first step; give "
                        'parameters of several models names of their own, and make a new optimizer for new parameters',
                        'BAD_SPEC')
        names.add(name)
        shape = list(parameter.shape) or [1]
        found.append((Member(name, g, parameter, optimizer._debug), parameter, _native.Tensor(name, unit, shape, g)))
    return found


class Fit:
    """Which tensors a session names when it opens its job: those that want gradients here, and as the job turns out to have others,
    those, and without those that it has not got."""

    def __init__(self, optimizer, trained):
        self._optimizer, self._trained, self._unknown = optimizer, set(trained), set()
        self._found = new_tensors(optimizer, self._trained)

    @property
    def members(self):
        return [member for member, _, _ in self._found if member.name not in self._unknown]

    @property
    def tensors(self):
        return [tensor for member, _, tensor in self._found if member.name not in self._unknown]

    @property
    def unknown(self):
        """Names, sorted: they may register with the next step."""
        return sorted(self._unknown)

    def add(self, name):
        """The job has it, and it is frozen here. False: there is none of that name."""
        self._trained.add(name)
        before, self._found = len(self._found), new_tensors(self._optimizer, self._trained)
        return len(self._found) > before

    def leave_out(self, name):
        """The job has not got it. False: then nothing would be left; or it could not register later, see _new_tensors()."""
        self._unknown.add(name)
        return bool(self.tensors) and self._optimizer._options.durability != 'every-K'
