# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over Gloo with a communication hook, one thread a rank. Prints what main.cpp prints.
# usage: hooks.py (under torchrun)
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
x, y = torch.randn(32, 784), torch.randint(10, (32,))
loss_of = nn.CrossEntropyLoss()


def sent():
    """Bytes that have left through the network, TCP's own included."""
    for line in open("/proc/self/net/dev"):
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    return 0


def make(hook, state):
    torch.manual_seed(0)
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    if hook is not None:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    for _ in range(10):  # PowerSGD begins after the second
        step()
    return step


def power(rank):
    return powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)


# PyTorch rejects its bf16_compress_hook without NCCL.
ways = {"none": (None, None), "fp16": (default_hooks.fp16_compress_hook, None),
        "PowerSGD 1": (powerSGD_hook.powerSGD_hook, power(1)), "PowerSGD 2": (powerSGD_hook.powerSGD_hook, power(2))}
steps, times, counts = {}, {}, {}
for name, (hook, state) in ways.items():
    steps[name], times[name], counts[name] = make(hook, state), [], 0
for _ in range(9):
    for name, step in steps.items():
        dist.barrier()
        before, begin = sent(), time.perf_counter()
        for _ in range(8):
            step()
        times[name].append((time.perf_counter() - begin) / 8 * 1e6)
        counts[name] = (sent() - before) / 8
if dist.get_rank() == 0:
    for name, values in times.items():
        values.sort()
        print(f"measured PyTorch, {name}: {values[len(values) // 2]:.1f} {values[0]:.1f} {counts[name]:.0f}", flush=True)
dist.destroy_process_group()
