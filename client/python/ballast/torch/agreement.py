"""What ranks tell each other before a step: what is wrong, which tensors are new, which have gradients, which were edited."""

import hashlib
import json
from typing import NamedTuple

from ballast.errors import Error

_WRONG, _FINE = b'!', b'.'
_TEXT_MAX = 4096


class Collected(NamedTuple):
    """One rank's side of a step, nothing of it done yet."""
    fresh: list  # of registration.new_tensors
    members: list  # those included
    gradients: list  # by member, None where there is none
    edited: list
    groups: list  # _native.GroupHyper

    @property
    def present(self):
        return [gradient is not None for gradient in self.gradients]

    def new_names(self):
        return hashlib.sha256('\0'.join(member.name for member, _, _ in self.fresh).encode()).digest()


def _describe(error):
    reason = error.reason if isinstance(error, Error) else ''
    text = str(error).removesuffix(f' [{reason}]')
    if not isinstance(error, Error):
        text = f'{type(error).__name__}: {text}'
    return _WRONG + json.dumps({'text': text[:_TEXT_MAX], 'reason': reason}).encode()


def _raise_wrong(said, wrong):
    """Raises what was wrong here, else on the first rank where something was."""
    if wrong is not None:
        raise wrong
    for rank, each in enumerate(said):
        if each.startswith(_WRONG):
            there = json.loads(each[1:])
            raise Error(f"rank {rank}: {there['text']}", there['reason'])


def together(exchange, act, alike):
    """act() on every rank; an error on one is an error on all, and so are results of which alike(result), a text, is not the same."""
    result = wrong = None
    try:
        result = act()
        mine = _FINE + alike(result).encode()
    except Exception as error:  # pylint: disable=broad-except
        wrong, mine = error, _describe(error)
    said = exchange(mine)
    _raise_wrong(said, wrong)
    for rank, each in enumerate(said):
        if each != mine:
            raise Error(f'rank {rank} has {each[1:].decode()}, this one {mine[1:].decode()}; expected the same on all', 'BAD_SPEC')
    return result


def agree(exchange, collect):
    """collect() on every rank, and what any of them says of each member: (collected, edited, present). An error on one is an
    error on all, which would wait for it else. `exchange`: all ranks' bytes for mine."""
    try:
        collected, wrong = collect(), None
        mine = _FINE + collected.new_names() + bytes(collected.edited) + bytes(collected.present)
    except Exception as error:  # pylint: disable=broad-except
        wrong, mine = error, _describe(error)
    said = exchange(mine)
    _raise_wrong(said, wrong)
    for rank, each in enumerate(said):
        if each[:33] != mine[:33]:
            raise Error(f'rank {rank} registers other parameters than this one; expected the same on all: what has a gradient, or '
                        'wants one', 'BAD_SPEC')
    count = len(collected.members)
    flags = [any(bits) for bits in zip(*(each[33:] for each in said))]
    return collected, flags[:count], flags[count:]
