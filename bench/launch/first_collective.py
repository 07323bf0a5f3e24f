# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes: started by torchrun, says when the first collective is over.
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(1000)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("first collective at", time.monotonic(), flush=True)
dist.destroy_process_group()
