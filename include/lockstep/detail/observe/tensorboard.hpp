// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Event files for TensorBoard.

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/observe/observers.hpp"
#include "lockstep/detail/observe/summary.hpp"

namespace lockstep {

namespace detail {

/// How many of a tensor's values lie in each of some intervals of equal length.
struct Histogram {
  static constexpr std::size_t most_buckets = 40;

  double min = 0;
  double max = 0;
  double count = 0;
  double sum = 0;
  double squares = 0;
  std::vector<double> limits{};  // the upper end of each interval
  std::vector<double> counts{};

  /// Of finite values; the others are counted by nobody.
  template <class Values>
  static Histogram of(const Values& values) {
    Histogram found;
    found.min = std::numeric_limits<double>::infinity();
    found.max = -found.min;
    const auto each = [&](const auto& f) {
      for (const auto& value : values) {
        const auto x = static_cast<double>(value);
        if (x - x == 0) f(x);
      }
    };
    each([&](double x) {
      found.min = std::min(found.min, x);
      found.max = std::max(found.max, x);
      found.sum += x;
      found.squares += x * x;
      ++found.count;
    });
    if (found.count == 0) return {};
    const std::size_t buckets = found.max > found.min ? most_buckets : 1;
    const double width = (found.max - found.min) / static_cast<double>(buckets);
    found.counts.resize(buckets);
    for (std::size_t i = 1; i <= buckets; ++i)
      found.limits.push_back(i == buckets ? found.max : found.min + width * static_cast<double>(i));
    each([&](double x) {
      const auto at = width > 0 ? static_cast<std::size_t>((x - found.min) / width) : 0;
      ++found.counts[std::min(at, buckets - 1)];
    });
    return found;
  }
};

/// An event file: records of TensorFlow's format, each with a checksum, appended whole.
class EventFile {
 public:
  /// Makes `folder` and a file of a name that no other run has.
  explicit EventFile(const std::string& folder);

  void add(std::string_view tag, double value, std::uint64_t step);
  void add(std::string_view tag, const Histogram& histogram, std::uint64_t step);

 private:
  /// A summary with one value: the fields of `value` behind its tag.
  void add_value(std::string_view tag, std::string_view fields, std::uint64_t step);
  void write(std::string_view event);

  std::string path_;
  Descriptor file_;
};

}  // namespace detail

/// Event files that TensorBoard opens, with `--tensorboard FOLDER`, from rank 0: loss, learning
/// rate, throughput and memory once a second and at the end of each epoch, scores and histograms of
/// parameters and of the last gradients at the end of each epoch.
struct TensorBoard : Observer<TensorBoard> {
  static constexpr std::string ObserverPaths::* path = &ObserverPaths::tensorboard;
  static constexpr std::string_view option = "--tensorboard";

  class Watch : public Observer<TensorBoard>::Watch {
   public:
    Watch(Session& session, const ObserverPaths& paths)
        : Observer<TensorBoard>::Watch(session, paths) {
      if (!paths.tensorboard.empty() && session.rank() == Rank{0}) file_.emplace(paths.tensorboard);
    }

    void count(std::string_view name, double value) {
      if (!file_) return;
      for (auto& [known, last] : last_)
        if (known == name) return void(last = value);
      last_.emplace_back(name, value);
    }
    void at_interval(auto& job) {
      using namespace std::chrono_literals;
      if (!file_ || std::chrono::steady_clock::now() - written_ < 1s) return;
      for (const auto& [name, value] : last_) file_->add("step/" + name, value, job.updates());
      add_throughput("step/", job);
      written_ = std::chrono::steady_clock::now();
    }
    void after_epoch(auto& job) {
      using Job = std::remove_cvref_t<decltype(job)>;
      if (!file_) return;
      const EpochSummary epoch = job.summary();
      const std::uint64_t step = job.updates();
      if (epoch.loss) file_->add("epoch/loss", *epoch.loss, step);
      file_->add("epoch/learning_rate", job.learning_rate(), step);
      add_throughput("epoch/", job);
      for (const Score& score : epoch.scores) file_->add("epoch/" + score.name, score.mean, step);
      if constexpr (!Job::on_gpus) {
        const auto add = [&](const char* what) {
          return [this, what, step](std::string_view name, auto view) {
            const std::span values(view.data_handle(), view.size());
            file_->add(std::string(what).append(name), detail::Histogram::of(values), step);
          };
        };
        if constexpr (!Job::gathers_parameters) job.for_each_parameter(add("parameters/"));
        if constexpr (!Job::frees_gradients) job.for_each_gradient(add("gradients/"));
      }
    }

   private:
    void add_throughput(const std::string& prefix, auto& job) {
      const EpochSummary now = job.summary();
      const auto add = [&](const char* name, double value) {
        if (value > 0) file_->add(prefix + name, value, job.updates());
      };
      add("samples_per_second", now.samples_per_second());
      add("tokens_per_second", now.tokens_per_second());
      add("flops_per_second", now.flops_per_second());
      add("mfu", now.utilisation());
      add("resident_bytes", detail::resident_bytes());
    }

    std::optional<detail::EventFile> file_;  // on rank 0
    std::vector<std::pair<std::string, double>> last_;
    std::chrono::steady_clock::time_point written_{};
  };
};

}  // namespace lockstep
