# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: the stack of main.cpp under DDP or fully_shard (FSDP2) over Gloo, one thread a rank.
# Prints what main.cpp prints: fsdp.py ddp|fully|kept ROWS
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

how, rows = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512, bias=False)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(12)))
if how == "ddp":
    model = DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=how == "fully")
    fully_shard(model, mesh=mesh, reshard_after_forward=how == "fully")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x = torch.randn(rows, 512)


def step():
    optimizer.zero_grad()
    out = model(x)
    (out.square().mean() / 2).backward()
    optimizer.step()


for _ in range(3):
    step()
times = []
for _ in range(15):
    dist.barrier()
    begin = time.perf_counter()
    step()
    times.append((time.perf_counter() - begin) * 1e6)
times.sort()
if dist.get_rank() == 0:
    print(f"measured step {times[len(times) // 2]:.1f} {times[0]:.1f}", flush=True)
dist.destroy_process_group()
