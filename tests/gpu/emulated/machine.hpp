// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The emulated GPUs of one test case.

#include "gpu/emulated/kernels.hpp"  // before the library's headers
//
#include <boost/test/unit_test.hpp>
#include <string>

#include "lockstep/detail/comm/threads/comm_streams.cuh"

namespace emulated {

/// As many GPUs as the case wants, while it lives. What was done to them that must not be done
/// fails the case, in words.
class Machine {
 public:
  explicit Machine(std::size_t gpus) {
    reset();
    host.gpus = static_cast<int>(gpus);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;
  ~Machine() {
    for (const std::string& fault : take_faults()) BOOST_ERROR("emulated CUDA: " << fault);
    Gpu::get().end_default_streams();
    reset();
  }

 private:
  static void reset() {
    host.gpus = 1;
    host.processors = 4;
    host.most_peers = 8;
    host.first_gpu = 0;
    host.may_access = true;
    host.corrupts_copies = false;
    for (auto& row : host.accesses)
      for (auto& one : row) one = false;
    Memory::get().forget_access();
    lockstep::detail::threads::peer_obstacles().clear();  // the library asks each pair once
    most_wait_milliseconds = 20000;
    stages_under_way = 0;
    current_gpu = 0;
    take_faults();
    take_tally();
  }
};

}  // namespace emulated
