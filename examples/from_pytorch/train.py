# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 train.py --epochs 3, and then --epochs 6 --resume
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--folder", default=".")
args = parser.parse_args()
last, best = os.path.join(args.folder, "last.pt"), os.path.join(args.folder, "best.pt")

dist.init_process_group("gloo")
x = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True).sin()
dataset = TensorDataset(x[:96], y[:96])
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
ddp = DistributedDataParallel(net)
optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
epoch, best_loss = 0, float("inf")
if args.resume:
    saved = torch.load(last)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    epoch, best_loss = saved["epoch"], saved["best_loss"]

while epoch < args.epochs:
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), labels).backward()
        optimizer.step()
    scheduler.step()
    epoch += 1
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(x[96:]), y[96:]).item()
    is_best = loss < best_loss
    best_loss = min(loss, best_loss)
    optimizer.consolidate_state_dict(to=0)  # all ranks
    if dist.get_rank() == 0:
        print(f"epoch {epoch} loss {loss:.9g}")
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
                    "epoch": epoch, "best_loss": best_loss}, last)
        if is_best:
            torch.save(net.state_dict(), best)
if dist.get_rank() == 0:
    print(f"best {best_loss:.9g}")
