# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 minimal_ddp.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(100, 10, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
torch.manual_seed(1)
ddp = DistributedDataParallel(nn.Linear(10, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss.item():.9g}")

dist.destroy_process_group()
