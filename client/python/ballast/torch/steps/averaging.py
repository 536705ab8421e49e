"""Schedule-free optimizers (Defazio et al. 2024): parameters are y while the loop trains, and the average x while it evaluates.

Servers keep y as master, and z - y as a moment. x follows from the two, so this rank computes its part of x when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ballast.errors import Error, warn
from ballast.torch.job.features import Feature
from ballast.torch.job.moments import MASTER, Array, read_part
from ballast.torch.modes import plainly
from ballast.torch.tensors import marks
from ballast.torch.tensors.kinds import local
from ballast.torch.tensors.members import wrote
from ballast.torch.tensors.remote import part_of

if TYPE_CHECKING:
    from ballast.torch.job.job import Job
    from ballast.torch.job.naming import Parameters
    from ballast.torch.job.opened import OpenJob
    from ballast.torch.ranks.groups import Group
    from ballast.torch.tensors.members import Member

_Z_MINUS_Y = Array('moment1')


class Averaging(Feature):
    """Threads: the training loop's."""

    def __init__(self) -> None:
        self.evaluates = False  # parameters hold x

    def opening(self, parameters: Parameters, group: Group) -> None:
        for g, i, parameter in parameters.placed():
            if part_of(parameter) is not None:
                raise Error(f"parameter '{parameters.name_of(g, i, parameter)}' lives on the servers, as shard() has it, and servers hand "
                            'out y alone, never the average: schedule-free optimizers need parameters in the trainer. Train without '
                            'shard(), or with another optimizer', 'UNSUPPORTED')

    def opened(self, job: OpenJob, for_step: bool) -> None:
        if self.evaluates:
            raise Error('the parameters hold the average, since optimizer.eval() was called; call optimizer.train() before a step, and '
                        'before anything that reads or writes state of the optimizer', 'BAD_REQUEST')

    def left(self) -> None:
        self.evaluates = False

    @plainly
    def eval(self, job: Job) -> None:
        """Parameters become the average x."""
        if self.evaluates:
            return
        if job.opened is None and job.options.resume == 'never':
            self.evaluates = True  # no step was made: the average is y
            return
        opened = job.open()
        if any(marks.edited(opened.members)) or opened.session.written:
            raise Error('parameters were written to since the last step, so the servers do not have what the average would follow from; '
                        'make a step first', 'BAD_REQUEST')
        for member in opened.members:
            if not member.is_frozen and opened.session.tensor_steps(member.name) > 0:
                _average(opened, member)
        wrote(opened.members)
        self.evaluates = True

    @plainly
    def train(self, job: Job) -> None:
        """Parameters become y again."""
        if not self.evaluates:
            return
        self.evaluates = False
        opened = job.opened
        if opened is None:
            return
        if any(marks.edited(opened.members)):
            warn('parameters were written to between optimizer.eval() and optimizer.train(), which brings back what they were in training: '
                 'the written values are lost')
        opened.pull()


@torch.no_grad()
def _average(job: OpenJob, member: Member) -> None:
    beta = float(job.param_groups[member.group]['betas'][0])
    y, z_minus_y = (read_part(job.session, member, array) for array in (MASTER, _Z_MINUS_Y))
    local(member.parameter).copy_(y.add_(z_minus_y, alpha=1 - 1 / beta))
