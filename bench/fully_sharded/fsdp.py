# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: the stack of main.cpp and gpu.cu under DDP or fully_shard (FSDP2).
#   fsdp.py ddp|fully|kept ROWS WIDTH                      over Gloo on CPUs, one thread a rank
#   fsdp.py ddp|fully|kept ROWS WIDTH float|bfloat16       on one GPU; several ranks share it, with NCCL's sockets between
# Prints what each program prints.
import json
import os
import sys
import time

how, rows, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
is_gpu = len(sys.argv) > 4
element = sys.argv[4] if is_gpu else "float"
if is_gpu:  # NCCL wants ranks of one GPU on different hosts
    os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

device = "cuda" if is_gpu else "cpu"
if is_gpu:
    torch.cuda.set_device(0)
else:
    torch.set_num_threads(1)
dist.init_process_group("nccl" if is_gpu else "gloo")
mesh = init_device_mesh(device, (dist.get_world_size(),))
is_half = element == "bfloat16"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


def make_step(how):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(12))).to(device)
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        mixed = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if is_half else {}
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=how == "fully", **mixed)
        fully_shard(model, mesh=mesh, reshard_after_forward=how == "fully", **mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if is_gpu else {}))
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16 if is_half else torch.float)

    def step():
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_half and how == "ddp"):
            out = model(x)
        (out.float().square().mean() / 2).backward()
        optimizer.step()

    return step


def measure(step, count):
    each = 1 if not is_gpu or dist.get_world_size() > 1 else 5
    times = []
    for _ in range(count):
        dist.barrier()
        if is_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(each):
            step()
        if is_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / each)
    return sorted(times)


def own_mebibytes():
    """Of this process; pages that processes share are divided among them."""
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) / 1024 for line in rollup if line.startswith("Pss:"))


before = 0 if is_gpu else own_mebibytes()
step = make_step(how)
for _ in range(3):
    step()
times = measure(step, 7 if is_gpu else 15)
if dist.get_rank() == 0 and is_gpu:
    peak = torch.cuda.max_memory_allocated()
    print("fsdp", json.dumps({"median": times[len(times) // 2], "minimum": times[0], "bytes": peak}), flush=True)
elif dist.get_rank() == 0:
    print(f"measured step {times[len(times) // 2]:.1f} {times[0]:.1f}", flush=True)
    print(f"measured memory {own_mebibytes() - before:.1f} ", flush=True)
dist.destroy_process_group()
