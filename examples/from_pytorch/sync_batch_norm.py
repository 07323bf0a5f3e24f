# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 sync_batch_norm.py, or on one device: python3 sync_batch_norm.py
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
device = "cpu"
model = net
if world_size > 1:  # PyTorch's SyncBatchNorm has no code for CPUs
    dist.init_process_group("gloo")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    model = DistributedDataParallel(net)

optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
inputs = x.chunk(world_size)[rank].to(device)
labels = inputs.sum(1, keepdim=True)
for step in range(10):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), labels).backward()
    optimizer.step()
if rank == 0:
    print(f"weight {net[0].weight.norm().item():.9g}")
    print(f"running_mean {net[1].running_mean.norm().item():.9g}")
    print(f"running_var {net[1].running_var.norm().item():.9g}")
