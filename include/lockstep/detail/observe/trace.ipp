// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of the trace: how ranks' recordings become one file.

#include <pthread.h>
#include <unistd.h>

#include <cmath>
#include <map>

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/observe/trace.hpp"
#include "lockstep/detail/store/protocol.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE TraceTrack::TraceTrack() {
  char name[32] = {};
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  const bool is_main = ::gettid() == ::getpid();
  name_ = is_main ? "main" : name;
}

LOCKSTEP_INLINE TraceTrack& Tracer::track() {
  struct Known {
    std::uint64_t tracer = 0;
    TraceTrack* track = nullptr;
  };
  static thread_local Known known;
  if (known.tracer != id_) {
    const std::lock_guard lock(mutex_);
    known = {id_, tracks_.emplace_back(std::make_unique<TraceTrack>()).get()};
  }
  return *known.track;
}

LOCKSTEP_INLINE void Tracer::add_measured(std::string_view name, const TraceEvent& event) {
  if (left_.fetch_sub(1, std::memory_order_relaxed) <= 0) return;
  const auto same = [&](const auto& track) {
    return track->is_measured() && track->name() == name;
  };
  std::unique_lock lock(mutex_);
  auto found = std::ranges::find_if(tracks_, same);
  if (found == tracks_.end())
    found = tracks_.insert(found, std::make_unique<TraceTrack>(std::string(name)));
  TraceTrack& track = **found;
  lock.unlock();
  track.add(event);
}

LOCKSTEP_INLINE void Tracer::take_calls(bool all) {
  for_each_recorder(rank_, [&](const FlightRecorder& recorder) {
    const auto same = [&](const Group& group) {
      return group.member.group == recorder.member().group && group.backend == recorder.backend();
    };
    auto group = std::ranges::find_if(groups_, same);
    if (group == groups_.end())
      group =
          groups_.insert(groups_.end(), Group{recorder.member(), std::string(recorder.backend())});
    if (!all && recorder.calls() - group->seen < FlightRecorder::kept / 4) return;
    for (const CallRecord& record : recorder.records(group->seen)) {
      if (record.completed == 0 && !all) break;
      group->seen = record.number;
      if (left_.fetch_sub(1, std::memory_order_relaxed) > 0) group->calls.push_back(record);
    }
  });
}

LOCKSTEP_INLINE std::string Tracer::bytes(FunctionRef<std::int64_t(std::int64_t)> on_clock) const {
  const TickScale scale;
  const auto time = [&](std::uint64_t at, bool is_measured = false) {
    if (at == 0) return at;
    const auto own = is_measured ? static_cast<std::int64_t>(at) : scale.time(at).count();
    return static_cast<std::uint64_t>(on_clock(own));
  };
  store_protocol::Writer out;
  const std::lock_guard lock(mutex_);
  const std::int64_t left = left_.load(std::memory_order_relaxed);
  out.u64(left < 0 ? static_cast<std::uint64_t>(-left) : 0);
  out.u32(static_cast<std::uint32_t>(tracks_.size()));
  for (const auto& track : tracks_) {
    const bool is_measured = track->is_measured();
    out.text(track->name()).u32(is_measured);
    std::uint32_t count = 0;
    track->for_each([&](const TraceEvent&) { ++count; });
    out.u32(count);
    track->for_each([&](const TraceEvent& event) {
      if (count-- == 0) return;  // what a thread adds meanwhile is left out
      out.text(event.name).u64(event.number).u64(event.bytes);
      out.u64(time(event.begin, is_measured)).u64(time(event.end, is_measured));
    });
  }
  out.u32(static_cast<std::uint32_t>(groups_.size()));
  for (const Group& group : groups_) {
    out.text(group.member.group).text(group.backend);
    out.u32(static_cast<std::uint32_t>(group.calls.size()));
    for (const CallRecord& record : group.calls) {
      const Call& call = record.call;
      out.text(collective_name(call.kind))
          .text(call.operation.data())
          .text(job_call_text(call.part_of));
      out.u64(record.is_message() ? 0 : record.sequence).u64(call.count);
      out.u64(call.count * element_size(call.element));
      out.u64(time(record.scheduled)).u64(time(record.started)).u64(time(record.completed));
    }
  }
  return out.bytes();
}

/// A rank's recording, as `Tracer::bytes` has written it.
class RecordedRank {
 public:
  struct Call {
    std::string name;
    std::string operation;
    std::string part_of;
    std::uint64_t sequence;
    std::uint64_t count;
    std::uint64_t bytes;
    std::int64_t scheduled;
    std::int64_t started;
    std::int64_t completed;
  };
  struct Group {
    std::string name;
    std::string backend;
    std::vector<Call> calls;
  };
  struct Event {
    std::string_view name;
    std::uint64_t number;
    std::uint64_t bytes;
    std::int64_t begin;
    std::int64_t end;  // 0: a counter
  };
  struct Track {
    std::string name;
    bool is_measured;  // by a GPU
    std::vector<Event> events;
  };

  std::vector<Track> tracks;
  std::vector<Group> groups;
  std::uint64_t lost = 0;

  explicit RecordedRank(std::string all) : bytes_(std::move(all)) {
    store_protocol::Reader in(bytes_);
    const auto time = [&] { return static_cast<std::int64_t>(in.u64()); };
    lost = in.u64();
    for (std::uint32_t t = in.u32(); in.ok() && t != 0; --t) {
      Track& track = tracks.emplace_back(Track{std::string(in.text()), false, {}});
      track.is_measured = in.u32() != 0;
      for (std::uint32_t n = in.u32(); in.ok() && n != 0; --n) {
        const std::string_view name = in.text();
        const std::uint64_t number = in.u64();
        const std::uint64_t bytes = in.u64();
        const std::int64_t begin = time();
        track.events.push_back({name, number, bytes, begin, time()});
      }
    }
    for (std::uint32_t g = in.u32(); in.ok() && g != 0; --g) {
      Group& group = groups.emplace_back();
      group.name = in.text();
      group.backend = in.text();
      for (std::uint32_t n = in.u32(); in.ok() && n != 0; --n) {
        Call& call = group.calls.emplace_back();
        call.name = in.text();
        call.operation = in.text();
        call.part_of = in.text();
        call.sequence = in.u64();
        call.count = in.u64();
        call.bytes = in.u64();
        call.scheduled = time();
        call.started = time();
        call.completed = time();
      }
    }
  }

 private:
  std::string bytes_;  // names of events are parts of it
};

/// Writes a trace in the format of Chrome, which Perfetto opens.
class TraceFile {
 public:
  TraceFile(const std::string& path, std::size_t world) : file_("trace", path, 0), world_(world) {}

  /// `first` is the number of the first of `ranks`, which may be one alone.
  void write(const std::vector<RecordedRank>& ranks, std::size_t first, std::string_view backend) {
    find_times(ranks, first);
    append(text(
        {"{\"schemaVersion\":1,\"displayTimeUnit\":\"ms\",\"distributedInfo\":",
         JsonLine().add("backend", backend).add("rank", first).add("world_size", world_).text(),
         ",\"baseTimeNanoseconds\":", static_cast<std::uint64_t>(begin_), ",\"traceEvents\":[\n"}));
    for (std::size_t r = 0; r != ranks.size(); ++r) write_rank(ranks[r], first + r);
    append("\n]}\n");
    flush();
    file_.commit();
  }

 private:
  /// Where each rank's communicators have their tracks, behind those of threads.
  static constexpr std::size_t first_group = 1000;

  struct Arrival {
    std::int64_t time = 0;
    std::size_t rank = 0;
    std::size_t ranks = 0;
  };

  /// When the first event was, and which rank has come last to each collective: the others have
  /// waited for it.
  void find_times(const std::vector<RecordedRank>& ranks, std::size_t first) {
    constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();
    begin_ = never;
    for (std::size_t r = 0; r != ranks.size(); ++r) {
      for (const auto& track : ranks[r].tracks)
        for (const auto& event : track.events) begin_ = std::min(begin_, event.begin);
      for (const auto& group : ranks[r].groups) {
        auto& arrivals = last_[group.name];
        for (const auto& call : group.calls) {
          begin_ = std::min(begin_, call.scheduled);
          if (call.sequence == 0) continue;
          Arrival& last = arrivals[call.sequence];
          ++last.ranks;
          if (call.scheduled > last.time) last = {call.scheduled, first + r, last.ranks};
        }
      }
    }
    if (begin_ == never) begin_ = 0;
  }

  void write_rank(const RecordedRank& rank, std::size_t number) {
    describe("process", number, 0, text({"rank ", number}), number);
    for (std::size_t t = 0; t != rank.tracks.size(); ++t) {
      describe("thread", number, t + 1, rank.tracks[t].name, t);
      for (const auto& event : rank.tracks[t].events)
        write_event(event, number, t + 1, rank.tracks[t].is_measured);
    }
    for (std::size_t g = 0; g != rank.groups.size(); ++g) {
      const auto& group = rank.groups[g];
      const std::size_t track = first_group + g;
      describe("thread", number, track, text({group.name, " (", group.backend, ")"}), track);
      std::uint64_t sent = 0;
      for (const auto& call : group.calls)
        write_call(group, call, number, track, sent += call.bytes);
    }
    if (rank.lost != 0)
      add(row("M", text({rank.lost, " events are left out: raise TraceOptions::most_events"}),
              number, 0));
  }

  /// The categories are those of PyTorch's profiler.
  void write_event(const RecordedRank::Event& event, std::size_t rank, std::size_t track,
                   bool is_of_gpu) {
    if (event.end == 0) {
      double value = 0;
      std::memcpy(&value, &event.number, sizeof value);
      return add_count(event.name, rank, event.begin, value);
    }
    const bool is_step = event.name == "ProfilerStep";
    const bool is_numbered = event.number != SpanName::no_number;
    JsonLine arguments;
    if (is_numbered && !is_step) arguments.add("number", event.number);
    if (event.bytes != 0) arguments.add("bytes", event.bytes);
    const std::string name =
        is_step ? text({event.name, "#", event.number}) : std::string(event.name);
    const char* const category = is_of_gpu ? "gpu_user_annotation"
                                 : is_step ? "user_annotation"
                                           : "cpu_op";
    add_at(row("X", name, rank, track).add("cat", category), event.begin, event.end, arguments);
  }

  void write_call(const RecordedRank::Group& group, const RecordedRank::Call& call,
                  std::size_t rank, std::size_t track, std::uint64_t sent) {
    JsonLine arguments;
    arguments.add("Process Group Name", group.name).add("sequence", call.sequence);
    arguments.add("count", call.count).add("bytes", call.bytes);
    if (!call.operation.empty()) arguments.add("operation", call.operation);
    if (!call.part_of.empty()) arguments.add("part_of", call.part_of);
    const std::int64_t end = call.completed != 0 ? call.completed : call.scheduled;
    if (call.completed == 0) arguments.add("state", "not completed");
    const Arrival* const last = last_arrival(group.name, call.sequence);
    const bool waited = last != nullptr && last->rank != rank && last->ranks > 1;
    if (waited) arguments.add("waited_for", last->rank);
    const std::string name = text({group.backend, ":", call.name});
    add_at(row("X", name, rank, track).add("cat", "communication"), call.scheduled, end, arguments);
    if (waited && last->time > call.scheduled)
      add_at(row("X", text({"waits for rank ", last->rank}), rank, track).add("cat", "wait"),
             call.scheduled, std::min(last->time, end), JsonLine().add("waited_for", last->rank));
    add_count("bytes so far", rank, end, sent);
  }

  const Arrival* last_arrival(const std::string& group, std::uint64_t sequence) const {
    const auto arrivals = last_.find(group);
    if (sequence == 0 || arrivals == last_.end()) return nullptr;
    const auto found = arrivals->second.find(sequence);
    return found == arrivals->second.end() ? nullptr : &found->second;
  }

  static JsonLine row(const char* phase, std::string_view name, std::size_t rank,
                      std::size_t track) {
    return JsonLine().add("ph", phase).add("name", name).add("pid", rank).add("tid", track);
  }
  /// The name of a process or thread, and its place among the others.
  void describe(const char* what, std::size_t rank, std::size_t track, std::string_view name,
                std::size_t index) {
    add(row("M", text({what, "_name"}), rank, track).add("args", JsonLine().add("name", name)));
    add(row("M", text({what, "_sort_index"}), rank, track)
            .add("args", JsonLine().add("sort_index", index)));
  }
  void add_count(std::string_view name, std::size_t rank, std::int64_t at, const auto& value) {
    add_at(JsonLine().add("ph", "C").add("name", name).add("pid", rank), at, 0,
           JsonLine().add(name, value));
  }
  /// Times are microseconds since the first event. Without an end it is a moment.
  void add_at(JsonLine line, std::int64_t begin, std::int64_t end, const JsonLine& arguments) {
    line.add("ts", static_cast<double>(begin - begin_) / 1000);
    if (end != 0)
      line.add("dur", static_cast<double>(std::max<std::int64_t>(end - begin, 0)) / 1000);
    if (!arguments.empty()) line.add("args", arguments);
    add(line);
  }
  void add(const JsonLine& line) {
    append(std::exchange(separator_, ",\n"));
    append(line.text());
  }
  void append(std::string_view part) {
    buffer_ += part;
    if (buffer_.size() >= write_chunk_bytes) flush();
  }
  void flush() {
    file_.append(std::as_bytes(std::span(buffer_)));
    buffer_.clear();
  }

  TemporaryFile file_;
  std::string buffer_;
  std::size_t world_;
  std::int64_t begin_ = 0;
  const char* separator_ = "";
  std::map<std::string, std::map<std::uint64_t, Arrival>> last_;  // by communicator and sequence
};

inline std::int64_t steady_nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE TraceRecording::TraceRecording(Session& session, TraceOptions options)
    : session_(&session), options_(std::move(options)) {
  if (options_.path.empty()) return;
  name_ = "lockstep/trace/" +
          detail::numbered_rendezvous(session.store(), session.rank(), "trace", "recording");
  begin_ = compare_clocks("begin");
  tracer_ = std::make_shared<detail::Tracer>(options_.most_events, session.rank());
  detail::recorder_of_thread() = tracer_;
}

LOCKSTEP_INLINE TraceRecording::~TraceRecording() {
  if (tracer_ == nullptr) return;
  detail::recorder_of_thread().reset();
  try {
    tracer_->take_calls(true);
    write();
  } catch (const std::exception& error) {
    detail::write_all(2, detail::text({"lockstep: rank ", session_->rank(),
                                       " cannot write its trace: ", error.what(), "\n"}));
  }
}

/// Ranks of one host have one clock. Others ask rank 0 for its time, and take the fastest answer.
LOCKSTEP_INLINE TraceRecording::Clock TraceRecording::compare_clocks(const char* when) {
  constexpr int rounds = 8;
  Store store = session_->store().share();
  const std::string prefix = detail::text({name_, "/", when, "/"});
  const auto key = [&](std::size_t rank, int round, const char* what) {
    return detail::text({prefix, rank, "/", static_cast<std::size_t>(round), "/", what});
  };
  const std::vector<std::string> hosts =
      store.gather(prefix + "hosts", session_->rank(), session_->world(), detail::host_identity());
  const std::size_t own = session_->rank().value();
  if (own == 0) {
    for (std::size_t rank = 1; rank != hosts.size(); ++rank) {
      for (int round = 0; round != rounds && hosts[rank] != hosts[0]; ++round) {
        store.get(key(rank, round, "asked"));
        store.set(key(rank, round, "time"), std::to_string(detail::steady_nanoseconds()));
      }
    }
  }
  Clock clock{detail::steady_nanoseconds(), 0};
  if (own == 0 || hosts[own] == hosts[0]) return clock;
  std::int64_t fastest = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round != rounds; ++round) {
    const std::int64_t before = detail::steady_nanoseconds();
    store.set(key(own, round, "asked"), "");
    const std::int64_t there = std::stoll(store.get(key(own, round, "time")));
    const std::int64_t after = detail::steady_nanoseconds();
    if (after - before >= fastest) continue;
    fastest = after - before;
    clock = {before + (after - before) / 2, there - before - (after - before) / 2};
  }
  return clock;
}

LOCKSTEP_INLINE void TraceRecording::write() {
  constexpr std::size_t piece = 4 << 20;
  const std::size_t own = session_->rank().value();
  const std::size_t world = session_->world().value();
  const bool alone = scope_.is_exception();
  // Clocks of two hosts drift: the offset changes evenly between the two comparisons.
  const Clock end = alone ? begin_ : compare_clocks("end");
  const double drift = end.at == begin_.at ? 0
                                           : static_cast<double>(end.offset - begin_.offset) /
                                                 static_cast<double>(end.at - begin_.at);
  const std::string bytes = tracer_->bytes([&](std::int64_t time) {
    return time + begin_.offset +
           static_cast<std::int64_t>(drift * static_cast<double>(time - begin_.at));
  });
  std::vector<detail::RecordedRank> ranks;
  if (alone) {
    ranks.emplace_back(bytes);
    detail::TraceFile(detail::text({options_.path, ".rank", own, ".json"}), world)
        .write(ranks, own, "lockstep");
    return;
  }
  Store store = session_->store().share();
  const auto key = [&](std::size_t rank, std::string_view what) {
    return detail::text({name_, "/", rank, "/", what});
  };
  if (own != 0) {
    std::size_t pieces = 0;
    for (std::size_t at = 0; at < bytes.size(); at += piece)
      store.set(key(own, std::to_string(pieces++)), std::string_view(bytes).substr(at, piece));
    store.set(key(own, "pieces"), std::to_string(pieces));
    store.get(key(own, "taken"));  // the store may be this process's
    return;
  }
  ranks.emplace_back(bytes);
  for (std::size_t rank = 1; rank != world; ++rank) {
    const std::size_t pieces = std::stoull(store.get(key(rank, "pieces")));
    std::string all;
    for (std::size_t p = 0; p != pieces; ++p) {
      all += store.get(key(rank, std::to_string(p)));
      store.erase(key(rank, std::to_string(p)));
    }
    store.set(key(rank, "taken"), "");
    ranks.emplace_back(std::move(all));
  }
  detail::TraceFile(options_.path, world).write(ranks, 0, "lockstep");
}

}  // namespace lockstep
