# SPDX-License-Identifier: Apache-2.0
# The clients of PyTorch's store for a large job, in one process: each connects, says where it is, and reads what
# all others have said, with one request (multi_get), after all have come.
import sys
import time
from datetime import timedelta
from threading import Thread

from torch.distributed import TCPStore

ranks = int(sys.argv[1])
limit = timedelta(seconds=120)
begin = time.monotonic()
server = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
clients = [None] * ranks


def for_each(f, threads=2):
    def run(first):
        for r in range(first, ranks, threads):
            f(r)

    running = [Thread(target=run, args=(t,)) for t in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def connect(r):
    clients[r] = TCPStore("127.0.0.1", server.port, None, False, limit, wait_for_workers=False)


def join(r):
    clients[r].add(f"joined/{r}", 1)
    clients[r].compare_set("world", "", "1")
    clients[r].compare_set("job", "", "1")
    clients[r].set(f"host/{r}", f"host {r // 8} 0f9e7a52-7f2c-4b53-a1b0-2c1c0d34f5aa")
    clients[r].set(f"gpu/{r}", f"GPU-{r}-0f9e7a52-7f2c-4b53-a1b0-2c1c0d34")


hosts = [f"host/{r}" for r in range(ranks)]
gpus = [f"gpu/{r}" for r in range(ranks)]


def read(r):
    clients[r].multi_get(hosts)
    clients[r].multi_get(gpus)


for_each(connect)
for_each(join)
for_each(read)
print("met in", time.monotonic() - begin, flush=True)
