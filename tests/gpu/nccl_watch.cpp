// SPDX-License-Identifier: Apache-2.0
// The watch over NCCL's communicators, without NCCL and without a GPU: ranks are threads, and the
// few calls of CUDA and NCCL that it makes are emulated here. Streams and events are lists of
// things that have yet to happen.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gpu/emulated/device.hpp"
#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/comm/nccl/watch.cuh"
#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/store/server.hpp"
#include "lockstep/detail/store/store.hpp"
#include "require.hpp"

using Happened = std::shared_ptr<std::atomic<bool>>;
struct Pending {
  std::mutex mutex;
  std::vector<Happened> list;

  std::vector<Happened> get() {
    const std::lock_guard lock(mutex);
    std::erase_if(list, [](const Happened& one) { return one->load(); });
    return list;
  }
  void add(const std::vector<Happened>& more) {
    const std::lock_guard lock(mutex);
    list.insert(list.end(), more.begin(), more.end());
  }
  bool is_empty() {
    const std::lock_guard lock(mutex);
    for (const Happened& one : list)
      if (!*one) return false;
    return true;
  }
};
struct CUstream_st : Pending {};
struct CUevent_st : Pending {};
struct ncclComm {
  std::mutex mutex;
  std::vector<Happened> kernels;
  std::atomic<ncclResult_t> state = ncclSuccess;
};

extern "C" {
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = new CUstream_st, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = new CUstream_st, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stream->is_empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return stream->add(event->get()), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = new CUevent_st, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto list = stream->get();
  const std::lock_guard lock(event->mutex);
  return event->list = list, cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->is_empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  return *data = std::malloc(bytes), cudaSuccess;
}
cudaError_t cudaFree(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  return *data = std::malloc(bytes), cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaMemset(void*, int, std::size_t) { return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

const char* ncclGetErrorString(ncclResult_t) {
  return "remote process exited or there was a network error";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclMemAlloc(void**, std::size_t) { return ncclInternalError; }
ncclResult_t ncclMemFree(void*) { return ncclSuccess; }
ncclResult_t ncclCommRegister(ncclComm_t, void*, std::size_t, void**) { return ncclSuccess; }
ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  return *state = comm->state, ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return delete comm, ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  for (const Happened& kernel : comm->kernels) *kernel = true;
  return delete comm, ncclSuccess;
}
}

namespace {

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A rank with a watched engine whose calls can be left undone.
class Player {
 public:
  Player(const detail::StoreServer& server, Rank rank, WorldSize world,
         std::chrono::milliseconds limit)
      : engine_(make(server, rank, world, limit)) {}

  nccl::Engine& engine() { return *engine_; }
  Rank rank() const { return engine_->rank(); }

  /// A call that ends when `end` happens, or NCCL is aborted.
  nccl::Ticket call(const Call& call, const Happened& end) {
    return engine_->post(call, [&] {
      engine_->nccl("ncclEmulated", [&](ncclComm_t comm) {
        comm->kernels.push_back(end);
        engine_->stream()->add({end});
        return ncclSuccess;
      });
    });
  }
  /// Before a call fails or the communicator ends.
  void fail_nccl(ncclResult_t state) { comm_->state = state; }

 private:
  std::shared_ptr<nccl::Engine> make(const detail::StoreServer& server, Rank rank, WorldSize world,
                                     std::chrono::milliseconds limit) {
    Membership member;
    member.rank = rank;
    member.world = world;
    member.timeout = limit;
    auto engine = std::make_shared<nccl::Engine>(
        member, "world", std::make_shared<Gpu>(rank, 0),
        std::make_shared<Store>("127.0.0.1", server.port(), "sesame", 5s));
    engine->connect([&](ncclComm_t* comm) { return *comm = comm_ = new ncclComm, ncclSuccess; });
    return engine;
  }

  ncclComm_t comm_ = nullptr;
  nccl::WatchedEngine engine_;
};

Happened never() { return std::make_shared<std::atomic<bool>>(false); }
Happened at_once() { return std::make_shared<std::atomic<bool>>(true); }

const Call sum = calls::AllReduce<float, Sum>{{}, {}, 100}.call();
const Call cast = calls::Broadcast<float>{{}, {}, 100}.call();

struct End {
  std::string words;
  double seconds = 0;
  bool consequence = false;
};

/// What became of each rank: the words of its error, if it ended with one.
std::vector<End> play(std::size_t world, std::chrono::milliseconds limit,
                      const std::function<void(Player&)>& part) {
  const detail::StoreServer server("sesame");
  std::vector<End> ends(world);
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      const Clock::time_point begin = Clock::now();
      try {
        Player player(server, Rank{r}, WorldSize{world}, limit);
        part(player);
      } catch (const Error& error) {
        ends[r] = {error.text(), 0, error.is_consequence()};
      }
      ends[r].seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    });
  }
  threads.clear();
  return ends;
}

void keep_waiting(Player& player, std::chrono::seconds limit = 15s) {
  for (const auto begin = Clock::now(); Clock::now() - begin < limit;) {
    player.engine().synchronize();
    std::this_thread::sleep_for(5ms);
  }
}

void expect(const End& end, const std::vector<std::string>& parts, double least, double most) {
  for (const std::string& part : parts)
    require(end.words.find(part) != std::string::npos, "not said: " + part + " in: " + end.words);
  require(end.seconds >= least && end.seconds <= most,
          "it took " + std::to_string(end.seconds) + " s: " + end.words);
}

void calls_that_end_are_fine() {
  const auto ends = play(3, 2s, [](Player& player) {
    for (int i = 0; i < 2000; ++i) {
      player.engine().order(player.call(sum, at_once()));
      if (i % 100 == 0) std::this_thread::sleep_for(10ms);
    }
    player.engine().wait(player.call(cast, at_once()));
    player.engine().synchronize();
  });
  for (const End& end : ends) require(end.words.empty(), end.words);
}

void a_call_that_does_not_end_names_who_is_missing() {
  const auto ends = play(3, 2s, [](Player& player) {
    player.call(sum, at_once());
    if (player.rank() != Rank{1}) player.engine().order(player.call(cast, never()));
    keep_waiting(player);
  });
  expect(ends[0], {"broadcast(100 float, root 0)", "rank 1 is in no call (made 1 of 2)"}, 1.9, 3.5);
  expect(ends[1], {"failed", "broadcast(100 float, root 0)"}, 1.9, 3.5);
  require(ends[1].consequence, "rank 1 only hears of it");
}

void time_does_not_count_while_the_model_computes() {
  const auto ends = play(2, 1s, [](Player& player) {
    const Happened computed = never();
    player.engine().gpu().stream()->add({computed});
    const auto ticket = player.call(sum, at_once());
    std::this_thread::sleep_for(2500ms);
    require(!player.engine().test(ticket), "it waits for the model");
    *computed = true;
    player.engine().wait(ticket);
  });
  for (const End& end : ends) require(end.words.empty(), end.words);
}

void ranks_that_disagree_all_hear_of_both_calls() {
  const auto ends = play(4, 10s, [](Player& player) {
    for (int i = 0; i < 5; ++i) player.call(sum, at_once());
    player.engine().order(player.call(player.rank() == Rank{2} ? cast : sum, never()));
    keep_waiting(player);
  });
  for (const End& end : ends) {
    expect(end,
           {"call 5",
            "ranks disagree: rank 0 called all_reduce(sum of 100 float) and rank 2 called "
            "broadcast(100 float, root 0)"},
           0, 2);
  }
}

void a_rank_that_gives_up_tells_the_others() {
  const auto ends = play(3, 10s, [](Player& player) {
    if (player.rank() == Rank{2}) {
      player.engine().give_up("no disk");
    } else {
      player.engine().wait(player.call(sum, never()));
    }
    keep_waiting(player);
  });
  expect(ends[0], {"all_reduce(sum of 100 float)", "rank 2 failed: no disk"}, 0, 1.5);
  require(ends[0].consequence && ends[1].consequence && !ends[2].consequence, "whose fault it is");
}

void a_rank_that_throws_tells_the_others() {
  const auto ends = play(2, 10s, [](Player& player) {
    if (player.rank() == Rank{1}) throw Error("the loader", "no data", "", player.rank());
    player.engine().wait(player.call(sum, never()));
  });
  expect(ends[0], {"rank 1 failed: it ended with an exception"}, 0, 1.5);
  expect(ends[1], {"no data"}, 0, 1.5);
}

void what_nccl_reports_is_raised_once_nobody_explains_it() {
  const auto ends = play(2, 10s, [](Player& player) {
    player.engine().order(player.call(sum, never()));
    if (player.rank() == Rank{0}) player.fail_nccl(ncclRemoteError);
    keep_waiting(player);
  });
  expect(ends[0], {"all_reduce(sum of 100 float)", "remote process exited"}, 0.7, 2.5);
  expect(ends[1], {"rank 0 failed", "remote process exited"}, 0.7, 2.5);
}

void a_rank_that_ended_without_a_word_is_named() {
  const auto ends = play(3, 10s, [](Player& player) {
    if (player.rank() == Rank{2}) return;
    player.engine().order(player.call(sum, never()));
    if (player.rank() == Rank{0}) player.fail_nccl(ncclRemoteError);
    keep_waiting(player);
  });
  expect(ends[0], {"remote process exited", "; rank 2 does not answer;"}, 0.7, 2.5);
  expect(ends[1], {"rank 0 failed", "rank 2 does not answer"}, 0.7, 2.5);
}

void a_call_that_nccl_does_not_start_counts_too() {
  const auto ends = play(2, 1s, [](Player& player) {
    if (player.rank() == Rank{0}) player.fail_nccl(ncclInProgress);
    if (player.rank() == Rank{0}) player.call(cast, at_once());
    keep_waiting(player);
  });
  expect(ends[0], {"broadcast(100 float, root 0)", "rank 1 is in no call"}, 0.9, 2.5);
}

void the_host_does_not_run_away_from_the_gpu() {
  const auto ends = play(1, 10s, [](Player& player) {
    const Happened gate = never();
    std::jthread opener([&] {
      std::this_thread::sleep_for(500ms);
      *gate = true;
    });
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < nccl::CallRing::most + 1; ++i) player.call(sum, gate);
    require(Clock::now() - begin > 400ms, "the ring has no bounds");
  });
  require(ends[0].words.empty(), ends[0].words);
}

void closing_with_calls_that_never_end_takes_the_time_limit() {
  const auto ends = play(1, 1s, [](Player& player) { player.call(sum, never()); });
  require(ends[0].seconds < 3, "closing took " + std::to_string(ends[0].seconds) + " s");
}

}  // namespace

int main() {
  const std::pair<const char*, void (*)()> cases[] = {
#define CASE(name) {#name, name}
      CASE(calls_that_end_are_fine),
      CASE(a_call_that_does_not_end_names_who_is_missing),
      CASE(time_does_not_count_while_the_model_computes),
      CASE(ranks_that_disagree_all_hear_of_both_calls),
      CASE(a_rank_that_gives_up_tells_the_others),
      CASE(a_rank_that_throws_tells_the_others),
      CASE(what_nccl_reports_is_raised_once_nobody_explains_it),
      CASE(a_rank_that_ended_without_a_word_is_named),
      CASE(a_call_that_nccl_does_not_start_counts_too),
      CASE(the_host_does_not_run_away_from_the_gpu),
      CASE(closing_with_calls_that_never_end_takes_the_time_limit),
#undef CASE
  };
  int failed = 0;
  for (const auto& [name, run] : cases) {
    const auto begin = Clock::now();
    try {
      run();
      std::printf("ok     %s (%.1f s)\n", name,
                  std::chrono::duration<double>(Clock::now() - begin).count());
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", name, error.what());
      failed = 1;
    }
  }
  return failed;
}
