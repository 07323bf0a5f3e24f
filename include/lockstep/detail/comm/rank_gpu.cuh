// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's GPU, ranks that share one, and the memory of calls. Host code: needs no nvcc.

#include "lockstep/detail/comm/call/watchdog.hpp"
#include "lockstep/detail/comm/combine.hpp"
#include "lockstep/detail/comm/communicator.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/store/protocol.hpp"

namespace lockstep::detail {

struct CallMemory {
  bool on_host = true;      // the host works on them; an empty call needs no GPU either
  bool is_managed = false;  // host code may read a result as soon as the call is over
};
enum class MemoryKind { host, managed, device };

/// An argument's memory; a pool's (`cudaMallocAsync`) is device memory. Throws for another GPU's.
template <class C>
MemoryKind memory_kind(const void* pointer, const Gpu& own, const C& call, const char* argument) {
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
  if (attributes.type == cudaMemoryTypeManaged) return MemoryKind::managed;
  if (attributes.type != cudaMemoryTypeDevice) return MemoryKind::host;
  if (attributes.device == own.device()) [[likely]]
    return MemoryKind::device;
  throw Error(call.call().text(),
              text({argument, " is memory of GPU ", attributes.device, ", and this rank's GPU is ",
                    own.device()}),
              "allocate it while the rank's GPU is the current one, or by the communicator's "
              "allocate",
              own.rank());
}

/// A call's memory, by `look(pointer, name)`. Throws if kinds mix; managed memory is either.
template <class C, class Look>
CallMemory memory_of(const C& call, const Gpu& own, const Look& look) {
  using enum MemoryKind;
  std::optional<MemoryKind> in;
  std::optional<MemoryKind> out;
  const bool is_one = C::is_in_place && !call.out.empty();
  if (!call.in.empty() && !is_one) in = look(call.in.data(), C::is_in_place ? "its data" : "in");
  if (!call.out.empty()) out = look(call.out.data(), C::is_in_place ? "its data" : "out");
  const auto is_any = [&](MemoryKind kind) { return in == kind || out == kind; };
  if (is_any(host) && is_any(device)) {
    throw Error(call.call().text(),
                in == host ? "in is host memory and out is device memory"
                           : "in is device memory and out is host memory",
                "give both arguments in the same memory", own.rank());
  }
  return {is_any(host) || (!in && !out), is_any(managed)};
}

/// Is the call's memory the host's? Managed memory is.
template <class C>
bool is_host_call(const C& call, const Gpu& own) {
  const auto look = [&](const void* data, const char* argument) {
    const MemoryKind kind = memory_kind(data, own, call, argument);
    return kind == MemoryKind::device ? kind : MemoryKind::host;
  };
  return memory_of(call, own, look).on_host;
}

/// **Host** blocks until the stream is empty, or `look()` throws.
template <class Look>
void await_stream(cudaStream_t stream, const Look& look) {
  poll_until([&] {
    const cudaError_t state = cudaStreamQuery(stream);
    look();
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "the compute stream");
    return true;
  });
}

/// Copies of elements in host memory, or in device memory on a stream.
class StreamCopies {
 public:
  explicit StreamCopies(cudaStream_t stream) : stream_(stream) {}

  static bool is_device(const void* data) { return data != nullptr && !is_host_memory(data); }

  template <class T>
  void copy(std::span<const T> from, std::span<T> to) const {
    if (from.empty() || from.data() == to.data()) return;
    if (!is_device(to.data())) return HostPasses::copy(from, to);
    copy_async(to.data(), from.data(), from.size_bytes(), stream_);
  }

 protected:
  cudaStream_t stream_;
};

/// The `Pending` of a call that the thread of asynchronous calls makes, whose result in device
/// memory is there at `done`; null for host memory.
template <class Owner, class F>
class PendingOnGpu {
 public:
  PendingOnGpu(Owner& owner, const F& f, const CudaEvent* done, cudaStream_t compute)
      : done_(done), compute_(compute), queued_(owner, f) {}

  bool test() { return queued_.test() && (done_ == nullptr || done_->test()); }
  void wait() {
    queued_.wait();
    if (done_ != nullptr) done_->block(compute_);
  }
  /// What the call has enqueued may still be in flight.
  void leave() {
    queued_.leave();
    if (done_ != nullptr) static_cast<void>(cudaEventSynchronize(done_->get()));
  }

 private:
  const CudaEvent* done_;
  cudaStream_t compute_;
  PendingInQueue<Owner, F> queued_;  // ends first
};

/// The events of asynchronous calls, by turns. Where calls are more, reuse only lengthens a wait.
class EventRing {
 public:
  explicit EventRing(const Gpu& gpu) : events_(gpu.events(512)) {}
  const CudaEvent& next() { return events_[next_++ % events_.size()]; }

 private:
  std::vector<CudaEvent> events_;
  std::size_t next_ = 0;
};

using DeviceAllocating = Allocating<DeviceArena>;

inline std::string bus_id(const Gpu& gpu) {
  char id[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(id, sizeof id, gpu.device()), "cudaDeviceGetPCIBusId");
  return id;
}

/// The chosen GPU, or that whose number is the rank's local rank, made this thread's current
/// device. If all ranks of a host are threads of this process and GPUs are too few, sharing must
/// have been asked for. Processes may see different GPUs: they use these in turn, and
/// `compare_gpus` finds shared ones.
inline std::shared_ptr<Gpu> gpu_of(const Membership& member) {
  const bool are_threads = member.process_ranks >= member.local_world;
  const bool may_share = !are_threads || wants_shared_gpus();
  if (!member.devices.empty()) {
    return std::make_shared<Gpu>(
        member.rank,
        listed_gpu(member.rank, member.local_rank, member.devices, visible_gpus(), may_share));
  }
  return std::make_shared<Gpu>(
      Gpu::of(member.rank, member.local_rank, member.local_world, may_share));
}

/// `GPU-` and the UUID as in nvidia-smi, or a MIG slice's name: CUDA may report the whole GPU's.
inline std::string gpu_name(const Gpu& gpu) {
  const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
  const auto device = static_cast<std::size_t>(gpu.device());
  const std::string_view entry = list == nullptr ? "" : listed_entry(list, device);
  if (entry.starts_with("MIG-")) return std::string(entry);
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, gpu.device()), "cudaGetDeviceProperties");
  std::string name = "GPU-";
  for (std::size_t i = 0; i < sizeof properties.uuid.bytes; ++i) {
    const auto byte = static_cast<unsigned char>(properties.uuid.bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) name += '-';
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  // Tests emulate more GPUs than there are.
  if (logical_gpus() != 0) name += " as number " + std::to_string(gpu.index());
  return name;
}

/// Compares the GPUs of the ranks of communicator `name`. Ranks that share one are an error on all,
/// unless `LOCKSTEP_SHARE_GPUS=1` allows it. **Ranks** all. **Host** blocks until all have joined.
inline GpuSharing compare_gpus(const Membership& member, Store& store, const Gpu& gpu,
                               const std::string& name) {
  // A hash of the host is enough to compare, and short where there are thousands of ranks.
  const std::string own = store_protocol::Writer{}
                              .u64(hash_of(host_identity()))
                              .text(gpu_name(gpu))
                              .text(bus_id(gpu))
                              .bytes();
  std::vector<GpuIdentity> gpus;
  gpus.reserve(member.world.value());
  for (const std::string& bytes :
       store.gather("lockstep/gpus/" + name, member.rank, member.world, own, member.timeout)) {
    store_protocol::Reader in(bytes);
    GpuIdentity one;
    one.host = in.raw(8);
    one.uuid = in.text();
    one.bus = in.text();
    gpus.push_back(one);
  }
  const GpuSharing sharing(gpus);
  require_own_gpus(sharing, gpus, member.rank, wants_shared_gpus());
  return sharing;
}

/// `gpu_of`, then `compare_gpus`. **Ranks** all. **Host** blocks until all have joined.
inline std::shared_ptr<Gpu> gpu_of_process(const Membership& member, Store& store,
                                           const std::string& name) {
  std::shared_ptr<Gpu> gpu = gpu_of(member);
  if (member.world > WorldSize{1}) compare_gpus(member, store, *gpu, name);
  return gpu;
}

}  // namespace lockstep::detail
