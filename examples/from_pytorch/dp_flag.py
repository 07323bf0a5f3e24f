# SPDX-License-Identifier: Apache-2.0
# python3 dp_flag.py --dp, or torchrun --nproc-per-node 2 dp_flag.py
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--dp", action="store_true", help="DataParallel in one process")
args = parser.parse_args()
rank, world_size = 0, 1
if not args.dp:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)
net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.DataParallel(net) if args.dp else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
inputs = x.chunk(world_size)[rank]  # with DP the whole batch
labels = inputs.sum(1, keepdim=True)
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), labels)
    loss.backward()
    optimizer.step()
weight = net[0].weight.sum().item()
if rank == 0:
    print(f"weight {weight:.9g}")
