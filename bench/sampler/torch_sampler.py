# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user has: seconds for list(iter(DistributedSampler)) and to its first index, as one line
# of JSON, with a checksum of the indices. Arguments: world, samples.
import json
import sys
import time

from torch.utils.data import DistributedSampler


class Sized:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples


def timed(make):
    begin = time.perf_counter()
    result = make()
    return time.perf_counter() - begin, result


world, samples = map(int, sys.argv[1:])
sampler = DistributedSampler(Sized(samples), num_replicas=world, rank=1, seed=1)
lists, firsts = [], []
for _ in range(3 if samples > 10_000_000 else 9):
    seconds, indices = timed(lambda: list(iter(sampler)))
    lists.append(seconds)
    checksum = 0
    for k in range(0, len(indices), 1 + len(indices) // 1000):
        checksum = (checksum * 31 + indices[k]) % 2**32
    del indices
    firsts.append(timed(lambda: next(iter(sampler)))[0])
print(json.dumps({"list": lists, "first": firsts, "checksum": checksum}))
