// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder.

#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "lockstep/detail/observe/display.hpp"
#include "lockstep/detail/observe/stragglers.hpp"
#include "lockstep/detail/store/protocol.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

LOCKSTEP_INLINE const Score& Scores::find(std::string_view name) const {
  std::vector<std::string> known;
  for (const Score& score : scores_) {
    if (score.name == name) return score;
    known.push_back(score.name);
  }
  detail::fail("scores", {"there is no '", name, "'"},
               known.empty() ? "nothing was counted yet"
                             : detail::text({"there are: ", detail::listed(known)}));
}

LOCKSTEP_INLINE void Tally::add(std::string_view name, double sum, double count) {
  const auto entry = std::ranges::find(entries_, name, &Entry::name);
  if (entry == entries_.end()) return void(entries_.push_back({std::string(name), sum, count}));
  entry->sum += sum;
  entry->count += count;
}

LOCKSTEP_INLINE Scores Tally::scores() const {
  std::vector<Score> scores;
  scores.reserve(entries_.size());
  for (const Entry& entry : entries_)
    scores.push_back({entry.name, entry.sum / entry.count, entry.count});
  return Scores(std::move(scores));
}

}  // namespace lockstep

namespace lockstep::detail {

/// `54321 samples/s`, with tokens and arithmetic where they are known.
LOCKSTEP_INLINE std::string throughput_text(const EpochSummary& now) {
  std::string line = text({rate_text(now.samples_per_second()), " samples/s"});
  if (now.tokens > 0) line += text({"  ", rate_text(now.tokens_per_second()), " tokens/s"});
  if (now.flops > 0) line += text({"  ", rate_text(now.flops_per_second() / 1e9), " GFLOP/s"});
  if (now.utilisation() > 0)
    line += text({" (", rate_text(100 * now.utilisation()), "% of the peak)"});
  return line;
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE std::string EpochSummary::text() const {
  std::string line = detail::text({title(), "  ", steps, " steps"});
  if (loss) line += detail::text({"  loss ", value_text(*loss)});
  for (const Score& score : scores)
    line += detail::text({"  ", score.name, " ", value_text(score.mean)});
  return detail::text(
      {line, "  ", detail::throughput_text(*this), "  ", detail::duration_text(seconds)});
}

LOCKSTEP_INLINE JsonLine EpochSummary::json() const {
  JsonLine line;
  line.add("epoch", epoch).add("epochs", epochs).add("steps", steps).add("samples", samples);
  line.add("seconds", seconds);
  if (loss) line.add("loss", *loss);
  for (const Score& score : scores) line.add(score.name, score.mean);
  if (tokens > 0) line.add("tokens_per_second", tokens_per_second());
  if (flops > 0) line.add("flops_per_second", flops_per_second());
  if (flops > 0 && peak_flops > 0) line.add("mfu", utilisation());
  return line;
}

LOCKSTEP_INLINE void ProgressDisplay::begin_epoch(std::uint64_t epoch, std::uint64_t epochs,
                                                  std::uint64_t batches) {
  now_ = {};
  now_.epoch = epoch;
  now_.epochs = epochs;
  batches_ = batches;
  loss_sum_ = 0;
  loss_samples_ = 0;
  work_samples_ = 0;
  flops_ = tokens_ = 0;
  steps_per_look_ = until_look_ = 1;
  begin_ = looked_ = shown_ = detail::DisplayClock::now();
  if (terminal_.is_terminal) show(begin_);
}

LOCKSTEP_INLINE void ProgressDisplay::go_on(const EpochSummary& so_far) {
  now_.steps = so_far.steps;
  now_.samples = so_far.samples;
  begin_ -=
      std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(so_far.seconds));
  if (!so_far.loss) return;
  loss_samples_ = so_far.samples;
  loss_sum_ = *so_far.loss * static_cast<double>(so_far.samples);
}

LOCKSTEP_INLINE EpochSummary ProgressDisplay::summary_at(Time time) const {
  EpochSummary all = now_;
  all.seconds = std::chrono::duration<double>(time - begin_).count();
  if (loss_samples_ > 0) all.loss = loss_sum_ / static_cast<double>(loss_samples_);
  if (work_samples_ > 0) {
    all.flops = flops_ / static_cast<double>(work_samples_);
    all.tokens = tokens_ / static_cast<double>(work_samples_);
  }
  all.peak_flops = peak_flops_;
  return all;
}

LOCKSTEP_INLINE void ProgressDisplay::look() {
  const Time time = detail::DisplayClock::now();
  const bool brief = time - looked_ < std::chrono::milliseconds(10);
  steps_per_look_ = brief && !looks_often_ ? std::min(2 * steps_per_look_, 16u) : 1;
  until_look_ = steps_per_look_;
  looked_ = time;
  const std::chrono::milliseconds pause(terminal_.is_terminal ? 100 : 10'000);
  if (time - shown_ >= pause) show(time);
}

LOCKSTEP_INLINE void ProgressDisplay::show(Time time) {
  shown_ = time;
  if (terminal_.is_quiet || has_begun_line()) return;
  if (terminal_.is_own) {  // windows change their width
    terminal_.columns =
        detail::terminal_columns(::fileno(terminal_.file)).value_or(terminal_.columns);
  }
  const std::string line = detail::progress_line(summary_at(time), batches_, terminal_);
  drawn_ = terminal_.is_terminal;
  write(detail::text({line, drawn_ ? "\033[K\r" : "\n"}));
  if (!drawn_ || !terminal_.is_own || ::__flbf(terminal_.file) == 0) return;
  waiting_ = std::fwrite("\033[K", 1, 3, terminal_.file);
}

LOCKSTEP_INLINE void ProgressDisplay::write(std::string_view text) {
  if (terminal_.file == nullptr) return;
  std::fwrite(text.data(), 1, text.size(), terminal_.file);
  std::fflush(terminal_.file);
  waiting_ = 0;
}

}  // namespace lockstep

namespace lockstep::detail {

LOCKSTEP_INLINE double resident_bytes() {
  unsigned long all = 0;
  unsigned long resident = 0;
  const std::string pages = read_file("/proc/self/statm");
  if (std::sscanf(pages.c_str(), "%lu %lu", &all, &resident) != 2) return 0;
  return static_cast<double>(resident) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

LOCKSTEP_INLINE double waiting_share(Rank job_rank, std::uint64_t since) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> waits;
  const std::uint64_t now = ticks_now();
  for_each_recorder(job_rank, [&](const FlightRecorder& recorder) {
    const std::vector<CallRecord> records = recorder.records();
    if (records.size() == FlightRecorder::kept) since = std::max(since, records.front().scheduled);
    for (const CallRecord& record : records)
      if (record.started != 0) waits.emplace_back(record.scheduled, record.started);
  });
  std::ranges::sort(waits);  // those of buckets overlap
  std::uint64_t waited = 0, counted = since;
  for (const auto& [begin, end] : waits) {
    if (end <= counted) continue;
    waited += end - std::max(begin, counted);
    counted = end;
  }
  return now > since ? static_cast<double>(waited) / static_cast<double>(now - since) : 0;
}

LOCKSTEP_INLINE std::optional<Straggler> find_straggler(std::span<const double> shares) {
  constexpr double worth_a_line = 0.15;
  if (shares.size() < 2) return {};
  const auto least = std::ranges::min_element(shares);
  double others = 0;
  for (const double& share : shares)
    if (&share != &*least) others += share / static_cast<double>(shares.size() - 1);
  if (others - *least < worth_a_line || *least > others / 4) return {};
  return Straggler{Rank{static_cast<std::size_t>(least - shares.begin())}, others - *least};
}

/// With many ranks rank 0 asks less often, for a request per rank.
LOCKSTEP_INLINE StragglerWatch::StragglerWatch(const Session& session, Milliseconds pause)
    : pause_(std::max(pause, Milliseconds(10 * session.world().value()))),
      next_(session.world().value() == 1 ? std::chrono::steady_clock::time_point::max()
                                         : std::chrono::steady_clock::now() + pause_),
      known_(session.rank() == Rank{0} ? session.world().value() : 0) {}

/// A store that fails is for the next collective to report, which knows who has died.
LOCKSTEP_INLINE std::string StragglerWatch::look(Session& session) {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return {};
  next_ = now + pause_;
  try {
    return compare(session);
  } catch (const Error&) {
    next_ = std::chrono::steady_clock::time_point::max();
    return {};
  }
}

LOCKSTEP_INLINE std::string StragglerWatch::compare(Session& session) {
  const auto key = [](std::size_t rank) { return text({"lockstep/waits/", rank}); };
  const double own = waiting_share(session.membership().job_rank.value_or(session.rank()),
                                   std::exchange(since_, ticks_now()));
  const std::string told = text({++looks_, " ", static_cast<std::size_t>(std::lround(1000 * own))});
  if (known_.empty()) {
    session.store().set(key(session.rank().value()), told);
    return {};
  }
  std::vector<double> shares{own};
  bool all_new = true;
  for (std::size_t rank = 1; rank != known_.size(); ++rank) {
    const std::string now_told = session.store().try_get(key(rank)).value_or("");
    all_new &= std::exchange(known_[rank], now_told) != now_told;
    shares.push_back(std::strtod(now_told.c_str() + (now_told.find(' ') + 1), nullptr) / 1000);
  }
  if (!all_new) return {};
  const std::optional<Straggler> found = find_straggler(shares);
  const std::optional<Rank> before =
      std::exchange(last_, found ? std::optional(found->rank) : std::nullopt);
  if (!found || before != found->rank || named_ == found->rank) return {};
  named_ = found->rank;
  return text({"rank ", found->rank, " is slow: the others wait for it in ",
               static_cast<std::size_t>(std::lround(100 * found->share)), "% of the time"});
}

LOCKSTEP_INLINE std::string packed_names(const Tally& tally) {
  store_protocol::Writer packed;
  for (const Tally::Entry& entry : tally) packed.text(entry.name);
  return packed.bytes();
}

LOCKSTEP_INLINE std::vector<std::string> unpacked_names(std::string_view packed) {
  std::vector<std::string> names;
  store_protocol::Reader reader(packed);
  while (!reader.at_end()) names.emplace_back(reader.text());
  return names;
}

LOCKSTEP_INLINE std::vector<std::string> common_names(const std::vector<std::string>& packed,
                                                      Rank me) {
  std::vector<std::string> agreed;
  std::size_t first = 0;
  for (std::size_t r = 0; r < packed.size(); ++r) {
    std::vector<std::string> names = unpacked_names(packed[r]);
    if (names.empty()) continue;
    if (agreed.empty()) {
      first = r;
      agreed = std::move(names);
      continue;
    }
    if (std::is_permutation(names.begin(), names.end(), agreed.begin(), agreed.end())) continue;
    for (std::vector<std::string>* const list : {&agreed, &names})
      for (std::string& name : *list) name = text({"'", name, "'"});
    fail("reduce",
         {"rank ", first, " has tallied ", listed(agreed), " and rank ", r, " ", listed(names)},
         "tally the same names on all ranks that tally any", me);
  }
  return agreed;
}

LOCKSTEP_INLINE std::vector<double> sums_and_counts(const Tally& tally,
                                                    const std::vector<std::string>& names) {
  std::vector<double> totals(2 * names.size());
  for (const Tally::Entry& entry : tally) {
    const auto at = static_cast<std::size_t>(std::ranges::find(names, entry.name) - names.begin());
    totals[2 * at] = entry.sum;
    totals[2 * at + 1] = entry.count;
  }
  return totals;
}

LOCKSTEP_INLINE std::string progress_line(const EpochSummary& now, std::uint64_t batches,
                                          const Terminal& terminal) {
  const std::string title = now.title();
  const std::string steps = detail::text({now.steps});
  std::string count = detail::text({"  ", steps, " steps"});
  std::string loss;
  std::string rate;
  std::string left;
  if (batches > 0) {
    const std::string all = detail::text({batches});
    const std::string blanks(all.size() > steps.size() ? all.size() - steps.size() : 0, ' ');
    count = detail::text({"  ", blanks, steps, "/", all});
  }
  if (now.loss) loss = detail::text({"  loss ", value_text(*now.loss)});
  if (now.steps > 0) rate = detail::text({"  ", throughput_text(now)});
  if (now.steps > 0 && batches > 0) {
    const std::uint64_t rest = batches - std::min(now.steps, batches);
    const double seconds_each = now.seconds / static_cast<double>(now.steps);
    left = detail::text({"  ", clock_text(static_cast<double>(rest) * seconds_each), " left"});
  }

  const auto line = [&](std::string_view bar) {
    return detail::text({title, bar, count, loss, rate, left});
  };
  if (!terminal.is_terminal) return line("");

  // A character in the last column makes some terminals wrap.
  const std::size_t room = std::max<std::size_t>(terminal.columns, 1) - 1;
  for (std::string* part : {&rate, &loss, &left}) {
    if (line("").size() > room) part->clear();
  }
  constexpr std::size_t frame = 4;  // two spaces and the brackets
  constexpr std::size_t fewest = 5;
  constexpr std::size_t most = 40;
  const std::size_t width = line("").size() + frame;
  if (batches == 0 || width + fewest > room) return line("").substr(0, room);
  const double share = std::min(1.0, static_cast<double>(now.steps) / static_cast<double>(batches));
  const std::size_t cells = std::min(most, room - width);
  const auto filled = static_cast<std::size_t>(share * static_cast<double>(cells));
  return line(
      detail::text({"  [", terminal.color ? "\033[32m" : "", std::string(filled, '#'),
                    terminal.color ? "\033[0m" : "", std::string(cells - filled, ' '), "]"}));
}

LOCKSTEP_INLINE LogFile::LogFile(const std::string& path, Rank rank) : path_(path) {
  if (rank != Rank{0}) return;
  constexpr int flags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
  file_ = Descriptor(::open(path_.c_str(), flags, 0666));
  if (file_) return;
  const int error = errno;
  detail::fail("log", {"'", path_, "' cannot be opened: ", error_text(error)},
               error == ENOENT ? "make its folder first, or name another file"
                               : "name a file that may be written",
               rank);
}

LOCKSTEP_INLINE void LogFile::write(const JsonLine& line) {
  if (!file_) return;
  const off_t end = ::lseek(file_.get(), 0, SEEK_END);
  if (write_all(file_.get(), detail::text({line.text(), "\n"}))) return;
  const std::string why = error_text(errno);
  // Removes a line that was written in part.
  [[maybe_unused]] const int n = end < 0 ? 0 : ::ftruncate(file_.get(), end);
  detail::fail("log", {"'", path_, "' cannot be written: ", why},
               "make room there, or name a file elsewhere", Rank{0});
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
