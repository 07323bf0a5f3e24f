# SPDX-License-Identifier: Apache-2.0
# The network of example 07 as a PyTorch user writes it: DDP over NCCL on one GPU, fused SGD with momentum, a batch that
# lies on the GPU already. Prints microseconds a step for each way to run it; a way that fails says so on stderr and is
# left out. PyTorch's convolutions use TF32 unless told otherwise, as those of the example do.
import json
import os
import sys
import time

os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as PyTorch asks for graphs of DDP

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rows = int(sys.argv[1])
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
torch.manual_seed(0)
x = torch.randn(rows, 1, 28, 28, device="cuda")
y = torch.randint(10, (rows,), device="cuda")
loss_of = nn.CrossEntropyLoss()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.fc = nn.Linear(64 * 7 * 7, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.relu(self.bn1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(nn.functional.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def make(**options):
    model = DistributedDataParallel(ConvNet().cuda(), device_ids=[0], **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def stepper(model, optimizer, inputs=x):
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs), y).backward()
        optimizer.step()

    return step


def eager():
    return stepper(*make())


def measured():  # cuDNN's algorithms chosen by trying them, images channels last
    torch.backends.cudnn.benchmark = True
    net = ConvNet().cuda().to(memory_format=torch.channels_last)
    model = DistributedDataParallel(net, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    step = stepper(model, optimizer, x.to(memory_format=torch.channels_last))
    for _ in range(20):
        step()
    torch.backends.cudnn.benchmark = False  # what was chosen by then is kept for these shapes
    return step


kept = []  # a graph does not keep alive what it was captured from


def captured():
    # DDP must be made on the stream that captures, and needs 11 steps before that.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = stepper(*make())
        for _ in range(15):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    kept.append(step)
    return graph.replay


ways = {"eager": (eager, 200), "measured": (measured, 200), "graph": (captured, 1000)}
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
    print("convnet", json.dumps(result), flush=True)
dist.destroy_process_group()
