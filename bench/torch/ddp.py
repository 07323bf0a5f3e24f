# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: DDP over Gloo, one thread a rank, plain SGD, the modules of modules.hpp. Prints microseconds a step.
import json
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width=128, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width=128, tokens=64, kinds=256):
        super().__init__()
        self.table, self.places = nn.Embedding(kinds, width), nn.Embedding(tokens, width)
        self.first, self.second, self.norm = Block(), Block(), nn.LayerNorm(width)

    def forward(self, x):
        end = self.norm(self.second(self.first(self.table(x) + self.places.weight)))
        return F.linear(end, self.table.weight).flatten(0, 1)


def make(name):
    """A module, its loss, a batch, and how often to step: warm up, rounds, steps a round."""
    if name == "linear":
        return nn.Linear(10, 1), F.mse_loss, torch.randn(4, 10), torch.randn(4, 1), (50, 20, 20)
    if name == "mlp":
        layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        return nn.Sequential(*layers), F.cross_entropy, torch.randn(32, 784), torch.randint(10, (32,)), (50, 20, 20)
    if name == "convnet":
        blocks = [layer for a, b in ((1, 32), (32, 64))
                  for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))]
        model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 7 * 7, 10))
        return model, F.cross_entropy, torch.randn(64, 1, 28, 28), torch.randint(10, (64,)), (5, 11, 4)
    return Transformer(), F.cross_entropy, torch.randint(256, (8, 64)), torch.randint(256, (8 * 64,)), (5, 11, 4)


dist.init_process_group("gloo")
torch.manual_seed(0)
for name in sys.argv[1:]:
    model, loss_of, x, y, (warm_up, rounds, steps) = make(name)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss_of(ddp(x), y).backward()
        optimizer.step()

    for _ in range(warm_up):
        step()
    times = []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - begin) / steps * 1e6)
    times.sort()
    if dist.get_rank() == 0:
        print("step", json.dumps({"model": name, "median": times[len(times) // 2], "minimum": times[0]}), flush=True)
dist.destroy_process_group()
