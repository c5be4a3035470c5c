#!/usr/bin/env python3
"""The state-space scan of mamba_ssm, timed alone beside bench_ssm_gpu.

  ssd.py [--shape B,S,H,G,P,N ...] [--runs N]

Prints a JSON line for each shape: the median milliseconds of mamba_chunk_scan_combined, forward and
backward, in bf16 with softplus of the steps and the skip D, by device events over runs on different inputs.
Needs torch with CUDA and Triton, and the package mamba_ssm on PYTHONPATH (its sources are enough). Triton
tunes each new shape first, which takes a minute or more.
"""

import argparse
import json
import statistics
import sys
import types

import torch

# Extensions that the scan does not use, but that mamba_ssm imports.
for name in ("causal_conv1d", "selective_scan_cuda", "causal_conv1d_cuda"):
    module = types.ModuleType(name)
    module.causal_conv1d_fn = module.causal_conv1d_update = None
    sys.modules.setdefault(name, module)
for name in ("causal_conv1d.causal_conv1d_varlen", "causal_conv1d.cpp_functions"):
    module = types.ModuleType(name)
    for function in ("causal_conv1d_varlen_states", "causal_conv1d_fwd_function",
                     "causal_conv1d_bwd_function", "causal_conv1d_update_function"):
        setattr(module, function, None)
    sys.modules.setdefault(name, module)

from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # noqa: E402


def median_ms(work, runs):
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    marks[0].record()
    for i in range(runs):
        work()
        marks[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))


def measure(shape, runs):
    b, s, h, g, p, n = shape
    make = dict(device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    x = torch.randn(b, s, h, p, **make).requires_grad_()
    dt = torch.randn(b, s, h, **make).requires_grad_()
    key = torch.randn(b, s, g, n, **make).requires_grad_()
    query = torch.randn(b, s, g, n, **make).requires_grad_()
    a = (-torch.rand(h, device="cuda") * 15 - 1).requires_grad_()
    bias = torch.full((h,), -4.0, device="cuda").requires_grad_()
    d = torch.ones(h, device="cuda").requires_grad_()
    dy = torch.randn(b, s, h, p, **make)

    def forward():
        return mamba_chunk_scan_combined(x, dt, a, key, query, chunk_size=256, D=d, dt_bias=bias,
                                         dt_softplus=True)

    y = forward()
    inputs = (x, dt, key, query, a, bias, d)
    with torch.no_grad():
        one = median_ms(forward, runs)
    two = median_ms(lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True), runs)
    print(json.dumps(dict(shape=shape, forward_ms=round(one, 4), backward_ms=round(two, 4),
                          torch=torch.__version__)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", action="append",
                        help="samples, tokens, heads, groups, head width, state; default 8,2048,48,1,64,128")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    for text in options.shape or ["8,2048,48,1,64,128"]:
        measure([int(number) for number in text.split(",")], options.runs)


if __name__ == "__main__":
    main()
