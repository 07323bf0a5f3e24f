// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Non-template definitions of this folder.

#include <charconv>
#include <system_error>

#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/trainer/progress.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

/// Parses the digits at the front of an option's value as a positive number.
template <class Number>
Number parse_positive(std::string_view name, std::string_view value, std::string_view digits,
                      std::string_view advice) {
  Number number = 0;
  const char* const last = digits.data() + digits.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `last` is where it ends
  const auto [end, error] = std::from_chars(digits.data(), last, number);
  if (error == std::errc::result_out_of_range)
    fail_value(name, value, "this is more than can be counted; give a smaller number");
  if (error != std::errc{} || end != last || !(number > 0)) fail_value(name, value, advice);
  return number;
}

/// `5m`, `300s`, `1.5h`, `2d`, or `100` for updates.
LOCKSTEP_INLINE CheckpointFlags::Every parse_interval(std::string_view name,
                                                      std::string_view value) {
  constexpr std::string_view advice =
      "give it a time above 0, such as 30s, 5m or 1h, or a number of updates from 1, such as 100";
  constexpr std::pair<char, double> units[] = {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}};
  for (const auto& [letter, seconds] : units) {
    if (!value.ends_with(letter)) continue;
    const std::string_view digits = value.substr(0, value.size() - 1);
    const double milliseconds =
        parse_positive<double>(name, value, digits, advice) * seconds * 1000;
    // Beyond a thousand years the clock's arithmetic would overflow; `inf` is a number too.
    if (!(milliseconds < 3.2e13))
      fail_value(name, value, "no run is as long as that; give a shorter time");
    return {0, std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(milliseconds)))};
  }
  return {parse_positive<std::uint64_t>(name, value, value, advice), {}};
}

/// A score and which of its values are better: `wer:lower`.
LOCKSTEP_INLINE void parse_best(std::string_view name, std::string_view value,
                                CheckpointFlags& flags) {
  const std::size_t colon = std::min(value.rfind(':'), value.size());
  const std::string_view side = value.substr(colon);
  flags.best_by = value.substr(0, colon);
  if (side == ":lower" || side == ":higher") flags.higher_is_better = side == ":higher";
  if (flags.best_by->empty() || (!flags.higher_is_better && !side.empty()))
    fail_value(name, value, "name a score, such as test_accuracy, or wer:lower or f1:higher");
}

LOCKSTEP_INLINE CheckpointOptions CheckpointFlags::over(CheckpointOptions options) const {
  if (folder) options.folder = *folder;
  if (options.folder.empty() && any()) {
    fail("launch",
         {resume    ? "--resume"
          : every   ? "--checkpoint-every"
          : best_by ? "--best"
                    : "--keep",
          " is given without --checkpoint"},
         "add --checkpoint DIR, the folder of the checkpoints");
  }
  if (every) {
    options.every_steps = every->first;
    options.every_time = every->second;
  }
  if (keep) options.keep = *keep;
  if (best_by) {
    options.best_by = *best_by;
    options.higher_is_better = higher_is_better;
  }
  options.resume = options.resume || resume;
  return options;
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE TrainerOptions parse_trainer_options(const std::vector<std::string>& arguments) {
  const std::vector<std::string_view> views(arguments.begin(), arguments.end());
  detail::CutArguments cut = detail::cut_arguments(views, detail::trainer_flags);
  TrainerOptions options;
  options.arguments = std::move(cut.rest);
  const auto dashes = std::ranges::find(options.arguments, "--");
  if (dashes != options.arguments.end()) options.arguments.erase(dashes);
  detail::CheckpointFlags& saves = options.checkpoint;
  for (const auto& [name, value] : cut.given) {
    if (name == "--seed") options.seed = Seed{detail::parse_number(name, value)};
    if (name == "--replicas") options.replicas = detail::parse_ranks(name, value).first;
    if (name == "--data") options.data = value;
    if (name == "--trace") options.observers.trace = value;
    if (name == "--tensorboard") options.observers.tensorboard = value;
    if (name == "--prometheus") options.observers.prometheus = value;
    if (name == "--peak-flops") {
      options.peak_flops = detail::parse_positive<double>(
          name, value, value, "give what a rank's device computes in a second, for example 989e12");
    }
    if (name == "--log" || name == "--record") {
      if (!options.log.empty()) {
        detail::fail("launch", {"--log and --record are the same option, and both are given"},
                     "give one of them");
      }
      options.log = value;
    }
    if (name == "--resume") saves.resume = true;
    if (name == "--checkpoint-every") saves.every = detail::parse_interval(name, value);
    if (name == "--checkpoint") {
      if (value.empty()) detail::fail_value(name, value, "name a folder");
      if (value.starts_with("--"))
        detail::fail_value(name, value, "name a folder; one of that name is ./--...");
      saves.folder = value;
    }
    if (name == "--keep") {
      constexpr auto advice = "give the number of checkpoints that stay, from 1, or all";
      saves.keep = value == "all" ? keep_all
                                  : detail::parse_positive<std::size_t>(name, value, value, advice);
    }
    if (name == "--best") detail::parse_best(name, value, saves);
  }
  return options;
}

namespace detail {

LOCKSTEP_INLINE TrainerOptions take_trainer_options(Session& session) {
  ProgramOptions& command_line = session.options();
  const bool is_first = command_line.takers() == 0;
  try {
    TrainerOptions options = parse_trainer_options(command_line.take(trainer_flags));
    if (!is_first && options.checkpoint.any()) {
      fail("launch",
           {"the program makes several jobs, and all of them would save into the folder that "
            "--checkpoint names"},
           "leave --checkpoint and its companions out, and give each job a folder of its own: "
           "job.checkpoints({.folder = \"...\"})");
    }
    if (!command_line.asks_for_help()) return options;
    TrainerOptions harmless;  // nothing is written or resumed
    harmless.data = options.data;
    return harmless;
  } catch (const Error& error) {
    throw command_line.speaks() ? error : error.as_consequence();
  }
}

LOCKSTEP_INLINE EpochProgress::EpochProgress(Rank rank, const TrainerOptions& options)
    : display(rank == Rank{0} ? detect_terminal(stdout, options.progress.value_or(progress_style()))
                              : Terminal{}),
      log(options.log.empty() ? LogFile() : LogFile(options.log, rank)) {}

/// A policy without the library's namespaces.
LOCKSTEP_INLINE std::string plain_policy(std::string_view spelling) {
  std::string plain(spelling);
  const std::pair<std::string, std::string_view> changes[] = {
      {"lockstep::", ""}, {"detail::", ""}, {text({dynamic}), "dynamic"}};
  for (const auto& [part, by] : changes) {
    for (std::size_t at = plain.find(part); at != std::string::npos;
         at = plain.find(part, at + by.size()))
      plain.replace(at, part.size(), by);
  }
  return plain;
}

LOCKSTEP_INLINE void EpochProgress::log_run(
    WorldSize world, Seed seed, std::uint64_t fingerprint,
    std::initializer_list<std::pair<std::string_view, std::string_view>> policies) {
  JsonLine spelled;
  for (const auto& [axis, policy] : policies) spelled.add(axis, plain_policy(policy));
  JsonLine run;
  run.add("time", utc_text("%Y-%m-%dT%H:%M:%SZ")).add("lockstep", version);
  run.add("world", world.value()).add("seed", seed.value());
  // As text: most readers of JSON round numbers of this size.
  run.add("fingerprint", checksum_text(fingerprint)).add("policies", spelled);
  log.write(JsonLine().add("run", run));
}

LOCKSTEP_INLINE void EpochProgress::set_field(std::string_view name, JsonLine field) {
  constexpr std::string_view own =
      " epoch epochs steps samples seconds loss lr run mfu data_seconds step_seconds "
      "evaluate_seconds epoch_seconds run_seconds tokens_per_second flops_per_second "
      "resident_bytes ";
  if (own.find(text({" ", name, " "})) != std::string_view::npos)
    fail("log_field", {"'", name, "' is a field that lockstep writes"}, "give it another name",
         Rank{0});
  const auto known = std::ranges::find(fields_, name, &std::pair<std::string, JsonLine>::first);
  if (known == fields_.end()) {
    fields_.emplace_back(name, std::move(field));
  } else {
    known->second = std::move(field);
  }
}

LOCKSTEP_INLINE void EpochProgress::resume(const SamplerState& position) {
  resumed_.emplace();  // in the first loop over data of the position's epoch
  resumed_->run = resumed_->loop = 1;
  resumed_->epoch = position.epoch.value();
  resumed_->position = position;
  resumed_->has_metrics = false;
  now_.run = 0;
}

LOCKSTEP_INLINE void EpochProgress::go_on(const TrainingProgress& progress) {
  abort_epoch();
  resumed_ = progress;
  now_.run = 0;
  now_.run_steps = progress.run_steps;
  now_.epoch_updates = progress.epoch_updates;
  now_.skipped = progress.skipped;
  goes_on_ = true;
  opened_ = now_.is_closed = false;
  shown_scores_.clear();
  if (progress.loop == 0 && progress.is_closed)
    take_metrics(progress);  // until the next epoch begins
}

LOCKSTEP_INLINE void EpochProgress::take_metrics(const TrainingProgress& progress) {
  now_.is_closed = progress.is_closed;
  now_.metrics = progress.metrics;
  shown_scores_.clear();
  std::string_view names = progress.score_names;
  for (std::size_t i = 0; i != std::min(progress.score_means.size(), progress.score_counts.size());
       ++i) {
    const std::size_t end = std::min(names.find('\n'), names.size());
    shown_scores_.push_back(
        {std::string(names.substr(0, end)), progress.score_means[i], progress.score_counts[i]});
    names.remove_prefix(std::min(end + 1, names.size()));
  }
}

LOCKSTEP_INLINE EpochSummary EpochProgress::summary() const {
  EpochSummary now = metrics();
  now.scores = Scores(shown_scores_);
  return now;
}

LOCKSTEP_INLINE void EpochProgress::show(const Scores& scores, std::string_view name) {
  for (Score score : scores) {
    score.name.insert(0, std::string(name) + "_");
    shown_scores_.push_back(std::move(score));
  }
}

LOCKSTEP_INLINE std::uint64_t EpochProgress::begin_epochs(std::uint64_t count) {
  ++now_.run;
  now_.epoch = 0;
  run_begins_ = true;
  if (!resumed_ || now_.run > resumed_->run) {
    resumed_.reset();
    goes_on_ = false;
  } else {
    now_.epoch = now_.run < resumed_->run ? count : resumed_->epoch;
  }
  return now_.epoch;
}

LOCKSTEP_INLINE void EpochProgress::begin_epoch(std::uint64_t number, std::uint64_t last) {
  if (resumed_ && number > resumed_->epoch) resumed_.reset();
  now_.epoch = number;
  now_.loop = 0;
  epochs_ = last;
  times.begin_epoch();
  shown_scores_.clear();
  opened_ = printed_ = now_.is_closed = false;
  is_in_epoch_ = true;
  display.begin_epoch(number + 1, last, 0);
  if (!resumed_ || !resumed_->has_metrics || resumed_->loop == 0) return;
  take_metrics(*resumed_);
  scores_of_data_ = shown_scores_.size();
  if (!now_.is_closed) return;
  display.go_on(now_.metrics);
  now_.metrics.epochs = epochs_;
  opened_ = true;
}

LOCKSTEP_INLINE std::optional<SamplerState> EpochProgress::begin_loop(const SamplerState& fresh,
                                                                      std::size_t size) {
  const std::uint64_t loop = ++now_.loop;
  resumes_loop_ = resumed_ && loop == resumed_->loop && !resumed_->loop_is_over;
  now_.loop_is_over = resumed_ && loop <= resumed_->loop && !resumes_loop_;
  if (!now_.loop_is_over) return resumes_loop_ ? resumed_->position : std::nullopt;
  SamplerState end = fresh;
  end.position = size;
  return end;
}

LOCKSTEP_INLINE std::array<double, 2> EpochProgress::open_loop(std::size_t batches, Rank rank,
                                                               WorldSize world) {
  opened_ = true;
  display.begin_epoch(now_.epoch + 1, epochs_, batches);
  std::array<double, 2> own{};
  if (resumes_loop_ && resumed_ && resumed_->has_metrics) {
    display.go_on(resumed_->metrics);
    const std::vector<double>& losses = resumed_->losses;
    for (std::size_t at = 2 * rank.value(); at + 1 < losses.size(); at += 2 * world.value()) {
      own[0] += losses[at];
      own[1] += losses[at + 1];
    }
  }
  steps_before_batch_ = display.steps();
  if (resumes_loop_) resumed_.reset();
  return own;
}

LOCKSTEP_INLINE void EpochProgress::report_epoch(double learning_rate) {
  if (!now_.is_closed) return;
  const EpochSummary now = summary();
  if (!printed_ && !display.is_quiet()) display.print(now.text());
  if (!log) return;
  JsonLine record = now.json().add("lr", learning_rate);
  record.add(times.json(now.seconds)).add("resident_bytes", resident_bytes());
  record.add("run_seconds",
             std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count());
  for (const auto& [name, field] : fields_) record.add(field);
  fields_.clear();
  log.write(record);
}

LOCKSTEP_INLINE TrainingProgress EpochProgress::training_progress(const EpochSummary& now) const {
  TrainingProgress state = now_;
  state.metrics = now;
  state.loss = now.loss.value_or(0);
  // A program that resumes after the data evaluates again.
  const bool is_behind_data = now_.loop_is_over && now_.is_closed;
  for (std::size_t i = 0; i != (is_behind_data ? scores_of_data_ : shown_scores_.size()); ++i) {
    state.score_names.append(shown_scores_[i].name).append("\n");
    state.score_means.push_back(shown_scores_[i].mean);
    state.score_counts.push_back(shown_scores_[i].count);
  }
  return state;
}

}  // namespace detail

}  // namespace lockstep
