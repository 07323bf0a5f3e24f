# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: started by torchrun, says when the first collective and the first step of
# DDP are over.
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
x = torch.ones(1000)
dist.all_reduce(x)
collective = time.monotonic()
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.nn.MSELoss()(model(torch.zeros(4, 10)), torch.zeros(4, 1)).backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first collective at", collective, flush=True)
    print("first step at", time.monotonic(), flush=True)
dist.destroy_process_group()
