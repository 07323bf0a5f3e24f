# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user has: a DataLoader over the files that bench/loader has written, drawing with DistributedSampler.
# Answers questions, a line of JSON each, so that it can take turns: seconds of an epoch, or what it held.
# usage: loader.py FOLDER SAMPLES
import json
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

torch.set_num_threads(1)  # a rank is a core; DataLoader's own processes have one thread each
folder, samples = sys.argv[1], int(sys.argv[2])
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print is no answer
try:
    import lmdb
except ImportError:
    lmdb = None


def augment(x):
    """RandomCrop(28, padding=2) and RandomHorizontalFlip(), as torchvision writes them."""
    x = F.pad(x.view(28, 28), (2, 2, 2, 2))
    i, j = torch.randint(0, 5, (1,)).item(), torch.randint(0, 5, (1,)).item()
    x = x[i:i + 28, j:j + 28]
    if torch.rand(1) < 0.5:
        x = x.flip(-1)
    return x.reshape(784)


class Memory(TensorDataset):
    """Two tensors."""

    def __init__(self):
        super().__init__(torch.from_numpy(np.load(f"{folder}/inputs.npy")), torch.from_numpy(np.load(f"{folder}/labels.npy")))


class Npy(Dataset):
    """Two mapped files."""

    def __init__(self):
        self.inputs = np.load(f"{folder}/inputs.npy", mmap_mode="r")
        self.labels = np.load(f"{folder}/labels.npy", mmap_mode="r")

    def __len__(self):
        return samples

    def __getitem__(self, i):
        return torch.from_numpy(np.array(self.inputs[i])), torch.from_numpy(np.asarray(self.labels[i], dtype=np.int32))


class Idx(Dataset):
    """MNIST's format, mapped: bytes become floats when they are drawn."""

    def __init__(self):
        self.images = np.memmap(f"{folder}/train-images-idx3-ubyte", np.uint8, "r", 16, (samples, 784))
        self.labels = np.memmap(f"{folder}/train-labels-idx1-ubyte", np.uint8, "r", 8, (samples,))

    def __len__(self):
        return samples

    def __getitem__(self, i):
        x = torch.from_numpy(np.array(self.images[i])).to(torch.float32).div_(255)
        return x, torch.from_numpy(np.asarray(self.labels[i], dtype=np.int32))


class Lmdb(Dataset):
    """The records of write_lmdb, by number: behind 24 bytes, which hold the label, are the inputs."""

    def __init__(self):
        self.records = None

    def __len__(self):
        return samples

    def __getitem__(self, i):
        if self.records is None:  # each worker process opens its own
            self.file = lmdb.open(f"{folder}/train.lmdb", subdir=False, readonly=True, lock=False, readahead=False)
            self.records = self.file.begin(buffers=True)
        record = self.records.get(i.to_bytes(8, "big"))
        x = torch.from_numpy(np.frombuffer(record, np.float32, 784, 24).copy())
        return x, torch.from_numpy(np.frombuffer(record, np.int32, 1, 16).copy())[0]

    def close(self):
        """Worker processes that are forked while the file is open here could not open it."""
        if self.records is not None:
            self.records.abort()
            self.file.close()
            self.records = None


class Transformed(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return samples

    def __getitem__(self, i):
        x, y = self.source[i]
        return augment(x), y


sources = {"memory": Memory, "idx": Idx, "npy": Npy, "lmdb": Lmdb}
loaders, data = {}, None  # of one source, transform and batch size: workers of others have ended


def loader_of(asked):
    global data
    if data != (asked["source"], asked["transform"], asked["batch"]):
        loaders.clear()
        data = (asked["source"], asked["transform"], asked["batch"])
    key = (asked["workers"], asked["batched"])
    if key not in loaders:
        source = sources[asked["source"]]()
        if asked["transform"]:
            source = Transformed(source)
        sampler = DistributedSampler(source, num_replicas=asked["world"], rank=0, seed=0)
        workers = {"num_workers": asked["workers"], "persistent_workers": asked["workers"] > 0}
        if asked["batched"]:  # no collation: the data set is indexed with a whole batch's list
            loader = DataLoader(source, batch_size=None, sampler=BatchSampler(sampler, asked["batch"], False), **workers)
        else:
            loader = DataLoader(source, batch_size=asked["batch"], sampler=sampler, **workers)
        loaders[key] = (loader, sampler)
    return loaders[key]


def epoch_of(asked):
    loader, sampler = loader_of(asked)
    sampler.set_epoch(asked["epoch"])
    if asked["check"]:
        labels, total, count = 0, 0.0, 0
        for x, y in loader:
            labels += int((y.to(torch.int64) * torch.arange(count, count + len(y))).sum())
            total += float(x.to(torch.float64).sum())
            count += len(y)
        close(loader.dataset)
        return {"labels": labels, "total": total, "count": count}
    begin = time.perf_counter()
    count = 0
    for x, _ in loader:
        count += len(x)
    seconds = time.perf_counter() - begin
    close(loader.dataset)
    return {"seconds": seconds, "count": count}


def close(source):
    source = getattr(source, "source", source)
    if isinstance(source, Lmdb):
        source.close()


answers.write(json.dumps({"torch": torch.__version__, "numpy": np.__version__,
                          "lmdb": lmdb.__version__ if lmdb else None}) + "\n")
for line in sys.stdin:
    try:
        answers.write(json.dumps(epoch_of(json.loads(line))) + "\n")
    except Exception as error:  # the benchmark says which row it was
        answers.write(json.dumps({"error": str(error)}) + "\n")
loaders.clear()
