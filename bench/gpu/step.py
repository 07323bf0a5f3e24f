# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over NCCL on one GPU, a fused optimizer, a batch that lies on the GPU already.
# Prints microseconds a step for each way to run it; a way that fails says so on stderr and is left out.
import json
import os
import sys
import time

os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as PyTorch asks for graphs of DDP

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
torch.manual_seed(0)
x = torch.randn(64, 784, device="cuda")
y = torch.randint(10, (64,), device="cuda")
loss_of = nn.CrossEntropyLoss()


def make(capturable=False, **options):
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[0], **options)
    if sys.argv[1] == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return model, torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)


def stepper(model, optimizer):
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def eager():
    return stepper(*make())


kept = []  # a graph does not keep alive what it was captured from


def captured(**options):
    # DDP must be made on the stream that captures, and needs 11 steps before that.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = stepper(*make(capturable=True, **options))
        for _ in range(15):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    kept.append(step)
    return graph.replay


def compiled(**options):
    model, optimizer = make()
    return stepper(torch.compile(model, **options), optimizer)


ways = {
    "eager": (eager, 200),
    "graph": (captured, 2000),
    "views": (lambda: captured(gradient_as_bucket_view=True), 2000),
    "compile": (compiled, 200),
    "overhead": (lambda: compiled(mode="reduce-overhead"), 200),
}
steps = {}
for way, (prepare, count) in ways.items():
    try:
        step = prepare()
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        steps[way] = (step, count)
    except Exception as error:
        print(f"PyTorch, {way}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def measure(step, count):
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


times = {way: [] for way in steps}
for _ in range(9):
    for way, (step, count) in steps.items():
        times[way].append(measure(step, count))
for way, pairs in times.items():
    result = {"way": way}
    for clock, values in zip(("wall", "device"), map(sorted, zip(*pairs))):
        result[clock] = {"median": values[len(values) // 2], "minimum": values[0]}
    print("step", json.dumps(result), flush=True)
dist.destroy_process_group()
