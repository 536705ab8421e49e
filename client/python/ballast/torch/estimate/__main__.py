"""Tells what training a model would take, and which call to make. Exit code: 0 it fits, 1 it does not, 2 the question is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ballast.errors import Error
from ballast.torch.estimate import call
from ballast.torch.estimate.job import estimate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='python -m ballast.torch.estimate', description=__doc__)
    parser.add_argument('config', help='a Hugging Face config.json, or the folder that has it; weights are not needed')
    parser.add_argument('--card', help="memory of each rank's accelerator, such as 24GiB; without it ranks compute on CPUs")
    parser.add_argument('--dram', help="a server's budget of memory, such as 64GiB; default: 0.8 of what is free here")
    parser.add_argument('--nvme', help="a server's budget of disk, such as 1TB; default: none")
    parser.add_argument('--ranks', type=int, default=1, help='how many trainers there are (default: 1)')
    parser.add_argument('--servers', type=int, default=0, help='how many named state servers (default: 0, one beside the ranks of a host)')
    parser.add_argument('--optimizer', default='adamw', choices=tuple(call.CLASSES))
    parser.add_argument('--moments', choices=('f32', 'bf16', 'i8', 'f8'), help='default: f32, or i8 if only that fits')
    parser.add_argument('--durability', choices=('step', 'none'), help='default: step with nvme, or none if only that fits')
    parser.add_argument('--dtype', help='float32, bfloat16 or float16; default: that of the configuration')
    parser.add_argument('--directory', help="the server's folder; its machine profile, if there is one, gives the time of a step")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = vars(_parser().parse_args(arguments))
    try:
        told = estimate(given.pop('config'), **given)
    except Error as error:
        print(f'estimate: {error}', file=sys.stderr)
        return 2
    print(told.text)
    return 0 if told.fits else 1


if __name__ == '__main__':
    sys.exit(main())
