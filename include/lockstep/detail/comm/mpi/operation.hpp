// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A call in flight: a coroutine that waits for MPI's requests, after ranks have agreed on
/// it.

#include <coroutine>

#include "lockstep/detail/comm/call/watchdog.hpp"
#include "lockstep/detail/comm/mpi/process.hpp"

namespace lockstep::detail::over_mpi {

/// What a rank says of its next call of all ranks.
struct Hello {
  Call call;
  std::uint32_t rank = 0;
  bool leaves = false;  // it closes its communicator instead
};

/// What some ranks say together: the lowest one's hello, and that of the lowest rank that differs.
struct Agreement {
  Hello first;
  Hello other;
  bool differs = false;

  static bool are_alike(const Hello& a, const Hello& b) {
    return a.leaves == b.leaves && a.call == b.call;
  }

  /// The same for two disjoint sets of ranks, in any order: MPI may combine them as it likes, and
  /// all ranks name the same two.
  static Agreement merged(const Agreement& a, const Agreement& b) {
    const Agreement& low = a.first.rank < b.first.rank ? a : b;
    const Agreement& high = &low == &a ? b : a;
    Agreement both = low;
    const auto consider = [&](const Hello& hello) {
      if (are_alike(both.first, hello) || (both.differs && both.other.rank < hello.rank)) return;
      both.other = hello;
      both.differs = true;
    };
    consider(high.first);
    if (high.differs) consider(high.other);
    return both;
  }

  static MPI_Datatype type() {
    static const MPI_Datatype made = [] {
      MPI_Datatype bytes = MPI_DATATYPE_NULL;
      check_mpi(MPI_Type_contiguous(sizeof(Agreement), MPI_BYTE, &bytes), "MPI_Type_contiguous");
      check_mpi(MPI_Type_commit(&bytes), "MPI_Type_commit");
      return Process::get().keep_type(bytes);
    }();
    return made;
  }
  static MPI_Op operation() {
    static const MPI_Op made = [] {
      MPI_Op op = MPI_OP_NULL;
      MPI_User_function* const merge = [](void* in, void* inout, int* count, MPI_Datatype*) {
        const auto* const from = static_cast<const Agreement*>(in);
        auto* const to = static_cast<Agreement*>(inout);
        for (int i = 0; i < *count; ++i) to[i] = merged(from[i], to[i]);
      };
      check_mpi(MPI_Op_create(merge, 1, &op), "MPI_Op_create");
      return Process::get().keep_operation(op);
    }();
    return made;
  }
};
static_assert(std::is_trivially_copyable_v<Agreement>);

/// A coroutine that is resumed when what it waits for is done.
class Flow {
 public:
  struct Promise {
    Flow get_return_object() { return Flow(std::coroutine_handle<Promise>::from_promise(*this)); }
    static std::suspend_always initial_suspend() noexcept { return {}; }
    static std::suspend_always final_suspend() noexcept { return {}; }
    static void return_void() {}
    void unhandled_exception() { error = std::current_exception(); }

    void* awaited = nullptr;
    bool (*test)(void* awaited) = nullptr;
    std::exception_ptr error;
  };
  using promise_type = Promise;

  /// The base of what a flow waits for: `test()` says whether it is done.
  template <class Self>
  struct Awaited {
    bool await_ready() { return static_cast<Self*>(this)->test(); }
    void await_suspend(std::coroutine_handle<Promise> flow) {
      flow.promise().awaited = this;
      flow.promise().test = [](void* awaited) {
        return static_cast<Self*>(static_cast<Awaited*>(awaited))->test();
      };
    }
  };

  Flow() = default;
  explicit Flow(std::coroutine_handle<Promise> handle) : handle_(handle) {}
  Flow(Flow&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Flow& operator=(Flow&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Flow() {
    if (handle_) handle_.destroy();
  }

  /// Goes on until it waits for what is not done. Returns whether it has moved.
  bool advance() {
    bool has_moved = false;
    promise_type& promise = handle_.promise();
    while (!handle_.done() && (promise.awaited == nullptr || promise.test(promise.awaited))) {
      promise.awaited = nullptr;
      handle_.resume();
      has_moved = true;
    }
    return has_moved;
  }
  bool is_over() const { return handle_.done(); }
  const std::exception_ptr& error() const { return handle_.promise().error; }

 private:
  std::coroutine_handle<Promise> handle_;
};

/// Waits for a request. Throws MPI's own words if it fails.
struct Done : Flow::Awaited<Done> {
  explicit Done(MPI_Request& request) : request(&request) {}

  bool test() {
    int is_done = 0;
    code = MPI_Test(request, &is_done, MPI_STATUS_IGNORE);
    return is_done != 0 || code != MPI_SUCCESS;
  }
  void await_resume() const { check_mpi(code, "MPI_Test"); }

  MPI_Request* request;
  int code = MPI_SUCCESS;
};

/// A call in flight of one communicator.
///
/// Ranks compare a collective by a small all-reduce of their hellos, on a communicator of its own:
/// messages and time grow with the logarithm of the world. Collectives of the data's communicator
/// have to begin in one order on all ranks, so a call begins when the one before has begun all of
/// its own.
struct Operation {
  Call call;
  std::optional<Rank> peer{};  // of a message
  std::uint64_t number = 0;    // among collectives, from 1
  Rank rank{};                 // this one
  std::size_t world = 1;
  MPI_Comm comm = MPI_COMM_NULL;  // for elements
  PendingCalls* pending = nullptr;
  PendingCalls::Entry entry{};

  Flow flow{};
  bool is_next = false;  // all calls before have begun all that they need
  bool has_begun_all = false;
  bool holds_memory = false;  // MPI may read or write memory of the program
  bool is_over = false;
  std::optional<WaitTime> polled{};

  MPI_Request hello = MPI_REQUEST_NULL;
  Agreement said{};
  Agreement heard{};

  /// Waits until all ranks have said what they call, and until it is this call's turn. Throws if
  /// they do not agree.
  struct Agreed : Flow::Awaited<Agreed> {
    explicit Agreed(Operation& operation) : operation(operation), hello(operation.hello) {}

    bool test() { return hello.test() && operation.is_next; }
    void await_resume() const {
      hello.await_resume();
      operation.verify();
      operation.pending->agree(operation.entry);
    }

    Operation& operation;
    Done hello;
  };
  Agreed agreed() { return Agreed(*this); }
  bool has_heard() const { return hello == MPI_REQUEST_NULL; }

 private:
  void verify() const {
    if (!heard.differs) return;
    for (const Hello& hello : {heard.first, heard.other})
      if (hello.leaves) throw rank_left(call.text(), Rank{hello.rank}, rank);
    throw ranks_disagree(number, heard.first.call.text(), Rank{heard.other.rank},
                         heard.other.call.text(), rank);
  }
};

}  // namespace lockstep::detail::over_mpi
