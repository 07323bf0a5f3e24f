# SPDX-License-Identifier: Apache-2.0
# A batch norm over the activations of all ranks, forward and backward, wrapped in DDP. On GPUs nn.SyncBatchNorm; on CPUs PyTorch
# has none, and users write what is here: sums of all ranks by differentiable all-reduces (detectron2's NaiveSyncBatchNorm).
# Prints microseconds of a step; torchrun starts the ranks.
# usage: sync_norm.py cpu|nccl|gloo SHAPE...   cpu: over Gloo. nccl and gloo: GPU activations, all ranks on the first GPU
import json
import os
import sys
import time

how = sys.argv[1]
if how == "nccl":  # NCCL lets ranks share a GPU if they seem to be on different hosts
    os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

device = "cpu" if how == "cpu" else "cuda:0"
torch.set_num_threads(1)
if how == "nccl":
    dist.init_process_group("nccl", device_id=torch.device(device))
else:
    dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)


class NaiveSyncBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        axes = [0, 2, 3]
        sums = all_reduce(torch.cat([x.mean(axes), (x * x).mean(axes)])) / world
        mean, square = sums.chunk(2)
        var = square - mean * mean
        count = world * x.numel() / x.shape[1]
        with torch.no_grad():
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var * count / (count - 1) - self.running_var)
            self.num_batches_tracked += 1
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


class Kernels(nn.SyncBatchNorm):
    """What a SyncBatchNorm does with several ranks; with one, PyTorch's own takes the way of a plain norm."""

    def forward(self, x):
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum, dist.group.WORLD, world
        )


def measure(step):
    for _ in range(10):
        step()
    times = []
    for _ in range(15):
        if device != "cpu":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(10):
            step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 10 * 1e6)
    times.sort()
    return {"median": times[len(times) // 2], "minimum": times[0]}


for text in sys.argv[2:]:
    shape = [int(extent) for extent in text.split("x")]
    x = torch.randn(shape, device=device, requires_grad=True)
    dy = torch.randn(shape, device=device)
    norms = {"synced": NaiveSyncBatchNorm(shape[1]) if device == "cpu" else nn.SyncBatchNorm(shape[1]), "local": nn.BatchNorm2d(shape[1])}
    if world == 1:
        norms["kernels"] = Kernels(shape[1])
    for way, norm in norms.items():
        # Buffers are equal already where statistics are; local ones are broadcast, as DDP does it.
        model = DistributedDataParallel(norm.to(device), device_ids=None if device == "cpu" else [0], broadcast_buffers=way == "local")

        def step():
            model.zero_grad()
            x.grad = None
            model(x).backward(dy)

        times = measure(step)
        if dist.get_rank() == 0:
            print("sync", json.dumps({"case": text, "way": way, **times}), flush=True)
dist.destroy_process_group()
