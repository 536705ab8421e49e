"""One call of step(), from gradients to parameters; and the same beside the training loop."""

import atexit
import concurrent.futures
import contextlib
import threading
import weakref

import torch

from ballast.errors import Error
from ballast.torch.host_memory import current_streams, on_streams
from ballast.torch.members import Memory, is_sharded, local
from ballast.torch.modes import plainly
from ballast.torch.naming import unit_of
from ballast.torch.registration import placed


_GRACE_SECONDS = 2.0


class Step:
    """run() may be on any thread. land() and end() are the training loop's, since they touch parameters as autograd sees them."""

    def __init__(self, optimizer, collected, changes, scale, blob):
        """changes: members, by index, whose parameters it may change. Those of others are left alone."""
        self._optimizer, self._collected, self._changes, self._scale, self._blob = optimizer, collected, changes, scale, blob
        # The optimizer's are others when another thread closes it, or registers more.
        self._session, self._members = optimizer._session, optimizer._members
        self._before = self._session.version
        early = optimizer._early
        self._memory = Memory(self._members, optimizer._host, collected.gradients, early.there if early is not None else frozenset())
        self._streams = current_streams(local(member.parameter) for member in self._members)
        self._landed = set()
        self._report = None
        self._sent = early.take() if early is not None else None

    def run(self, ready=None):
        """ready(indices): parameters of some members hold the new version, and their gradients are not read any more."""
        optimizer, collected = self._optimizer, self._collected
        try:
            memory = self._memory.wait()
            if ready is None and memory.is_copied:
                ready = self._land_unit
            self._report = self._session.step(
                memory.gradients, memory.parameters, collected.groups, 1.0 if self._scale is None else self._scale, optimizer._max_norm,
                blob=optimizer._pack_blob(optimizer._steps + 1, self._blob), ready=ready)
        except BaseException:
            self.give_up()
            raise

    def give_up(self):
        """Of a step that was not made: no later one takes what was pushed early for it."""
        if self._sent:
            with contextlib.suppress(Error):  # the session is over, and has let go of them
                self._session.drop()

    # While the loop waits in run(): a unit's parameters are on their way to the GPU as the next ones are updated.
    def _land_unit(self, indices):
        with on_streams(self._streams):
            self.land(set(indices))

    def interrupt(self):
        self._session.interrupt()

    def land(self, indices):
        """Parameters of these members, by index, hold the new version."""
        for i in (indices & self._changes) - self._landed:
            self._memory.write_back(i)
            self._optimizer._wrote(self._members[i])
        self._landed |= indices

    def end(self):
        """After run(), whatever it raised."""
        optimizer = self._optimizer
        # Also where an error came after it was decided: the job has made that step.
        if self._session.version > self._before:
            optimizer._steps, optimizer._blob = optimizer._steps + 1, self._blob
            if self._report is None:
                optimizer._unpulled = True  # parameters may be of either version
            elif not self._report.skipped:
                self.land(set(range(len(self._members))))
        if self._report is not None:
            optimizer._took(self._report, self._collected.gradients, scaled=self._scale is not None)


class Overlap:
    """Steps on a thread of their own, while the training loop goes on: forward passes of `model` and its state_dict wait for the
    parameters that they read. Threads: the training loop's, but _ready."""

    def __init__(self, model):
        if not isinstance(model, torch.nn.Module):
            raise Error(f'overlap={type(model).__name__}: expected the model whose forward passes wait for parameters', 'BAD_CONFIG')
        self._model = model
        self._pool = None
        self._step = self._future = None
        self._changed = threading.Condition()
        self._ready_members = set()  # of the step under way, by index
        self._gradients = []
        self._needs, self._needs_of = {}, []
        self._hooked = weakref.WeakSet()
        self._hook()

    def _hook(self):
        fresh = [module for module in self._model.modules() if module not in self._hooked]
        for module in fresh:
            module.register_forward_pre_hook(_Hook(self, forward=True), prepend=True)
            module.register_state_dict_pre_hook(_Hook(self, forward=False))
        self._hooked.update(fresh)
        if fresh:
            torch.compiler.reset()  # functions that were compiled when these modules had no hooks would go on without

    def check(self, optimizer):
        """Refuses what hooks of modules do not see. Before start()."""
        for name, module in self._model.named_modules():
            if hasattr(module, '_orig_mod') or getattr(module, '_compiled_call_impl', None) is not None:
                raise Error(f"overlap: module '{name}' is compiled, and runs without the hooks that wait for parameters; leave overlap "
                            'or compile out', 'UNSUPPORTED')
        self._hook()
        seen = {id(parameter) for parameter in self._model.parameters()}
        for g, i, parameter in placed(optimizer):
            if is_sharded(parameter):
                raise Error('overlap: parameters are DTensors, which fully_shard gathers before any hook of ours; leave overlap out',
                            'UNSUPPORTED')
            if id(parameter) not in seen:
                raise Error(f'overlap: parameter {i} of group {g} is not one of the model: nothing would wait for it', 'BAD_CONFIG')

    def start(self, step, members, gradients):
        """What wait() has been called before."""
        if self._needs_of != members:
            self._needs, self._needs_of = _needs(self._model, members), list(members)
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, 'ballast-step')
            atexit.register(_end_of_process, weakref.ref(self))
        self._gradients = [None if gradient is None else (gradient, gradient._version) for gradient in gradients]
        self._ready_members = set()
        try:
            self._future = self._pool.submit(step.run, self._ready)
        except BaseException:
            step.give_up()
            raise
        self._step = step
        self._future.add_done_callback(lambda _: self._ready(()))

    @property
    def is_under_way(self):
        return self._step is not None

    def _ready(self, indices):
        with self._changed:
            self._ready_members.update(indices)
            self._changed.notify_all()

    def before_forward(self, module):
        if self._step is None:
            return
        needed = self._needs.get(module, set())
        self._await(lambda: needed <= self._ready_members)
        if self._step is None:
            return  # a signal's handler has waited
        if needed <= self._ready_members:
            self._land(needed)
        else:
            self.wait()

    def _await(self, enough):
        """Until the step has ended, or that. As a call of the session does, Ctrl-C leaves it two seconds, then ends the session."""
        future = self._future
        def over():
            return future.done() or enough()
        with self._changed:
            try:
                self._changed.wait_for(over)
            except BaseException:
                if not self._changed.wait_for(over, _GRACE_SECONDS):
                    self._step.interrupt()
                raise

    def _land(self, indices):
        self._step.land(indices)
        for i in indices:
            gradient, self._gradients[i] = self._gradients[i], None
            if gradient is not None and gradient[0]._version != gradient[1]:
                raise Error(f"the gradient of parameter '{self._needs_of[i].name}' was changed while the step read it, which may have "
                            'spoiled the update: with overlap, set gradients to None (zero_grad() does), or call wait() first',
                            'BAD_REQUEST')

    def wait(self):
        """Until the step under way has ended. Raises what it raised."""
        if self._step is None:
            return
        step, future, ready = self._step, self._future, self._ready_members
        self._await(lambda: False)
        if self._step is not step:
            return  # a signal's handler has waited
        try:
            self._land(set(ready))
        except Error as error:
            raise future.exception() or error  # the step's own comes first
        finally:
            self._step = self._future = None
            step.end()
        future.result()


class _Hook:
    """A copy of the model has a hook that does nothing."""

    def __init__(self, overlap=None, forward=True):
        self._overlap, self._forward = None if overlap is None else weakref.ref(overlap), forward

    @plainly
    def __call__(self, module, *_):
        overlap = None if self._overlap is None else self._overlap()
        if overlap is not None:
            overlap.before_forward(module) if self._forward else overlap.wait()

    def __deepcopy__(self, memo):
        return _Hook()

    def __reduce__(self):
        return _Hook, ()


def _end_of_process(overlap):
    if overlap() is not None:
        overlap().wait()


def _needs(model, members):
    """Of each module, the members that its forward may read, by index: all of a unit's, for a module within the unit; else its own
    parameters, and those of children that have no forward."""
    index = {id(member.parameter): i for i, member in enumerate(members)}
    units = {}
    for i, member in enumerate(members):
        units.setdefault(unit_of(member.name), set()).add(i)

    def own(module):
        found = {index[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in index}
        for child in module.children():
            if type(child).forward is torch.nn.Module.forward:
                found |= own(child)
        return found

    needs = {}
    for module in model.modules():
        everything = {index[id(parameter)] for parameter in module.parameters() if id(parameter) in index}
        within = {unit_of(members[i].name) for i in everything}
        needs[module] = set(units[within.pop()]) if len(within) == 1 else own(module)
    return needs
