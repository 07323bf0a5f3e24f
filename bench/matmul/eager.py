# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes, on one thread: minimum and median seconds of forward and backward.
import statistics
import sys
import time

import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for batch in map(int, sys.argv[2:]):
    x, y = torch.randn(batch, 784), torch.randint(0, 10, (batch,))
    times, end = [], time.perf_counter() + float(sys.argv[1])
    while time.perf_counter() < end:
        begin = time.perf_counter()
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter() - begin)
    print(batch, min(times), statistics.median(times))
