# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 log_loss.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
ddp = DistributedDataParallel(nn.Linear(10, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
inputs = x.chunk(world_size)[rank]
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    logged = loss.detach()
    dist.reduce(logged, dst=0)  # the sum, on rank 0
    if rank == 0:
        print(f"step {step} loss {logged.item() / world_size:.9g}")
