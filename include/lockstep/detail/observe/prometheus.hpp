// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A text file of metrics for Prometheus, which node exporter's textfile collector reads.

#include "lockstep/detail/observe/observers.hpp"
#include "lockstep/detail/observe/summary.hpp"

namespace lockstep {

namespace detail {

/// Metrics in Prometheus's text format: `lockstep_loss{job="1234"} 0.25`.
class PrometheusText {
 public:
  explicit PrometheusText(std::string_view job);

  PrometheusText& add(std::string_view name, std::string_view help, double value);
  /// A score has its name as a label, because a metric's name cannot hold it.
  PrometheusText& add_score(const Score& score);
  const std::string& text() const { return text_; }

 private:
  std::string labels_;
  std::string text_;
  bool has_scores_ = false;
};

/// Replaces the file at once: a reader never sees a part of it.
void write_prometheus(const std::string& path, const PrometheusText& metrics, Rank rank);

}  // namespace detail

/// With `--prometheus FILE`, rank 0 writes loss, scores, learning rate, throughput, epoch, updates
/// and memory, every 15 seconds and at the end of each epoch.
struct Prometheus : Observer<Prometheus> {
  static constexpr std::string ObserverPaths::* path = &ObserverPaths::prometheus;
  static constexpr std::string_view option = "--prometheus";

  class Watch : public Observer<Prometheus>::Watch {
   public:
    Watch(Session& session, const ObserverPaths& paths);

    void at_interval(auto& job) {
      using namespace std::chrono_literals;
      if (!path_.empty() && std::chrono::steady_clock::now() - written_ >= 15s) write(job);
    }
    void after_epoch(auto& job) {
      if (!path_.empty()) write(job);
    }

   private:
    void write(auto& job) {
      const EpochSummary now = job.summary();
      detail::PrometheusText text(job_);
      text.add("lockstep_epoch", "The epoch, from 1.", static_cast<double>(now.epoch))
          .add("lockstep_updates_total", "Updates of the optimizer.",
               static_cast<double>(job.updates()))
          .add("lockstep_learning_rate", "The learning rate.", job.learning_rate())
          .add("lockstep_samples_per_second", "Samples a second, of all ranks.",
               now.samples_per_second())
          .add("lockstep_resident_bytes", "The memory of rank 0's process.",
               detail::resident_bytes());
      if (now.tokens > 0)
        text.add("lockstep_tokens_per_second", "Tokens a second, of all ranks.",
                 now.tokens_per_second());
      if (now.flops > 0)
        text.add("lockstep_flops_per_second", "The model's arithmetic a second, of all ranks.",
                 now.flops_per_second());
      if (now.utilisation() > 0)
        text.add("lockstep_mfu", "Model FLOP utilisation, from 0 to 1.", now.utilisation());
      if (now.loss) text.add("lockstep_loss", "The epoch's mean loss so far.", *now.loss);
      for (const Score& score : now.scores) text.add_score(score);
      detail::write_prometheus(path_, text, Rank{0});
      written_ = std::chrono::steady_clock::now();
    }

    std::string path_;  // on rank 0
    std::string job_;
    std::chrono::steady_clock::time_point written_ = std::chrono::steady_clock::now();
  };
};

}  // namespace lockstep
