"""Chooses how to call ballast.torch for a card's memory, and writes the call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ballast.torch.estimate.model import Layer, Model, Unit
from ballast.torch.estimate.processes import assisting, in_use

# The part of a card that a call may take: activations need the rest.
_SHARE = 7 / 8
_PIECE_MIN = 1 << 20  # elements: smaller tiles would not help, and gathers of them take long
CLASSES = {'adamw': 'AdamW', 'adam': 'Adam', 'sgd': 'SGD', 'adagrad': 'Adagrad', 'lion': 'Lion', 'muon': 'Muon',
           'ademamix': 'AdEMAMix', 'adamw_schedule_free': 'AdamWScheduleFree'}


class Way(NamedTuple):
    """How parameters come to a rank."""
    is_sharded: bool
    units: tuple[Unit, ...]  # with tiles
    tiles: dict[str, int]  # out_tiles, by name of a layer in which * stands for numbers
    short: str  # what does not fit into the card; '': it fits
    text: str  # why


def way(model: Model, ranks: int, card: int | None, is_sharded: bool) -> Way:
    """is_sharded: shard() is asked for. card: bytes; None: ranks have the host's memory, and any way fits."""
    whole = (model.elements + model.trained) * model.width + sum(assisting(model, ranks, False, ranks == 1).values())
    head = f'{model.name}: {model.elements} parameters in {model.dtype}, {_gib(model.elements * model.width)}.'
    if card is None:
        return Way(is_sharded, tuple(model.units), {}, '', head)
    room = int(card * _SHARE)
    if whole <= room and not is_sharded:
        return Way(False, tuple(model.units), {}, '', f'{head}\nParameters and gradients take {_gib(whole)} of the card, which leaves '
                   f'{_gib(card - whole)} for activations.')
    if whole > room:
        head += f'\nParameters and gradients take {_gib(whole)}, and the card has {_gib(card)}: they do not fit beside activations.'
    return _sharded(model, ranks, card, room, head)


def _sharded(model: Model, ranks: int, card: int, room: int, head: str) -> Way:
    if not model.units:
        return Way(True, (), {}, '', head)
    units, tiles = _tiled(model, ranks, room)
    used = _used(model._replace(units=list(units)), ranks)
    largest = max(model.units, key=lambda unit: unit.elements)
    name = f"'{largest.name}'" if largest.name else 'the root, which is all outside of blocks'
    if tiles:
        head += (f'\nThe units of the model are too large for the card; the largest is {name}, with '
                 f'{_gib(largest.elements * model.width)}. TiledLinear cuts {", ".join(tiles)}.')
    if used > room:
        return Way(True, units, tiles, _short(model, units, name, card), head)
    return Way(True, units, tiles, '', f'{head}\nWith shard() a rank takes {_gib(used)} of the card at most, which leaves '
               f'{_gib(card - used)} for activations.')


def _gib(size: int) -> str:
    return f'{size / 2**30:.2f} GiB'


def _used(model: Model, ranks: int) -> int:
    return sum(in_use(model, ranks).values()) + sum(assisting(model, ranks, True, ranks == 1).values())


def _short(model: Model, units: tuple[Unit, ...], name: str, card: int) -> str:
    layer = max((layer for unit in units for layer in unit.layers), key=lambda layer: layer.elements, default=None)
    what = '' if layer is None else (f"; its largest layer that is left whole is '{layer.name}', with "
                                     f'{_gib(layer.elements * model.width)}')
    cut = '' if model.units[0].layers or len(model.units) > 1 else ' Give estimate() a model or a configuration: it then finds the units.'
    return (f'No call fits: the units that a rank has at a time are too large for a card of {_gib(card)}. The largest is {name}{what}. '
            f'Only nn.Linear can be cut. Take a larger card, or a smaller dtype.{cut}')


def _pattern(name: str) -> str:
    """The name that alike layers of all blocks share."""
    return re.sub(r'(?<=\.)\d+(?=\.|$)', '*', name)


def _tiled(model: Model, ranks: int, room: int) -> tuple[tuple[Unit, ...], dict[str, int]]:
    """Returns the units, and how many tiles the layers have, with as few tiles as the room allows: always cuts the largest piece."""
    tiles: dict[str, int] = {}
    units = tuple(model.units)
    linear = {_pattern(layer.name): layer.elements for unit in model.units for layer in unit.layers if layer.is_linear}
    while _used(model._replace(units=list(units)), ranks) > room:
        pieces = {pattern: elements // tiles.get(pattern, 1) for pattern, elements in linear.items()}
        largest = max(pieces, key=lambda pattern: pieces[pattern], default='')
        if not largest or pieces[largest] < _PIECE_MIN:
            break
        tiles[largest] = 2 * tiles.get(largest, 1)
        units = tuple(piece for unit in model.units for piece in _cut(unit, tiles))
    return units, tiles


def _cut(unit: Unit, tiles: Mapping[str, int]) -> list[Unit]:
    """Returns the rest of the unit, and the tiles of its layers."""
    share = unit.trained / max(unit.elements, 1)
    rest: list[Layer] = []
    pieces: list[Unit] = []
    for layer in unit.layers:
        count = tiles.get(_pattern(layer.name), 1) if layer.is_linear else 1
        if count == 1:
            rest.append(layer)
            continue
        size = -(-layer.elements // count)
        pieces += [Unit(f'{layer.name}.tiles.{i}', size, int(size * share), (), unit.is_expert) for i in range(count)]
    elements = sum(layer.elements for layer in rest)
    return [Unit(unit.name, elements, int(elements * share), tuple(rest), unit.is_expert), *pieces]


def lines(asked: Mapping[str, Any], way: Way) -> str:
    """Returns the Python that makes the job. asked: arguments of estimate()."""
    made = ['model = ballast.torch.split_experts(model)'] if asked['splits'] else []
    made += _cutting(way.tiles) if way.tiles else []
    if way.is_sharded:
        arguments = {'weights': None, 'prefetch_bytes': 256 << 20, 'frozen': 'working', 'working': None}
        made.append(f'model = ballast.torch.shard({", ".join(["model", *_given(asked, arguments)])})')
    return '\n'.join([*made, _optimizer(asked)])


def _optimizer(asked: Mapping[str, Any]) -> str:
    kind = CLASSES[asked['optimizer']]
    more = {'moments': 'f32', 'amsgrad': False, 'master': 'f32', 'pin_interval': 0, 'chunk_elements': 1 << 20}
    if kind == 'AdamW' and asked['moments'] == 'i8':
        kind, more['moments'] = 'AdamW8bit', 'i8'
    given = ['lr=1e-4', *['momentum=0.9'][:asked['momentum']], *_given(asked, more)]
    lasts = asked['servers'] > 0 or asked['directory'] is not None
    if asked['servers']:
        given.append(f'servers={",".join(f"host{i}:7070" for i in range(1, asked["servers"] + 1))!r}')
    else:
        given += _given(asked, dict.fromkeys(('directory', 'dram', 'nvme')))
    given += _given(asked, {'durability': 'step' if lasts else 'none'}) if asked['durability'] else []
    params = 'ballast.torch.muon_groups(model)' if kind == 'Muon' else 'model.named_parameters()'
    return f'optimizer = ballast.torch.{kind}({params}, {", ".join(given)})'


def _given(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that differ from their defaults."""
    return [f'{key}={asked[key]!r}' for key, default in defaults.items() if asked[key] != default]


def _cutting(tiles: Mapping[str, int]) -> list[str]:
    """Returns the lines that replace layers by tiles."""
    def expression(pattern: str) -> str:
        return r'\.'.join(r'\d+' if part == '*' else part for part in pattern.split('.'))
    which = ', '.join(f"r'{expression(pattern)}': {count}" for pattern, count in tiles.items())
    return ['import re', f'for pattern, tiles in {{{which}}}.items():',
            '    for name in [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]:',
            '        model.set_submodule(name, ballast.torch.TiledLinear.of(model.get_submodule(name), out_tiles=tiles))']


def shown(lines: str, asked: Mapping[str, Any], way: Way) -> str:
    """Returns the call, and how to start it, for people."""
    ranks, servers = asked['ranks'], asked['servers']
    start = ''
    if servers:
        nvme = '' if asked['nvme'] is None else f' --budget.nvme {asked["nvme"]}'
        start = f'Start each server as: ballastd --budget.dram {asked["dram"]}{nvme} --data_directory DIRECTORY --listen HOST:7070\n'
    if way.is_sharded and asked['weights'] is not None:
        start += ('Make the model within torch.device(\'meta\'): shard() reads its weights, tensor by tensor, from safetensors in this '
                  'folder.\n')
    if asked['splits']:
        start += ('Read weights by from_pretrained() before split_experts(): shard(weights=) does not read what transformers stacks.\n')
    if ranks > 1 or way.is_sharded:
        start += ('Start the script by torchrun, and call torch.distributed.init_process_group() first: '
                  f'torchrun --nproc-per-node {ranks} SCRIPT\n')
    indented = '\n'.join(f'    {line}' for line in lines.splitlines())
    return f'It fits. The call:\n\n{indented}\n\n{start}'
