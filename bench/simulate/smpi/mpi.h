// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file SimGrid's MPI with what it lacks for this library, for the simulated job alone.
///
/// Ranks are contexts of one thread. What differs from SMPI's own:
///  - Non-blocking collectives of much data are what Open MPI's are: a message to every other rank,
///    all at once. SMPI's are too, but it takes the square of their number to wait for them.
///  - Those of few bytes, by which ranks compare calls and join, are blocking ones, whose
///    algorithms can be chosen: SMPI's own are not trees.
///  - `MPI_Comm_idup` is missing, and `MPI_Comm_dup` of 1,024 ranks takes a minute: a duplicate is
///    the communicator itself, whose collectives and messages have other tags.
///  - `MPI_Test` cannot let time pass while the library polls: a request that is tested again,
///    before the rank has computed, is waited for.
///
/// With `emulated_world` this process is rank 0 of so many ranks, all calls are complete at once,
/// and only messages and bytes are counted.
#include_next <mpi.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

namespace simulated {

/// The ranks of each host, where those of a host reach each other without a switch; 0: unknown.
inline int ranks_of_host = 0;

/// What this rank has sent.
struct Sent {
  std::size_t messages = 0;
  std::size_t bytes = 0;

  void count(std::size_t of, std::size_t size) {
    messages += of;
    bytes += of * size;
  }
};
inline Sent hellos;  // compare calls: a tree's messages, one for each doubling of the ranks
inline Sent data;
inline std::size_t emulated_world = 0;
/// Messages of a collective that are simulated, of each rank; 0: all. Rounds take equally long, so
/// that the time of all is told by two numbers of them.
inline std::size_t rounds = 0;

/// The messages of a collective, by its request, which is the first of them.
inline std::map<MPI_Request, std::vector<MPI_Request>> parts;
/// Requests that were tested in vain since the rank has last computed.
inline std::vector<MPI_Request*> tested;

/// Simulated time passes as if the rank computed.
inline void compute(double seconds) {
  tested.clear();
  if (emulated_world == 0 && seconds > 0) smpi_execute(seconds);
}

inline std::size_t size_of(MPI_Datatype type) {
  int size = 0;
  MPI_Type_size(type, &size);
  return static_cast<std::size_t>(size);
}

inline int comm_size(MPI_Comm comm, int* size) {
  if (emulated_world == 0) return MPI_Comm_size(comm, size);
  *size = static_cast<int>(emulated_world);
  return MPI_SUCCESS;
}
inline std::size_t world_of(MPI_Comm comm) {
  int size = 0;
  comm_size(comm, &size);
  return static_cast<std::size_t>(size);
}

/// Advances a request: waits for it, or says whether it is done.
inline bool advance(MPI_Request* request, bool waits) {
  const auto found = parts.find(*request);
  if (found == parts.end()) {
    int is_done = 1;
    if (waits) {
      MPI_Wait(request, MPI_STATUS_IGNORE);
    } else {
      MPI_Test(request, &is_done, MPI_STATUS_IGNORE);
    }
    return is_done != 0;
  }
  // From the last: the first names the others, and nobody else waits for it.
  for (auto& messages = found->second; !messages.empty(); messages.pop_back()) {
    int is_done = 1;
    if (waits) {
      MPI_Wait(&messages.back(), MPI_STATUS_IGNORE);
    } else {
      MPI_Test(&messages.back(), &is_done, MPI_STATUS_IGNORE);
    }
    if (is_done == 0) return false;
  }
  parts.erase(found);
  *request = MPI_REQUEST_NULL;
  return true;
}

inline int test(MPI_Request* request, int* is_done, MPI_Status*) {
  *is_done = *request == MPI_REQUEST_NULL || advance(request, false);
  if (*is_done != 0) {
    std::erase(tested, request);
  } else if (std::ranges::find(tested, request) == tested.end()) {
    tested.push_back(request);
  } else {
    advance(tested.front(), true);
    *is_done = tested.front() == request;
    tested.clear();
  }
  return MPI_SUCCESS;
}

inline int comm_idup(MPI_Comm comm, MPI_Comm* made, MPI_Request* request) {
  *request = MPI_REQUEST_NULL;
  *made = comm;
  return MPI_SUCCESS;
}
inline int comm_free(MPI_Comm* comm) {
  *comm = MPI_COMM_NULL;
  return MPI_SUCCESS;
}

inline int iallreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                      MPI_Comm comm, MPI_Request* request) {
  const std::size_t bytes = static_cast<std::size_t>(count) * size_of(type);
  hellos.count(std::bit_width(world_of(comm) - 1), bytes);
  *request = MPI_REQUEST_NULL;
  if (emulated_world == 0) return MPI_Allreduce(in, out, count, type, op, comm);
  std::memcpy(out, in, bytes);
  return MPI_SUCCESS;
}

inline int ibcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm,
                  MPI_Request* request) {
  *request = MPI_REQUEST_NULL;
  return emulated_world == 0 ? MPI_Bcast(buffer, count, type, root, comm) : MPI_SUCCESS;
}

/// Sends `from + places[w]` to every other rank w, and receives into `out + to[w]`; with `rounds`
/// to so many of them only, which are spread evenly.
inline int exchange(const char* from, const int* counts, const int* places, char* out,
                    const int* received, const int* to, MPI_Datatype type, MPI_Comm comm,
                    MPI_Request* request) {
  const std::size_t world = world_of(comm);
  const std::size_t size = size_of(type);
  constexpr int tag = 7;  // the data's communicator has no messages but these, in their order
  int own = 0;
  MPI_Comm_rank(comm, &own);
  const auto rank = static_cast<std::size_t>(own);
  std::vector<MPI_Request> messages;
  const std::size_t most = rounds == 0 ? world - 1 : std::min(rounds, world - 1);
  for (std::size_t i = 0; i < most; ++i) {
    const std::size_t step = most == world - 1 ? i + 1 : (i + 1) * world / (most + 1);
    const std::size_t next = (rank + step) % world;
    const std::size_t last = (rank + world - step) % world;
    const auto at = [&](const int* offsets, std::size_t w) {
      return static_cast<std::size_t>(offsets[w]) * size;
    };
    if (counts[next] != 0) data.count(1, static_cast<std::size_t>(counts[next]) * size);
    if (emulated_world != 0) continue;
    if (received[last] != 0)
      MPI_Irecv(out + at(to, last), received[last], type, static_cast<int>(last), tag, comm,
                &messages.emplace_back());
    if (counts[next] != 0)
      MPI_Isend(from + at(places, next), counts[next], type, static_cast<int>(next), tag, comm,
                &messages.emplace_back());
  }
  *request = messages.empty() ? MPI_REQUEST_NULL : messages.front();
  if (!messages.empty()) parts.emplace(*request, std::move(messages));
  return MPI_SUCCESS;
}

/// Are the ranks of a communicator on one host of `ranks_of_host`?
inline bool is_inside(MPI_Comm comm) {
  if (ranks_of_host == 0) return false;
  const int ends[] = {0, static_cast<int>(world_of(comm)) - 1};
  int in_world[2] = {};
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Comm_group(comm, &group);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_translate_ranks(group, 2, ends, world, in_world);
  return in_world[0] / ranks_of_host == in_world[1] / ranks_of_host;
}

/// Open MPI's sends to rank 0 first, then to rank 1: all send to one rank at a time, and the queue
/// of the last one's link begins to fill when that of the first is empty. All together take
/// (2 W - 3) / (W - 1) times as long as over links that are shared fairly, as they are here: so
/// messages are that much longer, but for those inside of a host. What is in them is not looked at.
inline int ialltoallv(const void* /*in*/, const int* counts, const int* /*places*/,
                      MPI_Datatype type, void* /*out*/, const int* received, const int* /*to*/,
                      MPI_Datatype /*to*/, MPI_Comm comm, MPI_Request* request) {
  constexpr std::size_t most = 64 << 20;
  static char* const memory = static_cast<char*>(SMPI_SHARED_MALLOC(most));
  const std::size_t world = world_of(comm);
  const Sent before = data;
  const auto size = static_cast<double>(size_of(type));
  const auto w = static_cast<double>(world);
  const double longer = emulated_world != 0 || is_inside(comm) ? 1 : (2 * w - 3) / (w - 1);
  std::vector<int> sent(world);
  std::vector<int> come(world);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < world; ++i) {
    sent[i] = static_cast<int>(counts[i] * size * longer);
    come[i] = static_cast<int>(received[i] * size * longer);
    bytes += static_cast<std::size_t>(counts[i] * size);
  }
  const std::vector<int> places(world);
  const int code = exchange(memory, sent.data(), places.data(), memory, come.data(), places.data(),
                            MPI_BYTE, comm, request);
  data.bytes = before.bytes + bytes;
  return code;
}

inline int iallgatherv(const void* /*in place*/, int /*count*/, MPI_Datatype /*type*/, void* out,
                       const int* counts, const int* places, MPI_Datatype type, MPI_Comm comm,
                       MPI_Request* request) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  const auto own = static_cast<std::size_t>(rank);
  const std::vector<int> sent(world_of(comm), counts[own]);
  const std::vector<int> from(world_of(comm), places[own]);
  char* const memory = static_cast<char*>(out);
  return exchange(memory, sent.data(), from.data(), memory, counts, places, type, comm, request);
}

inline int iallgather(const void* in, int count, MPI_Datatype type, void* out, int received,
                      MPI_Datatype to, MPI_Comm comm, MPI_Request* request) {
  constexpr std::size_t few_bytes = 64 << 10;
  const std::size_t world = world_of(comm);
  const std::size_t bytes = static_cast<std::size_t>(received) * size_of(to);
  if (emulated_world == 0 && bytes * world <= few_bytes) {
    data.count(world - 1, bytes);
    *request = MPI_REQUEST_NULL;
    return MPI_Allgather(in, count, type, out, received, to, comm);
  }
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  char* const memory = static_cast<char*>(out);
  if (in != MPI_IN_PLACE) std::memcpy(memory + static_cast<std::size_t>(rank) * bytes, in, bytes);
  std::vector<int> counts(world, received);
  std::vector<int> places(world);
  for (std::size_t w = 0; w < world; ++w) places[w] = received * static_cast<int>(w);
  return iallgatherv(nullptr, 0, type, out, counts.data(), places.data(), to, comm, request);
}

}  // namespace simulated

#define MPI_Comm_size simulated::comm_size
#define MPI_Comm_idup simulated::comm_idup
#define MPI_Comm_free simulated::comm_free
#define MPI_Test simulated::test
#define MPI_Iallreduce simulated::iallreduce
#define MPI_Iallgather simulated::iallgather
#define MPI_Ialltoallv simulated::ialltoallv
#define MPI_Iallgatherv simulated::iallgatherv
#define MPI_Ibcast simulated::ibcast
