# SPDX-License-Identifier: Apache-2.0
# What a PyTorch user writes for several GPUs: DDP over NCCL, the networks and batches of bench/many/step.cuh, plain
# SGD. usage: torchrun --standalone --nproc-per-node N ddp.py    prints lines `many {json}` on rank 0
import json
import os
import statistics
import time

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # as PyTorch asks for graphs of DDP
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

gpus = torch.cuda.device_count()
if world > gpus:  # only where LOCKSTEP_SHARE_GPUS says so: NCCL takes ranks that share a GPU for hosts
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
torch.cuda.set_device(rank % gpus)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank % gpus))
loss_of = nn.CrossEntropyLoss()


def say(**fields):
    if rank == 0:
        print("many", json.dumps(fields), flush=True)


def prepare(width, hidden, rows, capturing):
    torch.manual_seed(0)
    x, y = torch.randn(rows, width, device="cuda"), torch.randint(10, (rows,), device="cuda")
    layers = [nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)]

    def stepper():
        model = DistributedDataParallel(nn.Sequential(*layers).cuda(), device_ids=[rank % gpus], gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(x), y).backward()
            optimizer.step()

        return step

    if not capturing:
        return stepper()
    # DDP must be made on the stream that captures, and needs 11 steps before that.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = stepper()
        for _ in range(15):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return lambda kept=step: graph.replay()


def microseconds(call, count):
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / count


def median(call, count):
    for _ in range(5):
        call()
    return statistics.median(microseconds(call, count) for _ in range(7))


say(what="torch", version=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())))
for size in (1 << 10, 64 << 10, 1 << 20, 25 << 20, 256 << 20):
    data = torch.zeros(size // 4, device="cuda")
    say(what="all_reduce", backend="torch", ranks=world, bytes=size, us=median(lambda: dist.all_reduce(data), 20 if size > 2 << 20 else 200))
networks = {"784-512-512-10, batch 64": (784, 512, 64, 500), "4096-4096-4096-10, batch 256": (4096, 4096, 256, 50)}
for network, (width, hidden, rows, count) in networks.items():
    # A graph that cannot be captured leaves NCCL's communicator in an unknown state, so calls come first.
    for way in ("calls", "graph"):
        try:
            say(what="step", backend="torch", ranks=world, network=network, way=way, us=median(prepare(width, hidden, rows, way == "graph"), count))
        except Exception as error:
            say(what="note", text=f"PyTorch {network}, {way}: {type(error).__name__}: {error}"[:300])
dist.destroy_process_group()
