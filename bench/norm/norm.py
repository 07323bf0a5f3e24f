# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: a norm in training, alone, with a ReLU, and with a residual and a ReLU, forward and forward with
# backward. On a CPU with one thread; on a GPU as eager calls and as a CUDA graph. Prints microseconds of each.
# usage: norm.py cpu|cuda CASE...   where a case is batch:32x64x28x28:float32, layer:4096x768:bfloat16; `:last`, channels last
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

device = sys.argv[1]
torch.manual_seed(0)
if device == "cpu":
    torch.set_num_threads(1)


def norm_of(kind, shape, dtype):
    if kind == "layer":
        return nn.LayerNorm(shape[-1], device=device, dtype=dtype)
    # Parameters and statistics of 16-bit activations are floats, as with autocast.
    return (nn.BatchNorm1d if len(shape) < 4 else nn.BatchNorm2d)(shape[1], device=device)


def ways_of(norm, x, residual):
    def add_relu():
        y = norm(x)
        y += residual
        return F.relu(y, inplace=True)

    return {"plain": lambda: norm(x), "relu": lambda: F.relu(norm(x), inplace=True), "add_relu": add_relu}


def passes_of(run, inputs, dy):
    def forward():
        with torch.no_grad():
            run()

    def both():
        torch.autograd.grad(run(), inputs, dy)

    return {"forward": forward, "both": both}


def batch_on_cpu(f, count):
    begin = time.perf_counter()
    for _ in range(count):
        f()
    return (time.perf_counter() - begin) / count * 1e6


def batch_on_gpu(f, count):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        f()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count * 1e3


def captured(f):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def measure(batch, f):
    for _ in range(3):
        f()
    once = batch(f, 3)
    count = max(1, int(5000 / once))
    times = sorted(batch(f, count) for _ in range(15))
    return {"median": times[len(times) // 2], "minimum": times[0]}


for number, case in enumerate(sys.argv[2:]):
    kind, extents, type_name, *layout = case.split(":")
    shape = [int(extent) for extent in extents.split("x")]
    dtype = getattr(torch, type_name)

    def tensor():
        values = torch.randn(shape, device=device).to(dtype)
        return values.contiguous(memory_format=torch.channels_last) if layout else values

    x, residual, dy = tensor().requires_grad_(), tensor().requires_grad_(), tensor()
    norm = norm_of(kind, shape, dtype)
    inputs = [x, norm.weight, norm.bias]
    ways = ways_of(norm, x, residual)
    if kind == "layer":
        ways = {"plain": ways["plain"]}
    for way, run in ways.items():
        for part, f in passes_of(run, inputs + [residual] * (way == "add_relu"), dy).items():
            clocks = {"eager": f}
            try:
                if device == "cuda":
                    clocks["graph"] = captured(f)
                    if number == 0 and part == "both":
                        clocks["compile"] = passes_of(torch.compile(run), inputs + [residual] * (way == "add_relu"), dy)[part]
                        clocks["compile"]()
            except Exception as error:
                clocks.pop("compile", None)
                print(f"PyTorch, {case}, {way}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            for clock, g in clocks.items():
                times = measure(batch_on_cpu if device == "cpu" else batch_on_gpu, g)
                print("norm", json.dumps({"case": case, "way": way, "pass": part, "clock": clock, **times}), flush=True)
            del clocks
    del x, residual, dy, norm, inputs, ways, run, f, g
