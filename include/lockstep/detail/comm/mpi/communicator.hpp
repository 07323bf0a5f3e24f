// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Backend<Mpi>`'s communicator: through MPI, with errors that name the cause.

#include <signal.h>

#include "lockstep/detail/comm/backend.hpp"
#include "lockstep/detail/comm/call/library_engine.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/comm/mpi/flows.hpp"
#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/topology/topology.hpp"

namespace lockstep::detail::over_mpi {

/// One rank's end of a communicator, and its `Peers`. All that ranks tell each other goes through
/// MPI, so that a communicator needs no store. It needs no thread either: whoever waits for a call
/// advances all calls in flight, receives other ranks' notes and measures the time. With a helper
/// thread, calls also advance while the rank computes.
class Engine : public LibraryEngine {
 public:
  /// A duplicate of `parent` for `member`'s rank and world. **Ranks** all of `parent`. **Host**
  /// blocks until all have come.
  Engine(const Membership& member, MPI_Comm parent, std::string name, bool has_helper)
      : LibraryEngine("mpi", member, std::move(name)) {
    try {
      if (has_helper) process_.require_threads();
      if (process_.has_left_memory()) throw memory_is_left();
      join(parent);
      if (has_helper) {
        helper_ = Thread(
            {"lockstep mpi", "the thread that advances MPI's calls"}, [this] { help(); },
            [this](const std::exception_ptr& thrown) {
              const std::lock_guard lock(process_.mutex());
              fail(Error(backend, error_of(thrown).problem(), "start the job again", rank()));
            });
      }
    } catch (const Error& error) {
      throw error.on(rank());
    } catch (const std::exception& error) {
      throw Error(backend, error.what(), "look at the other ranks' output", rank());
    }
    const std::lock_guard lock(process_.mutex());
    engines().push_back(this);
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {
    if (scope_.is_failure()) give_up();
    close();
    {
      const std::lock_guard lock(process_.mutex());
      std::erase(engines(), this);
      is_closing_ = true;
    }
    work_.notify_all();
    helper_.join();
  }

  MPI_Comm comm() const { return data_; }

  /// Starts a call, whose coroutine `make(operation)` returns.
  template <class Make>
  std::shared_ptr<Operation> start(const Call& call, std::optional<Rank> peer, const Make& make) {
    pending_.raise_fault();
    const auto op = std::make_shared<Operation>();
    const std::lock_guard lock(process_.mutex());
    begin(op, call, peer, false);
    op->flow = make(*op);
    ops_.push_back(op);
    advance();
    if (!op->is_over) work_.notify_one();
    return op;
  }

  /// Advances the call. Throws if it has failed. **Host** does not block.
  bool test(Operation& op) {
    std::unique_lock lock(process_.mutex(), std::try_to_lock);
    if (!lock) return false;
    if (!op.is_over) advance();
    if (!op.is_over) {
      const auto now = Clock::now();
      if (!op.polled) op.polled.emplace(now);
      look(op, *op.polled, now);
    }
    lock.unlock();
    pending_.raise_fault();
    return op.is_over;
  }

  /// **Host** blocks until the call is complete. Throws if it has failed.
  void wait(Operation& op) {
    waiting_.fetch_add(1, std::memory_order_relaxed);
    wait_until_over(op);
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    pending_.raise_fault();
  }
  /// **Host** blocks until no call is in flight.
  void drain() {
    std::unique_lock lock(process_.mutex());
    while (!ops_.empty()) {
      const std::shared_ptr<Operation> last = ops_.back();
      lock.unlock();
      wait(*last);
      lock.lock();
    }
  }

  void raise_fault() const { pending_.raise_fault(); }
  /// Aborts the calls in flight, and tells all other ranks why.
  void give_up(std::string_view reason = ended_by_exception) {
    const std::lock_guard lock(process_.mutex());
    fail(gave_up(described(), reason, rank()), reason);
  }

  // `Peers`.

  static constexpr bool has_left(std::size_t) { return false; }  // hellos tell
  bool has_died(std::size_t w) const { return died_ == w; }
  static constexpr const char* how_died() { return "'s process ended"; }
  std::string abort_reason(std::size_t w) const { return reasons_[w]; }

 private:
  using Clock = std::chrono::steady_clock;

  /// What one rank tells another beside its calls.
  struct Note {
    enum class Kind : std::uint32_t { fault, question, answer };

    Kind kind = Kind::fault;
    std::uint32_t length = 0;       // of the reason
    std::uint64_t collectives = 0;  // that the sender has begun
    std::array<char, 512> reason{};
  };
  struct Sent {
    Note note;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  /// Where a process is: ranks of one host see each other end.
  struct Place {
    std::uint64_t host = 0;
    std::int64_t process = 0;
  };

  /// An error must come within a second of the timeout.
  static constexpr Milliseconds answer_limit{400};
  /// A rank that fails waits until all others know, so that its launcher does not end them before.
  static constexpr Milliseconds fault_limit{500};
  static constexpr Milliseconds shutdown_limit{2'000};

  static std::vector<Engine*>& engines() {
    static std::vector<Engine*> all;
    return all;
  }

  std::string described() const { return "MPI's communicator '" + name_ + "'"; }
  Error memory_is_left() const {
    return {described(), "a call of this process has failed, and MPI may still use its memory",
            "start the job again", rank()};
  }

  // Joining.

  /// Waits for a request without a call to belong to. Throws if that takes too long.
  void await(MPI_Request& request, const char* what) {
    const Deadline deadline = Deadline::after(timeout());
    poll_until([&] {
      const std::lock_guard lock(process_.mutex());
      Done done(request);
      const bool is_done = done.test();
      done.await_resume();
      if (!is_done && deadline.passed()) {
        process_.leave_request();
        throw detail::time_is_over(text({what, " ", described()}), timeout(), "other ranks",
                                   rank());
      }
      return is_done;
    });
  }

  void join(MPI_Comm parent) {
    int ranks = 0;
    int mine = 0;
    MPI_Comm_size(parent, &ranks);
    MPI_Comm_rank(parent, &mine);
    if (static_cast<std::size_t>(ranks) != world() ||
        static_cast<std::size_t>(mine) != rank().value()) {
      throw Error(backend,
                  text({"this is rank ", rank(), " of ", world(), ", and to MPI it is rank ", mine,
                        " of ", ranks}),
                  "start the ranks with mpirun, or with srun --mpi=pmix (srun --mpi=list names "
                  "what it knows)",
                  rank());
    }
    for (MPI_Comm* const made : {&data_, &control_}) {
      MPI_Request request = MPI_REQUEST_NULL;
      {
        const std::lock_guard lock(process_.mutex());
        check_mpi(MPI_Comm_idup(parent, made, &request), "MPI_Comm_idup");
      }
      await(request, "joining");
      MPI_Comm_set_errhandler(*made, MPI_ERRORS_RETURN);
    }
    reasons_.resize(world());
    answers_.resize(world());
    places_.resize(world());
    const Place own = here();
    MPI_Request request = MPI_REQUEST_NULL;
    {
      const std::lock_guard lock(process_.mutex());
      check_mpi(MPI_Iallgather(&own, sizeof own, MPI_BYTE, places_.data(), sizeof own, MPI_BYTE,
                               control_, &request),
                "MPI_Iallgather");
    }
    await(request, "joining");
  }

  /// A process is known by its number within its namespace only.
  static Place here() {
    char space[64] = {};
    const auto length = ::readlink("/proc/self/ns/pid", space, sizeof space);
    const std::string_view name(space, length < 0 ? 0 : static_cast<std::size_t>(length));
    return {Hash{}.text(host_identity()).text(name).value(), ::getpid()};
  }

  // Calls in flight. The lock is held.

  void begin(const std::shared_ptr<Operation>& op, const Call& call, std::optional<Rank> peer,
             bool leaves) {
    op->call = call;
    op->peer = peer;
    op->rank = rank();
    op->world = world();
    op->comm = data_;
    op->pending = &pending_;
    if (!peer) op->number = ++collectives_;
    op->entry = pending_.begin(call, peer, op->number);
    if (peer) {
      op->has_begun_all = true;  // it has no place among collectives
      return;
    }
    op->said.first = {call, static_cast<std::uint32_t>(rank().value()), leaves};
    check_mpi(MPI_Iallreduce(&op->said, &op->heard, 1, Agreement::type(), Agreement::operation(),
                             control_, &op->hello),
              "MPI_Iallreduce");
  }

  /// Advances all calls as far as they go; the first that fails is a fault. Returns whether any has
  /// moved.
  bool advance() {
    const Operation* failed = nullptr;
    const bool has_moved = move_calls(failed);
    if (failed != nullptr) fail(explained(*failed));
    std::erase_if(ops_, [&](const auto& op) { return op->flow.is_over() && end(*op); });
    return has_moved;
  }
  bool move_calls(const Operation*& failed) {
    bool has_moved = false;
    bool is_next = true;
    for (const auto& op : ops_) {
      op->is_next = is_next;
      has_moved = op->flow.advance() || has_moved;
      is_next = is_next && (op->has_begun_all || op->flow.is_over());
      if (op->flow.is_over() && op->flow.error() && failed == nullptr) failed = op.get();
    }
    return has_moved;
  }
  bool end(Operation& op) {
    pending_.end(op.entry);
    op.is_over = true;
    return true;
  }

  /// A failure of MPI is explained by what other ranks tell, if they tell anything.
  Error explained(const Operation& op) {
    try {
      std::rethrow_exception(op.flow.error());
    } catch (const Error& error) {
      return error;
    } catch (const std::exception& failure) {
      const Deadline deadline = Deadline::after(fault_limit);
      while (!deadline.passed()) {
        if (auto error = check_peers(op)) return *error;
        sleep_for(Milliseconds(5));
      }
      return {op.call.text(), std::string("MPI failed: ") + failure.what(),
              "look at the other ranks' output", rank()};
    }
  }

  void wait_until_over(Operation& op) {
    WaitTime time;
    for (std::size_t polls = 0;; ++polls) {
      bool has_moved = false;
      {
        const std::lock_guard lock(process_.mutex());
        if (op.is_over) return;
        has_moved = advance();
        if (op.is_over) return;
        if (polls % 64 == 63) look(op, time, Clock::now());
      }
      if (has_moved || polls < 200) continue;
      // Data needs this rank to go on; a rank that has not come does not.
      const bool waits_for_rank = !op.peer && !op.has_heard();
      if (waits_for_rank && Clock::now() - time.begin() > Milliseconds(2)) {
        sleep_for(std::chrono::microseconds(50));
      } else {
        ::sched_yield();
      }
    }
  }

  /// The helper thread: advances calls while nobody waits for one.
  void help() {
    std::unique_lock lock(process_.mutex());
    while (!is_closing_) {
      if (ops_.empty()) {
        work_.wait(lock);
        continue;
      }
      const bool has_moved =
          waiting_.load(std::memory_order_relaxed) == 0 && !is_broken() && advance();
      lock.unlock();
      if (has_moved) {
        ::sched_yield();
      } else {
        sleep_for(std::chrono::microseconds(30));
      }
      lock.lock();
    }
  }

  // Faults. The lock is held.

  /// Looks for faults and measures the time, for a call that somebody waits for.
  void look(Operation& op, WaitTime& time, Clock::time_point now) {
    if (is_broken() || now - looked_ < look_interval) return;
    looked_ = now;
    std::optional<Error> error = check_peers(op);
    if (!error && time.until(now) >= timeout()) error = time_over(op);
    if (error && !op.is_over) fail(*error);
  }

  std::optional<Error> check_peers(const Operation& op) {
    if (process_.has_left_memory()) return memory_is_left();
    receive_notes();
    for (std::size_t w = 0; w < world() && !died_; ++w)
      if (reasons_[w].empty() && has_ended(w)) died_ = w;
    return find_culprit(*this, op.call.text(), [](std::size_t) { return true; });
  }
  bool has_ended(std::size_t w) const {
    const Place& own = places_[rank().value()];
    return places_[w].host == own.host && places_[w].process != own.process &&
           ::kill(static_cast<pid_t>(places_[w].process), 0) != 0 && errno == ESRCH;
  }

  /// Asks all ranks how far they are: who has begun this call, or waits in another, answers.
  std::optional<Error> time_over(Operation& op) {
    std::fill(answers_.begin(), answers_.end(), std::nullopt);
    answers_[rank().value()] = collectives_;
    tell(Note::Kind::question, {});
    const Deadline deadline = Deadline::after(answer_limit);
    const auto have_all = [&] {
      return std::all_of(answers_.begin(), answers_.end(),
                         [](const auto& a) { return a.has_value(); });
    };
    while (!have_all() && !deadline.passed()) {
      sleep_for(Milliseconds(1));
      receive_notes();
      advance();
      if (op.is_over) return std::nullopt;
    }
    std::vector<std::string> missing;
    for (std::size_t w = 0; w < world(); ++w) {
      const bool is_there = op.peer ? Rank{w} != *op.peer : answers_[w] >= op.number;
      if (!is_there) missing.push_back(text({w}));
    }
    return time_is_over(op.call, missing);
  }

  void tell(Note::Kind kind, std::string_view reason) {
    for (std::size_t w = 0; w < world(); ++w)
      if (w != rank().value()) tell(kind, reason, w);
  }
  void tell(Note::Kind kind, std::string_view reason, std::size_t to) {
    Sent& sent = *sent_.emplace_back(std::make_unique<Sent>());
    sent.note.kind = kind;
    sent.note.collectives = collectives_;
    sent.note.length =
        static_cast<std::uint32_t>(reason.copy(sent.note.reason.data(), sent.note.reason.size()));
    // What cannot be sent is a fault that the other rank finds out by itself.
    MPI_Isend(&sent.note, sizeof(Note), MPI_BYTE, static_cast<int>(to), 0, control_, &sent.request);
  }

  void receive_notes() {
    std::erase_if(sent_, [](const auto& sent) { return Done(sent->request).test(); });
    for (;;) {
      int has_come = 0;
      MPI_Status status;
      if (MPI_Iprobe(MPI_ANY_SOURCE, 0, control_, &has_come, &status) != MPI_SUCCESS) return;
      if (has_come == 0) return;
      Note note;
      const auto from = static_cast<std::size_t>(status.MPI_SOURCE);
      if (MPI_Recv(&note, sizeof note, MPI_BYTE, status.MPI_SOURCE, 0, control_,
                   MPI_STATUS_IGNORE) != MPI_SUCCESS) {
        return;
      }
      if (note.kind == Note::Kind::fault) {
        reasons_[from].assign(note.reason.data(),
                              std::min<std::size_t>(note.length, note.reason.size()));
      } else if (note.kind == Note::Kind::question) {
        tell(Note::Kind::answer, {}, from);
      } else {
        answers_[from] = note.collectives;
      }
    }
  }

  void fail(const Error& error) {
    fail(error, text({error.is_consequence() ? because_of_another : "", error.text()}));
  }
  void fail(const Error& error, std::string_view reason) {
    if (!pending_.note(error)) return;
    process_.note_failure();
    if (process_.has_left_memory()) return abandon();
    tell(Note::Kind::fault, reason);
    const Deadline deadline = Deadline::after(fault_limit);
    // What all ranks have agreed on can still be completed, unless one of them is gone.
    const auto holds_memory = [](const auto& op) {
      return op->holds_memory && !op->flow.is_over();
    };
    const auto knows = [&](std::size_t w) {
      return w == rank().value() || !reasons_[w].empty() || has_ended(w);
    };
    const auto is_done = [&] {
      std::size_t w = 0;
      while (w < world() && knows(w)) ++w;
      return w == world() && std::none_of(ops_.begin(), ops_.end(), holds_memory);
    };
    const Operation* failed = nullptr;
    while (!is_done() && !deadline.passed()) {
      if (!move_calls(failed)) sleep_for(std::chrono::microseconds(100));
      receive_notes();
    }
    abandon();
  }

  /// Ends the calls in flight, which MPI cannot cancel. Their own memory is kept for good. If MPI
  /// may still use memory of the program, the other communicators of this process fail as well.
  void abandon() {
    bool leaves_memory = false;
    for (const auto& op : ops_) {
      if (op->flow.is_over()) {
        end(*op);
        continue;
      }
      leaves_memory = leaves_memory || op->holds_memory;
      keep(op);
    }
    ops_.clear();
    if (!leaves_memory || process_.has_left_memory()) return;
    const Error error = memory_is_left();
    for (Engine* const other : engines())
      if (other != this && other->pending_.note(error))
        other->tell(Note::Kind::fault, text({because_of_another, error.text()}));
    process_.leave_memory();
    for (Engine* const other : engines())
      if (other != this) other->abandon();
  }
  /// Keeps a call that MPI has not ended.
  void keep(const std::shared_ptr<Operation>& op) {
    static auto* const kept = new std::vector<std::shared_ptr<Operation>>;
    kept->push_back(op);
    process_.leave_request();
    end(*op);
  }

  /// Says that this rank makes no call any more, and waits for the others to say so, up to a limit.
  void close() {
    try {
      if (!is_broken()) drain();
      if (!is_broken()) send_shutdown();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the fault has been told
    }
    const std::lock_guard lock(process_.mutex());
    for (auto& sent : sent_)
      if (process_.has_left_memory() || !Done(sent->request).test())
        sent.release();  // NOLINT(bugprone-unused-return-value): MPI may still read it
  }
  void send_shutdown() {
    const auto op = std::make_shared<Operation>();
    const Deadline deadline = Deadline::after(shutdown_limit);
    std::unique_lock lock(process_.mutex());
    begin(op, Call{}, std::nullopt, true);
    lock.unlock();
    poll_until([&] {
      const std::lock_guard held(process_.mutex());
      if (process_.has_left_memory()) return true;
      receive_notes();
      return Done(op->hello).test() || deadline.passed();
    });
    lock.lock();
    if (!op->has_heard()) return keep(op);
    pending_.end(op->entry);
    if (op->heard.differs) return;
    MPI_Comm_free(&control_);
    MPI_Comm_free(&data_);
  }

  Process& process_ = Process::get();
  EndOfScope scope_;
  MPI_Comm data_ = MPI_COMM_NULL;
  MPI_Comm control_ = MPI_COMM_NULL;  // for hellos and notes
  std::vector<Place> places_;
  std::vector<std::shared_ptr<Operation>> ops_;  // in flight, in order
  std::uint64_t collectives_ = 0;
  Clock::time_point looked_{};
  std::vector<std::string> reasons_;                   // why ranks gave up
  std::optional<std::size_t> died_;                    // a rank that ended without a reason
  std::vector<std::optional<std::uint64_t>> answers_;  // how many collectives ranks have begun
  std::vector<std::unique_ptr<Sent>> sent_;
  std::atomic<int> waiting_ = 0;  // threads that advance calls by themselves
  bool is_closing_ = false;
  std::condition_variable work_;
  Thread helper_;
};

/// A call's handle: see `Work`.
struct InFlight {
  Engine& engine;
  std::shared_ptr<Operation> operation;

  bool test() { return engine.test(*operation); }
  void wait() { engine.wait(*operation); }
  void leave() { engine.give_up(); }
};

/// A communicator of the listed ranks of `parent`, which its user frees. **Ranks** those.
inline MPI_Comm make_group(MPI_Comm parent, const std::vector<Rank>& members) {
  std::vector<int> ranks;
  ranks.reserve(members.size());
  for (const Rank member : members) ranks.push_back(mpi_count(member.value()));
  const std::lock_guard lock(Process::get().mutex());
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  MPI_Comm made = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(parent, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, mpi_count(ranks.size()), ranks.data(), &some), "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(parent, some, 0, &made), "MPI_Comm_create_group");
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  return made;
}

}  // namespace lockstep::detail::over_mpi

namespace lockstep {

/// Collectives through MPI. Results are bitwise equal on all ranks. Reductions are combined in rank
/// order, in every world and by every MPI; with `MpiAnyOrder` by MPI's own reductions, in an order
/// that may differ between worlds, but for 16-bit floats. Calls are compared before anything is
/// written. `Advance` says whether a thread advances asynchronous calls, or the rank's own calls
/// do.
/// **Host** every collective blocks until the result is here and arguments may be reused.
/// **Stream** none: host memory only.
template <std::size_t Ranks = dynamic, class Advance = HelperThread, class Transport = Mpi>
class MpiCommunicator : public Collectives<MpiCommunicator<Ranks, Advance, Transport>>,
                        public detail::HostAllocating {
  using Engine = detail::over_mpi::Engine;

 public:
  /// Calls in flight have no limit; this number is large enough for every job.
  static constexpr std::size_t most_in_flight = 256;

  /// Joins a duplicate of `parent`, whose ranks are those of `member`. **Ranks** all of `parent`.
  /// **Host** blocks until all have joined.
  MpiCommunicator(const Membership& member, MPI_Comm parent, const std::string& name = "world") {
    detail::require_world<Ranks>(member.world, member.rank);
    engine_ = std::make_unique<Engine>(member, parent, name, std::same_as<Advance, HelperThread>);
  }

  Rank rank() const { return engine_->rank(); }
  WorldSize world_size() const { return WorldSize{engine_->world()}; }
  std::chrono::milliseconds timeout() const { return engine_->timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { engine_->set_timeout(timeout); }
  void abort(std::string_view reason) { engine_->give_up(reason); }
  void give_up() { engine_->give_up(); }
  bool is_broken() const { return engine_->is_broken(); }

  // Called by `Collectives` and by adapters.

  /// May messages be in device memory? Of a CUDA-aware Open MPI, non-blocking collectives, which
  /// are all that this class uses, may not.
  static bool takes_device_messages() {
    return detail::over_mpi::Process::get().takes_device_memory();
  }

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) engine_->drain();
    engine_->wait(*begin(call));
  }

  void agree(const detail::Call& call) {
    const detail::calls::Barrier nothing{};
    engine_->wait(*engine_->start(call, std::nullopt, [&](detail::over_mpi::Operation& op) {
      return detail::over_mpi::move_elements(op, nothing);
    }));
  }

  /// Does this call gather all ranks' data whole, in one step?
  template <class C>
  bool is_small(const C& call) const {
    return C::kind == detail::CollectiveKind::all_reduce &&
           call.count * sizeof(typename C::element) * engine_->world() <=
               detail::over_mpi::few_bytes;
  }

  template <class C>
  auto start(const C& call) {
    return Work<detail::over_mpi::InFlight>(std::in_place, *engine_, begin(call));
  }

  template <std::size_t GroupRanks>
  auto split(const detail::GroupPosition& position) {
    agree(detail::division_call(position));
    const std::string name = engine_->next_group_name(position.group);
    std::optional<MpiCommunicator<GroupRanks, Advance, Transport>> group;
    if (position.is_member()) {
      MPI_Comm made = detail::over_mpi::make_group(engine_->comm(), position.members);
      group.emplace(engine_->beside(position.rank, position.world()), made, name);
      MPI_Comm_free(&made);
    }
    return group;
  }

 private:
  template <class C>
  auto begin(const C& call) {
    std::optional<Rank> peer;
    if constexpr (C::is_message) peer = call.root;
    return engine_->start(call.call(), peer, [&](detail::over_mpi::Operation& op) {
      return detail::over_mpi::flow_of<std::same_as<Transport, Mpi>>(op, call);
    });
  }

  std::unique_ptr<Engine> engine_;
};

static_assert(ArenaAllocating<MpiCommunicator<>> && AsyncReducing<MpiCommunicator<>> &&
              Splitting<MpiCommunicator<>>);

/// Creates a job's communicator `name`, or that of a group of its ranks, which find each other
/// through the store. **Ranks** all. **Host** blocks until all have joined.
template <std::size_t Ranks = dynamic, class Advance = HelperThread, class Transport = Mpi>
MpiCommunicator<Ranks, Advance, Transport> make_mpi_communicator(
    const Membership& member, Store& store, const std::string& name = "world") {
  using Made = MpiCommunicator<Ranks, Advance, Transport>;
  detail::over_mpi::Process::get();
  if (!member.job_rank) return Made(member, MPI_COMM_WORLD, name);
  const std::string known = detail::numbered_rendezvous(store, member.rank, "mpi", name);
  std::vector<Rank> members;
  for (const std::string& rank :
       store.gather("lockstep/mpi/" + known, member.rank, member.world,
                    std::to_string(member.job_rank->value()), member.timeout)) {
    members.emplace_back(std::stoul(rank));
  }
  MPI_Comm group = detail::over_mpi::make_group(MPI_COMM_WORLD, members);
  Made made(member, group, known);
  MPI_Comm_free(&group);
  return made;
}

}  // namespace lockstep
