# SPDX-License-Identifier: Apache-2.0
# PyTorch's DataParallel on the CPU, which is the module itself: microseconds a step on so many threads.
import json
import sys
import time

import torch
from torch import nn

torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
x = torch.randn(128, 784)
y = torch.randint(10, (128,))
layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
model = nn.DataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = nn.CrossEntropyLoss()


def step():
    optimizer.zero_grad(set_to_none=True)
    loss_of(model(x), y).backward()
    optimizer.step()


for _ in range(20):
    step()
times = []
for _ in range(15):
    begin = time.perf_counter()
    for _ in range(20):
        step()
    times.append((time.perf_counter() - begin) / 20 * 1e6)
times.sort()
print("step", json.dumps({"median": times[len(times) // 2], "minimum": times[0]}), flush=True)
