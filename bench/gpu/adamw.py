# SPDX-License-Identifier: Apache-2.0
# PyTorch's fused AdamW over GPT-2's 124 M parameters, in as many tensors as asked (1, 148 as GPT-2 has them, or
# any number of equal ones). Prints microseconds of device time an update.
import json
import sys

import torch

PARAMETERS = 124_439_808


def gpt2_sizes():
    width = 768
    block = [width, width, width * 3 * width, 3 * width, width * width, width]
    block += [width, width, width * 4 * width, 4 * width, 4 * width * width, width]
    return [50257 * width, 1024 * width] + 12 * block + [width, width]


tensors = int(sys.argv[1])
if tensors == 148:
    sizes = gpt2_sizes()
else:
    sizes = [PARAMETERS // tensors] * tensors
    sizes[0] += PARAMETERS - sum(sizes)
assert len(sizes) == tensors and sum(sizes) == PARAMETERS

torch.manual_seed(0)
parameters = [torch.randn(size, device="cuda").requires_grad_() for size in sizes]
for parameter in parameters:
    parameter.grad = torch.randn_like(parameter)


def device_times(step):
    for _ in range(5):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(31)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(1e3 * begin.elapsed_time(end) for begin, end in zip(marks, marks[1:]))
    return {"median": times[len(times) // 2], "minimum": times[0]}


# As a user calls it: with many tensors the device waits for the host.
eager = device_times(torch.optim.AdamW(parameters, fused=True).step)

# Replayed from a graph: the device alone.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    optimizer = torch.optim.AdamW(parameters, fused=True, capturable=True)
    for _ in range(3):
        optimizer.step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        optimizer.step()
    print("adamw", json.dumps({"tensors": tensors, "eager": eager, "graph": device_times(graph.replay)}), flush=True)
