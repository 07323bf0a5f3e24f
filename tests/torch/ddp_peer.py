# SPDX-License-Identifier: Apache-2.0
"""PyTorch's DDP over Gloo, for parity_test.cpp: trains the cases of cases.hpp.   usage: ddp_peer.py FOLDER

Writes FOLDER/CASE.WORLD, all values of rank 0's module as floats, for worlds of 1, 2 and 4. One start for all: ranks are forked
from a process that has imported PyTorch and has not used it yet."""
import os, sys

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

ROWS = 4
CASES = [  # name, steps, lr, momentum; momentum None is AdamW
    ("plain", 60, 0.0625, 0), ("momentum", 60, 0.015625, 0.875), ("adamw", 6, 0.00390625, None), ("norm", 20, 0.03125, 0.875),
    ("frozen", 10, 0.0625, 0), ("tied", 10, 0.0625, 0), ("sparse", 10, 0.0625, 0), ("channels_last", 10, 0.0625, 0),
    ("penalty", 10, 0.0625, 0)]


def pattern(sizes, number, scale):
    i = torch.arange(torch.Size(sizes).numel())
    return ((i * i * 37 + i * 7919 + number * 104729).remainder(2001) - 1000).float().mul(scale / 1024).view(sizes)


def whole_numbers(sizes, number, end):
    i = torch.arange(torch.Size(sizes).numel())
    return (i * i * 5 + i * 3 + number * 7).remainder(end).view(sizes)


def batch_of(name, step, rank):
    number = step * 16 + rank
    labels = whole_numbers([ROWS], number, 5)
    if name == "sparse":
        return whole_numbers([ROWS, 3], number, 30), labels
    if name == "channels_last":
        return pattern([ROWS, 3, 4, 4], number, 1).contiguous(memory_format=torch.channels_last), labels
    return pattern([ROWS, 12], number, 1), labels


class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.case = name
        if name == "sparse":
            self.table, self.last = nn.Embedding(30, 12, sparse=True), nn.Linear(12, 5)
        elif name == "channels_last":
            self.filter, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(64, 5)
        elif name == "tied":
            self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 5)
            self.weight = self.first.weight
        else:
            self.first = nn.Linear(12, 16)
            if name == "norm":
                self.norm = nn.BatchNorm1d(16)
            self.last = nn.Linear(16, 5)
            if name == "frozen":
                self.first.bias.requires_grad_(False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(pattern(parameter.shape, number + 1, 0.25))

    def forward(self, x):
        if self.case == "sparse":
            return self.last(self.table(x).mean(1))
        if self.case == "channels_last":
            return self.last(torch.tanh(self.filter(x)).flatten(1))
        hidden = self.first(x)
        if self.case == "norm":
            hidden = self.norm(hidden)
        hidden = torch.tanh(hidden)
        if self.case == "tied":
            hidden = torch.tanh(nn.functional.linear(hidden, self.weight))
        return self.last(hidden)


def train(name, steps, lr, momentum):
    net = Net(name)
    if name == "channels_last":
        net = net.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(net)
    trained = [p for p in net.parameters() if p.requires_grad]
    adamw = momentum is None
    optimizer = torch.optim.AdamW(trained, lr=lr) if adamw else torch.optim.SGD(trained, lr=lr, momentum=momentum)
    for step in range(steps):
        x, labels = batch_of(name, step, dist.get_rank())
        optimizer.zero_grad()
        if name == "penalty":
            x = x.requires_grad_()
            loss = cross_entropy(ddp(x), labels)
            slope, = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 4 * slope.square().sum()
        else:
            loss = cross_entropy(ddp(x), labels)
        loss.backward()
        optimizer.step()
    return torch.cat([t.detach().float().contiguous().view(-1) for t in [*net.parameters(), *net.buffers()]])


def be_rank(folder, world, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting.{world}", world_size=world, rank=rank)
    for case in CASES:
        values = train(*case)
        if rank == 0:
            values.numpy().tofile(f"{folder}/{case[0]}.{world}")
    dist.barrier()
    dist.destroy_process_group()


for world in (1, 2, 4):
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                be_rank(sys.argv[1], world, rank)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit(f"a rank of {world} failed")
