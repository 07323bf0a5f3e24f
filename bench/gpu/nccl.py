# SPDX-License-Identifier: Apache-2.0
# All-reduce through NCCL among processes that share one GPU. NCCL wants them on different hosts, so each pretends
# to be one, and the bytes go through sockets: an unfair peer, and the only one there is on one GPU.
# usage: torchrun --nproc-per-node N nccl.py    prints `nccl {"bytes": ..., "median": us, "minimum": us}` on rank 0
import json
import os
import statistics
import time

rank = int(os.environ["RANK"])
os.environ["NCCL_HOSTID"] = f"rank{rank}"
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
for count in (1 << 10, 1 << 20, 25 << 20, 64 << 20):
    data = torch.zeros(count // 4, device="cuda")
    times = []
    for turn in range(13):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        dist.all_reduce(data)
        torch.cuda.synchronize()
        if turn > 2:
            times.append(1e6 * (time.perf_counter() - begin))
    if rank == 0:
        print("nccl", json.dumps({"bytes": count, "median": statistics.median(times), "minimum": min(times)}), flush=True)
dist.destroy_process_group()
