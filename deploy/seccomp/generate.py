#!/usr/bin/env python3
"""Writes a seccomp profile to standard output: a container engine's default profile, and io_uring's three calls.

Usage: deploy/seccomp/generate.py [DEFAULT] >deploy/seccomp/ballast.json
DEFAULT: a profile in podman's and Docker's format (default: podman's, /usr/share/containers/seccomp.json).

Engines' formats tie rules to capabilities and architectures, and containerd, which Kubernetes calls, ignores such conditions in a
profile from a file. So the conditions are resolved here, for a container without capabilities on x86-64 or arm64; what remains is the
format of the OCI runtime specification, which all engines read.
"""
import json
import sys

ARCHES = ['amd64', 'arm64']
IO_URING = ['io_uring_enter', 'io_uring_register', 'io_uring_setup']


def applies(rule):
    includes, excludes = rule.get('includes') or {}, rule.get('excludes') or {}
    if includes.get('caps') or includes.get('minKernel') or excludes.get('minKernel'):
        return False
    arches = includes.get('arches')
    return (not arches or any(arch in arches for arch in ARCHES)) and not any(arch in excludes.get('arches', []) for arch in ARCHES)


def main():
    with open(sys.argv[1] if len(sys.argv) > 1 else '/usr/share/containers/seccomp.json') as file:
        default = json.load(file)
    rules = []
    for rule in filter(applies, default['syscalls']):
        kept = {'names': sorted(rule['names']), 'action': rule['action']}
        if rule.get('args'):
            kept['args'] = rule['args']
        if 'errnoRet' in rule:
            kept['errnoRet'] = rule['errnoRet']
        rules.append(kept)
    rules.append({'names': IO_URING, 'action': 'SCMP_ACT_ALLOW'})
    profile = {'defaultAction': default['defaultAction'], 'defaultErrnoRet': default.get('defaultErrnoRet', 1),
               'architectures': ['SCMP_ARCH_X86_64', 'SCMP_ARCH_AARCH64'], 'syscalls': rules}
    json.dump(profile, sys.stdout, indent=1)
    print()


if __name__ == '__main__':
    main()
