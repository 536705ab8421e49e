#!/usr/bin/env python3
"""Writes torch_errors.h: how far torch.optim in fp32 is from the same optimizer in fp64 after 200 steps.

Usage: torch_errors.py > torch_errors.h    (needs torch and numpy; the header says which torch version it was)

optimizer_oracle_test.cc repeats the inputs bit for bit and demands that our error is at most 1.05 times torch's.
"""
import numpy as np
import torch

STEPS = 200


def mix(x):
    """A bijection of 32 bits (Ellis, hash-prospector: lowbias32)."""
    x = x.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x = (x * np.uint32(0x7feb352d)).astype(np.uint32)
    x ^= x >> np.uint32(15)
    x = (x * np.uint32(0x846ca68b)).astype(np.uint32)
    x ^= x >> np.uint32(16)
    return x


def values(step, n):
    """Step 0: initial parameters; then gradients, whose size differs by up to 2^12 between elements. Exact in fp32."""
    i = np.arange(n, dtype=np.uint32)
    with np.errstate(over='ignore'):
        bits = mix(i + np.uint32(step) * np.uint32(0x9e3779b9))
    x = ((bits >> np.uint32(8)).astype(np.float64) - 2.0**23) / 2.0**23
    return x if step == 0 else x * 2.0 ** -(i % 13).astype(np.float64)


CASES = []


def case(name, n, kind, lr, **options):
    CASES.append((name, n, kind, lr, options))


case('adamw', 1003, 'AdamW', 1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
case('adamw strong decay', 257, 'AdamW', 6e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
case('adamw no decay', 4099, 'AdamW', 3e-5, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.0)
case('adamw amsgrad', 1003, 'AdamW', 1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, amsgrad=True)
case('adamw maximize', 1003, 'AdamW', 1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, maximize=True)
case('adam', 1003, 'Adam', 1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
case('adam l2', 257, 'Adam', 1e-2, betas=(0.9, 0.98), eps=1e-9, weight_decay=1e-2)
case('adam l2 amsgrad', 4099, 'Adam', 1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-3, amsgrad=True)
case('sgd', 1003, 'SGD', 1e-2)
case('sgd l2', 257, 'SGD', 1e-2, weight_decay=1e-2)
case('sgd momentum', 1003, 'SGD', 1e-2, momentum=0.9, weight_decay=1e-4)
case('sgd dampening', 4099, 'SGD', 1e-1, momentum=0.95, dampening=0.5)
case('sgd nesterov', 1003, 'SGD', 1e-2, momentum=0.9, nesterov=True, weight_decay=1e-4)
case('sgd maximize', 257, 'SGD', 1e-2, momentum=0.9, maximize=True)
case('adagrad', 1003, 'Adagrad', 1e-2, eps=1e-10)
case('adagrad decay', 4099, 'Adagrad', 1e-1, lr_decay=1e-3, weight_decay=1e-3, eps=1e-8)
case('adagrad initial', 257, 'Adagrad', 1e-2, initial_accumulator_value=0.1, eps=1e-10)


def by_torch(n, kind, lr, options, fused):
    parameter = torch.nn.Parameter(torch.from_numpy(values(0, n).astype(np.float32)))
    how = {'fused': True} if fused else {'foreach': False}
    optimizer = getattr(torch.optim, kind)([parameter], lr=lr, **options, **how)
    for step in range(1, STEPS + 1):
        parameter.grad = torch.from_numpy(values(step, n).astype(np.float32))
        optimizer.step()
    return parameter.detach().numpy().astype(np.float64)


def in_fp64(n, kind, lr, options):
    """torch.optim's documented formulas."""
    p = values(0, n)
    m, v, x = np.zeros(n), np.full(n, options.get('initial_accumulator_value', 0.0)), np.zeros(n)
    decay = options.get('weight_decay', 0.0)
    for t in range(1, STEPS + 1):
        g = values(t, n) * (-1 if options.get('maximize') else 1)
        if kind == 'AdamW':
            p = p * (1 - lr * decay)
        else:
            g = g + decay * p
        if kind in ('Adam', 'AdamW'):
            b1, b2 = options['betas']
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            x = np.maximum(x, v)
            root = np.sqrt((x if options.get('amsgrad') else v) / (1 - b2**t))
            p = p - lr * (m / (1 - b1**t)) / (root + options['eps'])
        elif kind == 'SGD':
            momentum = options.get('momentum', 0.0)
            if momentum:
                m = g if t == 1 else momentum * m + (1 - options.get('dampening', 0.0)) * g
                g = g + momentum * m if options.get('nesterov') else m
            p = p - lr * g
        else:
            v = v + g * g
            p = p - lr / (1 + (t - 1) * options.get('lr_decay', 0.0)) * g / (np.sqrt(v) + options['eps'])
    return p


def rms(x):
    return float(np.sqrt(np.mean(x * x)))


print(f'''// Written by torch_errors.py with torch {torch.__version__.split('+')[0]}; do not edit.
// After {STEPS} steps in fp32: root mean square error of torch.optim's fused and single-tensor implementations against the
// same optimizer in fp64, whose first and last parameters are given.
#pragma once

#include "ballast/kernels/optimizer.h"

namespace ballast::kernels {{

struct TorchErrors {{
  const char* name;
  uint64_t n;
  OptimizerSpec spec;
  Hyper hyper;
  double fused, single_tensor;
  double oracle_first, oracle_last;
}};

inline constexpr uint64_t kTorchSteps = {STEPS};

inline const TorchErrors kTorchErrors[] = {{''')
for name, n, kind, lr, options in CASES:
    oracle = in_fp64(n, kind, lr, options)
    fused, single = (rms(by_torch(n, kind, lr, options, how) - oracle) for how in (True, False))
    b1, b2 = options.get('betas', (options.get('momentum', 0.0), 0.0))
    flag = lambda key: str(bool(options.get(key))).lower()
    print(f'''    {{"{name}",
     {n},
     {{.kind = OptimizerKind::k{kind.capitalize()},
      .amsgrad = {flag('amsgrad')},
      .momentum = {flag('momentum')},
      .nesterov = {flag('nesterov')},
      .gradient = Dtype::kF32,
      .working = Dtype::kF32}},
     {{.learning_rate = {lr!r},
      .beta1 = {b1!r},
      .beta2 = {b2!r},
      .epsilon = {options.get('eps', 0.0)!r},
      .weight_decay = {options.get('weight_decay', 0.0)!r},
      .dampening = {options.get('dampening', 0.0)!r},
      .learning_rate_decay = {options.get('lr_decay', 0.0)!r},
      .initial_accumulator = {options.get('initial_accumulator_value', 0.0)!r},
      .maximize = {flag('maximize')}}},
     {fused!r},
     {single!r},
     {float(oracle[0])!r},
     {float(oracle[-1])!r}}},''')
print('''};

}  // namespace ballast::kernels''')
