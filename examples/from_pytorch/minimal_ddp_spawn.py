# SPDX-License-Identifier: Apache-2.0
# python3 minimal_ddp_spawn.py
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    inputs = x.chunk(world_size)[rank]
    labels = inputs.sum(1, keepdim=True)
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(10):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.9g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
