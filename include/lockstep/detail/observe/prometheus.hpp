// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A text file of metrics for Prometheus, which node exporter's textfile collector reads.

#include "lockstep/detail/observe/observers.hpp"
#include "lockstep/detail/observe/summary.hpp"

namespace lockstep {

namespace detail {

/// Metrics in Prometheus's text format: `lockstep_loss{job="1234"} 0.25`. A score has its name as a
/// label, because a metric's name cannot hold it. Replaces the file at once: a reader never sees a
/// part of it.
void write_prometheus(const std::string& path, std::string_view job, const EpochSummary& now,
                      std::uint64_t updates, double learning_rate);

}  // namespace detail

/// With `--prometheus FILE`, rank 0 writes loss, scores, learning rate, throughput, epoch, updates
/// and memory, every 15 seconds and at the end of each epoch.
struct Prometheus : Observer<Prometheus> {
  static constexpr std::string ObserverPaths::* path = &ObserverPaths::prometheus;
  static constexpr std::string_view option = "--prometheus";

  class Watch : public Observer<Prometheus>::Watch {
   public:
    Watch(Session& session, const ObserverPaths& paths)
        : Observer<Prometheus>::Watch(session, paths), job_(session.membership().job) {
      if (session.rank() == Rank{0}) path_ = paths.prometheus;
    }

    void at_interval(auto& job) {
      using namespace std::chrono_literals;
      if (!path_.empty() && std::chrono::steady_clock::now() - written_ >= 15s) write(job);
    }
    void after_epoch(auto& job) {
      if (!path_.empty()) write(job);
    }

   private:
    void write(auto& job) {
      detail::write_prometheus(path_, job_, job.summary(), job.updates(), job.learning_rate());
      written_ = std::chrono::steady_clock::now();
    }

    std::string path_;  // on rank 0
    std::string job_;
    std::chrono::steady_clock::time_point written_ = std::chrono::steady_clock::now();
  };
};

}  // namespace lockstep
