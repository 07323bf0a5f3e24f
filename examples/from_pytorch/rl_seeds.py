# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 rl_seeds.py --seed 7
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=7)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(args.seed)  # the same initial values on all ranks
policy = DistributedDataParallel(nn.Linear(2, 4))
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
rng = torch.Generator().manual_seed(args.seed + dist.get_rank())  # other episodes on every rank
pays = torch.tensor([[0.1, 0.9, 0.3, 0.2], [0.8, 0.1, 0.2, 0.4]])  # of each arm, in two states

for update in range(20):
    state = torch.randint(0, 2, (32,), generator=rng)
    logits = policy(nn.functional.one_hot(state, 2).float()).log_softmax(1)
    action = torch.multinomial(logits.detach().exp(), 1, generator=rng)
    reward = pays[state].gather(1, action) + 0.1 * torch.randn(32, 1, generator=rng)
    optimizer.zero_grad()
    (-(reward - reward.mean()) * logits.gather(1, action)).mean().backward()
    optimizer.step()
    mean = reward.mean()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"update {update} reward {mean.item() / dist.get_world_size():.9g}")
