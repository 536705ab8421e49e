#!/usr/bin/env python3
"""Fails unless the optimizers' loops ask for each line of each array ahead of use, on every instruction set.

Usage: prefetched_lines.py LIBRARY    libballast_kernels.a, compiled with optimisation

Counts the prefetches in the machine code of each RuleBlock over fp32 moments: one for each array and line of a turn of the loop, which is
two vectors long. A loop that leaves out lines gives the right bits, so no other test on any machine sees it.
"""
import collections
import re
import subprocess
import sys

ARRAYS = (3, 4, 3, 4, 1, 2, 2, 2, 2, 4, 3)  # p and the moments, in the order of enum Rule
LINES = {'AVX2': 1, 'AVX3': 2, 'AVX3_DL': 2}  # of two vectors


def prefetches(library):
    """{(instruction set, rule, ends): number of prefetch instructions}"""
    code = subprocess.run(['objdump', '--disassemble', '--demangle', '--no-show-raw-insn', library], capture_output=True, text=True,
                          check=True).stdout
    counts, function = collections.Counter(), None
    for line in code.splitlines():
        if line.endswith('>:'):
            function = re.search(r'N_(\w+)::.*RuleBlock<.*?\)(\d+), .*?\)0, .*?\)(\d+)>', line)
            if function:
                counts[function.groups()] += 0
        elif function and 'prefetch' in line:
            counts[function.groups()] += 1
    return counts


def main():
    found = [(isa, int(rule), ends, count) for (isa, rule, ends), count in prefetches(sys.argv[1]).items() if isa in LINES]
    if not found:
        print('no loops of AVX2 or AVX-512 in the library')
        return 77
    wrong = [(isa, rule, ends, count) for isa, rule, ends, count in found if count != ARRAYS[rule] * LINES[isa]]
    for isa, rule, ends, count in wrong:
        print(f'rule {rule}, ends {ends} on {isa}: {count} prefetches for {ARRAYS[rule]} arrays of {LINES[isa]} lines')
    print(f'{len(found)} loops, {len(wrong)} that do not ask for every line')
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
