# SPDX-License-Identifier: Apache-2.0
# PyTorch's DataParallel over the GPUs there are (it rejects one GPU twice, and over one it is the module itself),
# with a fused optimizer and a batch that comes from pinned memory. Prints the memory and microseconds a step.
import json
import time

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 784).pin_memory()
y = torch.randint(10, (64,)).pin_memory()
layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
model = nn.DataParallel(nn.Sequential(*layers).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
loss_of = nn.CrossEntropyLoss()


def step():
    optimizer.zero_grad(set_to_none=True)
    loss_of(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)).backward()
    optimizer.step()


for _ in range(20):
    step()
torch.cuda.synchronize()
reserved = [torch.cuda.memory_reserved(g) / 2**20 for g in range(torch.cuda.device_count())]
times = []
for _ in range(9):
    begin = time.perf_counter()
    for _ in range(200):
        step()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - begin) / 200 * 1e6)
times.sort()
memory = ", ".join(f"GPU {g} {size:.0f} MiB" for g, size in enumerate(reserved))
print("step", json.dumps({"median": times[len(times) // 2], "minimum": times[0], "memory": memory}), flush=True)
