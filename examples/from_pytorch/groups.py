# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 4 groups.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
halves = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
half = halves[rank // 2]
torch.manual_seed(1)
ddp = DistributedDataParallel(nn.Linear(10, 1))  # over all ranks
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
inputs = x.chunk(world_size)[rank]
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    logged = loss.detach()
    dist.all_reduce(logged, group=half)  # within the half
    if dist.get_rank(half) == 0:
        print(f"half {rank // 2} step {step} loss {logged.item() / 2:.9g}")
