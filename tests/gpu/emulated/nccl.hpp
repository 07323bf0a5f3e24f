// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of NCCL that the library uses, emulated on the host between the threads of a
/// process, or for collectives between processes, on emulated GPUs (cuda.hpp). A collective is work
/// of each rank's stream that waits there until all partners' streams have come to it. As NCCL
/// does, a communicator connects at the first call of each kind, and allocates then.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpu/emulated/cuda.hpp"
#include "gpu/emulated/nccl_processes.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/reduce_op.hpp"

namespace emulated::nccl {

/// How often a communicator has connected for a kind of call.
inline std::atomic<int> connections = 0;
/// What has become of `ncclAvg`, which rounds 1/N to the elements' type: the library is not to use
/// it.
inline std::atomic<int> averages = 0;
/// Are ranks processes? A program says so before it has communicators.
inline bool between_processes = false;

enum class Kind : std::uint8_t {
  all_reduce,
  reduce,
  reduce_scatter,
  broadcast,
  all_gather,
  messages
};

struct Operation {
  ncclRedOp_t op = ncclSum;
  double factor = 1;  // before the sum
};

/// What one rank brings to a collective.
struct Part {
  Kind kind = Kind::all_reduce;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclUint8;
  Operation operation;
  int root = 0;

  /// Is this another rank's part of the same collective?
  bool fits(const Part& other) const {
    return kind == other.kind && count == other.count && type == other.type && root == other.root &&
           operation.op == other.operation.op;
  }
};

/// Calls `f(T{})` with the elements' type.
template <class F>
void with_type(ncclDataType_t type, const F& f) {
  switch (type) {
    case ncclFloat64:
      return f(double{});
    case ncclFloat32:
      return f(float{});
    case ncclFloat16:
      return f(lockstep::Half{});
    case ncclBfloat16:
      return f(lockstep::BFloat16{});
    case ncclInt8:
      return f(std::int8_t{});
    case ncclInt32:
      return f(std::int32_t{});
    case ncclInt64:
      return f(std::int64_t{});
    case ncclUint32:
      return f(std::uint32_t{});
    case ncclUint64:
      return f(std::uint64_t{});
    default:
      return f(std::uint8_t{});
  }
}
inline std::size_t size_of(ncclDataType_t type) {
  std::size_t size = 0;
  with_type(type, [&](auto value) { size = sizeof value; });
  return size;
}

/// One collective of all ranks. The first that finds all there works for all, before any writes.
struct Rendezvous {
  explicit Rendezvous(std::size_t ranks) : parts(ranks) {}

  std::vector<Part> parts;
  std::atomic<std::size_t> arrived = 0;
  std::once_flag worked;
  std::vector<std::byte> result;  // of all ranks, one behind the other where each has its own

  bool is_complete() const { return arrived == parts.size(); }

  void work() {
    const Part& first = parts.front();
    for (const Part& part : parts) {
      if (!part.fits(first)) note_fault("ranks make different calls of NCCL");
    }
    const std::size_t bytes = first.count * size_of(first.type);
    const std::size_t all = parts.size();
    if (first.kind == Kind::broadcast) {
      const auto* const from =
          static_cast<const std::byte*>(parts[static_cast<std::size_t>(first.root)].in);
      result.assign(from, from + bytes);
    } else if (first.kind == Kind::all_gather) {
      for (const Part& part : parts) {
        const auto* const from = static_cast<const std::byte*>(part.in);
        result.insert(result.end(), from, from + bytes);
      }
    } else {
      const bool scatters = first.kind == Kind::reduce_scatter;
      result.resize(scatters ? all * bytes : bytes);
      with_type(first.type, [&]<class T>(T) { reduce<T>(scatters ? all : 1); });
    }
  }

  /// Every sum is rounded to T, as NCCL's are.
  template <class T>
  void reduce(std::size_t rows) {
    using A = lockstep::detail::Accumulator<T>;
    const Part& first = parts.front();
    double factor = first.operation.factor;
    if (first.operation.op == ncclAvg) factor = 1 / static_cast<double>(parts.size());
    const A by = static_cast<A>(static_cast<T>(static_cast<A>(factor)));
    auto* const to = reinterpret_cast<T*>(result.data());
    for (std::size_t i = 0; i < rows * first.count; ++i) {
      const auto value = [&](std::size_t r) {
        const A own = static_cast<A>(static_cast<const T*>(parts[r].in)[i]);
        return factor == 1 ? own : static_cast<A>(static_cast<T>(by * own));
      };
      A sum = value(0);
      for (std::size_t r = 1; r < parts.size(); ++r) {
        const A next = value(r);
        const ncclRedOp_t op = first.operation.op;
        const bool less = lockstep::detail::less(static_cast<T>(next), static_cast<T>(sum));
        const A both = op == ncclProd  ? static_cast<A>(sum * next)
                       : op == ncclMin ? (less ? next : sum)
                       : op == ncclMax ? (less ? sum : next)
                                       : static_cast<A>(sum + next);
        sum = static_cast<A>(static_cast<T>(both));
      }
      to[i] = static_cast<T>(sum);
    }
  }

  void deliver(std::size_t rank) const {
    const Part& own = parts[rank];
    const std::size_t bytes = own.count * size_of(own.type);
    if (own.kind == Kind::reduce && static_cast<std::size_t>(own.root) != rank) return;
    const std::byte* const from =
        result.data() + (own.kind == Kind::reduce_scatter ? rank * bytes : 0);
    std::memcpy(own.out, from, own.kind == Kind::all_gather ? result.size() : bytes);
  }
};

/// The ranks of a communicator.
struct World {
  explicit World(std::size_t ranks) : ranks(ranks) {}

  const std::size_t ranks;
  std::shared_ptr<SharedWorld<Part>> shared;  // of processes
  std::atomic<std::size_t> joined = 0;
  std::mutex mutex;
  std::map<std::uint64_t, std::shared_ptr<Rendezvous>> all_rendezvous;  // by number
  struct Division {
    std::size_t arrived = 0;
    std::vector<std::pair<int, int>> positions;  // colour and key of each rank
    std::vector<std::function<void(std::shared_ptr<World>, int)>> tell;
  };
  std::map<std::uint64_t, Division> divisions;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> mail;  // from, to
  std::map<std::pair<int, int>, std::atomic<std::size_t>> letters;

  /// How many ranks have joined.
  std::atomic<std::size_t>& present() { return shared == nullptr ? joined : shared->joined; }

  std::shared_ptr<Rendezvous> rendezvous(std::uint64_t number) {
    const std::lock_guard lock(mutex);
    auto& found = all_rendezvous[number];
    if (found == nullptr) found = std::make_shared<Rendezvous>(ranks);
    return found;
  }
};

inline std::mutex worlds_mutex;
inline std::map<std::string, std::shared_ptr<World>> worlds;  // by unique id

}  // namespace emulated::nccl

struct ncclComm {
  struct State {
    std::shared_ptr<emulated::nccl::World> world;
    std::size_t rank = 0;
    std::atomic<bool> is_joined = false;
    std::atomic<bool> is_aborted = false;
    std::atomic<bool> divides = false;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
  int gpu = 0;
  std::uint64_t calls = 0;
  std::uint64_t divisions = 0;
  std::set<std::string> connected;
  std::vector<emulated::nccl::Operation> operations;
  std::vector<void*> memory;  // that connections took
};

namespace emulated::nccl {

struct Message {
  bool sends;
  void* data;
  std::size_t bytes;
  int peer;
  ncclComm_t comm;
  cudaStream_t stream;
};
inline thread_local int groups = 0;
inline thread_local std::vector<Message> grouped;

/// The first call of a kind connects, which allocates on the communicator's GPU. NCCL allocates in
/// a thread of its own, so that a call whose peer has died can be aborted: between processes, where
/// this happens, it is left out.
inline void connect(ncclComm_t comm, const std::string& kind) {
  if (!comm->connected.insert(kind).second) return;
  ++connections;
  if (between_processes) return;
  const int before = std::exchange(current_gpu, comm->gpu);
  void* memory = nullptr;
  static_cast<void>(cudaMalloc(&memory, 256));
  comm->memory.push_back(memory);
  current_gpu = before;
}

inline ncclResult_t check(ncclComm_t comm, cudaStream_t stream) {
  if (stream->gpu == comm->gpu) return ncclSuccess;
  note_fault("NCCL's communicator of GPU " + std::to_string(comm->gpu) +
             " is given a stream of GPU " + std::to_string(stream->gpu));
  return ncclInvalidArgument;
}

inline void check_memory(ncclComm_t comm, const void* data) {
  const int gpu = Memory::get().gpu_of(const_cast<void*>(data));
  if (gpu != comm->gpu)
    note_fault("NCCL's communicator of GPU " + std::to_string(comm->gpu) +
               " is given memory of GPU " + std::to_string(gpu));
}

/// One rank's part of a collective between processes, of which each computes its own results. Ranks
/// with different calls wait for ever, as NCCL's do if they are lucky.
inline void exchange(const ncclComm::State& state, std::uint64_t number, const Part& part) {
  auto& shared = *state.world->shared;
  const std::size_t ranks = state.world->ranks;
  const std::size_t rows = part.kind == Kind::reduce_scatter ? ranks : 1;
  const std::size_t bytes = rows * part.count * size_of(part.type);
  if (bytes > shared.most_bytes) note_fault("more bytes than ranks of emulated NCCL share");
  shared.exchange(
      ranks, state.rank, number, part, bytes, [&] { return state.is_aborted.load(); },
      [&] {
        Rendezvous all(ranks);
        for (std::size_t r = 0; r < ranks; ++r) {
          all.parts[r] = shared.slots[r].part;
          while (!all.parts[r].fits(part)) {
            if (state.is_aborted) return;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          all.parts[r].in = shared.slots[r].data.data();
          all.parts[r].out = part.out;
        }
        all.work();
        all.deliver(state.rank);
      });
}

/// The messages of a group between processes, of which every rank has one: each brings all that it
/// sends, peer by peer, behind the number of bytes for each.
inline void exchange_messages(const ncclComm::State& state, std::uint64_t number,
                              const std::vector<Message>& messages) {
  auto& shared = *state.world->shared;
  const std::size_t ranks = state.world->ranks;
  std::vector<std::uint64_t> lengths(ranks);
  std::vector<std::byte> sent(ranks * sizeof(std::uint64_t));
  for (std::size_t peer = 0; peer < ranks; ++peer) {
    for (const Message& message : messages) {
      if (!message.sends || static_cast<std::size_t>(message.peer) != peer) continue;
      const auto* const from = static_cast<const std::byte*>(message.data);
      sent.insert(sent.end(), from, from + message.bytes);
      lengths[peer] += message.bytes;
    }
  }
  std::memcpy(sent.data(), lengths.data(), ranks * sizeof(std::uint64_t));
  if (sent.size() > shared.most_bytes) note_fault("more bytes than ranks of emulated NCCL share");
  const Part part{Kind::messages, sent.data(), nullptr, 0, ncclUint8, {}, 0};
  shared.exchange(
      ranks, state.rank, number, part, sent.size(), [&] { return state.is_aborted.load(); },
      [&] {
        std::vector<const std::byte*> from;
        for (std::size_t r = 0; r < ranks; ++r) {
          if (shared.slots[r].part.kind != Kind::messages)
            note_fault("ranks make different calls of NCCL");
          const std::byte* const data = shared.slots[r].data.data();
          std::memcpy(lengths.data(), data, ranks * sizeof(std::uint64_t));
          from.push_back(std::accumulate(lengths.begin(),
                                         lengths.begin() + static_cast<std::ptrdiff_t>(state.rank),
                                         data + ranks * sizeof(std::uint64_t)));
        }
        for (const Message& message : messages) {
          if (message.sends) continue;
          auto& at = from[static_cast<std::size_t>(message.peer)];
          std::memcpy(message.data, at, message.bytes);
          at += message.bytes;
        }
      });
}

inline ncclResult_t start(const char* name, ncclComm_t comm, const Part& part,
                          cudaStream_t stream) {
  count(name);
  if (check(comm, stream) != ncclSuccess) return ncclInvalidArgument;
  if (part.operation.op == ncclAvg) ++averages;
  check_memory(comm, part.in);
  const bool is_large = part.count * size_of(part.type) > 65536;
  connect(comm, std::string(part.kind <= Kind::reduce_scatter ? "reductions" : "movements") +
                    (is_large ? " of much" : ""));
  const auto state = comm->state;
  if (state->world->shared != nullptr) {
    const std::uint64_t number = ++comm->calls;
    Gpu::get().enqueue(stream,
                       {[=] { exchange(*state, number, part); }, nullptr, nullptr, 0, nullptr});
    return ncclSuccess;
  }
  if (Gpu::get().capture_status(stream) != cudaStreamCaptureStatusNone) {
    // A node of a graph, which meets those of other ranks' graphs anew in every replay.
    const std::uint64_t number = comm->calls++;
    const auto replays = std::make_shared<std::atomic<std::uint64_t>>(0);
    const auto replay = [=] {
      const auto rendezvous =
          state->world->rendezvous(std::uint64_t{1} << 63 | number << 32 | (*replays)++);
      rendezvous->parts[state->rank] = part;
      ++rendezvous->arrived;
      while (!rendezvous->is_complete()) {
        if (state->is_aborted) return;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      std::call_once(rendezvous->worked, [&] { rendezvous->work(); });
      rendezvous->deliver(state->rank);
    };
    Gpu::get().enqueue(stream, {replay, nullptr, nullptr, 0, nullptr});
    return ncclSuccess;
  }
  const auto rendezvous = state->world->rendezvous(comm->calls++);
  const auto arrive = [=] {
    rendezvous->parts[state->rank] = part;
    ++rendezvous->arrived;
  };
  const auto is_ready = [=] { return rendezvous->is_complete() || state->is_aborted; };
  const auto work = [=] {
    if (state->is_aborted) return;
    std::call_once(rendezvous->worked, [&] { rendezvous->work(); });
    rendezvous->deliver(state->rank);
  };
  Gpu::get().enqueue(stream, {[arrive] {
                                arrive();
                                Gpu::get().wake();
                              },
                              nullptr, nullptr, 0, nullptr});
  Gpu::get().enqueue(stream, {work, nullptr, nullptr, 0, is_ready});
  return ncclSuccess;
}

inline Operation operation_of(ncclComm_t comm, ncclRedOp_t op) {
  if (op < ncclNumOps) return {op, 1};
  return comm->operations[static_cast<std::size_t>(op) - ncclNumOps];
}

/// The messages of a group travel together: all are sent, then all are received.
inline ncclResult_t deliver(const std::vector<Message>& messages) {
  if (messages.empty()) return ncclSuccess;
  const ncclComm_t comm = messages.front().comm;
  const cudaStream_t stream = messages.front().stream;
  if (check(comm, stream) != ncclSuccess) return ncclInvalidArgument;
  for (const Message& message : messages)
    connect(comm, "messages with " + std::to_string(message.peer));
  const auto state = comm->state;
  const auto world = state->world;
  if (world->shared != nullptr) {
    const std::uint64_t number = ++comm->calls;
    Gpu::get().enqueue(stream, {[=] { exchange_messages(*state, number, messages); }, nullptr,
                                nullptr, 0, nullptr});
    return ncclSuccess;
  }
  const int me = static_cast<int>(state->rank);
  const auto send = [=] {
    {
      const std::lock_guard lock(world->mutex);
      for (const Message& message : messages) {
        if (!message.sends) continue;
        const auto* const from = static_cast<const std::byte*>(message.data);
        world->mail[{me, message.peer}].emplace_back(from, from + message.bytes);
        ++world->letters[{me, message.peer}];
      }
    }
    Gpu::get().wake();
  };
  const auto is_ready = [=] {
    if (state->is_aborted) return true;
    const std::lock_guard lock(world->mutex);
    std::map<int, std::size_t> wanted;
    for (const Message& message : messages)
      if (!message.sends) ++wanted[message.peer];
    return std::all_of(wanted.begin(), wanted.end(), [&](const auto& one) {
      return world->letters[{one.first, me}] >= one.second;
    });
  };
  const auto receive = [=] {
    if (state->is_aborted) return;
    const std::lock_guard lock(world->mutex);
    for (const Message& message : messages) {
      if (message.sends) continue;
      auto& box = world->mail[{message.peer, me}];
      if (box.front().size() != message.bytes) note_fault("a message of another length");
      std::memcpy(message.data, box.front().data(), std::min(box.front().size(), message.bytes));
      box.pop_front();
      --world->letters[{message.peer, me}];
    }
  };
  Gpu::get().enqueue(stream, {send, nullptr, nullptr, 0, nullptr});
  Gpu::get().enqueue(stream, {receive, nullptr, nullptr, 0, is_ready});
  return ncclSuccess;
}

inline ncclResult_t post(const Message& message) {
  check_memory(message.comm, message.data);
  if (groups == 0) return deliver({message});
  return grouped.push_back(message), ncclSuccess;
}

}  // namespace emulated::nccl

extern "C" {
inline const char* ncclGetErrorString(ncclResult_t) { return "an emulated error"; }
inline const char* ncclGetLastError(ncclComm_t) { return ""; }

inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  using emulated::nccl::Part, emulated::nccl::SharedWorld;
  static std::atomic<int> next = 0;
  *id = {};
  const std::string name = emulated::nccl::between_processes ? SharedWorld<Part>::make()
                                                             : "emulated " + std::to_string(next++);
  return name.copy(id->internal, sizeof id->internal - 1), ncclSuccess;
}
inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                           ncclConfig_t*) {
  emulated::count(__func__);
  *comm = new ncclComm;
  (*comm)->gpu = emulated::current_gpu;
  (*comm)->state->rank = static_cast<std::size_t>(rank);
  const std::lock_guard lock(emulated::nccl::worlds_mutex);
  auto& world = emulated::nccl::worlds[id.internal];
  using Shared = emulated::nccl::SharedWorld<emulated::nccl::Part>;
  if (world == nullptr) world = std::make_shared<emulated::nccl::World>(ranks);
  (*comm)->state->world = world;
  if (Shared::is_path(id.internal) && (world->shared = Shared::open(id.internal)) == nullptr)
    return ncclSystemError;
  (*comm)->state->is_joined = true;
  ++world->present();
  return ncclInProgress;
}
inline ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t* divided,
                                  ncclConfig_t*) {
  emulated::count(__func__);
  *divided = nullptr;
  if (colour != NCCL_SPLIT_NOCOLOR) {
    *divided = new ncclComm;
    (*divided)->gpu = comm->gpu;
  }
  const auto state = *divided == nullptr ? nullptr : (*divided)->state;
  const auto parent = comm->state;
  parent->divides = true;
  const auto world = parent->world;
  const std::lock_guard lock(world->mutex);
  auto& division = world->divisions[comm->divisions++];
  division.positions.resize(world->ranks);
  division.tell.resize(world->ranks);
  division.positions[parent->rank] = {colour, key};
  division.tell[parent->rank] = [=](std::shared_ptr<emulated::nccl::World> own, int rank) {
    if (state != nullptr) {
      state->world = std::move(own);
      state->rank = static_cast<std::size_t>(rank);
      ++state->world->joined;
      state->is_joined = true;
    }
    parent->divides = false;
  };
  if (++division.arrived != world->ranks) return ncclInProgress;
  std::map<int, std::vector<std::pair<int, std::size_t>>> members;  // of a colour: key and rank
  for (std::size_t r = 0; r < world->ranks; ++r)
    members[division.positions[r].first].emplace_back(division.positions[r].second, r);
  for (auto& [group, all] : members) {
    std::sort(all.begin(), all.end());
    const auto own = std::make_shared<emulated::nccl::World>(all.size());
    for (std::size_t i = 0; i < all.size(); ++i)
      division.tell[all[i].second](own, static_cast<int>(i));
  }
  division.tell.clear();  // they hold their parents, which hold this world
  return ncclInProgress;
}
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  const auto& state = *comm->state;
  const bool is_ready =
      state.is_joined && state.world->present() == state.world->ranks && !state.divides;
  return *result = is_ready ? ncclSuccess : ncclInProgress, ncclSuccess;
}
inline ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  for (void* const memory : comm->memory) static_cast<void>(cudaFree(memory));
  return delete comm, ncclSuccess;
}
inline ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->state->is_aborted = true;
  emulated::Gpu::get().wake();
  return ncclCommDestroy(comm);
}

inline ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                             ncclScalarResidence_t, ncclComm_t comm) {
  emulated::nccl::with_type(type, [&]<class T>(T) {
    T factor;
    std::memcpy(&factor, scalar, sizeof factor);
    comm->operations.push_back(
        {ncclSum, static_cast<double>(static_cast<lockstep::detail::Accumulator<T>>(factor))});
  });
  *op = static_cast<ncclRedOp_t>(ncclNumOps + comm->operations.size() - 1);
  return ncclSuccess;
}
inline ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

inline ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  const auto operation = emulated::nccl::operation_of(comm, op);
  return emulated::nccl::start(
      __func__, comm, {emulated::nccl::Kind::all_reduce, in, out, count, type, operation, 0},
      stream);
}
inline ncclResult_t ncclReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  const auto operation = emulated::nccl::operation_of(comm, op);
  return emulated::nccl::start(
      __func__, comm, {emulated::nccl::Kind::reduce, in, out, count, type, operation, root},
      stream);
}
inline ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                      cudaStream_t stream) {
  const auto operation = emulated::nccl::operation_of(comm, op);
  return emulated::nccl::start(
      __func__, comm, {emulated::nccl::Kind::reduce_scatter, in, out, count, type, operation, 0},
      stream);
}
inline ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                  int root, ncclComm_t comm, cudaStream_t stream) {
  return emulated::nccl::start(
      __func__, comm, {emulated::nccl::Kind::broadcast, in, out, count, type, {}, root}, stream);
}
inline ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                  ncclComm_t comm, cudaStream_t stream) {
  return emulated::nccl::start(
      __func__, comm, {emulated::nccl::Kind::all_gather, in, out, count, type, {}, 0}, stream);
}
inline ncclResult_t ncclSend(const void* data, std::size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  return emulated::nccl::post(
      {true, const_cast<void*>(data), count * emulated::nccl::size_of(type), peer, comm, stream});
}
inline ncclResult_t ncclRecv(void* data, std::size_t count, ncclDataType_t type, int peer,
                             ncclComm_t comm, cudaStream_t stream) {
  return emulated::nccl::post(
      {false, data, count * emulated::nccl::size_of(type), peer, comm, stream});
}
inline ncclResult_t ncclGroupStart() { return ++emulated::nccl::groups, ncclSuccess; }
inline ncclResult_t ncclGroupEnd() {
  if (--emulated::nccl::groups != 0) return ncclSuccess;
  return emulated::nccl::deliver(std::exchange(emulated::nccl::grouped, {}));
}

inline ncclResult_t ncclMemAlloc(void** data, std::size_t bytes) {
  return cudaMalloc(data, bytes) == cudaSuccess ? ncclSuccess : ncclSystemError;
}
inline ncclResult_t ncclMemFree(void* data) {
  return static_cast<void>(cudaFree(data)), ncclSuccess;
}
inline ncclResult_t ncclCommRegister(ncclComm_t, void*, std::size_t, void** handle) {
  return *handle = nullptr, ncclSuccess;
}
inline ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
}
