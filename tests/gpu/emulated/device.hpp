// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The GPUs of a host that plays CUDA: how many there are, which one is a thread's current
/// one, which may access which, what went wrong, and how often each function was called.

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace emulated {

inline constexpr std::size_t most_gpus = 16;

/// What a test says of its GPUs, before it uses them.
struct Host {
  std::atomic<int> gpus = 1;
  std::atomic<int> processors = 4;  // multiprocessors of each
  std::atomic<int> most_peers = 8;  // of one GPU
  std::atomic<int> first_gpu = 0;   // the number of GPU 0 among those that the process cannot see
  std::atomic<bool> may_access = true;        // can GPUs access each other's memory?
  std::atomic<bool> corrupts_copies = false;  // between GPUs that access each other
  /// Which GPU has enabled access to which. Pools have access of their own.
  std::array<std::array<std::atomic<bool>, most_gpus>, most_gpus> accesses = {};
};
inline Host host;

/// The calling thread's GPU. A stream's thread has its stream's.
inline thread_local int current_gpu = 0;

// ---- Faults: what a program must not do, whether CUDA would tell it or not

inline std::mutex faults_mutex;
inline std::vector<std::string> faults;
inline const pid_t first_process = getpid();

/// Takes note of a fault. A process that a test has started ends, because nobody would see it.
inline void note_fault(const std::string& message) {
  const std::lock_guard lock(faults_mutex);
  faults.push_back(message);
  if (getpid() == first_process) return;
  std::fprintf(stderr, "emulated CUDA: %s\n", message.c_str());
  std::abort();
}
/// What has gone wrong since this was called last.
inline std::vector<std::string> take_faults() {
  const std::lock_guard lock(faults_mutex);
  return std::exchange(faults, {});
}

// ---- Errors, as CUDA has them: one for each thread

inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local std::string error_words;

inline cudaError_t fail(cudaError_t error, std::string words) {
  last_error = error;
  error_words = std::move(words);
  return error;
}
/// An error that no program of ours may ever cause.
inline cudaError_t fault(cudaError_t error, const std::string& words) {
  note_fault(words);
  return fail(error, words);
}

// ---- Counting

struct Launch {
  std::string kernel;
  int gpu = 0;
  dim3 blocks;
  unsigned threads = 0;
};
struct Tally {
  std::map<std::string, std::size_t, std::less<>> calls;  // by function
  std::vector<Launch> launches;

  std::size_t of(std::string_view function) const {
    const auto found = calls.find(function);
    return found == calls.end() ? 0 : found->second;
  }
};
inline std::mutex tally_mutex;
inline Tally tally;

inline void count(const char* function) {
  const std::lock_guard lock(tally_mutex);
  ++tally.calls[function];
}
inline void count(Launch launch) {
  const std::lock_guard lock(tally_mutex);
  ++tally.calls["launch"];
  tally.launches.push_back(std::move(launch));
}
/// The calls since this was called last, of all threads.
inline Tally take_tally() {
  const std::lock_guard lock(tally_mutex);
  return std::exchange(tally, {});
}

inline bool is_gpu(int gpu) { return gpu >= 0 && gpu < host.gpus; }
inline bool accesses(int gpu, int other) {
  return gpu == other ||
         host.accesses[static_cast<std::size_t>(gpu)][static_cast<std::size_t>(other)];
}
inline std::string gpu_text(int gpu) { return "GPU " + std::to_string(gpu); }
inline cudaError_t no_such_gpu(int gpu) {
  return fault(cudaErrorInvalidDevice,
               "there is no " + gpu_text(gpu) + ", but " + std::to_string(host.gpus) + " GPUs");
}

}  // namespace emulated

extern "C" {
inline const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    default:
      return "cudaError";
  }
}
inline const char* cudaGetErrorString(cudaError_t) {
  return emulated::error_words.empty() ? "an error" : emulated::error_words.c_str();
}
inline cudaError_t cudaGetLastError() { return std::exchange(emulated::last_error, cudaSuccess); }
inline cudaError_t cudaPeekAtLastError() { return emulated::last_error; }

inline cudaError_t cudaGetDeviceCount(int* count) {
  return *count = emulated::host.gpus, cudaSuccess;
}
inline cudaError_t cudaSetDevice(int gpu) {
  emulated::count(__func__);
  if (!emulated::is_gpu(gpu)) return emulated::no_such_gpu(gpu);
  return emulated::current_gpu = gpu, cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* gpu) { return *gpu = emulated::current_gpu, cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int gpu) {
  if (!emulated::is_gpu(gpu)) return emulated::no_such_gpu(gpu);
  *value = 0;
  if (attribute == cudaDevAttrMultiProcessorCount) *value = emulated::host.processors;
  if (attribute == cudaDevAttrMemoryPoolsSupported) *value = 1;
  if (attribute == cudaDevAttrMaxThreadsPerMultiProcessor) *value = 2048;
  if (attribute == cudaDevAttrMaxThreadsPerBlock) *value = 1024;
  if (attribute == cudaDevAttrPciBusId) *value = emulated::host.first_gpu + gpu + 1;
  if (attribute == cudaDevAttrComputeCapabilityMajor) *value = 9;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int gpu) {
  if (!emulated::is_gpu(gpu)) return emulated::no_such_gpu(gpu);
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02x:00.0",
                static_cast<unsigned>(emulated::host.first_gpu + gpu + 1));
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int gpu) {
  if (!emulated::is_gpu(gpu)) return emulated::no_such_gpu(gpu);
  *properties = {};
  const int number = emulated::host.first_gpu + gpu;
  std::snprintf(properties->name, sizeof properties->name, "Played GPU");
  std::memset(properties->uuid.bytes, number + 1, sizeof properties->uuid.bytes);
  properties->pciBusID = number + 1;
  properties->multiProcessorCount = emulated::host.processors;
  properties->major = 9;
  properties->totalGlobalMem = std::size_t{1} << 34;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceCanAccessPeer(int* possible, int gpu, int peer) {
  if (!emulated::is_gpu(gpu)) return emulated::no_such_gpu(gpu);
  if (!emulated::is_gpu(peer)) return emulated::no_such_gpu(peer);
  return *possible = emulated::host.may_access && gpu != peer, cudaSuccess;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (!emulated::is_gpu(peer)) return emulated::no_such_gpu(peer);
  auto& own = emulated::host.accesses[static_cast<std::size_t>(emulated::current_gpu)];
  if (!emulated::host.may_access || peer == emulated::current_gpu)
    return emulated::fail(cudaErrorPeerAccessUnsupported, "peer access is not possible");
  int peers = 0;
  for (const auto& enabled : own) peers += enabled;
  if (peers >= emulated::host.most_peers)
    return emulated::fail(cudaErrorTooManyPeers, "a GPU has as many peers as it can have");
  if (own[static_cast<std::size_t>(peer)].exchange(true))
    return emulated::fail(cudaErrorPeerAccessAlreadyEnabled, "peer access has been enabled before");
  return cudaSuccess;
}
inline cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  if (!emulated::is_gpu(peer)) return emulated::no_such_gpu(peer);
  auto& own = emulated::host.accesses[static_cast<std::size_t>(emulated::current_gpu)];
  if (!own[static_cast<std::size_t>(peer)].exchange(false))
    return emulated::fail(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled");
  return cudaSuccess;
}
}
