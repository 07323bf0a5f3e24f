# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 fully_shard.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 16).normal_(0, 0.2))

    def forward(self, x):
        return x + torch.relu(x @ self.weight.T)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world_size,))
torch.manual_seed(1)
net = nn.Sequential(*(Block() for _ in range(4)))
for block in net:
    fully_shard(block, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)

x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).chunk(world_size)[rank]
for step in range(10):
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"rank {rank} step {step} loss {loss.item():.9g}", flush=True)

dist.destroy_process_group()
