// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communication streams of a process's ranks, peer access, and the kernel that moves bytes.

#include "lockstep/detail/comm/combine.cuh"
#include "lockstep/detail/comm/threads/rendezvous.hpp"

namespace lockstep::detail::threads {

/// The most ranks of a process: a kernel's argument holds two pointers for each.
inline constexpr std::size_t most_ranks = 128;

/// A pointer to every rank's memory, for `Ranks` or, if `dynamic`, up to `most_ranks` ranks.
template <class T, std::size_t Ranks>
struct RankPointers {
  static constexpr std::size_t static_ranks = Ranks;
  static constexpr std::size_t capacity = Ranks == dynamic ? most_ranks : Ranks;
  const T* at[capacity];
  __device__ const T* operator()(unsigned w) const { return at[w]; }
};

/// For source s and target t: the bytes at in[s] + t * in_stride go to out[t] + s * out_stride.
struct Movement {
  const unsigned char* in[most_ranks];
  unsigned char* out[most_ranks];
  PacketPass pass;
  std::size_t in_stride;
  std::size_t out_stride;
  unsigned targets;
};

/// `Dealt`: every target gets its own piece of a source; else all get the same, loaded once.
template <bool Dealt>
LOCKSTEP_KERNEL __launch_bounds__(PacketPass::threads)
    move_bytes(const __grid_constant__ Movement work) {
  const unsigned source = blockIdx.y;
  work.pass.template for_each_packet<16>([&]<std::size_t N>(std::size_t i) {
    const unsigned char* const from = work.in[source] + i;
    const std::size_t to = source * work.out_stride + i;
    Packet<unsigned char, N> packet;
    if constexpr (!Dealt) packet = load_some<N>(from);
    for (unsigned t = 0; t < work.targets; ++t) {
      if constexpr (Dealt) packet = load_some<N>(from + t * work.in_stride);
      store_some<N>(work.out[t] + to, packet);
    }
  });
}

/// Do bytes reach a peer both ways? An IOMMU can corrupt them without an error. **Host** blocks.
inline bool bytes_arrive(int a, int b) {
  constexpr std::size_t bytes = 16 * 1024;  // some pages
  const std::size_t gpus[] = {static_cast<std::size_t>(a), static_cast<std::size_t>(b)};
  std::vector<DeviceArena> memory;
  for (const std::size_t gpu : gpus) {
    const OnGpu current(gpu);
    memory.emplace_back(bytes);
  }
  std::vector<std::uint64_t> sent(bytes / sizeof(std::uint64_t));
  std::vector<std::uint64_t> arrived(sent.size());
  std::uint64_t word = 0;
  for (int trial = 0; trial < 8; ++trial) {
    const OnGpu current(gpus[trial & 1]);  // uses its own memory and the peer's
    const CudaStream stream;
    std::byte* const source = memory[trial >> 1 & 1].data();
    std::byte* const target = memory[1 - (trial >> 1 & 1)].data();
    for (std::uint64_t& one : sent) one = word += 0x9e3779b97f4a7c15u;  // never the same bytes
    copy_now(source, sent.data(), bytes);
    if (trial < 4) {
      copy_async(target, source, bytes, stream);
    } else {
      Movement work{};
      work.in[0] = reinterpret_cast<const unsigned char*>(source);
      work.out[0] = reinterpret_cast<unsigned char*>(target);
      work.pass = PacketPass::cut<unsigned char>(bytes, 0);
      work.targets = 1;
      launch_kernel<move_bytes<false>>("move_bytes", stream, work.pass.grid<unsigned char>(8),
                                       PacketPass::threads, work);
    }
    stream.synchronize();
    copy_now(arrived.data(), target, bytes);
    if (arrived != sent) return false;
  }
  return true;
}

/// Enables peer access both ways, and tests it if it was off. Returns empty, or the reason why not.
inline std::string open_peers(int a, int b, bool is_new) {
  const auto both_ways = [&](const auto& f) {
    for (const auto& [own, peer] : {std::pair(a, b), std::pair(b, a)}) {
      const OnGpu current(static_cast<std::size_t>(own));
      if (std::string rejection = f(own, peer); !rejection.empty()) return rejection;
    }
    return std::string();
  };
  std::string rejection = both_ways([&](int own, int peer) -> std::string {
    int possible = 0;
    check_cuda(cudaDeviceCanAccessPeer(&possible, own, peer), "cudaDeviceCanAccessPeer");
    if (possible == 0) {
      return text({"GPU ", own, " cannot access the memory of GPU ", peer,
                   ". NVLink or a common PCIe switch makes that possible (nvidia-smi topo -m)"});
    }
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    is_new |= error == cudaSuccess;
    if (error == cudaSuccess) return {};
    static_cast<void>(cudaGetLastError());
    if (error == cudaErrorPeerAccessAlreadyEnabled) return {};
    return text({"GPU ", own, " may not access the memory of GPU ", peer, " (",
                 cudaGetErrorName(error), "). Without NVSwitch a GPU has at most eight peers"});
  });
  if (!rejection.empty() || !is_new) return rejection;
  const bool works = bytes_arrive(a, b);
  both_ways([&](int own, int peer) -> std::string {
    if (!works) {  // so that copies go through the host too
      if (cudaDeviceDisablePeerAccess(peer) != cudaSuccess) static_cast<void>(cudaGetLastError());
      return {};
    }
    // Peer access excludes memory of `cudaMallocAsync`, to which these two pools grant it.
    int has_pools = 0;
    check_cuda(cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, own),
               "cudaDeviceGetAttribute");
    if (has_pools == 0) return {};
    cudaMemPool_t pools[2] = {};
    check_cuda(cudaDeviceGetDefaultMemPool(&pools[0], own), "cudaDeviceGetDefaultMemPool");
    check_cuda(cudaDeviceGetMemPool(&pools[1], own), "cudaDeviceGetMemPool");
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = peer;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    for (cudaMemPool_t pool : pools) {
      if (cudaMemPoolSetAccess(pool, &access, 1) != cudaSuccess)
        static_cast<void>(cudaGetLastError());
    }
    return {};
  });
  if (works) return {};
  return text({"GPUs ", a, " and ", b,
               " do not get each other's bytes right: an IOMMU or PCIe's access control (ACS) "
               "stands between them. Turn these off (in the BIOS, or the kernel's iommu=pt)"});
}

/// Per pair of devices: empty, or why there is no peer access.
inline std::map<std::pair<int, int>, std::string>& peer_obstacles() {
  static std::map<std::pair<int, int>, std::string> known;
  return known;
}

/// Can these GPUs use each other's memory? If not, says why once. **Host** blocks the first time.
inline bool open_ways(const std::vector<int>& devices) {
  const char* const wish = std::getenv("LOCKSTEP_PEER_ACCESS");
  if (wish != nullptr && std::string_view(wish) == "0") return false;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::string reason;
  std::size_t failed_pairs = 0;
  bool is_open = true;
  for (auto a = devices.begin(); a != devices.end(); ++a) {
    for (auto b = a + 1; b != devices.end(); ++b) {
      if (*a == *b) continue;
      const auto [pair, is_new] = peer_obstacles().try_emplace(std::minmax(*a, *b));
      std::string& obstacle = pair->second;
      if (is_new || obstacle.empty()) obstacle = open_peers(*a, *b, is_new);
      if (obstacle.empty()) continue;
      is_open = false;
      if (is_new && failed_pairs++ == 0) reason = obstacle;
    }
  }
  if (failed_pairs == 0) return is_open;
  const std::string others =
      failed_pairs == 1 ? "" : text({" (as in ", failed_pairs - 1, " other pairs)"});
  std::fputs(text({"lockstep: ", reason, others,
                   ". Until then ranks exchange everything through host memory, which is slower; "
                   "LOCKSTEP_PEER_ACCESS=0 says that you know\n"})
                 .c_str(),
             stderr);
  return false;
}

/// The most bytes per rank that are staged through host memory at a time.
inline constexpr std::size_t most_staged_bytes = std::size_t{4} << 20;

/// Makes a stream wait for the event of a rank.
inline void follow(cudaStream_t stream, void* event) {
  check_cuda(cudaStreamWaitEvent(stream, static_cast<cudaEvent_t>(event), 0),
             "cudaStreamWaitEvent");
}

/// One GPU's stream for communication.
struct CommStream {
  /// Must be constructed on the GPU.
  explicit CommStream(std::size_t gpu) : gpu(gpu), stream(CudaStream::urgent()) {
    check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_of(gpu)),
               "cudaDeviceGetAttribute");
  }

  std::size_t gpu;
  CudaStream stream;
  CudaEvent reached;  // for other communication streams to wait for
  int processors = 0;
  std::size_t ranks = 0;  // on this GPU
  bool is_only = true;    // are all ranks on this GPU?
};

/// All communication streams of a world. One rank at a time enqueues work. Streams and ranks wait
/// for each other by one event each way: CUDA calls grow with their sum, not their product. With
/// several streams, two idle hubs collect events, so that a stream need not wait for busy ones.
class CommStreams {
 public:
  /// `gpus[r]` is rank r's GPU; `most_staged` bounds a rank's staging slot.
  explicit CommStreams(const std::vector<std::size_t>& gpus,
                       std::size_t most_staged = most_staged_bytes) {
    std::vector<int> devices;
    for (const std::size_t gpu : gpus) {
      const auto comm_stream = std::ranges::find(streams_, gpu, &CommStream::gpu);
      stream_of_rank_.push_back(static_cast<std::size_t>(comm_stream - streams_.begin()));
      if (comm_stream == streams_.end()) {
        const OnGpu current(gpu);
        streams_.emplace_back(gpu);
        devices.push_back(device_of(gpu));
      }
      ++streams_[stream_of_rank_.back()].ranks;
    }
    const OnGpu current(streams_.front().gpu);
    ended_ = std::vector<CudaEvent>(ring);
    if (is_one()) return;
    for (CommStream& comm_stream : streams_) comm_stream.is_only = false;
    for (int i = 0; i < 2; ++i) hubs_.emplace_back(streams_.front().gpu);
    if (open_ways(devices)) return;
    // A slot per rank and one for a result. Allocated here: in a call it might wait for that call.
    const std::size_t least = gpus.size() * 256;
    slot_bytes_ =
        std::clamp((std::size_t{64} << 20) / gpus.size(), least, std::max(most_staged, least)) /
        least * least;
    staging_.emplace((gpus.size() + 1) * slot_bytes_);
  }

  std::span<const CommStream> all() const { return streams_; }
  const CommStream& of(std::size_t rank) const { return streams_[stream_of_rank_[rank]]; }
  bool is_one() const { return streams_.size() == 1; }

  /// Does data pass through pinned host memory, because there is no peer access?
  bool is_staged() const { return staging_.has_value(); }
  /// Bytes per slot, which all ranks can divide evenly into whole packets.
  std::size_t slot_bytes() const { return slot_bytes_; }
  /// A rank's slot of the staging memory. The slot after the last rank's is for a result.
  template <class T>
  T* slot(std::size_t rank) const {
    return is_staged() ? reinterpret_cast<T*>(staging_->data() + rank * slot_bytes_) : nullptr;
  }

  /// Calls `stages()`, which enqueues a call's work with `each` and `barrier`. **Stream** after
  /// what all ranks' compute streams held when they announced the call.
  template <class Stages>
  void run(std::span<const CallArguments> ranks, std::uint64_t ticket, const Stages& stages) const {
    const cudaStream_t begin = is_one() ? streams_.front().stream : hubs_[0].stream;
    for (const CallArguments& rank : ranks) follow(begin, rank.event);
    release_streams();
    stages();
    const cudaStream_t end = is_one() ? begin : hubs_[1].stream;
    await_streams(end);
    ended_[ticket % ring].record(end);
  }
  template <class F>
  void each(const F& f) const {
    for (const CommStream& comm_stream : streams_) {
      const OnGpu current(comm_stream.gpu);
      f(comm_stream);
    }
  }
  template <class F>
  void each_rank(const F& f) const {
    each([&](const CommStream& comm_stream) {
      for (std::size_t w = 0; w < stream_of_rank_.size(); ++w)
        if (&comm_stream == &of(w)) f(comm_stream, w);
    });
  }
  /// **Stream** later work of every stream runs after what all streams hold.
  void barrier() const {
    if (is_one()) return;
    await_streams(hubs_[0].stream);
    release_streams();
  }

  void block(cudaStream_t stream, std::uint64_t ticket) const {
    ended_[ticket % ring].block(stream);
  }
  bool test(std::uint64_t ticket) const { return ended_[ticket % ring].test(); }

  /// Calls `f(stream, event)` with every communication stream and an event of its GPU.
  template <class F>
  void for_each_stream(const F& f) const {
    for (const std::vector<CommStream>* comm_streams : {&streams_, &hubs_})
      for (const CommStream& comm_stream : *comm_streams)
        f(comm_stream.stream.get(), comm_stream.reached.get());
  }

 private:
  void await_streams(cudaStream_t stream) const {
    if (is_one()) return;
    for (const CommStream& comm_stream : streams_) {
      comm_stream.reached.record(comm_stream.stream);
      comm_stream.reached.block(stream);
    }
  }
  void release_streams() const {
    if (is_one()) return;
    hubs_[0].reached.record(hubs_[0].stream);
    for (const CommStream& comm_stream : streams_) hubs_[0].reached.block(comm_stream.stream);
  }

  std::vector<CommStream> streams_;
  std::vector<std::size_t> stream_of_rank_;
  std::vector<CudaEvent> ended_;  // one per call in flight
  std::vector<CommStream> hubs_;  // if several: two that collect events before and after a call
  std::size_t slot_bytes_ = 0;
  std::optional<PinnedArena> staging_;
};

}  // namespace lockstep::detail::threads
