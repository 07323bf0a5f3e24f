# SPDX-License-Identifier: Apache-2.0
# The network of example 07 as a PyTorch user writes it: DDP over NCCL on one GPU, fused SGD with momentum, a batch that
# lies on the GPU already. Prints microseconds a step for each way to run it; a way that fails says so on stderr and is
# left out. PyTorch's convolutions use TF32 unless told otherwise, as those of the example do.
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.dont_write_bytecode = True
import ddp_ways  # before torch, which reads the environment

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rows = int(sys.argv[1])
ddp_ways.join_alone()
x = torch.randn(rows, 1, 28, 28, device="cuda")
y = torch.randint(10, (rows,), device="cuda")


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.fc = nn.Linear(64 * 7 * 7, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.relu(self.bn1(self.conv1(x))), 2)
        x = nn.functional.max_pool2d(nn.functional.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def make(net):
    model = DistributedDataParallel(net, device_ids=[0])
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def eager():
    return ddp_ways.stepper(*make(ConvNet().cuda()), x, y)


def measured():  # cuDNN's algorithms chosen by trying them, images channels last
    torch.backends.cudnn.benchmark = True
    net = ConvNet().cuda().to(memory_format=torch.channels_last)
    step = ddp_ways.stepper(*make(net), x.to(memory_format=torch.channels_last), y)
    for _ in range(20):
        step()
    torch.backends.cudnn.benchmark = False  # what was chosen by then is kept for these shapes
    return step


ddp_ways.print_ways("convnet", {
    "eager": (eager, 200),
    "measured": (measured, 200),
    "graph": (lambda: ddp_ways.captured(eager), 1000),
})
