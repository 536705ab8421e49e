"""Tensors without memory: this rank's part of a parameter that lives on the servers, and of a gradient that has gone there."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from ballast.errors import Error

aten = torch.ops.aten
Tensor = TypeVar('Tensor', bound=torch.Tensor)


class Home(Protocol):
    """What the tensor of a part needs to know of its unit, which it is gathered with, and of its model."""

    @property
    def frozen(self) -> str:
        """What servers keep of parameters that want no gradient. '': their state."""

    @property
    def working(self) -> str:
        """The working dtype that servers send. '': that of gathers."""

    @property
    def how(self) -> str:
        """A text of what must be alike on all ranks."""

    def initial(self, part: Part) -> torch.Tensor:
        """Returns the values that a new job starts with."""

    def initial_digest(self, part: Part) -> int:
        """Returns what the values of all ranks that have this part must have alike."""

    def take(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Returns the part for the gather that is beginning."""

    def wants_gradient(self, part: Part) -> bool: ...


class Part:
    """This rank's part of one parameter: a box of its elements."""

    def __init__(self, name: str, shape: Sequence[int], box: Sequence[tuple[int, int]], padded: Sequence[int], gathered: torch.dtype,
                 ranks: Sequence[int]) -> None:
        """shape: of the whole parameter. box: (begin, end) of each dimension. padded: the shape that FSDP2 gathers from every rank, which
        may have more rows. gathered: the dtype of gathers. ranks: all ranks that have parts of the parameter."""
        self.name, self.shape, self.gathered, self.ranks = name, torch.Size(shape), gathered, frozenset(ranks)
        self.padded = torch.Size(padded)
        self.box = tuple(box)
        self.elements = math.prod(end - begin for begin, end in box)
        self._home: Home | None = None
        self.requires_grad = True  # of the parameter, at its last gather
        self.version: int | None = None  # of the gathered parameter's memory, which no gather moves; None: there was no gather

    @property
    def home(self) -> Home:
        """The part's Home. Each part has one once shard() has made all units."""
        if self._home is None:
            raise self.refuse('a use before shard() has ended')
        return self._home

    @home.setter
    def home(self, home: Home) -> None:
        self._home = home

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this part of the whole parameter, contiguous, in memory of its own."""
        return whole.detach()[tuple(slice(begin, end) for begin, end in self.box)].clone(memory_format=torch.contiguous_format)

    def refuse(self, operation: str) -> Error:
        return Error(f"parameter '{self.name}' lives on Ballast's servers and has no memory here, which {operation} needs. Read it within "
                     'ballast.torch.gathered(model), and write it through the optimizer. dtype and device are fixed before shard(), and '
                     'CPUOffloadPolicy has nothing to offload', 'UNSUPPORTED')

    def lost(self, what: str) -> Error:
        """Returns the error for a change that the servers do not see. what: happened to the parameter in the trainer."""
        return Error(f"parameter '{self.name}' lives on Ballast's servers, and {what} since shard(). The servers do not know of that, and "
                     "the next gather would undo it. Write values within ballast.torch.gathered(model, write=True), or by the model's "
                     'load_state_dict(). Make other modules and shapes before shard()', 'UNSUPPORTED')


class GoneGradient:
    """Stands in for a gradient that was pushed in backward. digest, sketch: of the gradient, if replicas compare it in this step; else
    None."""

    def __init__(self, name: str, digest: int | None, sketch: list[float] | None) -> None:
        self.name, self.digest, self.sketch = name, digest, sketch

    def refuse(self, operation: str) -> Error:
        pipeline = 'With a pipeline, give its schedule scale_grads=False and divide the loss. ' if operation.startswith('aten.div_') else ''
        return Error(f"the gradient of parameter '{self.name}' has gone to Ballast's servers in backward, but {operation} needs it here. "
                     f'{pipeline}Clip by max_norm= of the optimizer, scale by LossScaler, tell shard(backwards=) how many backward passes '
                     'with gradient sync a step has, or keep gradients in the trainer by shard(push_early=False)', 'UNSUPPORTED')


class Remote(torch.Tensor):
    """A tensor with shape, dtype and device, but no memory. Reads and writes raise an error that names the parameter. of: what it stands
    for."""

    of: Part | GoneGradient

    @staticmethod
    def __new__(cls, of: Part | GoneGradient, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Remote:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.of = of
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch hides its own signature
        return f"Remote('{self.of.name}', {list(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        """torch returns 0 for every such tensor, and Accelerate, for example, would take all of them for one."""
        raise self.of.refuse('its address')

    def __deepcopy__(self, memo: Any) -> Remote:
        raise self.of.refuse('a copy')

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.of.refuse('a copy')

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as a method of objects
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allows what FSDP2 does with a shard when it pads and wraps it, since that changes only shapes."""
        operation, tensor = func, args[0]
        if isinstance(tensor, Remote):
            shape = _shape_after(operation, tensor, args[1:])
            if shape is not None:
                return cls(tensor.of, shape, tensor.dtype, tensor.device)
            if operation is aten.copy_.default and isinstance(args[1], Remote) and args[1].of is tensor.of:
                return tensor
        remote = next(each for each in _flat((args, kwargs or {})) if isinstance(each, Remote))
        raise remote.of.refuse(str(operation))

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any,
                            mp_policy: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        """FSDP2's extension. Returns the part that this rank brings to the gather, padded."""
        if not isinstance(self.of, Part):
            raise self.of.refuse('a gather')
        self.of.requires_grad = self.of.home.wants_gradient(self.of)
        return (self.of.home.take(self.of, mp_policy.param_dtype or self.dtype),), None

    def fsdp_post_all_gather(self, gathered: tuple[torch.Tensor, ...], metadata: None, param_dtype: torch.dtype, *,
                             out: torch.Tensor | None = None) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """FSDP2's extension. The gathered parts are the parameter."""
        return None if out is not None else (gathered[0], (gathered[0],))


def named(tensor: Tensor) -> Tensor:
    """Makes a DTensor over a Remote refuse, by name, what its local tensor does not see, and what DTensors refuse without a name."""
    tensor.__class__ = _named_class()
    return tensor


@functools.cache
def _named_class() -> type:
    from torch.distributed.tensor import DTensor

    class RemoteDTensor(DTensor):
        __slots__ = ()

        @property
        def data(self) -> torch.Tensor:
            return named(super().data)

        @data.setter
        def data(self, _: torch.Tensor) -> None:
            raise _refused(self, 'an assignment to .data')  # it would change nothing

        def untyped_storage(self) -> Any:
            raise _refused(self, 'its storage')  # it has a size and no memory: a write ends the process

        def __deepcopy__(self, memo: Any) -> torch.Tensor:
            raise _refused(self, 'a copy')

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise _refused(self, 'a copy')

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # as Remote's
                cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
            dispatch: Any = super().__torch_dispatch__
            try:
                return dispatch(operation, types, args, kwargs or {})
            except Error:
                raise
            except (RuntimeError, NotImplementedError) as error:
                remote = next((each for each in _flat((args, kwargs or {})) if remote_of(each) is not None), None)
                of = remote_of(remote)
                if of is None:
                    raise
                raise of.refuse(str(operation)) from error
    return RemoteDTensor


def _refused(tensor: torch.Tensor, operation: str) -> Error:
    of = remote_of(tensor)
    return Error(f'{operation} of a tensor without memory', 'UNSUPPORTED') if of is None else of.refuse(operation)


def _flat(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        return [leaf for each in tree for leaf in _flat(each)]
    return _flat(list(tree.values())) if isinstance(tree, dict) else [tree]


def _shape_after(operation: Any, tensor: Remote, rest: Sequence[Sequence[int]]) -> Sequence[int] | None:
    """Returns the shape that an operation gives, if it needs no elements. None: it needs them."""
    if operation in (aten.detach.default, aten.alias.default):
        return tensor.shape
    if operation is aten.view.default:
        return [tensor.numel()] if list(rest[0]) == [-1] else rest[0]
    if operation is aten.new_zeros.default:
        return rest[0]
    if operation is aten.slice.Tensor:
        given: list[Any] = [*rest, *(0, 0, None, 1)[len(rest):]]
        dim, start, end, step = given
        cut = list(tensor.shape)
        cut[dim] = len(range(*slice(start, end, step).indices(cut[dim])))
        return cut
    return None


def working_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which the trainer wants a parameter. Gathers of a sharded one may have a smaller dtype than its own."""
    part = part_of(parameter)
    return parameter.dtype if part is None else part.gathered


def is_coded(parameter: torch.Tensor) -> bool:
    """Servers send the parameter in blocks of 8 bits ('f8'), and gathers decode them."""
    part = part_of(parameter)
    return part is not None and part.home.working != ''


def part_of(parameter: torch.Tensor | None) -> Part | None:
    """Returns what a parameter, or its local part, stands for. None: it has memory of its own."""
    of = remote_of(parameter)
    return of if isinstance(of, Part) else None


def gone_of(gradient: torch.Tensor | None) -> GoneGradient | None:
    """Returns what a gradient, or its local part, stands for. None: it is here."""
    of = remote_of(gradient)
    return of if isinstance(of, GoneGradient) else None


def remote_of(tensor: torch.Tensor | None) -> Part | GoneGradient | None:
    """Returns what a parameter, a gradient or its local part stands for. None: it has memory of its own."""
    memory = getattr(tensor, '_local_tensor', tensor)
    return memory.of if isinstance(memory, Remote) else None
