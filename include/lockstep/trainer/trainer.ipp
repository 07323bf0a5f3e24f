// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder that are no templates: options, progress, records, refusals.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/trainer/epochs.hpp"
#include "lockstep/trainer/job_checkpoints.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/progress.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE EpochSummary CourseState::shown() const {
  EpochSummary epoch = figures;
  if (epoch.samples != 0) epoch.loss = loss;
  return epoch;
}

LOCKSTEP_INLINE std::vector<Score> CourseState::scores() const {
  std::vector<Score> scores;
  std::size_t at = 0;
  for (std::size_t i = 0; i != std::min(score_means.size(), score_counts.size()); ++i) {
    const std::size_t end = std::min(score_names.find('\n', at), score_names.size());
    scores.push_back({score_names.substr(at, end - at), score_means[i], score_counts[i]});
    at = std::min(end + 1, score_names.size());
  }
  return scores;
}

LOCKSTEP_INLINE void CourseState::set_scores(const std::vector<Score>& scores) {
  for (const Score& score : scores) {
    score_names.append(score.name).append("\n");
    score_means.push_back(score.mean);
    score_counts.push_back(score.count);
  }
}

LOCKSTEP_INLINE std::vector<double> CourseState::losses_of(std::size_t rank,
                                                           std::size_t world) const {
  std::vector<double> own(2);
  for (std::size_t from = rank; 2 * from + 1 < losses.size(); from += world) {
    own[0] += losses[2 * from];
    own[1] += losses[2 * from + 1];
  }
  return own;
}

LOCKSTEP_INLINE std::uint64_t CourseState::updates_before(std::uint64_t updates) const {
  if (!position || position->samples == 0) return 0;
  const auto over =
      static_cast<double>(position->first + position->position * position->world.value());
  const double fraction = std::fmin(over / static_cast<double>(position->samples), 1);
  return static_cast<std::uint64_t>(std::lround(fraction * static_cast<double>(updates)));
}

[[noreturn]] LOCKSTEP_INLINE void fail_checkpoint_flag(std::string_view name,
                                                       std::string_view value,
                                                       std::string_view advice) {
  fail("launch", {name, " is '", value, "'"}, advice);
}

/// The value of an option, `text`, is a number above 0 and the letter `unit`, if that is one.
template <class Number>
Number parse_positive(std::string_view name, std::string_view text, std::string_view advice,
                      char unit = '\0') {
  Number number = 0;
  const std::string_view digits = text.substr(0, text.size() - (unit == '\0' ? 0 : 1));
  const char* const last = digits.data() + digits.size();
  // NOLINTNEXTLINE(bugprone-suspicious-stringview-data-usage): `last` is where it ends
  const auto [end, error] = std::from_chars(digits.data(), last, number);
  if (error == std::errc::result_out_of_range) {
    fail_checkpoint_flag(name, text, "this is more than can be counted; give a smaller number");
  }
  if (error != std::errc{} || end != last || !(number > 0)) {
    fail_checkpoint_flag(name, text, advice);
  }
  return number;
}

LOCKSTEP_INLINE CheckpointFlags::Every parse_checkpoint_interval(std::string_view name,
                                                                 std::string_view text) {
  constexpr std::string_view advice =
      "give it a time above 0, such as 30s, 5m or 1h, or a number of updates from 1, such as 100";
  if (text.empty()) fail_checkpoint_flag(name, text, advice);
  constexpr std::pair<char, double> units[] = {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}};
  for (const auto& [letter, seconds] : units) {
    if (text.back() != letter) continue;
    const double count = parse_positive<double>(name, text, advice, letter);
    // Beyond a thousand years the clock's arithmetic would overflow, and `inf` is a number too.
    if (!(count * seconds < 3.2e10)) {
      fail_checkpoint_flag(name, text, "no run is as long as that; give a shorter time");
    }
    const double milliseconds = std::ceil(count * seconds * 1000);
    return {0, std::chrono::milliseconds(static_cast<std::int64_t>(milliseconds))};
  }
  return {parse_positive<std::uint64_t>(name, text, advice), {}};
}

LOCKSTEP_INLINE bool CheckpointFlags::any() const {
  return folder || every || keep || best_by || resume;
}

LOCKSTEP_INLINE CheckpointFlags parse_checkpoint_flags(std::span<const CutArguments::Given> given) {
  CheckpointFlags flags;
  for (const auto& [name, value] : given) {
    if (name == "--resume") flags.resume = true;
    if (name == "--checkpoint-every") flags.every = parse_checkpoint_interval(name, value);
    if (name == "--checkpoint") {
      if (value.empty()) fail_checkpoint_flag(name, value, "name a folder");
      if (value.starts_with("--")) {
        fail_checkpoint_flag(name, value, "name a folder; one of that name is ./--...");
      }
      flags.folder = value;
    }
    if (name == "--keep") {
      flags.keep = value == "all" ? keep_all
                                  : parse_positive<std::size_t>(
                                        name, value,
                                        "give the number of checkpoints that stay, from 1, or all");
    }
    if (name == "--best") {
      const std::size_t colon = value.rfind(':');
      const std::string_view side =
          colon == std::string_view::npos ? std::string_view() : value.substr(colon + 1);
      const std::string_view score = value.substr(0, colon);
      if (side == "lower" || side == "higher") flags.higher_is_better = side == "higher";
      if (score.empty() || (!flags.higher_is_better && colon != std::string_view::npos)) {
        fail_checkpoint_flag(name, value,
                             "name a score, such as test_accuracy, or wer:lower or f1:higher");
      }
      flags.best_by = score;
    }
  }
  return flags;
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
  const std::vector<std::string_view> words(arguments.begin(), arguments.end());
  detail::CutArguments cut = detail::cut_arguments(words, detail::trainer_flags);
  TrainerOptions options;
  options.arguments = std::move(cut.rest);
  const auto dashes = std::find(options.arguments.begin(), options.arguments.end(), "--");
  if (dashes != options.arguments.end()) options.arguments.erase(dashes);
  options.checkpoint = detail::parse_checkpoint_flags(cut.given);
  for (const auto& [name, value] : cut.given) {
    if (name == "--seed") options.seed = Seed{detail::parse_number(name, value)};
    if (name == "--replicas") options.replicas = detail::parse_number(name, value);
    if (name == "--data") options.data = value;
    if (name != "--log" && name != "--record") continue;
    if (!options.log.empty()) {
      detail::fail("launch", {"--log and --record are the same option, and both are given"},
                   "give one of them");
    }
    options.log = value;
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

LOCKSTEP_INLINE TrainerOptions leave_options_to_job(Session& session, TrainerOptions options,
                                                    const bool& /*is_noted*/) {
  session.options().leave_to_job();
  return options;
}

// EpochProgress

LOCKSTEP_INLINE EpochProgress::EpochProgress(Rank rank, const TrainerOptions& options)
    : display(rank == Rank{0} ? detect_terminal(stdout, options.progress.value_or(progress_style()))
                              : Terminal{}),
      log(options.log.empty() ? LogFile() : LogFile(options.log, rank)) {}

/// A policy without the library's namespaces.
LOCKSTEP_INLINE std::string plain_policy(std::string_view spelling) {
  std::string plain(spelling);
  const std::string number = text({dynamic});
  const auto replace_all = [&](std::string_view part, std::string_view by) {
    for (std::size_t at = plain.find(part); at != std::string::npos; at = plain.find(part, at)) {
      plain.replace(at, part.size(), by);
      at += by.size();
    }
  };
  replace_all("lockstep::", "");
  replace_all("detail::", "");
  replace_all(number, "dynamic");
  return plain;
}

LOCKSTEP_INLINE void EpochProgress::log_run(WorldSize world, Seed seed, std::uint64_t fingerprint,
                                            const PolicySpelling* policies, std::size_t count) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char time[32];
  std::strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%SZ", &utc);
  char digits[32];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fingerprint));
  JsonLine spelled;
  for (std::size_t i = 0; i != count; ++i)
    spelled.add(policies[i].axis, plain_policy(policies[i].policy));
  JsonLine run;
  run.add("time", static_cast<const char*>(time)).add("lockstep", version);
  run.add("world", world.value()).add("seed", seed.value());
  // As text: most readers of JSON round numbers of this size.
  run.add("fingerprint", static_cast<const char*>(digits)).add("policies", spelled);
  log.write(JsonLine().add("run", run));
}

LOCKSTEP_INLINE void EpochProgress::set_field(std::string_view name, JsonLine field) {
  for (const std::string_view own :
       {"epoch", "epochs", "steps", "samples", "seconds", "loss", "lr", "data_seconds",
        "step_seconds", "evaluate_seconds", "epoch_seconds", "run"}) {
    if (name == own) {
      fail("log_field", {"'", name, "' is a field that lockstep writes"}, "give it another name",
           Rank{0});
    }
  }
  for (auto& [known, value] : fields_) {
    if (known == name) {
      value = std::move(field);
      return;
    }
  }
  fields_.emplace_back(name, std::move(field));
}

LOCKSTEP_INLINE void EpochProgress::resume(const SamplerState& position) {
  resumed_.emplace();  // in the first loop over data of the position's epoch
  resumed_->run = resumed_->loop = 1;
  resumed_->epoch = position.epoch.value();
  resumed_->position = position;
  resumed_->has_figures = false;
  runs_ = 0;
}

LOCKSTEP_INLINE void EpochProgress::go_on(const CourseState& course) {
  resumed_ = course;
  runs_ = 0;
  curve.go_on(course);
  skipped_ = course.skipped;
  under_way_ = opened_ = false;
  closed_.reset();
  shown_scores_.clear();
  if (course.loop != 0 || !course.is_closed) return;
  closed_ = course.shown();  // of the last epoch, until the next begins
  shown_scores_ = course.scores();
}

LOCKSTEP_INLINE EpochSummary EpochProgress::summary() const {
  EpochSummary now = figures();
  now.scores = Scores(shown_scores_);
  return now;
}

LOCKSTEP_INLINE void EpochProgress::show(const Scores& scores, std::string_view name) {
  for (Score score : scores) {
    score.name.insert(0, std::string(name) + "_");
    shown_scores_.push_back(std::move(score));
  }
}

LOCKSTEP_INLINE void EpochProgress::show_skipped(std::uint64_t skipped) {
  if (skipped != skipped_)
    shown_scores_.push_back({"skipped", static_cast<double>(skipped - skipped_)});
  skipped_ = skipped;
}

LOCKSTEP_INLINE std::uint64_t EpochProgress::begin_epochs(std::uint64_t count) {
  ++runs_;
  next_epoch_ = 0;
  if (!resumed_ || runs_ > resumed_->run) {
    resumed_.reset();
    curve.forget();
  } else {
    next_epoch_ = runs_ < resumed_->run ? count : resumed_->epoch;
  }
  return next_epoch_;
}

LOCKSTEP_INLINE void EpochProgress::begin_epoch(std::uint64_t number, std::uint64_t last) {
  if (resumed_ && number > resumed_->epoch) resumed_.reset();
  next_epoch_ = epoch_ = number;
  epochs_ = last;
  times.begin_epoch();
  shown_scores_.clear();
  closed_.reset();
  loops_ = 0;
  opened_ = printed_ = false;
  under_way_ = true;
  display.begin_epoch(number + 1, last, 0);
  if (!resumed_ || !resumed_->has_figures || resumed_->loop == 0) return;
  const CourseState& course = *resumed_;
  shown_scores_ = course.scores();
  scores_of_data_ = shown_scores_.size();
  if (!course.is_closed) return;
  display.go_on(course.shown());
  closed_ = course.shown();
  closed_->epochs = epochs_;
  opened_ = true;
}

LOCKSTEP_INLINE std::optional<SamplerState> EpochProgress::begin_loop(const SamplerState& fresh,
                                                                      std::size_t size) {
  ++loops_;
  loop_is_over_ = resumed_ && resumed_->is_over(loops_);
  resumes_loop_ = resumed_ && resumed_->resumes(loops_);
  if (loop_is_over_) {
    SamplerState end = fresh;
    end.position = size;
    return end;
  }
  return resumes_loop_ ? resumed_->position : std::nullopt;
}

LOCKSTEP_INLINE std::pair<double, double> EpochProgress::open_loop(std::size_t batches, Rank rank,
                                                                   WorldSize world) {
  opened_ = true;
  display.begin_epoch(epoch_ + 1, epochs_, batches);
  std::pair<double, double> own{};
  if (resumes_loop_ && resumed_ && resumed_->has_figures) {
    display.go_on(resumed_->shown());
    const std::vector<double> losses = resumed_->losses_of(rank.value(), world.value());
    own = {losses[0], losses[1]};
  }
  steps_before_batch_ = display.steps();
  if (resumes_loop_) resumed_.reset();
  return own;
}

LOCKSTEP_INLINE void EpochProgress::close(const EpochSummary& now) {
  closed_ = now;
  scores_of_data_ = shown_scores_.size();
  display.clear();
}

LOCKSTEP_INLINE void EpochProgress::leave_epoch() {
  under_way_ = false;
  next_epoch_ = epoch_ + 1;
}

LOCKSTEP_INLINE void EpochProgress::report_epoch(double learning_rate) {
  if (!closed_) return;
  const EpochSummary now = summary();
  if (!printed_ && !display.is_quiet()) display.print(now.text());
  if (!log) return;
  JsonLine record = now.json().add("lr", learning_rate);
  record.add(times.json(closed_->seconds));
  for (const auto& [name, field] : fields_) record.add(field);
  fields_.clear();
  log.write(record);
}

LOCKSTEP_INLINE CourseState EpochProgress::course(const EpochSummary& now) const {
  CourseState state;
  state.run = runs_;
  state.epoch = next_epoch_;
  curve.tell(state);
  state.skipped = skipped_;
  state.is_closed = closed_.has_value();
  state.figures = now;
  state.figures.scores = {};
  state.loss = now.loss.value_or(0);
  // The program evaluates once more when it goes on behind the data.
  std::vector<Score> scores = shown_scores_;
  if (under_way_ && loop_is_over_ && closed_) scores.resize(scores_of_data_);
  state.set_scores(scores);
  if (!under_way_) return state;
  state.loop = loops_;
  state.loop_is_over = loop_is_over_;
  return state;
}

LOCKSTEP_INLINE void refuse_uneven_epoch(std::size_t most, std::size_t least, std::size_t begun,
                                         Rank rank, WorldSize world) {
  fail("epoch", {"rank 0 has ", most, " batches and rank ", world.value() - 1, " has ", least},
       begun == 0 ? "train with Padding, DropLast or Masked, with a batch size that divides, or "
                    "with UnevenInputs<Join>"
                  : "resume with a number of ranks or a batch size that divides what is left",
       rank);
}

LOCKSTEP_INLINE void refuse_empty_epoch(std::size_t samples, std::size_t batch_size, Rank rank,
                                        WorldSize world) {
  fail("epoch",
       {"there is no batch to train on: ", samples, " samples among ", world.value(),
        " ranks, in batches of ", batch_size},
       "make batches smaller, or leave drop_last and DropLast out", rank);
}

LOCKSTEP_INLINE void OptionWriter::operator()(std::string_view name, double value) const {
  char digits[32];
  std::snprintf(digits, sizeof digits, " %.17g\n", value);
  text.append(whose).append(name).append(digits);
}

LOCKSTEP_INLINE std::string title_of_group(std::size_t group) {
  return group == 0 ? "optimizer " : text({"optimizer of group ", group, ": "});
}

LOCKSTEP_INLINE std::string describe_data(std::size_t samples, const LoaderOptions& options,
                                          Seed seed, bool is_fed) {
  std::string data = text({"data of ", samples, " samples\nbatches of ", options.batch_size,
                           " samples", options.drop_last ? ", full ones only\n" : "\n"});
  data += describe_sampler(seed);
  if (is_fed) data += text({"batches sent ", options.prefetch, " ahead\n"});
  return data;
}

LOCKSTEP_INLINE std::string describe_sampler(Seed seed) {
  return text({"a sampler with seed ", seed.value(), "\n"});
}

LOCKSTEP_INLINE DpOptions dp_options(const TrainerOptions& options, const Membership& membership) {
  DpOptions wanted;
  if (options.replicas) wanted.replicas = *options.replicas;
  wanted.seed = options.seed;
  wanted.timeout = membership.timeout;
  return wanted;
}

LOCKSTEP_INLINE void refuse_ranks_of_dp(WorldSize world, Rank rank) {
  fail("ParallelStrategy<DP>",
       {"the job has ", world.value(), " ranks, and DP is for the devices of one process"},
       "start it once, with --replicas, or use ParallelStrategy<DDP>", rank);
}

LOCKSTEP_INLINE void refuse_replicas_of_ddp(Rank rank) {
  fail("launch", {"--replicas was given to a job of ParallelStrategy<DDP>"},
       "give it --ranks, or use ParallelStrategy<DP>", rank);
}

LOCKSTEP_INLINE void refuse_negative_epochs(Rank rank) {
  fail("epochs", {"their number is negative"}, "give it 0 or more", rank);
}

LOCKSTEP_INLINE void refuse_inside_rank0(const char* operation, Rank rank) {
  fail(operation, {"rank 0 alone has come here, inside on_rank0"}, "call it outside, on all ranks",
       rank);
}

LOCKSTEP_INLINE void refuse_short_epoch(std::size_t batches, std::size_t micro_batches, Rank rank) {
  fail("epoch",
       {"it has ", batches, " batches, and Accumulate<", micro_batches,
        ", Tail::drop> drops what is less than a step"},
       "accumulate less, make batches smaller, or choose Tail::step", rank);
}

LOCKSTEP_INLINE void refuse_checkpoint_flags(Rank rank) {
  fail("launch",
       {"the command line asks for checkpoints, and this program never mentions them: it was "
        "compiled without"},
       "add the line job.checkpoints(); before job.fit or job.epochs", rank);
}

}  // namespace detail

}  // namespace lockstep
