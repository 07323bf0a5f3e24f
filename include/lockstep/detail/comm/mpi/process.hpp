// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file This process in MPI: initialised once, its lock, its thread level, its datatypes.

#include <unistd.h>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <mutex>

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/comm/mpi/library.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/thread.hpp"

namespace lockstep::detail::over_mpi {

inline constexpr const char* backend = "Backend<Mpi>";

/// Throws MPI's own words unless a function of it has returned MPI_SUCCESS.
inline void check_mpi(int code, const char* function) {
  if (code == MPI_SUCCESS) [[likely]]
    return;
  char words[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, words, &length);
  throw std::runtime_error(
      text({function, ": ", std::string_view(words, static_cast<std::size_t>(length))}));
}

/// A number of elements as MPI takes it.
inline int mpi_count(std::size_t count) {
  if (count > INT_MAX)
    throw std::runtime_error(text({count, " elements are more than a call of MPI can count"}));
  return static_cast<int>(count);
}

/// MPI's part of the process. A program that has not called MPI_Init leaves it to the first use
/// here, and MPI_Finalize to `exit`; a program that has called it also calls MPI_Finalize itself.
///
/// No function of MPI that could wait for another rank is called, but for those that make groups:
/// requests are started and tested. So one lock serves all threads of the process, of which MPI
/// needs MPI_THREAD_SERIALIZED; a process that calls from one thread only needs nothing.
class Process {
 public:
  /// Never destroyed: the handler at the process's end uses it.
  static Process& get() {
    static Process* const process = new Process;
    return *process;
  }

  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Held while MPI is called.
  std::mutex& mutex() { return mutex_; }

  /// Throws unless several threads of this process may call MPI, one at a time.
  void require_threads() const {
    if (level_ >= MPI_THREAD_SERIALIZED) return;
    fail(
        backend,
        {"MPI is initialised with ",
         level_ == MPI_THREAD_FUNNELED ? "MPI_THREAD_FUNNELED" : "MPI_THREAD_SINGLE",
         ", and the thread that advances asynchronous calls needs MPI_THREAD_SERIALIZED"},
        "call MPI_Init_thread with MPI_THREAD_SERIALIZED, or choose Progress<Callers>, which needs "
        "no thread");
  }

  /// Is MPI CUDA-aware? Where it cannot say so, it is not.
  bool takes_device_memory() {
#if defined(MPIX_CUDA_AWARE_SUPPORT) || (defined(MPICH_NUMVERSION) && MPICH_NUMVERSION >= 40000000)
    const std::lock_guard lock(mutex_);
    return MPIX_Query_cuda_support() == 1;
#else
    return false;
#endif
  }

  /// Types and operations of MPI that live as long as MPI does.
  MPI_Datatype keep_type(MPI_Datatype type) { return types_.emplace_back(type); }
  MPI_Op keep_operation(MPI_Op operation) { return operations_.emplace_back(operation); }

  /// A failed call has left memory of the program to MPI, which may still read or write it. From
  /// now on nothing calls MPI, not even MPI_Finalize.
  void leave_memory() { has_left_memory_ = true; }
  bool has_left_memory() const { return has_left_memory_; }
  /// A call has failed.
  void note_failure() { has_failed_ = true; }
  /// A request was left unfinished, with memory that is kept: MPI_Finalize could wait for it.
  void leave_request() { has_left_request_ = true; }

 private:
  Process() {
    int is_initialised = 0;
    MPI_Initialized(&is_initialised);
    if (is_initialised != 0) {
      MPI_Query_thread(&level_);
      return;
    }
    // Threads of MPI's own must not take the program's signals.
    const int code = without_signals(
        [&] { return MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level_); });
    if (code != MPI_SUCCESS)
      throw Error(backend, "MPI_Init_thread failed", "start the program with mpirun or srun");
    // Requests of collectives report their errors to the world in some versions of Open MPI.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    process_ = ::getpid();
    ::on_exit([](int status, void* self) { static_cast<Process*>(self)->finalize(status); }, this);
  }

  /// MPI_Finalize waits for all ranks: a rank that has failed must not wait, so that its launcher
  /// sees it end. The launcher then ends the others at once, which have the same fault to report:
  /// they get a moment. A forked process leaves MPI alone.
  void finalize(int status) {
    const bool is_well = status == 0 || status == stopped_status;
    if (!is_well && has_failed_ && process_ == ::getpid()) sleep_for(Milliseconds(200));
    if (!is_well || has_left_memory_ || has_left_request_ || process_ != ::getpid()) return;
    int is_finalised = 0;
    MPI_Finalized(&is_finalised);
    if (is_finalised != 0) return;
    for (MPI_Datatype& type : types_) MPI_Type_free(&type);
    for (MPI_Op& operation : operations_) MPI_Op_free(&operation);
    MPI_Finalize();
  }

  std::mutex mutex_;
  int level_ = MPI_THREAD_SINGLE;
  std::vector<MPI_Datatype> types_;
  std::vector<MPI_Op> operations_;
  ::pid_t process_ = 0;  // the one that has called MPI_Init here
  std::atomic<bool> has_left_memory_ = false;
  std::atomic<bool> has_failed_ = false;
  bool has_left_request_ = false;
};

/// A datatype of as many bytes, for calls that only move elements.
template <class T>
MPI_Datatype moved_type() {
  if constexpr (sizeof(T) == 1) return MPI_UINT8_T;
  if constexpr (sizeof(T) == 2) return MPI_UINT16_T;
  if constexpr (sizeof(T) == 4) return MPI_UINT32_T;
  if constexpr (sizeof(T) == 8) return MPI_UINT64_T;
}

}  // namespace lockstep::detail::over_mpi
