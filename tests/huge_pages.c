// SPDX-License-Identifier: Apache-2.0
// Preloaded into compilers by ./x: memory that g++ takes for its trees, by mmap in small pieces, comes from huge pages.
// They are a tenth of the time that it takes: of faults for single pages, and of addresses that the processor looks up.
// malloc has a setting for it (GLIBC_TUNABLES), mmap has none. Nothing depends on it: where this file does not compile, where
// there is no memory for a chunk, or where pages have another size, compilers get what they would have got without it.
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { page = 4096, huge = 2 << 20, chunk = 64 << 20 };

static __thread char *next, *end;  // what is left of a thread's last chunk

// A piece of a chunk. It may be given back by munmap as any other: what is left of the chunk stays.
static void* take(size_t bytes) {
  if ((size_t)(end - next) < bytes) {
    char* memory = (char*)syscall(SYS_mmap, NULL, (size_t)chunk + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return memory;
    next = (char*)(((uintptr_t)memory + huge - 1) & ~(uintptr_t)(huge - 1));
    end = next + chunk;
    madvise(next, chunk, MADV_HUGEPAGE);
  }
  next += bytes;
  return next - bytes;
}

void* mmap(void* where, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (where == NULL && file == -1 && flags == (MAP_PRIVATE | MAP_ANONYMOUS) && protection == (PROT_READ | PROT_WRITE) &&
      bytes != 0 && bytes <= chunk / 8 && sysconf(_SC_PAGESIZE) == page) {
    void* memory = take((bytes + page - 1) / page * page);
    if (memory != MAP_FAILED) return memory;
  }
  return (void*)syscall(SYS_mmap, where, bytes, protection, flags, file, offset);
}
void* mmap64(void* where, size_t bytes, int protection, int flags, int file, off_t offset) {
  return mmap(where, bytes, protection, flags, file, offset);
}
