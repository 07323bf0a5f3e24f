// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of comm's headers that are no templates.

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <map>

#include "lockstep/detail/comm/hierarchical/hosts.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"
#include "lockstep/detail/core/json.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string job_call_text(JobCall call) {
  const auto bits = static_cast<std::uint32_t>(call);
  constexpr auto gather = static_cast<std::uint32_t>(JobCall::gather_of_unit);
  if (bits < gather) return std::string(job_call_names[bits]);
  if (bits < static_cast<std::uint32_t>(JobCall::step_of_subgraphs))
    return detail::text({"param of unit ", bits - gather});
  std::string text = "step";
  for (std::uint32_t set = 0; set <= most_compared_subgraphs; ++set) {
    if ((bits >> set & 1) == 0) continue;
    text.append(text == "step" ? " of " : " and ");
    text.append(set == 0 ? std::string("the whole model") : detail::text({"sub-graph ", set}));
  }
  return text;
}

LOCKSTEP_INLINE std::string Call::text() const {
  if (part_of == JobCall::none) return collective_text();
  return detail::text({job_call_text(part_of), " (its ", collective_text(), ")"});
}

LOCKSTEP_INLINE std::string Call::collective_text() const {
  const std::string_view name = collective_name(kind);
  const char* const of = operation[0] != '\0' ? " of " : "";
  const char* other_rank = "";
  switch (kind) {
    case CollectiveKind::barrier:
    case CollectiveKind::capture:
      return detail::text({name, "()"});
    case CollectiveKind::replay:
      return detail::text({name, " of a captured step"});
    case CollectiveKind::new_group:
      return detail::text({name, "(", count, count == 1 ? " rank)" : " ranks)"});
    case CollectiveKind::all_gather_variable:
      return detail::text({name, "(", element_name(element), ")"});
    case CollectiveKind::gather_variable:
      return detail::text({name, "(", element_name(element), ", root ", root, ")"});
    case CollectiveKind::send:
      other_rank = ", to rank ";
      break;
    case CollectiveKind::receive:
      other_rank = ", from rank ";
      break;
    case CollectiveKind::reduce:
    case CollectiveKind::broadcast:
    case CollectiveKind::gather:
    case CollectiveKind::scatter:
      other_rank = ", root ";
      break;
    default:
      break;
  }
  return detail::text({name, "(", operation.data(), of, count, " ", element_name(element),
                       other_rank, *other_rank != '\0' ? detail::text({root}) : std::string(),
                       staged ? ", memory of its own)" : ")"});
}

LOCKSTEP_INLINE GroupMember group_member(const Membership& member, const std::string& group) {
  return {group, member.rank, member.world, member.job_rank.value_or(member.rank)};
}

LOCKSTEP_INLINE GatheredPieces pieces_of(std::vector<std::size_t> counts) {
  std::vector<std::size_t> offsets(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), std::size_t{0});
  return {std::move(counts), std::move(offsets)};
}

LOCKSTEP_INLINE Membership membership_in_group(const Membership& member, Store& store,
                                               const GroupPosition& position,
                                               const std::string& name) {
  Membership own = in_group(member, position.rank, position.world());
  const Hosts hosts = discover_hosts(
      own, store,
      text({"lockstep/groups/", numbered_rendezvous(store, own.rank, "groups", name), "/"}));
  own.local_world = hosts.ranks(hosts.host(own.rank)).size();
  return own;
}

LOCKSTEP_INLINE std::string group_name(const std::vector<Rank>& members) {
  std::string name = "group of";
  for (const Rank member : members) name += text({" ", member});
  return name;
}

}  // namespace lockstep::detail

namespace lockstep::detail::shm {

/// The number after `label` in a file of /proc or /sys; the largest number if there is none.
LOCKSTEP_INLINE std::size_t number_in(const char* path, std::string_view label) {
  const std::string contents = read_file(path);
  const std::size_t found = contents.find(label);
  const char* const digits =
      found == std::string::npos ? "" : contents.c_str() + found + label.size();
  char* end = nullptr;
  const std::size_t number = std::strtoull(digits, &end, 10);
  return end == digits ? std::numeric_limits<std::size_t>::max() : number;
}

/// The memory that this process may still use, according to the kernel and its cgroup.
LOCKSTEP_INLINE std::size_t available_memory() {
  constexpr std::size_t unknown = std::numeric_limits<std::size_t>::max();
  const std::size_t kilobytes = number_in("/proc/meminfo", "MemAvailable:");
  const std::size_t available = kilobytes == unknown ? unknown : kilobytes << 10;
  const std::size_t limit = number_in("/sys/fs/cgroup/memory.max", "");
  const std::size_t used = number_in("/sys/fs/cgroup/memory.current", "");
  if (limit == unknown || used == unknown) return available;
  const std::size_t left = limit > used ? limit - used : 0;
  return left < available ? left : available;
}

/// Allocates every page up to `bytes`: a lack of memory is an error here, not a SIGBUS later.
LOCKSTEP_INLINE void reserve_memory(const Descriptor& file, std::size_t bytes) {
  struct stat state{};
  ::fstat(file.get(), &state);
  const auto have = static_cast<std::size_t>(state.st_size);
  if (bytes <= have) return;
  const std::size_t available = available_memory();
  const bool enough = bytes - have <= available;
  if (enough && ::posix_fallocate(file.get(), static_cast<off_t>(have),
                                  static_cast<off_t>(bytes - have)) == 0) {
    return;
  }
  fail("shared memory",
       {(bytes - have) >> 20, " MiB more are needed and ", available >> 20, " MiB are available"},
       "use fewer ranks, a smaller model, or a host with more memory");
}

// Liveness: every rank locks a byte of the file, which the kernel unlocks when the process ends.

LOCKSTEP_INLINE struct flock byte_of(Rank rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(rank.value());
  lock.l_len = 1;
  return lock;
}

LOCKSTEP_INLINE void lock_byte(const Descriptor& file, Rank rank) {
  struct flock lock = byte_of(rank);
  if (::fcntl(file.get(), F_SETLK, &lock) != 0) {
    fail("shared memory", {error_text(errno)}, "locking failed");
  }
}

LOCKSTEP_INLINE bool is_locked(int file, Rank rank) {
  struct flock lock = byte_of(rank);
  return ::fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

LOCKSTEP_INLINE std::shared_ptr<std::byte> map_memory(const Descriptor& file, std::size_t offset,
                                                      std::size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<ino_t, std::size_t>, std::weak_ptr<std::byte>> known;
  struct stat state{};
  ::fstat(file.get(), &state);
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& mapping) { return mapping.second.expired(); });
  std::weak_ptr<std::byte>& shared = known[{state.st_ino, offset}];
  if (std::shared_ptr<std::byte> memory = shared.lock()) return memory;
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(),
                              static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) {
    fail("shared memory", {error_text(errno)}, "mapping failed; check ulimit -v");
  }
  ::madvise(mapped, bytes, MADV_HUGEPAGE);
  const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(mapped),
                                          [bytes](std::byte* data) { ::munmap(data, bytes); });
  shared = memory;
  return memory;
}

/// The largest page size of common kernels.
inline constexpr std::size_t page = 64_KiB;

LOCKSTEP_INLINE Descriptor Engine::make_file(WorldSize world) {
  Descriptor file(::memfd_create("lockstep", MFD_CLOEXEC));
  if (!file) {
    detail::fail("shared memory", {error_text(errno)},
                 "memfd_create failed; is the kernel older than 3.17?");
  }
  reserve_memory(file, align_up(world.value() * sizeof(RankBlock), page));
  return file;
}

LOCKSTEP_INLINE std::string Engine::address(const Descriptor& file) {
  return text({"/proc/", ::getpid(), "/fd/", file.get()});
}

LOCKSTEP_INLINE Descriptor Engine::open(const std::string& address) {
  Descriptor file(::open(address.c_str(), O_RDWR | O_CLOEXEC));
  if (!file) {
    detail::fail(text({"shared memory, opening ", address}), {error_text(errno)},
                 "ranks that share memory must run on one host, in one container, as one user");
  }
  return file;
}

LOCKSTEP_INLINE Descriptor Engine::join(const Membership& member, Store& store,
                                        const std::string& name) {
  if (member.local_world != member.world.value()) {
    detail::fail("shared memory",
                 {"of the job's ", member.world.value(), " ranks, ", member.local_world,
                  " are on this host"},
                 "Backend<Shm> is for the ranks of one host", member.rank);
  }
  const std::string key =
      text({"lockstep/shm/", numbered_rendezvous(store, member.rank, "shm", name)});
  if (member.rank != Rank{0}) return open(store.get(key, member.timeout));
  Descriptor file = make_file(member.world);
  store.set(key, address(file));
  return file;
}

LOCKSTEP_INLINE Engine::Engine(const GroupMember& member, Descriptor file, Milliseconds timeout)
    : Engine(member, map_memory(file, 0, member.world.value() * sizeof(RankBlock)), std::move(file),
             timeout) {}

LOCKSTEP_INLINE Engine::Engine(const GroupMember& member, std::shared_ptr<std::byte> blocks,
                               Descriptor&& file, Milliseconds timeout)
    : SharedPeers("shm", member, &reinterpret_cast<RankBlock*>(blocks.get())->state,
                  sizeof(RankBlock), timeout, file.get()),
      file_(std::move(file)),
      blocks_(std::move(blocks)),
      file_bytes_(align_up(member.world.value() * sizeof(RankBlock), page)) {
  lock_byte(file_, member.rank);
  own().process.store(static_cast<std::uint32_t>(::getpid()), std::memory_order_release);
}

LOCKSTEP_INLINE std::byte* Engine::allocate(std::size_t bytes, bool common) try {
  const std::size_t part = align_up(std::max<std::size_t>(bytes, 1), page);
  const std::size_t length = common ? part : world() * part;
  if (rank() == Rank{0}) reserve_memory(file_, file_bytes_ + length);
  const Call call{CollectiveKind::allocate, JobCall::none, ElementKind::u8, false, 0, bytes};
  const std::uint64_t ticket = post(call, 0, {});
  finish_pending(ticket);
  wait_arrived(ticket);
  arenas_.push_back(
      {map_memory(file_, file_bytes_, length), length, file_bytes_, common ? 0 : part});
  file_bytes_ += length;
  finish(ticket);
  return arenas_.back().memory.get() + (common ? 0 : me() * part);
} catch (const Error& error) {
  fail(error.on(rank()));
}

LOCKSTEP_INLINE void Engine::fail_disagreement(std::uint64_t ticket) {
  const auto call_of = [&](std::size_t w) -> const Call& { return slot(w, ticket).call; };
  if (const auto error = find_disagreement(ticket, world(), call_of, rank())) fail(*error);
  std::terminate();  // it is called only where calls differ
}

LOCKSTEP_INLINE void Engine::send(const Call& call, std::span<const std::byte> bytes, Rank to) {
  Outbox& outbox = block(me()).outbox;
  const std::uint64_t record = recorder().schedule(call);
  std::size_t done = 0;
  do {
    const std::uint64_t sent = outbox.sent.value.load(std::memory_order_relaxed);
    wait(to.value(), outbox.received, sent, call);
    const std::size_t n = std::min(outbox.data.size(), bytes.size() - done);
    outbox.address.store((sent + 1) << 16 | to.value(), std::memory_order_relaxed);
    outbox.call = call;
    outbox.bytes = n;
    if (n != 0) std::memcpy(outbox.data.data(), bytes.data() + done, n);
    done += n;
    publish(outbox.sent, sent + 1);
  } while (done < bytes.size());
  recorder().complete(record);
}

LOCKSTEP_INLINE void Engine::receive(const Call& call, std::span<std::byte> bytes, Rank from) {
  Outbox& outbox = block(from.value()).outbox;
  const std::uint64_t record = recorder().schedule(call);
  for (std::size_t done = 0;;) {
    const std::uint64_t piece = outbox.received.value.load(std::memory_order_acquire) + 1;
    wait(from.value(), outbox.sent, piece, call);
    const std::uint64_t address = outbox.address.load(std::memory_order_acquire);
    if (address >> 16 != piece) continue;  // its receiver has taken it meanwhile
    if ((address & 0xffff) != me()) {
      wait(from.value(), outbox.received, piece, call);
      continue;
    }
    if (!outbox.call.carries_the_same_as(call))
      fail(messages_differ(call, from, outbox.call.text(), rank()));
    if (outbox.bytes != 0) std::memcpy(bytes.data() + done, outbox.data.data(), outbox.bytes);
    done += outbox.bytes;
    publish(outbox.received, piece);
    if (done >= bytes.size()) break;
  }
  recorder().complete(record);
}

LOCKSTEP_INLINE void Engine::start_helper() {
  const auto work_if_ready = [this] {
    const auto turn = this->turn<true>();
    if (is_broken() || worked_ == posted_ || !all_arrived(worked_) || !all_agree(worked_))
      return false;
    finish_next();
    return true;
  };
  helper_ = Thread(
      ThreadName{"lockstep helper", "the helper thread of Progress<HelperThread>"},
      [this, work_if_ready] {
        while (!stopping_.load())
          if (!work_if_ready()) sleep_for(std::chrono::microseconds(50));
      },
      [this](const std::exception_ptr&) { abort("its helper thread ended with an exception"); });
}

LOCKSTEP_INLINE Engine::~Engine() {
  stopping_.store(true);
  helper_.join();
  leave();
}

}  // namespace lockstep::detail::shm

namespace lockstep::detail {

/// The low half of a counter, which is what the kernel compares.
LOCKSTEP_INLINE std::uint32_t* futex_word(Counter& counter) {
  static_assert(std::endian::native == std::endian::little);
  return reinterpret_cast<std::uint32_t*>(&counter.value);
}

LOCKSTEP_INLINE void wake_sleepers(Counter& counter) {
  ::syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

LOCKSTEP_INLINE void sleep_on(Counter& counter, std::uint64_t value) {
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const std::uint64_t seen = counter.value.load(std::memory_order_seq_cst);
  if (seen < value) {
    const timespec slice{0, std::chrono::nanoseconds(look_interval).count()};
    ::syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &slice,
              nullptr, 0);
  }
  counter.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

LOCKSTEP_INLINE bool SharedPeers::has_died(std::size_t w) const {
  const std::uint32_t process = state(w).process.load(std::memory_order_acquire);
  // The lock is read first, because a rank that leaves sets `left` before it unlocks.
  return process != 0 && process != static_cast<std::uint32_t>(::getpid()) &&
         !shm::is_locked(file_, Rank{w}) && state(w).left.load(std::memory_order_acquire) == 0;
}

LOCKSTEP_INLINE void SharedPeers::give_up(const Error& error, std::string_view reason) {
  bool is_first = false;
  change_state([&] {
    const std::lock_guard lock(mutex_);
    if (is_broken()) return;
    fault_.emplace(error);
    auto& shown = own().reason;
    shown[reason.copy(shown.data(), shown.size() - 1)] = '\0';
    own().has_reason.store(reason.empty() ? 0 : 1, std::memory_order_release);
    own().failed.store(1, std::memory_order_release);
    is_first = true;
  });
  if (is_first) dump_after_fault(recorder_.member().job_rank);
}

LOCKSTEP_INLINE std::optional<Error> SharedPeers::check(const Call& call, std::optional<Rank> one,
                                                        std::uint64_t calls,
                                                        Clock::duration waited) const {
  const std::string operation = call.text();
  auto fault = find_culprit(*this, operation, [&](std::size_t w) { return lacks(w, one, calls); });
  if (fault || waited < timeout_) return fault;
  return time_is_over(operation, timeout_, missing_ranks(one, calls), rank());
}

/// The ranks that a timed-out wait lacks: all with fewer calls, or else those yet to do their part.
LOCKSTEP_INLINE std::string SharedPeers::missing_ranks(std::optional<Rank> one,
                                                       std::uint64_t calls) const {
  const std::uint64_t expected = calls_made(rank_);
  bool any_behind = false;
  for (std::size_t w = 0; w < world_; ++w) any_behind |= calls_made(w) < expected;
  std::string missing;
  for (std::size_t w = 0; w < world_; ++w) {
    const std::uint64_t made = calls_made(w);
    if (w == rank_ || !(any_behind ? made < expected : lacks(w, one, calls))) continue;
    missing += text({missing.empty() ? "rank " : ", rank ", w});
    if (!has_joined(w)) {
      missing += " (never joined)";
    } else if (made < expected) {  // else it has not sent, or not received, a message
      missing += text({" (made ", made, " of ", expected, " calls)"});
    }
  }
  return missing.empty() ? "the last rank" : missing;
}

// ---- the flight recorder -----------------------------------------------------------------------

/// All recorders of the process. They are never destroyed: threads may still record at its end.
struct FlightRecorders {
  std::mutex mutex;
  std::vector<const FlightRecorder*> all;

  static FlightRecorders& of_process() {
    static auto* const recorders = new FlightRecorders;
    return *recorders;
  }
};

LOCKSTEP_INLINE void for_each_recorder(Rank job_rank,
                                       const std::function<void(const FlightRecorder&)>& f) {
  FlightRecorders& recorders = FlightRecorders::of_process();
  const std::lock_guard lock(recorders.mutex);
  for (const FlightRecorder* recorder : recorders.all)
    if (recorder->member().job_rank == job_rank) f(*recorder);
}

/// The folder for dumps, null if there is none.
inline const char* flight_recorder_folder() {
  const char* const folder = std::getenv("LOCKSTEP_FLIGHT_RECORDER");
  return folder != nullptr && *folder != '\0' ? folder : nullptr;
}

/// Lets SIGUSR2 dump the records of all ranks of this process, unless the program handles it.
/// The handler only wakes a thread, which writes.
LOCKSTEP_INLINE void dump_on_signal() {
  static std::atomic<pid_t> prepared{0};  // a forked process has to start a thread of its own
  static int wake = -1;
  if (prepared.exchange(::getpid()) == ::getpid()) return;
  struct sigaction before{};
  ::sigaction(SIGUSR2, nullptr, &before);
  if (before.sa_handler != SIG_DFL && wake < 0) return;
  auto [read, write] = make_pipe();
  const auto dump_all = [] {
    std::vector<Rank> ranks;
    {
      FlightRecorders& recorders = FlightRecorders::of_process();
      const std::lock_guard lock(recorders.mutex);
      for (const FlightRecorder* recorder : recorders.all)
        ranks.push_back(recorder->member().job_rank);
    }
    std::ranges::sort(ranks);
    const auto same = std::ranges::unique(ranks);
    ranks.erase(same.begin(), same.end());
    for (const Rank rank : ranks) dump_after_fault(rank);
  };
  Thread(
      ThreadName{"lockstep dump", "the thread that writes the flight recorder on SIGUSR2"},
      [read = std::move(read), dump_all] {
        char byte = 0;
        while (::read(read.get(), &byte, 1) == 1) dump_all();
      },
      [](const std::exception_ptr&) {})
      .detach();
  static Descriptor kept;  // of this process, for as long as it lives
  kept = std::move(write);
  wake = kept.get();
  struct sigaction action{};
  action.sa_handler = [](int) {
    const int error = errno;
    static_cast<void>(::write(wake, "", 1) == 1);
    errno = error;
  };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR2, &action, nullptr);
}

LOCKSTEP_INLINE FlightRecorder::FlightRecorder(std::string_view backend, GroupMember member)
    : backend_(backend), member_(std::move(member)) {
  if (flight_recorder_folder() != nullptr) dump_on_signal();
  FlightRecorders& recorders = FlightRecorders::of_process();
  const std::lock_guard lock(recorders.mutex);
  recorders.all.push_back(this);
}

LOCKSTEP_INLINE FlightRecorder::~FlightRecorder() {
  FlightRecorders& recorders = FlightRecorders::of_process();
  const std::lock_guard lock(recorders.mutex);
  std::erase(recorders.all, this);
}

LOCKSTEP_INLINE std::vector<CallRecord> FlightRecorder::records(std::uint64_t after) const {
  const std::uint64_t newest = calls();
  std::vector<CallRecord> found;
  for (std::uint64_t n = std::max(after, newest - std::min<std::uint64_t>(newest, kept));
       n < newest; ++n) {
    const Entry& entry = entries_[n % kept];
    CallRecord record;
    record.number = entry.number.load(std::memory_order_acquire);
    std::array<std::uint64_t, call_words> words{};
    for (std::size_t i = 0; i != call_words; ++i)
      words[i] = entry.call[i].load(std::memory_order_acquire);
    record.sequence = entry.sequence.load(std::memory_order_acquire);
    record.scheduled = entry.scheduled.load(std::memory_order_acquire);
    record.started = entry.started.load(std::memory_order_acquire);
    record.completed = entry.completed.load(std::memory_order_acquire);
    if (record.number != n + 1 || entry.number.load(std::memory_order_relaxed) != n + 1) continue;
    std::memcpy(static_cast<void*>(&record.call), words.data(), sizeof record.call);
    found.push_back(record);
  }
  return found;
}

/// PyTorch's names of element types, in the order of `ElementKind`.
inline constexpr std::string_view torch_element_names[] = {
    "",    "Double", "Float", "Half",   "BFloat16", "Char",  "Short",
    "Int", "Long",   "Byte",  "UInt16", "UInt32",   "UInt64"};
static_assert(std::size(torch_element_names) == element_kinds);

/// A call's input and output, in elements: `Call::count` is what errors show.
inline std::pair<std::uint64_t, std::uint64_t> sizes_of(const Call& call, std::size_t world) {
  switch (call.kind) {
    case CollectiveKind::all_gather:
    case CollectiveKind::gather:
      return {call.count, call.count * world};
    case CollectiveKind::scatter:
      return {call.count * world, call.count};
    case CollectiveKind::reduce_scatter:
      return {call.count, call.count / world};
    case CollectiveKind::send:
      return {call.count, 0};
    case CollectiveKind::receive:
      return {0, call.count};
    default:
      return {call.count, call.count};
  }
}

/// `gloo:all_reduce`, `shm:send 0->1`, `nccl:recv 1<-0`: the names by which PyTorch matches calls.
inline std::string profiling_name(const FlightRecorder& recorder, const Call& call) {
  const Rank me = recorder.member().rank;
  switch (call.kind) {
    case CollectiveKind::send:
      return text({recorder.backend(), ":send ", me, "->", call.root});
    case CollectiveKind::receive:
      return text({recorder.backend(), ":recv ", me, "<-", call.root});
    default:
      return text({recorder.backend(), ":", collective_name(call.kind)});
  }
}

LOCKSTEP_INLINE std::string flight_record(Rank job_rank) {
  const TickScale scale;
  const std::chrono::nanoseconds wall = std::chrono::system_clock::now().time_since_epoch() -
                                        std::chrono::steady_clock::now().time_since_epoch();
  const auto add_time = [&](JsonLine& line, std::string_view name, std::uint64_t ticks) {
    if (ticks != 0) line.add(name, (wall + scale.time(ticks)).count());
  };
  const auto add_memory = [](JsonLine& line, std::string_view name, std::uint64_t count,
                             ElementKind element) {
    line.add_array(text({name, "_sizes"}), std::array<std::array<std::uint64_t, 1>, 1>{{{count}}});
    line.add_array(text({name, "_dtypes"}),
                   std::array{torch_element_names[static_cast<std::size_t>(element)]});
  };
  JsonLine groups;
  std::vector<std::pair<std::uint64_t, JsonLine>> entries;  // by the time of the call
  for_each_recorder(job_rank, [&](const FlightRecorder& recorder) {
    const GroupMember& member = recorder.member();
    groups.add(member.group, JsonLine()
                                 .add("name", member.group)
                                 .add("desc", recorder.backend())
                                 .add("rank", member.rank.value())
                                 .add("size", member.world.value()));
    for (const CallRecord& record : recorder.records()) {
      const Call& call = record.call;
      JsonLine line;
      line.add_array("process_group",
                     std::array<std::string_view, 2>{member.group, recorder.backend()})
          .add("collective_seq_id", record.is_message() ? 0 : record.sequence)
          .add("p2p_seq_id", record.is_message() ? record.sequence : 0)
          .add("op_id", record.number)
          .add("is_p2p", record.is_message())
          .add("profiling_name", profiling_name(recorder, call))
          .add("operation", call.operation.data())
          .add("state", record.completed != 0 ? "completed"
                        : record.started != 0 ? "started"
                                              : "scheduled")
          .add("retired", record.completed != 0);
      const auto [in, out] = sizes_of(call, member.world.value());
      add_memory(line, "input", in, call.element);
      add_memory(line, "output", out, call.element);
      add_time(line, "time_created_ns", record.scheduled);
      add_time(line, "time_discovered_started_ns", record.started);
      add_time(line, "time_discovered_completed_ns", record.completed);
      std::vector<JsonLine> frames;  // the job's operation; a C++ program has no other stack
      if (call.part_of != JobCall::none)
        frames.push_back(
            JsonLine().add("name", job_call_text(call.part_of)).add("filename", "").add("line", 0));
      line.add_array("frames", frames);
      entries.emplace_back(record.scheduled, std::move(line));
    }
  });
  std::ranges::stable_sort(entries, {}, [](const auto& entry) { return entry.first; });
  std::vector<JsonLine> sorted;
  sorted.reserve(entries.size());
  for (auto& [time, line] : entries)
    sorted.push_back(JsonLine().add("record_id", sorted.size()).add(line));
  return JsonLine()
      .add("version", "2.10")  // of PyTorch's format
      .add("rank", job_rank.value())
      .add("pg_config", groups)
      .add_array("entries", sorted)
      .text();
}

LOCKSTEP_INLINE void dump_after_fault(Rank job_rank) noexcept {
  const char* const folder = flight_recorder_folder();
  if (folder == nullptr) return;
  try {
    dump_flight_recorder(folder, job_rank);
  } catch (const std::exception& error) {
    write_all(2, text({"lockstep: rank ", job_rank,
                       " cannot write its flight recorder: ", error.what(), "\n"}));
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE void dump_flight_recorder(const std::string& folder, Rank rank) {
  const std::string path = detail::text({folder, "/rank_", rank, ".json"});
  const std::string written = path + ".new";  // a reader finds whole files only
  ::mkdir(folder.c_str(), 0777);
  const detail::Descriptor file(
      ::open(written.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file || !detail::write_all(file.get(), detail::flight_record(rank)) ||
      ::rename(written.c_str(), path.c_str()) != 0) {
    detail::fail("flight recorder", {"'", path, "' cannot be written: ", detail::error_text(errno)},
                 "name a folder that this process may write to, on a disk with room", rank);
  }
}

}  // namespace lockstep

#if defined(LOCKSTEP_LIBRARY)
namespace lockstep {

template void detail::DynamicShm::perform_as(const detail::calls::Broadcast<std::uint8_t>&,
                                             const detail::Call&);
template void detail::DynamicShm::perform_as(const detail::calls::AllGather<std::uint8_t>&,
                                             const detail::Call&);
template void detail::DynamicShm::perform_as(const detail::calls::AllReduce<float, Average>&,
                                             const detail::Call&);
template void detail::DynamicShm::perform_as(const detail::calls::AllReduce<float, Sum>&,
                                             const detail::Call&);
template void detail::DynamicShm::perform_as(const detail::calls::AllReduce<double, Sum>&,
                                             const detail::Call&);

}  // namespace lockstep
#endif
