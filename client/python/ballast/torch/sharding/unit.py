"""Parameters that FSDP2 gathers together. One pull brings this rank's parts of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ballast.errors import Error
from ballast.torch.sharding.coded import Coded
from ballast.torch.sharding.model import Model
from ballast.torch.tensors.remote import Part

if TYPE_CHECKING:
    from ballast.torch.sharding.wrapped import Wrapped


class Gathers(Protocol):
    """What gathers a unit. See collectives.Gather."""

    @property
    def has_second(self) -> bool: ...


class Unit:
    """A unit, and the Home of its parts. Threads: one at a time, as FSDP2 gathers."""

    def __init__(self, name: str, parts: Sequence[Part], device: torch.device, model: Model, pull: Callable[[Unit], list[torch.Tensor]],
                 modules: Sequence[Wrapped], known: Mapping[Part, Any], groups: Sequence[Any]) -> None:
        """device: where gathers take place. pull(unit): returns its pieces, by part, at the job's version. modules: those that fully_shard
        has wrapped together. known, groups: FSDP2's objects, for each parameter and for all of them."""
        self.name, self.parts, self.device, self.model = name, list(parts), device, model
        self.modules, self.known, self.groups = list(modules), dict(known), list(groups)
        self._pull = pull
        self.is_expert = False  # a pass gathers it only if tokens reach it
        self.alike: Sequence[Unit] = ()  # of an expert: all of its list
        self.gathers = 0  # so far: the same on all ranks that gather together
        self._gathered_at: object = None  # Sharded.now() of the last pull
        self._pieces: dict[Part, torch.Tensor] = {}  # of the pull that is being taken, until its gather has them
        self._asked: dict[Part, None] = {}  # by the gather that is being prepared, in its order
        self.coded: Coded | None = None  # servers send blocks of 8 bits
        self._coded: torch.Tensor | None = None  # this rank's bytes, on the device, from a gather's first part on
        self.gather: Gathers | None = None  # None: FSDP2's own, which nothing can replace where a unit has several meshes
        self._lent: list[tuple[Any, Any, Any]] = []  # groups, and what FSDP2 has in them otherwise
        for part in self.parts:
            part.home = self

    @property
    def frozen(self) -> str:
        return self.model.frozen

    @property
    def how(self) -> str:
        return self.model.how

    @property
    def working(self) -> str:
        return self.model.working

    def initial(self, part: Part) -> torch.Tensor:
        return self.model.values.of(part, self.parts)

    def initial_digest(self, part: Part) -> int:
        return self.model.values.digest(part, self.parts)

    def wants_gradient(self, part: Part) -> bool:
        return self.model.parameters[part].requires_grad

    @property
    def is_stale(self) -> bool:
        """What was gathered last is not the job's version."""
        return self._gathered_at is not None and self._gathered_at != self.model.now()

    @property
    def is_pinned(self) -> bool:
        """Pulls go into page-locked memory, on their way to a GPU."""
        return self.device.type == 'cuda'

    @property
    def ranks(self) -> int:
        """How many ranks gather it and reduce its gradients together."""
        return max(int(group.mesh_info.mesh.size()) for group in self.groups)

    def bytes(self, width: int) -> int:
        """Returns the bytes of one pull. width: the bytes of an element, unless servers send blocks."""
        return self.coded.bytes if self.coded is not None else width * sum(part.padded.numel() for part in self.parts)

    def pieces(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Divides memory of the host, for one pull, into a padded piece for each part. Pieces are zero behind the part's elements."""
        pieces = list(memory.split([part.padded.numel() for part in self.parts]))
        for part, piece in zip(self.parts, pieces):
            piece[part.elements:].zero_()
        return pieces

    def take(self, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Returns the part at the job's version, in its padded shape. The first part that a gather takes pulls all parts."""
        with torch.inference_mode(False), torch.no_grad():
            if not self._asked or part in self._asked:
                self._asked = {}
                self.gathers += 1
                self._coded = None
            self._asked[part] = None
            if self.gather is not None and self.gather.has_second:
                return torch.empty(part.padded, dtype=dtype, device=self.device)  # which the gather does not read
            if self.coded is not None:
                return self._take_coded(self.coded, part, dtype)
            if part not in self._pieces or self._gathered_at != self.model.now():
                self._pieces = dict(zip(self.parts, self._pull(self)))
                self._gathered_at = self.model.now()
            piece = self._pieces.pop(part)
            return piece.to(self.device, non_blocking=True).to(dtype).view(part.padded)

    def _take_coded(self, coded: Coded, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """Pulls the unit's bytes. The gather decodes those of all ranks; without others, the part is decoded here."""
        if self._coded is None:
            self._gathered_at = self.model.now()
            self._coded = self._pull(self)[0].to(self.device, non_blocking=True)
        taken = torch.empty(part.padded, dtype=dtype, device=self.device)
        if coded.ranks == 1:
            coded.values(part, self._coded.view(1, -1), taken.view(1, -1))
            if len(self._asked) == len(self.parts):
                self._coded = None
        return taken

    @property
    def brought(self) -> torch.Tensor | None:
        """This rank's bytes of the gather that has asked for all parts. None: the gather has values, not blocks of 8 bits."""
        return None if self.coded is None or self.coded.ranks == 1 else self._coded

    def decode(self, came: torch.Tensor, output: torch.Tensor) -> None:
        """Fills a gather's output [ranks, elements of all parts, padded], from the bytes [ranks, bytes] that ranks brought."""
        assert self.coded is not None
        parts = list(self._asked)
        for part, to in zip(parts, output.split([part.padded.numel() for part in parts], 1)):
            self.coded.values(part, came, to)
        self._coded = None

    # --- the parameters in the trainer's modules

    def reshard(self) -> None:
        for module in self.modules:
            module.reshard()

    @property
    def is_gathered(self) -> bool:
        return any(group.is_unsharded for group in self.groups)

    @property
    def needs_gather(self) -> bool:
        """A pass that begins with it now gathers it. Backward, which computes a block again, may have gathered it ahead."""
        under_way = any(getattr(group, '_all_gather_result', None) is not None for group in self.groups)
        return self.is_stale or not (self.is_gathered or under_way)

    def hide(self) -> None:
        """Gives modules Remotes while gathered parameters stay in memory for the next pass, because a write to gathered ones would be
        lost."""
        if self.is_gathered:
            for part, known in self.known.items():
                known._setattr_on_modules(self.model.parameters[part])

    def show(self) -> None:
        """Gives modules the parameters that FSDP2 expects them to have."""
        if self.is_gathered:
            for part, known in self.known.items():
                part.requires_grad = self.model.parameters[part].requires_grad
                known.to_unsharded()

    def note(self) -> None:
        """Notes that what was gathered is as FSDP2 wrote it."""
        for part, known in self.known.items():
            whole = _whole(known)
            if part.version is None and whole is not None:
                part.version = _version(whole)

    @property
    def has_gradients(self) -> bool:
        return any(self.model.parameters[part].grad is not None or known.unsharded_accumulated_grad is not None or
                   getattr(_whole(known), 'grad', None) is not None for part, known in self.known.items())

    def forget_whole_gradients(self) -> None:
        """Drops gradients that were not reduced."""
        for known in self.known.values():
            known.unsharded_accumulated_grad = None
            whole = _whole(known)
            if whole is not None:
                whole.grad = None

    def check(self, model: nn.Module | None = None, inside: Collection[nn.Module] = ()) -> None:
        """Refuses changes that would be lost: another Parameter in a parameter's place, or a write to gathered values. The error names the
        parameter, which is in its place again. A requires_grad that was set on a gathered one becomes the parameter's. model: also checks
        that the parameter's module is still in it. inside: all of its modules."""
        for part, known in self.known.items():
            parameter, whole = self.model.parameters[part], _whole(known)
            for module, path, leaf in self.model.places[part]:
                now = module._parameters.get(leaf)
                if now is None or (now is not parameter and now is not whole):
                    self._put_back(part, module, leaf)
                    raise part.lost('it was taken out of its module' if now is None else 'another Parameter took its place')
                if model is not None and module not in inside:
                    parent, _, name = path.rpartition('.')
                    with contextlib.suppress(AttributeError):  # others may have wrapped modules since
                        model.get_submodule(parent)._modules[name] = module
                    raise part.lost(f"module '{path}' was replaced or taken out")
            if whole is not None:
                self._check_gathered(part, known, whole)

    def _put_back(self, part: Part, module: nn.Module, leaf: str) -> None:
        parameter = self.model.parameters[part]
        module._parameters[leaf] = parameter
        for other in [other for other, there in module._parameters.items() if there is parameter]:
            if all((module, other) != (place[0], place[2]) for place in self.model.places[part]):
                del module._parameters[other]  # as torch.nn.utils.prune gives it another name

    def _check_gathered(self, part: Part, known: Any, whole: nn.Parameter) -> None:
        is_moved = _memory(whole).untyped_storage()._cdata != known._unsharded_inner_tensors[0].untyped_storage()._cdata
        if is_moved or part.version not in (None, _version(whole)):
            part.version = None
            self.reshard()
            del known._unsharded_param  # the next gather makes another
            raise part.lost('its gathered values were written to')
        if self.is_gathered and whole.requires_grad != part.requires_grad:
            self.model.parameters[part].requires_grad_(whole.requires_grad)

    # --- within gathered()

    @property
    def has_copies(self) -> bool:
        return any(part in self.model.copies for part in self.parts)

    def lend(self) -> None:
        """Lets a forward pass use the copies, by making FSDP2 believe that it has gathered them."""
        copies = self.model.copies
        for part in self.parts:
            copy = copies.get(part)
            if copy is None:
                what = f"'{part.name}', which is gathered with them, is not among the copies: give gathered() the model"
            elif self.device.type != 'cpu' or part.gathered != copy.dtype:
                what = f'passes compute in {part.gathered} on {self.device}, and the copies are {copy.dtype} on the host'
            elif torch.is_grad_enabled() and copy.requires_grad:
                what = 'no step takes gradients of copies: use torch.no_grad()'
            else:
                continue
            raise Error(f"a forward pass within gathered(), with copies of parameters such as '{self.parts[0].name}': {what}; or run the "
                        'pass outside, where FSDP2 gathers for it', 'UNSUPPORTED')
        for group in self.groups:
            self._lent.append((group, group._sharded_state, group.post_forward_mesh_info))
            group._sharded_state, group.post_forward_mesh_info = type(group._sharded_state).UNSHARDED, None

    def take_back(self) -> None:
        for group, state, mesh in self._lent:
            group._sharded_state, group.post_forward_mesh_info = state, mesh
        self._lent = []


def _whole(known: Any) -> nn.Parameter | None:
    """Returns FSDP2's gathered parameter, which it makes at the first gather and fills again at each."""
    return getattr(known, '_unsharded_param', None)


def _memory(whole: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a gathered parameter. With tensor parallelism it is still a DTensor."""
    return getattr(whole, '_local_tensor', whole)


def _version(whole: torch.Tensor) -> int:
    memory = _memory(whole)
    return whole._version + (0 if memory is whole else memory._version)

