// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a host has for ranks: GPUs and cores, how many ranks that makes, and who shares what.
///
/// GPUs are counted without CUDA, of which a program for the host alone has nothing, and whose
/// context in the launcher would take memory of a GPU for the whole job. Ranks ask CUDA itself: if
/// it shows them fewer, they say so.
///
/// OpenMP runtimes, such as LibTorch's, start a thread per core in every process. Several ranks per
/// host would oversubscribe the cores: a small step of LibTorch takes a multiple of its time then.
/// So ranks divide the cores, unless OMP_NUM_THREADS is set, which the runtime reads before `main`.

#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include <set>

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/device/gpu_sharing.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The GPUs that CUDA shows to a process, by the driver's files under `root` and the value of
/// CUDA_VISIBLE_DEVICES, or null. The list is read as PyTorch reads it: the first entry that names
/// no GPU ends it, one that is there twice leaves none, and names (`GPU-...`, `MIG-...`) only
/// count.
inline std::size_t count_gpus(const std::string& root, const char* visible) {
  // A container has the devices that it may use. The driver may create them at their first use.
  std::size_t there = count_paths((root + "/dev/nvidia[0-9]*").c_str());
  if (there == 0) there = count_paths((root + "/proc/driver/nvidia/gpus/*").c_str());
  if (visible == nullptr || there == 0) return there;
  std::string_view list = visible;
  const std::string_view kind =
      list.starts_with("GPU-") || list.starts_with("MIG-") ? list.substr(0, 4) : "";
  std::set<std::string> seen;
  while (!list.empty()) {
    std::string_view entry = list.substr(0, list.find(','));
    list.remove_prefix(std::min(entry.size() + 1, list.size()));
    if (kind.empty()) {
      // As `strtoul` does: blanks before the digits and anything behind them are ignored.
      entry.remove_prefix(std::min(entry.find_first_not_of(" \t+"), entry.size()));
      entry = entry.substr(0, entry.find_first_not_of("0123456789"));
      std::size_t number = there;
      std::from_chars(entry.data(), entry.data() + entry.size(), number);
      if (number >= there) break;
      entry.remove_prefix(std::min(entry.find_first_not_of('0'), entry.size() - 1));
    } else if (!entry.starts_with(kind)) {
      break;
    }
    if (!seen.emplace(entry).second) return 0;
  }
  return seen.size();
}

/// `0-2,8` is 0, 1, 2, 8, as in sysfs.
inline std::vector<std::size_t> parse_cpu_list(std::string_view list) {
  std::vector<std::size_t> cpus;
  const char* at = list.data();
  const char* const end = at + list.size();
  while (at != end) {
    std::size_t first = 0;
    auto read = std::from_chars(at, end, first);
    if (read.ec != std::errc{}) break;
    std::size_t last = first;
    if (read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    for (; first <= last && read.ec == std::errc{}; ++first) cpus.push_back(first);
    at = read.ptr == end || *read.ptr != ',' ? end : read.ptr + 1;
  }
  return cpus;
}

/// The groups of `cpus` that share an L3 cache inside of a NUMA node, or the node where sysfs,
/// under `root`, names no such cache; at least 1.
inline std::size_t count_core_groups(const std::string& root,
                                     const std::vector<std::size_t>& cpus) {
  const std::string system = root + "/sys/devices/system";
  std::map<std::size_t, std::size_t> nodes;  // by CPU
  for (const std::size_t node : parse_cpu_list(read_file((system + "/node/online").c_str()))) {
    const std::string list = text({system, "/node/node", node, "/cpulist"});
    for (const std::size_t cpu : parse_cpu_list(read_file(list.c_str()))) nodes[cpu] = node;
  }
  std::set<std::pair<std::size_t, std::string>> groups;
  for (const std::size_t cpu : cpus) {
    std::string shared_by;
    for (std::size_t index = 0;; ++index) {
      const std::string cache = text({system, "/cpu/cpu", cpu, "/cache/index", index});
      const std::string level = read_file((cache + "/level").c_str());
      if (level.empty()) break;
      if (level.starts_with('3')) shared_by = read_file((cache + "/shared_cpu_list").c_str());
    }
    groups.emplace(nodes[cpu], std::move(shared_by));
  }
  return std::max<std::size_t>(groups.size(), 1);
}

/// `0,2,5`: device numbers, each once unless ranks may share GPUs.
inline std::vector<std::size_t> parse_devices(std::string_view name, std::string_view list) {
  std::vector<std::size_t> devices;
  for (std::string_view rest = list;;) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    std::size_t device = 0;
    if (!read_number(entry, device)) {
      fail_value(name, list, "give it the numbers of GPUs, one for each rank of this host: 0,2,5");
    }
    if (!wants_shared_gpus() && std::ranges::find(devices, device) != devices.end()) {
      fail("launch", {name, " is '", list, "', which has ", device, " twice"},
           "list every GPU once, or set LOCKSTEP_SHARE_GPUS=1 if ranks are to share one");
    }
    devices.push_back(device);
    if (entry.size() == rest.size()) return devices;
    rest.remove_prefix(entry.size() + 1);
  }
}

inline constexpr const char* openmp_variable = "OMP_NUM_THREADS";

inline std::size_t openmp_share(std::size_t ranks) {
  return std::max<std::size_t>(core_count() / std::max<std::size_t>(ranks, 1), 1);
}

inline bool is_openmp_decided() { return std::getenv(openmp_variable) != nullptr; }

/// Prints the share once, if the program has an OpenMP runtime, which is looked up, not linked.
inline void say_openmp_share(std::size_t ranks) {
  static bool is_said = false;
  if (is_said || ranks < 2 || is_openmp_decided()) return;
  if (::dlsym(RTLD_DEFAULT, "omp_get_max_threads") == nullptr) return;
  is_said = true;
  const std::size_t share = openmp_share(ranks);
  const std::size_t cores = core_count();
  write_all(2, text({"lockstep: ", openmp_variable, " is not set, so each of the ", ranks,
                     " ranks here computes with ", share, share == 1 ? " thread" : " threads",
                     ", its share of ", cores, cores == 1 ? " core\n" : " cores\n"}));
}

inline void call_if_found(const char* name, int argument) {
  void* const found = ::dlsym(RTLD_DEFAULT, name);
  if (found != nullptr) reinterpret_cast<void (*)(int)>(found)(argument);
}

/// OpenMP in a forked rank would wait for the parent's threads: such a rank computes with one.
inline void use_openmp_share(std::size_t ranks, bool had_threads) {
  if (had_threads) {
    call_if_found("omp_set_num_threads", 1);
    call_if_found("omp_set_max_active_levels", 0);
    call_if_found("MKL_Set_Num_Threads", 1);
  } else if (!is_openmp_decided()) {
    call_if_found("omp_set_num_threads", static_cast<int>(openmp_share(ranks)));
  }
}

// NCCL rejects two ranks on one GPU of a host, so each rank that shares one claims a host of its
// own (NCCL_HOSTID). NCCL uses loopback, a lone host's only interface, only by NCCL_SOCKET_IFNAME.
//
// Ranks know that they share only after the rendezvous, when other threads may read the environment
// that setenv moves. So where sharing is allowed, the variables are set at the start under unused
// names, and one byte changes before NCCL's first communicator: LCCL_HOSTID becomes NCCL_HOSTID.

/// Adds the variables of one rank, as `name=value`, if sharing is allowed.
inline void add_shared_gpu_variables(std::vector<std::string>& variables, std::string_view job,
                                     Rank rank) {
  if (!wants_shared_gpus()) return;
  variables.push_back(text({"LCCL_HOSTID=", job.empty() ? "lockstep" : job, ".", rank}));
  variables.emplace_back("LCCL_SOCKET_IFNAME=lo");
}

/// Sets them in this process, for ranks of other launchers, unless it has other threads.
inline void prepare_shared_gpus(std::string_view job, Rank rank) {
  std::vector<std::string> variables;
  add_shared_gpu_variables(variables, job, rank);
  if (variables.empty() || ::getenv("LCCL_HOSTID") != nullptr || has_other_threads()) return;
  for (std::string& variable : variables) {
    const std::size_t equals = variable.find('=');
    variable[equals] = '\0';
    ::setenv(variable.c_str(), variable.c_str() + equals + 1, 0);
  }
}

/// Makes a prepared variable, such as "NCCL_HOSTID", visible to NCCL; false if there is none.
inline bool use_shared_gpu_variable(const char* name) {
  if (::getenv(name) != nullptr) return true;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view prepared(*variable);
    if (!prepared.starts_with("LCCL_") ||
        prepared.substr(1, prepared.find('=') - 1) != std::string_view(name).substr(1)) {
      continue;
    }
    std::atomic_ref<char>(**variable).store('N', std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
