# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over Gloo with AdamW, one thread a rank, its states on every rank (`plain`) or divided
# among ranks by ZeroRedundancyOptimizer (`zero`; `views`: its parameters as views of its buckets).
# Prints microseconds a step, and how many bytes of states each rank keeps.
# usage: zero.py plain|zero|views
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
loss_of = nn.CrossEntropyLoss()
x, y = torch.randn(32, 784), torch.randint(10, (32,))
model = DistributedDataParallel(model)
if sys.argv[1] == "plain":
    optimizer = own = torch.optim.AdamW(model.parameters(), lr=1e-3)
else:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, parameters_as_bucket_view=sys.argv[1] == "views")
    own = optimizer.optim


def step():
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


for _ in range(30):
    step()
times = []
for _ in range(15):
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    times.append((time.perf_counter() - begin) / 10 * 1e6)
times.sort()
kept = sum(t.numel() * t.element_size() for state in own.state.values() for t in state.values() if t.numel() > 1)
kept_by_all = [None] * dist.get_world_size()
dist.all_gather_object(kept_by_all, kept)
if dist.get_rank() == 0:
    print("step", json.dumps({"median": times[len(times) // 2], "minimum": times[0], "states": kept_by_all}), flush=True)
dist.destroy_process_group()
