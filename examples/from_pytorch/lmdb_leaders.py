# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 4 lmdb_leaders.py --data points.lmdb
import argparse

import lmdb
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __init__(self, path):
        self.records = lmdb.open(path, subdir=False, readonly=True, lock=False).begin(buffers=True)

    def __len__(self):
        return self.records.stat()["entries"]

    def __getitem__(self, i):  # ten inputs and a label, behind a key of 8 bytes
        return torch.frombuffer(bytearray(self.records.get(i.to_bytes(8, "big"))), dtype=torch.float32)


parser = argparse.ArgumentParser()
parser.add_argument("--data")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group([leader, leader + 1]) for leader in range(0, world_size, 2)]
leader, group = rank - rank % 2, groups[rank // 2]
if rank == leader:  # it reads for both
    points = Points(args.data)
    samplers = [DistributedSampler(points, world_size, r) for r in (leader, leader + 1)]
    loaders = [DataLoader(points, 8, sampler=sampler) for sampler in samplers]
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Linear(10, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
steps = torch.tensor(len(loaders[0]) if rank == leader else 0)
dist.broadcast(steps, leader, group=group)

for epoch in range(3):
    if rank == leader:
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = zip(*loaders)
    total = torch.zeros(1)
    for step in range(steps):
        batch = torch.empty(8, 11)
        dist.scatter(batch, list(next(batches)) if rank == leader else None, leader, group=group)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(batch[:, :10]), batch[:, 10:])
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.reduce(total, dst=0)
    if rank == 0:
        print(f"epoch {epoch} loss {total.item() / world_size / steps.item():.9g}")
