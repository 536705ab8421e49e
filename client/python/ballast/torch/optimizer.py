"""The torch.optim.Optimizer behind all of ballast.torch's.

Parameters stay in the trainer; master weights and moments are on state servers. Only step() orders a step: gradients
and param_groups are read then. It returns when every parameter holds the new version, but with overlap (stepping.py).
"""

import contextlib
import functools
import itertools
import struct
from typing import NamedTuple

import torch

from ballast import _native
from ballast.errors import Error, warn
from ballast.torch import arguments, checkpoint, hooks, job_spec, loading, marker, moments, ranks, state
from ballast.torch.agreement import Collected, agree, alike, check_values, checked, together
from ballast.torch.connection import Connection
from ballast.torch.early import Early
from ballast.torch.host_memory import HostMemory
from ballast.torch.members import DTYPES, Memory, gradient_of, is_sharded, local, warn_of_others, whole
from ballast.torch.modes import methods_plainly, same_bits
from ballast.torch.naming import Names, split_named, unwrapped
from ballast.torch.registration import Fit, new_tensors, placed
from ballast.torch.stepping import Overlap, Step

# Steps in a row that may be skipped for an Inf or NaN before step() raises.
_SKIPS_MAX = 50
# A job's parameter groups are counted when it is made, so it is made with room for more: a multiple of so many.
_GROUPS = 16
# In front of the user's blob: how many steps the loop has made.
_BLOB = struct.Struct('<Q')
_optimizers = itertools.count()  # the same on all ranks, which make theirs in one order


class Resumed(NamedTuple):
    step: int  # calls of step() so far, skipped ones included
    blob: bytes  # what the last of them kept


@methods_plainly('step')
class Optimizer(torch.optim.Optimizer):
    """See the package's README for the arguments that all optimizers share.

    Attributes after a step, for which they wait: grad_norm (global norm of the gradients as they were taken), last_step_skipped.
    """

    def __init__(self, params, defaults, *, kind, moments='f32', servers=None, dram=None, nvme=None, directory=None,
                 threads=None, name='default', resume='never', durability=None, pin_interval=0, checkpoints=2,
                 max_norm=0.0, chunk_elements=1 << 20, seed=0, step_timeout=120.0, open_timeout=30.0, debug=None,
                 overlap=None, push_early=False):
        arguments.check(name=name, resume=resume, durability=durability, pin_interval=pin_interval, checkpoints=checkpoints,
                        moments=moments, max_norm=max_norm, chunk_elements=chunk_elements, seed=seed, threads=threads, dram=dram,
                        nvme=nvme, step_timeout=step_timeout, open_timeout=open_timeout)
        self._number = next(_optimizers)
        self._connection = Connection(servers, {'dram': dram, 'nvme': nvme, 'directory': directory, 'threads': threads})
        options = self._options = _native.OpenOptions()
        options.job, options.resume, options.pin_interval = name, resume, pin_interval
        self._durability = durability
        options.chunk_elements, options.seed = chunk_elements, seed
        options.step_timeout, options.open_timeout = float(step_timeout), float(open_timeout)
        self._kind, self._moments = kind, moments
        self._debug = arguments.flag('debug', debug, 'BALLAST_DEBUG')
        self._kept = checkpoint.Kept(checkpoints)
        self._max_norm, self._gradient_scale = float(max_norm), None
        self._seconds = {'push': 0.0, 'seal': 0.0, 'pull': 0.0}
        self._session = None
        self._opening = False
        self._closed = False
        self._members = []
        self._by_parameter = {}
        self._host = HostMemory()
        self._names = Names(self)
        self._skips = 0
        self._steps = 0
        self._blob = b''
        self._partly = False  # the job's state is what a load that did not end left
        self._unpulled = False  # the job was open before; parameters are not its own yet
        self._found = None  # the version that the job was found at; None: it was new
        self._last_step_skipped = False
        self._grad_norm = None
        self._overlap = None if overlap is None else Overlap(overlap)
        self._early = Early(self._debug, self._is_under_way) if arguments.flag('push_early', push_early) else None
        super().__init__([{**group, 'param_names': names} for group, names in zip(*split_named(params))], defaults)
        if overlap is not None:
            self.attach(overlap)

    @property
    def state(self):
        return state.State(self)

    @state.setter
    def state(self, value):
        if hasattr(self, 'param_groups'):  # else torch's constructor makes an empty one
            state.replace(self, value)

    # What a job fixes for its life: an optimizer's own part of the spec, from its first group.
    def _spec(self, group):
        return {}

    # _native.GroupHyper from a param_group.
    def _hyper(self, group):
        raise NotImplementedError

    def add_param_group(self, param_group):
        """torch's. Of an open job the parameters register at the next step."""
        if self._session is not None and len(self.param_groups) == self._options.group_count:
            raise Error(f'the job has room for {self._options.group_count} parameter groups, and has them all: make a new job, with '
                        'all groups from the start', 'BAD_SPEC')
        groups, names = split_named([param_group])
        if len({id(parameter) for parameter in groups[0]['params']}) < len(groups[0]['params']):
            raise ValueError('some parameters appear more than once in a parameter group')
        super().add_param_group(groups[0])
        if self._session is not None:
            try:
                job_spec.check(self, self._options.optimizer)
            except Error:
                self.param_groups.pop()
                raise
        self._names.add(groups[0], names[0])

    def attach(self, model):
        """Names of parameters, and units (a block each), from `model`; before the first step. Returns self."""
        if self._session is not None:
            raise Error('attach(model) comes before the first step: the job has its names', 'BAD_REQUEST')
        known = {parameter: unwrapped(name) for name, parameter in model.named_parameters()}
        for group in self.param_groups:
            self._names.add(group, [known.get(parameter) for parameter in group['params']])
        return self

    # --- the session

    def _open(self, partly=False, trained=(), for_step=False):
        """partly: also a job whose state is not whole, and without its parameters. trained: as new_tensors'. Gradients that were
        pushed early go back, but for_step."""
        self._check_usable()
        self.wait()
        if self._session is None:
            self._start(trained)
        if not partly and self._partly:
            loading.refuse_partly(self._options.job)
        if self._early is not None:
            if not for_step:
                self._early.withdraw()
            self._early.follow(self._session, self._members, self._host)
        if not partly and self._unpulled:
            self._pull()
        return self._session

    def _check_usable(self):
        self._connection.check_process()
        if self._closed:
            raise Error('the optimizer was closed; make a new one', 'BAD_REQUEST')

    def _exchange(self, call):
        """agreement's, of ranks that make this call."""
        self._check_usable()
        if self._session is not None:
            return ranks.Within(call, self._session.exchange)
        return functools.partial(ranks.exchange, f"{call} of job '{self._options.job}'", timeout=self._options.step_timeout)

    def _look(self, trained):
        """What the job is opened with. Whatever is wrong here is wrong on all ranks."""
        fit = Fit(self, trained)
        if not fit.members:
            raise Error('no parameter requires a gradient: there is nothing to optimize', 'BAD_SPEC')
        self._options.optimizer = job_spec.of(self)
        job_spec.check(self, self._options.optimizer)
        self._options.group_count = -(-len(self.param_groups) // _GROUPS) * _GROUPS
        self._options.durability = self._durability_to_be()
        self._options.rows = any(is_sharded(member.parameter) for member in fit.members)
        if self._early is not None and ranks.active():
            raise Error('push_early is for one rank: DistributedDataParallel reduces gradients after backward has made them, and what '
                        'clip_grad_norm_ does to the DTensors of fully_shard moves no version counter; leave push_early out', 'UNSUPPORTED')
        return fit

    def _start(self, trained):
        if self._opening:
            raise Error(f"job '{self._options.job}' is being opened by a call that this one came amid, from a signal's handler say: ask again "
                        'when that call has returned', 'BUSY')
        self._opening = True
        try:
            self._connect(trained)
        finally:
            self._opening = False

    def _connect(self, trained):
        self._session, fit = self._connection.open(self._options, lambda: self._look(trained))
        try:
            self._begin(fit)
        except BaseException:  # the next attempt begins anew
            self._session, self._members, self._by_parameter = None, [], {}
            self._connection.leave()
            raise

    def _begin(self, fit):
        self._members = fit.members
        if fit.unknown:
            warn(f"job '{self._options.job}' has no state of {len(fit.unknown)} parameters, '{fit.unknown[0]}' among them: they begin anew "
                 'with the next step')
        warn_of_others(self._members)
        self._take_blob()
        self._unpulled = not self._session.needs_values
        self._found = self._session.version if self._unpulled else None
        if self._session.needs_values:
            check_values(self._session.exchange, self._members)
            self._session.initialise(Memory(self._members, self._host).wait().parameters)

    def _durability_to_be(self):
        return self._durability or self._connection.default_durability

    def _origin(self):
        """Tells this optimizer's state_dicts, from before its job is open, from those of others."""
        return f'{marker.run()}/{self._number}'

    def _leave(self):
        """As if the job had not been opened."""
        self._session, self._members, self._by_parameter, self._host = None, [], {}, HostMemory()
        self._partly = self._unpulled = False
        self._found, self._steps, self._blob = None, 0, b''
        self._connection.leave()

    @staticmethod
    def _pack_blob(steps, blob=b''):
        return _BLOB.pack(steps) + blob

    def _take_blob(self):
        """Of the version that was found or restored: this rank's, or rank 0's if there were fewer."""
        blobs = self._session.blobs
        mine = (blobs[self._options.rank:self._options.rank + 1] or blobs[:1] or [b''])[0] or _BLOB.pack(0)
        self._steps, self._blob = _BLOB.unpack_from(mine)[0], mine[_BLOB.size:]
        self._partly = self._steps == loading.UNDER_WAY

    def resume(self):
        """Opens the job, if no step did; what it has done so far: Resumed(step=0, blob=b'') of a new one."""
        self._open()
        return Resumed(self._steps, self._blob)

    def _member(self, parameter):
        if len(self._by_parameter) < len(self._members):
            self._by_parameter = {id(member.parameter): member for member in self._members}
        return self._by_parameter.get(id(parameter))

    def _read_state(self, parameter):
        if self._session is None and self._options.resume == 'never':
            return {}  # as torch's: the job will be new
        session, member = self._open(), self._member(parameter)
        if member is None:
            return {}  # it never wanted a gradient
        start = self.param_groups[member.group].get('initial_accumulator_value', 0)
        return moments.read(session, member, parameter, moments.moment_names(self._kind, self._options.optimizer), start)

    def _read_master(self, parameter):
        return moments.read_array(self._open(), self._member(parameter), parameter, 'master')

    def _pull(self):
        memory = Memory(self._members, self._host).wait()
        self._session.pull(memory.parameters)
        for i, member in enumerate(self._members):
            memory.write_back(i)
            self._wrote(member)
        self._unpulled = False

    @staticmethod
    def _wrote(member):
        torch.autograd.graph.increment_version(local(member.parameter))
        member.noted()

    # --- edits by the user

    def sync_from_params(self):
        """Takes over what was written to parameters through `.data`, which their version counters do not tell. All ranks."""
        if self._session is None:
            self._open()
        exchange = self._exchange('sync_from_params()')
        together(exchange, self._open)
        check_values(exchange, self._members)
        for member in self._members:
            self._take_edit(member, exchange)

    @torch.no_grad()
    def _take_edit(self, member, exchange):
        parameter = whole(member.parameter.detach())
        together(exchange, lambda: self._write_edit(member, parameter))
        member.noted()

    def _write_edit(self, member, parameter):
        """parameter: all of it."""
        if member.edited_unseen():
            warn(f"parameter '{member.name}' was written through .data, which its version counter does not tell: taken over at step "
                 f'{self._steps}, as by sync_from_params(); without debug it would be lost')
        master = torch.empty(parameter.numel(), dtype=torch.float32, device='cpu')
        self._session.read(member.name, 'master', master)
        values = parameter.cpu().reshape(-1)
        kept = same_bits(master.to(values.dtype), values)
        # All ranks write, or none: their parameters are the same, but one of them may have been moved. Where they hold the master's
        # values once more, another edit may have been written that no step has taken.
        if self._options.world_size > 1 or member.name in self._session.written or not bool(kept.all()):
            self._session.write(member.name, torch.where(kept, master, values.float()))

    # --- checkpoints

    def __reduce_ex__(self, protocol):
        raise Error('an optimizer whose state is on servers cannot be copied or pickled; copy or save its state_dict(), or '
                    'full_state_dict() with the moments, or make a second optimizer with a name of its own', 'UNSUPPORTED')

    @hooks.around_state_dict
    def state_dict(self):
        """Of a durable job: its name and this version, which the servers keep (see Kept). Any one rank may ask, or all. Before
        the job is open it names none. Of a job with durability none: full_state_dict()."""
        if self._session is None:
            return checkpoint.unopened(self)
        self._open()
        if self._options.durability == 'none':
            return self.full_state_dict()
        if self._options.world_size == 1:
            self._settle_edits()
        self._kept.keep(self._session)
        return checkpoint.named(self, self._session.version)

    def _settle_edits(self):
        """What was written to parameters since the step belongs to the version that is kept."""
        for member in self._members:
            if member.edited():
                self._take_edit(member, self._session.exchange)
        self._commit_written()

    def _commit_written(self):
        """Edits that no step has taken, for it was skipped, say. On all ranks, which have written the same."""
        if self._session.written:
            self._session.commit_values()

    def full_state_dict(self):
        """torch.optim's format, with the moments themselves: any one rank may ask."""
        self._open()
        return checkpoint.full(self)

    @hooks.around_load_state_dict
    def load_state_dict(self, state_dict):
        """Takes the job, parameters included, back to the version that state_dict() named. Or makes moments, step counts and
        param_groups of a state in torch.optim's format the job's: parameters stay what they are. All ranks."""
        loading.load(self, state_dict)

    def versions(self):
        """What rollback() can go back to: versions that all servers keep."""
        session = self._open(partly=True)
        return session.pins() if self._partly else self._open().pins()

    def rollback(self, version):
        """Parameters, moments, step counts and blob become those of a version that state_dict() named; all ranks."""
        if self._session is None:
            self._open(partly=True)

        def look():
            session = self._open(partly=True)
            for member in self._members:
                member.edited()  # where a pull could not write to it, an error
            written = bool(session.written)
            if session.version == version and not written and version not in session.pins():
                raise Error(f"version {version} is the one that job '{self._options.job}' is at, and no state_dict() has named it: a state that "
                            'names it is of another job of that name', 'VERSION_GONE')
            return session, written
        session, written = alike(self._exchange('rollback()'), look, lambda looked: [
            ('the version', str(version)), ('whether there are edits that no step has taken', str(looked[1]))])
        if session.version != version or written:
            self._commit_written()
            session.restore(version)
            self._take_blob()
        if self._partly:
            loading.refuse_partly(self._options.job)
        self._kept.loaded(version)
        self._pull()

    # --- a step

    @contextlib.contextmanager
    def gradient_scale(self, scale):
        """Within it, step() multiplies gradients by `scale`, and skips without a word where one is not finite."""
        self._gradient_scale = scale
        try:
            yield
        finally:
            self._gradient_scale = None

    def stats(self):
        """Where step() spent its seconds so far: taking gradients (push), until the step was decided (seal), until parameters held the
        new version, its update included (pull)."""
        self.wait()
        return {'steps': self._steps, **{f'{key}_seconds': value for key, value in self._seconds.items()}}

    @property
    def grad_norm(self):
        self.wait()
        return self._grad_norm

    @property
    def last_step_skipped(self):
        self.wait()
        return self._last_step_skipped

    def _is_under_way(self):
        return self._overlap is not None and self._overlap.is_under_way

    def wait(self):
        """With overlap: returns when the last step has ended and every parameter holds its version. Raises what it raised."""
        if self._overlap is not None:
            self._overlap.wait()

    def zero_grad(self, set_to_none=True):
        if not set_to_none:
            self.wait()  # the step reads them
        if self._early is not None:
            self._early.discard()
        super().zero_grad(set_to_none)

    def step(self, closure=None, *, blob=b''):
        """torch's step. blob: of the caller, at most 60000 bytes (a data cursor, random states), kept with the step:
        resume() gives the last one back."""
        if not isinstance(blob, bytes):
            raise TypeError(f'step(blob={type(blob).__name__}): expected bytes, such as json.dumps(...).encode()')
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step(blob)
        return loss

    def _step(self, blob):
        if self._session is None:
            self._open(for_step=True)
        exchange = self._exchange('step()')
        if self._options.world_size > 1:
            collected, edited, present = agree(exchange, self._collect)
        else:
            collected = self._collect()
            edited, present = collected.edited, collected.present
        collected.settle()
        if self._early is not None and (collected.fresh or not self._early.stands(collected.gradients)):
            self._early.withdraw()
        self._register(collected.fresh, exchange)
        changed = [member for member, is_edited in zip(self._members, edited) if is_edited]
        check_values(exchange, changed)
        for member in changed:
            self._take_edit(member, exchange)
        written = self._session.written
        changes = {i for i, member in enumerate(self._members) if present[i] or member.name in written}
        step = Step(self, collected, changes, self._gradient_scale, blob)
        if self._overlap is not None:
            return self._overlap.start(step, self._members, collected.gradients)
        try:
            step.run()
        finally:
            step.end()

    def _took(self, report, gradients, scaled):
        for key in self._seconds:
            self._seconds[key] += getattr(report, f'{key}_seconds')
        self._grad_norm = report.norm
        self._last_step_skipped = report.skipped
        if not report.skipped:
            self._skips = 0
        elif not scaled:
            self._warn_skipped(gradients)

    def _new_tensors(self, trained=()):
        """Of the open job."""
        fresh = new_tensors(self, trained)
        if fresh and self._options.durability == 'every-K':
            raise Error(f"parameter '{fresh[0][0].name}' came after the first step, and a job with durability='every-K' has all of its "
                        'tensors from the start: its kept versions would have no state of it', 'UNSUPPORTED')
        return fresh

    def _check_dtypes(self, members, gradients):
        """Refuses what would be rounded: a job keeps one dtype of parameters and one of gradients."""
        spec = self._options.optimizer
        for member, gradient in zip(members, gradients):
            dtype = member.parameter.dtype
            if spec.working not in ('f32', DTYPES.get(dtype)):
                raise Error(f"parameter '{member.name}' is {dtype}, the job's are {spec.working}: it would be rounded; give all parameters to "
                            'the optimizer before the first step, and change their dtype before it', 'BAD_DTYPE')
            if gradient is not None and spec.gradient not in ('f32', DTYPES.get(gradient.dtype)):
                raise Error(f"parameter '{member.name}' has a gradient of {gradient.dtype}, the job's are {spec.gradient}: it would be rounded; "
                            'leave grad_dtype as it is, or keep parameters in float32 and compute under autocast', 'BAD_DTYPE')

    def _collect(self):
        self._open(for_step=True)
        self._last_step_skipped = False
        if self._overlap is not None:
            self._overlap.check(self)
        fresh = self._new_tensors()
        members = self._members + [member for member, _, _ in fresh]
        there = {id(parameter) for _, _, parameter in placed(self)}
        gradients = [gradient_of(member) if id(member.parameter) in there else None for member in members]
        edited = [member.edited() for member in members]
        self._check_dtypes(members, gradients)
        job_spec.check(self, self._options.optimizer)
        groups = [self._hyper(group) for group in self.param_groups]
        groups += groups[:1] * (self._options.group_count - len(groups))
        compared = checked(members, self._steps, self._debug) if self._options.world_size > 1 else []
        return Collected(fresh, members, gradients, edited, groups, compared)

    def _register(self, fresh, exchange):
        """All ranks, the same ones."""
        if not fresh:
            return
        check_values(exchange, [member for member, _, _ in fresh])
        self._commit_written()
        self._session.register([tensor for _, _, tensor in fresh])
        self._members.extend(member for member, _, _ in fresh)
        self._session.initialise(together(exchange, lambda: Memory(self._members, self._host).wait()).parameters)

    def _warn_skipped(self, gradients):
        names = [member.name for member, gradient in zip(self._members, gradients)
                 if gradient is not None and not bool(torch.isfinite(gradient).all())]
        self._skips += 1
        what = f"the gradient of '{names[0]}'" if names else 'a gradient'
        text = f'{what} is not finite: the step was skipped, nothing was updated (step {self._steps}, {self._skips} in a row)'
        if self._skips >= _SKIPS_MAX:
            raise Error(f'{text}; lower the learning rate or look at the data', 'BAD_REQUEST')
        warn(text)

    def close(self):
        """Ends the session. A durable job stays on its servers; another's memory on the embedded one is given back."""
        self._closed = True
        try:
            if self._early is not None:
                self._early.close()
            self.wait()
        finally:
            self._connection.close()  # a thread amid a step finds the session closed
            self._members, self._by_parameter, self._host = [], {}, HostMemory()
