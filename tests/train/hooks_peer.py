# SPDX-License-Identifier: Apache-2.0
"""PyTorch's averages of made-up gradients through its own hooks, for hooks_test.cpp.   usage: hooks_peer.py FILE WORLD...

Writes to FILE.WORLD a line for every hook, step and parameter: their names and numbers, and the averages as floats in hexadecimal."""
import math, os, sys, tempfile

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

SHAPES = [(40, 30), (40,), (12, 25), (3, 2)]
STEPS = 6
START = 2
MASK = (1 << 64) - 1


def mix_bits(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def random_at(stream, i):
    return mix_bits((stream + (i + 1) * 0x9E3779B97F4A7C15) & MASK)


def drawn(parameter, column, i):
    """What lockstep draws for the first Q."""
    bits = random_at(random_at(random_at(random_at(0, parameter), START), column), i)
    return (bits >> 11) * 2.0**-52 - 1


def gradient(rank, step, parameter, shape):
    """Smooth, so that it has small ranks, and different on every rank."""
    columns = shape[1] if len(shape) == 2 else 1
    values = [
        math.sin(0.37 * (i // columns) * (parameter + 1) + step + 0.5 * rank) * math.cos(0.11 * (i % columns) * (rank + 1))
        + 0.25 * math.sin(0.9 * i + 3 * step + rank)
        for i in range(math.prod(shape))
    ]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).reshape(shape)


class Given(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.own = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients):
        return sum((p * g).sum() for p, g in zip(self.own, gradients))


def randn(*shape, **_):
    parameter = next(p for p, s in enumerate(SHAPES) if len(s) == 2 and s[1] == shape[1])
    rows = [[drawn(parameter, column, i) for column in range(shape[2])] for i in range(shape[1])]
    return torch.tensor([rows], dtype=torch.float64).to(torch.float32)


def bf16(group, bucket):
    """Under its own name PyTorch rejects it on CPUs."""
    return default_hooks.bf16_compress_hook(group, bucket)


def run(rank, world, meeting, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.randn = randn
    state = lambda r: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=r, start_powerSGD_iter=START)
    hooks = {
        "bf16": (None, bf16),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "rank2": (state(2), powerSGD_hook.powerSGD_hook),
        "rank4": (state(4), powerSGD_hook.powerSGD_hook),
    }
    lines = []
    for name, (hook_state, hook) in hooks.items():
        model = DistributedDataParallel(Given())
        model.register_comm_hook(hook_state, hook)
        for step in range(STEPS):
            model.zero_grad()
            model([gradient(rank, step, p, s) for p, s in enumerate(SHAPES)]).backward()
            for p, own in enumerate(model.module.own):
                numbers = " ".join(float(x).hex() for x in own.grad.flatten())
                lines.append(f"{name} {step} {p} {numbers}\n")
    if rank == 0:
        with open(path, "w") as file:
            file.writelines(lines)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for world in map(int, sys.argv[2:]):
        with tempfile.TemporaryDirectory() as folder:
            children = []
            for rank in range(world):
                child = os.fork()
                if child == 0:
                    try:
                        run(rank, world, folder + "/meeting", f"{sys.argv[1]}.{world}")
                        os._exit(0)
                    except BaseException as error:
                        print(f"rank {rank} of {world}: {error}", file=sys.stderr, flush=True)
                        os._exit(1)
                children.append(child)
            if any([os.waitpid(child, 0)[1] for child in children]):
                sys.exit(1)
