// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What ranks of emulated NCCL share that are processes: memory without a name, which ends
/// with them however they end.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

namespace emulated::nccl {

/// Collectives one after the other, each of at most `most_bytes` from a rank.
template <class Part>
class SharedWorld {
 public:
  static constexpr std::size_t most_ranks = 4;
  static constexpr std::size_t most_bytes = std::size_t{8} << 20;

  struct Slot {
    std::atomic<std::uint64_t> arrived;  // collectives whose part is here
    std::atomic<std::uint64_t> ended;    // collectives of which this rank has all that it needs
    Part part;
    std::array<std::byte, most_bytes> data;
  };
  std::atomic<std::size_t> joined;
  std::array<Slot, most_ranks> slots;

  /// A new one, by the path under which others find it while this process lives.
  static std::string make() {
    const int file = ::memfd_create("emulated NCCL", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, sizeof(SharedWorld)) != 0) return {};
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(file);
  }
  static bool is_path(const std::string& id) { return id.starts_with("/proc/"); }
  /// Null where its maker has ended.
  static std::shared_ptr<SharedWorld> open(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return nullptr;
    void* const memory =
        ::mmap(nullptr, sizeof(SharedWorld), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (memory == MAP_FAILED) return nullptr;
    return {static_cast<SharedWorld*>(memory),
            [](SharedWorld* world) { ::munmap(world, sizeof(SharedWorld)); }};
  }

  /// Brings a part of so many bytes to collective `number`, counted from 1, and calls `work()` when
  /// all parts are here. Returns earlier if `is_aborted()`.
  template <class Aborted, class Work>
  void exchange(std::size_t ranks, std::size_t rank, std::uint64_t number, const Part& part,
                std::size_t bytes, const Aborted& is_aborted, const Work& work) {
    const auto all = [&](auto counter, std::uint64_t value) {
      while (!std::all_of(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(ranks),
                          [&](const Slot& slot) { return (slot.*counter).load() >= value; })) {
        if (is_aborted()) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      return true;
    };
    if (!all(&Slot::ended, number - 1)) return;
    slots[rank].part = part;
    std::memcpy(slots[rank].data.data(), part.in, bytes);
    slots[rank].arrived = number;
    if (!all(&Slot::arrived, number)) return;
    work();
    slots[rank].ended = number;
  }
};

}  // namespace emulated::nccl
