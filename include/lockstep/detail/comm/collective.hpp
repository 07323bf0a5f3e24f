// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's call: the description that ranks compare, its value, and its asynchronous handle.

#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/core/scope_guard.hpp"
#include "lockstep/detail/core/strong.hpp"
#include "lockstep/detail/core/view.hpp"

namespace lockstep::detail {

using Milliseconds = std::chrono::milliseconds;

enum class CollectiveKind : std::uint16_t {
  barrier,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  send,
  receive,
  allocate,
  new_group,
  replay,
  capture,
  all_gather_variable,
  gather_variable,
};

inline constexpr std::string_view collective_names[] = {
    "barrier",        "all_reduce", "reduce",  "broadcast",
    "all_gather",     "gather",     "scatter", "reduce_scatter",
    "all_to_all",     "send",       "receive", "allocate",
    "new_group",      "replay",     "capture", "all_gather_variable",
    "gather_variable"};

constexpr std::string_view collective_name(CollectiveKind kind) {
  return collective_names[static_cast<std::size_t>(kind)];
}

/// The job's operation that a collective is part of, for error messages.
enum class JobCall : std::uint16_t {
  none,  // the program has made the collective itself
  step,
  epochs,
  batches,
  evaluate,
  predict,
  reduce_metrics,
  save,
  load,
  open,
  forward,  // passes of a program's own loop
  backward,
  /// The bit of a gather of `FullyShard`; lower bits are the unit's number.
  gather_of_unit = 0x4000,
  /// The bit of a step of sub-graphs; lower bits say which, the lowest being the whole model.
  step_of_subgraphs = 0x8000,
};

/// A step that uses these sub-graphs, a bit mask.
constexpr JobCall step_of_subgraphs(std::uint32_t sets) {
  return static_cast<JobCall>(static_cast<std::uint32_t>(JobCall::step_of_subgraphs) | sets);
}
/// The gather of a unit's parameters: ranks that gather different units disagree, by name.
constexpr JobCall gather_of_unit(std::size_t unit) {
  return static_cast<JobCall>(static_cast<std::uint32_t>(JobCall::gather_of_unit) |
                              static_cast<std::uint32_t>(unit % 0x4000));
}
/// The number of sub-graphs that the mask has room for, besides the whole model.
inline constexpr std::size_t most_compared_subgraphs = 14;

inline constexpr std::string_view job_call_names[] = {
    "",     "step", "epochs", "batches", "evaluate", "predict", "reduce_metrics",
    "save", "load", "open",   "forward", "backward"};

std::string job_call_text(JobCall call);

inline JobCall& job_call_of_thread() {
  static thread_local JobCall call = JobCall::none;
  return call;
}
constexpr JobCall current_job_call() {
  return std::is_constant_evaluated() ? JobCall::none : job_call_of_thread();
}

/// The step's `JobCall`: this thread's if it is a pass or a step of sub-graphs, else `otherwise`.
inline JobCall step_call_of_thread(JobCall otherwise = JobCall::step) {
  const JobCall call = job_call_of_thread();
  return call >= JobCall::forward ? call : otherwise;
}

/// RAII: this thread's collectives are part of a job's operation. A step passes a constant instead.
struct InJobCall : ValueWhile<JobCall> {
  explicit InJobCall(JobCall call) : ValueWhile(job_call_of_thread(), call) {}
};

/// A call's description, sent as bytes: equal on all ranks of a collective, matching for a message.
struct Call {
  CollectiveKind kind = CollectiveKind::barrier;
  JobCall part_of = JobCall::none;
  ElementKind element = ElementKind::unsupported;
  bool staged = false;     // the memory is not visible to other ranks
  std::uint16_t root = 0;  // or the other rank of a message
  std::uint64_t count = 0;
  std::array<char, 24> operation{};  // the reduce operation's name

  friend bool operator==(const Call&, const Call&) = default;

  constexpr Call& with(std::string_view name) {
    name.copy(operation.data(), operation.size() - 1);
    return *this;
  }

  /// Do a sent and a received message have the same type and length?
  constexpr bool carries_the_same_as(const Call& other) const {
    return element == other.element && count == other.count;
  }

  /// For errors: `all_reduce(sum of 100 float)`, in a job `evaluate (its all_gather(1 uint64))`.
  std::string text() const;

 private:
  std::string collective_text() const;
};

}  // namespace lockstep::detail

namespace lockstep {

/// The handle of a call in flight, which cannot be moved; the data must not be used before the call
/// is complete. The destructor waits and never throws: if the call fails, or an exception unwinds
/// the scope before `wait`, all ranks abort and the communicator's next call throws. `Pending` is
/// the backend's part: `test()`, `wait()` and, for unwinding, `leave()`, after which data is free.
template <class Pending>
class [[nodiscard("the handle's end waits for the call")]] Work {
 public:
  template <class... Arguments>
  explicit Work(std::in_place_t, Arguments&&... arguments)
      : pending_{std::forward<Arguments>(arguments)...} {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  ~Work() {
    if (waited_) return;
    if (scope_.is_exception()) {
      leave();
      return;
    }
    try {
      pending_.wait();
    } catch (...) {
      waited_ = true;  // the communicator throws the fault from its next call
    }
  }

  /// Is the call complete? Advances it. **Host** does not block. Throws if the call has failed.
  bool test() { return pending_.test(); }

  /// **Host** blocks until the result is here or, in device memory, enqueued. **Stream** work that
  /// the compute stream is given afterwards sees the result. Throws if the call has failed.
  void wait() {
    waited_ = true;
    pending_.wait();
  }

  /// Drops the handle of a call that was part of a failed capture and never happened.
  void forget() { waited_ = true; }

 private:
  [[gnu::cold, gnu::noinline]] void leave() { pending_.leave(); }

  detail::EndOfScope scope_;
  bool waited_ = false;
  Pending pending_;
};

}  // namespace lockstep

namespace lockstep::detail {

/// The `Pending` of a call that was complete before its handle was made.
struct NothingPending {
  static constexpr bool test() { return true; }
  static constexpr void wait() {}
  static constexpr void leave() {}
};

/// A single number or bool, in place of memory that holds several.
template <class T>
concept SingleElement = Element<T> || std::same_as<T, bool>;

/// Elements as they are sent: a bool is a byte that is 0 or 1.
template <class T>
std::span<T> as_elements(std::span<T> values) {
  return values;
}
inline std::span<std::uint8_t> as_elements(std::span<bool> values) {
  static_assert(sizeof(bool) == 1);
  return {reinterpret_cast<std::uint8_t*>(values.data()), values.size()};
}
inline std::span<const std::uint8_t> as_elements(std::span<const bool> values) {
  return {reinterpret_cast<const std::uint8_t*>(values.data()), values.size()};
}

/// Is this memory of elements that collectives take? True for packed bits, which `flat` rejects.
template <class Data>
consteval bool holds_elements() {
  using Plain = std::remove_cvref_t<Data>;
  if constexpr (DenseView<Plain> || ContiguousMemory<Plain>)
    return packs_bits<Plain> || SingleElement<std::remove_const_t<FlatElement<Data>>>;
  return packs_bits<Plain>;
}

/// The elements of an argument, as they are sent. A rejected one yields floats, to be one error.
template <class Data>
auto elements_of(Data&& data) {
  constexpr bool fits = holds_elements<Data>();
  static_assert(fits,
                "lockstep: a collective takes memory of numbers or bools (a span, vector, array or "
                "view); their types are double, float, Half, BFloat16, integers and bool");
  if constexpr (fits) {
    return as_elements(flat(data));
  } else {
    return std::span<float>();
  }
}
template <class Data>
using ElementsOf = typename decltype(elements_of(std::declval<Data&>()))::element_type;

/// The operations of bool: those whose result is 0 or 1 again.
template <class Op>
inline constexpr bool is_logical =
    std::same_as<Op, Min> || std::same_as<Op, Max> || std::same_as<Op, BitAnd> ||
    std::same_as<Op, BitOr> || std::same_as<Op, BitXor>;

/// Both arguments' element type. At namespace scope, because nvcc writes its name into other code.
template <class In, class Out>
struct CommonElement {
  using type = ElementsOf<Out>;
  static_assert(std::same_as<std::remove_const_t<ElementsOf<const In>>, type>,
                "lockstep: a collective's arguments have one element type");
};

struct NoOperation {};

/// A call as a value. `in` and `out` hold one piece of `count` elements, or one for every rank in
/// rank order, and are empty on a rank that gives or gets nothing. A call in place uses one memory.
template <CollectiveKind Kind, class T, class Operation = NoOperation>
struct Collective {
  static constexpr CollectiveKind kind = Kind;
  using element = T;
  using operation = Operation;

  std::span<const T> in;
  std::span<T> out;
  std::size_t count = 0;  // elements of one piece, the same on all ranks
  JobCall part_of = JobCall::none;
  Rank root{0};  // of a rooted collective; of a message the other rank
  [[no_unique_address]] Operation op{};

  /// Does `in` hold a piece for every rank, where it holds anything?
  static constexpr bool deals_pieces = kind == CollectiveKind::scatter ||
                                       kind == CollectiveKind::reduce_scatter ||
                                       kind == CollectiveKind::all_to_all;
  /// Does `out` hold a piece of every rank, where it holds anything?
  static constexpr bool collects_pieces = kind == CollectiveKind::all_gather ||
                                          kind == CollectiveKind::gather ||
                                          kind == CollectiveKind::all_to_all;
  /// Does the result replace the input?
  static constexpr bool is_in_place = kind == CollectiveKind::all_reduce ||
                                      kind == CollectiveKind::reduce ||
                                      kind == CollectiveKind::broadcast;
  static constexpr bool is_message =
      kind == CollectiveKind::send || kind == CollectiveKind::receive;

  constexpr Collective on(std::span<const T> other_in, std::span<T> other_out,
                          std::size_t other_count) const {
    return {other_in, other_out, other_count, part_of, root, op};
  }

  constexpr std::span<T> data() const
    requires is_in_place
  {
    return {out.empty() ? const_cast<T*>(in.data()) : out.data(), count};
  }

  constexpr Call call() const {
    Call described{kind, part_of, element_kind<T>()};
    described.root = static_cast<std::uint16_t>(root.value());
    // The number of elements that errors show: all that a rank gives, or those of one piece.
    described.count = deals_pieces && kind != CollectiveKind::scatter ? in.size() : count;
    if constexpr (requires { Operation::name; }) described.with(Operation::name);
    return described;
  }
};

namespace calls {

using Barrier = Collective<CollectiveKind::barrier, std::uint8_t>;
template <class T, class Op>
using AllReduce = Collective<CollectiveKind::all_reduce, T, Op>;
template <class T, class Op>
using Reduce = Collective<CollectiveKind::reduce, T, Op>;
template <class T>
using Broadcast = Collective<CollectiveKind::broadcast, T>;
template <class T>
using AllGather = Collective<CollectiveKind::all_gather, T>;
template <class T>
using Gather = Collective<CollectiveKind::gather, T>;
template <class T>
using Scatter = Collective<CollectiveKind::scatter, T>;
template <class T, class Op>
using ReduceScatter = Collective<CollectiveKind::reduce_scatter, T, Op>;
template <class T>
using AllToAll = Collective<CollectiveKind::all_to_all, T>;
template <class T>
using Send = Collective<CollectiveKind::send, T>;
template <class T>
using Receive = Collective<CollectiveKind::receive, T>;

template <class T>
constexpr AllGather<T> all_gather(std::span<const T> in, std::span<T> out) {
  return {in, out, in.size()};
}
template <class T>
constexpr Send<T> send(std::span<const T> data, Rank to) {
  return {data, {}, data.size(), JobCall::none, to};
}
template <class T>
constexpr Receive<T> receive(std::span<T> data, Rank from) {
  return {{}, data, data.size(), JobCall::none, from};
}

}  // namespace calls
}  // namespace lockstep::detail
