# SPDX-License-Identifier: Apache-2.0
# Ways to run a step of PyTorch's DDP on one GPU: a step of its own, a captured one, and how long each way takes.
import json
import os
import sys
import time

os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as PyTorch asks for graphs of DDP

import torch
import torch.distributed as dist
from torch import nn

loss_of = nn.CrossEntropyLoss()


def join_alone():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.manual_seed(0)


def stepper(model, optimizer, inputs, labels):
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs), labels).backward()
        optimizer.step()

    return step


kept = []  # a graph does not keep alive what it was captured from


def captured(make_step):
    """Replays one step of those that `make_step()` returns."""
    # DDP must be made on the stream that captures, and needs 11 steps before that.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = make_step()
        for _ in range(15):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    kept.append(step)
    return graph.replay


def measure(step, count):
    """Microseconds a step: by the host's clock, and between events on the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    return wall / count * 1e6, begin.elapsed_time(end) / count * 1e3


def print_ways(word, ways):
    """Prints a line `word {json}` for each of `{name: (prepare, steps to time)}`, which take turns.

    A way that fails says so on stderr and is left out. `bytes` is the most memory that a way has had.
    """
    steps, taken = {}, {}
    for way, (prepare, count) in ways.items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            step = prepare()
            for _ in range(20):
                step()
            torch.cuda.synchronize()
            steps[way] = (step, count)
            taken[way] = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            print(f"PyTorch, {way}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    times = {way: [] for way in steps}
    for _ in range(9):
        for way, (step, count) in steps.items():
            times[way].append(measure(step, count))
    for way, pairs in times.items():
        result = {"way": way, "bytes": taken[way]}
        for clock, values in zip(("wall", "device"), map(sorted, zip(*pairs))):
            result[clock] = {"median": values[len(values) // 2], "minimum": values[0]}
        print(word, json.dumps(result), flush=True)
    dist.destroy_process_group()
