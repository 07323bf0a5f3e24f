# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over Gloo, one thread a rank, plain SGD. Prints microseconds a step.
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
warm_up, rounds, steps = 50, 20, 20
dist.init_process_group("gloo")
torch.manual_seed(0)
if sys.argv[1] == "linear":
    model, loss_of = nn.Linear(10, 1), nn.MSELoss()
    x, y = torch.randn(4, 10), torch.randn(4, 1)
elif sys.argv[1] == "convnet":  # PyTorch's SyncBatchNorm needs GPUs: here every rank has statistics of its own
    blocks = [layer for a, b in ((1, 32), (32, 64))
              for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))]
    model, loss_of = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 7 * 7, 10)), nn.CrossEntropyLoss()
    x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    warm_up, rounds, steps = 5, 11, 4
else:
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    loss_of = nn.CrossEntropyLoss()
    x, y = torch.randn(32, 784), torch.randint(10, (32,))
if sys.argv[2] == "ddp":
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step():
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


for _ in range(warm_up):
    step()
times = []
for _ in range(rounds):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    times.append((time.perf_counter() - begin) / steps * 1e6)
times.sort()
if dist.get_rank() == 0:
    print("step", json.dumps({"median": times[len(times) // 2], "minimum": times[0]}), flush=True)
dist.destroy_process_group()
