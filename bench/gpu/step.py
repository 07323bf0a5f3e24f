# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over NCCL on one GPU, a fused optimizer, a batch that lies on the GPU already.
# Prints microseconds a step for each way to run it; a way that fails says so on stderr and is left out.
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.dont_write_bytecode = True
import ddp_ways  # before torch, which reads the environment

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ddp_ways.join_alone()
x = torch.randn(64, 784, device="cuda")
y = torch.randint(10, (64,), device="cuda")


def make(capturable=False, **options):
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[0], **options)
    if sys.argv[1] == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    return model, torch.optim.AdamW(model.parameters(), fused=True, capturable=capturable)


def eager():
    return ddp_ways.stepper(*make(), x, y)


def captured(**options):
    return ddp_ways.captured(lambda: ddp_ways.stepper(*make(capturable=True, **options), x, y))


def compiled(**options):
    model, optimizer = make()
    return ddp_ways.stepper(torch.compile(model, **options), optimizer, x, y)


ddp_ways.print_ways("step", {
    "eager": (eager, 200),
    "graph": (captured, 2000),
    "views": (lambda: captured(gradient_as_bucket_view=True), 2000),
    "compile": (compiled, 200),
    "overhead": (lambda: compiled(mode="reduce-overhead"), 200),
})
