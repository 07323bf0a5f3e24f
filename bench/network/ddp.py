# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: all-reduces and DDP over Gloo, one thread a rank. Prints what main.cpp prints.
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")


def measure(name, batches, count, once):
    for _ in range(count):
        once()
    times = []
    for _ in range(batches):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            once()
        times.append((time.perf_counter() - begin) / count * 1e6)
    times.sort()
    if dist.get_rank() == 0:
        print(f"measured {name} {times[len(times) // 2]:.1f} {times[0]:.1f}", flush=True)


data = torch.zeros(25 * 2**20 // 4)
for name, size, batches, count in (("1KiB", 2**10, 15, 20), ("1MiB", 2**20, 9, 3), ("25MiB", 25 * 2**20, 3, 1)):
    part = data[: size // 4]
    measure(name, batches, count, lambda: dist.all_reduce(part))

torch.manual_seed(0)
layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
model = DistributedDataParallel(nn.Sequential(*layers))
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(32, 784), torch.randint(10, (32,))


def step():
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


measure("step", 9, 5, step)
dist.destroy_process_group()
