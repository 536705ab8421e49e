#!/usr/bin/env python3
"""Fails on an include against the order of the folders, or on a vendor header outside its room.

Usage: include_order.py ROOT        checks the tree
       include_order.py --self-test ROOT   plants wrong includes, each of which must be found
"""
import os
import re
import sys

# A file belongs to the longest prefix that matches; it may include from these folders.
ALLOWED = {
    'proto/model': ['ballast/v1', 'proto/model', 'kernels'],
    'kernels': ['kernels'],
    'storage/placement': ['storage/placement', 'kernels', 'proto/model'],
    'storage/catalog': ['storage/catalog', 'storage/io', 'proto/model'],
    'storage/io': ['storage/io', 'kernels/cuda/outcome.h', 'proto/model'],
    'storage/log': ['storage/log', 'storage/io', 'kernels', 'proto/model'],
    'storage/tier': ['storage/tier', 'storage/io', 'storage/placement', 'kernels', 'proto/model'],
    'storage': ['storage', 'kernels', 'proto/model', 'ballast/v1'],
    'services/step': ['services/step', 'proto/model', 'ballast/v1'],
    'services/embedded': ['services', 'client/transport.h', 'proto/model', 'ballast/v1'],
    'services': ['services', 'storage', 'kernels', 'proto/model', 'ballast/v1'],
    'client/python': ['client', 'services/embedded', 'services/estimate.h', 'services/state_server.h', 'kernels', 'proto/model', 'ballast/v1'],
    'client': ['client', 'kernels', 'proto/model', 'ballast/v1'],
}

# Vendor headers and the only rooms (path prefixes) that may name them.
ROOMS = [
    (r'cuda|cub/|thrust/', ['kernels/cuda/', 'storage/tier/hbm', 'storage/io/pin', 'client/collective/nccl', 'client/device/']),
    (r'nccl', ['client/collective/nccl']),
    (r'gloo/', ['client/collective/']),
    (r'liburing', ['storage/io/']),
    (r'rocksdb/', ['storage/catalog/']),
    (r'grpcpp/|grpc/|.*\.grpc\.pb\.h', ['services/rpc/', 'services/ctl/', 'client/grpc_']),
    (r'prometheus/', ['services/metrics/']),
    (r'yaml-cpp/', ['services/config/']),
    (r'CLI/', ['services/ballastd', 'services/ctl/', 'client/examples/main']),
    (r'hwy/', ['kernels/cpu/']),
    (r'isa-l|crc\.h', ['kernels/cpu/']),
    (r'cblas|openblas', ['client/examples/']),
]
FOLDERS = ['proto', 'kernels', 'storage', 'services', 'client']
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def check(path, text):
    """Yields 'path:line: message' for every wrong include in `text`."""
    owner = max((p for p in ALLOWED if path.startswith(p + '/')), key=len, default=None)
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        header = match.group(1)
        for pattern, rooms in ROOMS:
            if re.match(pattern, header) and not any(path.startswith(room) for room in rooms):
                yield f'{path}:{number}: <{header}> belongs in {", ".join(rooms)}'
        if not header.startswith('ballast/') or owner is None:
            continue
        target = header if header.startswith('ballast/v1/') else header[len('ballast/'):]
        if not any(target == allowed or target.startswith(allowed + '/') for allowed in ALLOWED[owner]):
            yield f'{path}:{number}: {owner} may not include {header}; it may include {", ".join(ALLOWED[owner])}'


def tree(root):
    for folder in FOLDERS:
        for directory, _, names in os.walk(os.path.join(root, folder)):
            for name in sorted(names):
                if name.endswith(('.h', '.cc', '.cu', '.cuh')):
                    full = os.path.join(directory, name)
                    yield os.path.relpath(full, root), open(full, encoding='utf-8').read()


def self_test(root):
    planted = [
        ('kernels/cpu/adamw.cc', '#include "ballast/storage/chunk_store.h"'),
        ('client/session.cc', '#include "ballast/services/state_server.h"'),
        ('client/session.cc', '#include "ballast/storage/chunk_store.h"'),
        ('services/job.cc', '#include "ballast/client/session.h"'),
        ('services/step/step_machine.cc', '#include "ballast/storage/chunk_store.h"'),
        ('storage/chunk_store.cc', '#include "ballast/services/job.h"'),
        ('services/job.cc', '#include <grpcpp/grpcpp.h>'),
        ('services/job.cc', '#include "ballast/v1/state_service.grpc.pb.h"'),
        ('storage/chunk_store.cc', '#include <cuda_runtime.h>'),
        ('client/session.cc', '#include <gloo/context.h>'),
        ('storage/tier/nvme_tier.cc', '#include <liburing.h>'),
    ]
    missed = [p for p in planted if not list(check(*p))]
    for path, line in missed:
        print(f'not found: {line} in {path}')
    print(f'{len(planted) - len(missed)} of {len(planted)} planted includes found')
    return 1 if missed else 0


def main():
    if sys.argv[1] == '--self-test':
        return self_test(sys.argv[2])
    files = 0
    wrong = []
    for path, text in tree(sys.argv[1]):
        files += 1
        wrong += check(path, text)
    print('\n'.join(wrong))
    print(f'{files} files, {len(wrong)} includes against the order')
    return 1 if wrong or files == 0 else 0


if __name__ == '__main__':
    sys.exit(main())
