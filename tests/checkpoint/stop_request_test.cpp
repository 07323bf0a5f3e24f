// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/checkpoint/checkpoints.hpp"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <exception>
#include <optional>
#include <string>

#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/thread.hpp"

BOOST_FIXTURE_TEST_SUITE(checkpoint_stop_request, Watchdog)

namespace {

using namespace lockstep;
using checkpoint_tests::Process;
using checkpoint_tests::say;
using detail::StopRequest;

void nothing_thrown(const std::exception_ptr&) {}

/// The exit status of a process that runs `f()`, or minus the signal that ended it.
int end_of(auto f) {
  Process process(f);
  const std::string words = process.words();
  BOOST_TEST(words.empty(), words);
  return process.end();
}

volatile sig_atomic_t own_calls = 0;

}  // namespace

BOOST_AUTO_TEST_CASE(the_first_signal_is_remembered_and_ends_nothing) {
  BOOST_TEST(end_of([] {
               const StopRequest stop;
               if (stop.is_made() || stop.signal() != 0) return 1;
               ::raise(SIGTERM);
               if (!stop.is_made() || stop.signal() != SIGTERM) return 2;
               ::raise(SIGUSR1);
               ::raise(SIGTERM);
               return stop.signal() == SIGTERM ? 0 : 3;
             }) == 0);
  BOOST_TEST(end_of([] {
               const StopRequest stop;
               ::raise(SIGUSR1);
               return stop.signal() == SIGUSR1 ? 0 : 1;
             }) == 0);
}

BOOST_AUTO_TEST_CASE(a_signal_from_another_process_is_seen_in_the_middle_of_a_step) {
  Process process([] {
    const StopRequest stop;
    say("ready");
    while (!stop.is_made()) {
    }
    return stop.signal();
  });
  BOOST_TEST(process.words(5) == "ready");
  ::kill(process.pid, SIGUSR1);
  BOOST_TEST(process.end() == SIGUSR1);
}

BOOST_AUTO_TEST_CASE(without_a_request_signals_do_what_they_did) {
  const auto raises = [](int signal) {
    return [signal] {
      {
        const StopRequest stop;
      }
      ::raise(signal);
      return 0;
    };
  };
  BOOST_TEST(end_of([] { return ::raise(SIGTERM); }) == -SIGTERM);
  BOOST_TEST(end_of([] { return ::raise(SIGUSR1); }) == -SIGUSR1);
  BOOST_TEST(end_of(raises(SIGTERM)) == -SIGTERM);
  BOOST_TEST(end_of(raises(SIGUSR1)) == -SIGUSR1);
}

BOOST_AUTO_TEST_CASE(several_objects_share_the_handlers_until_the_last_goes) {
  BOOST_TEST(end_of([] {
               std::optional<StopRequest> first;
               first.emplace();
               std::optional<StopRequest> second;
               detail::Thread({"rank", "a rank"}, [&] { second.emplace(); }, nothing_thrown).join();
               first.reset();
               ::raise(SIGTERM);
               if (second->signal() != SIGTERM) return 1;
               first.emplace();
               return first->signal() == SIGTERM ? 0 : 2;
             }) == 0);
  BOOST_TEST(end_of([] {
               {
                 const StopRequest first;
                 const StopRequest second;
               }
               ::raise(SIGTERM);
               return 0;
             }) == -SIGTERM);
}

BOOST_AUTO_TEST_CASE(a_second_signal_does_not_end_a_process_on_its_way_out) {
  BOOST_TEST(end_of([] {
               {
                 StopRequest stop;
                 ::raise(SIGTERM);
                 stop.finished();
               }
               ::raise(SIGTERM);
               ::raise(SIGUSR1);
               return stopped_status;
             }) == 75);
  // A rank that stops because another was asked: its own signal comes when it has saved.
  BOOST_TEST(end_of([] {
               ::setenv("LOCKSTEP_GRACE_SECONDS", "0.1", 1);
               {
                 StopRequest stop;
                 stop.finished();
               }
               ::raise(SIGTERM);
               detail::sleep_for(std::chrono::milliseconds(300));
               return stopped_status;
             }) == 75);
  BOOST_TEST(end_of([] {
               {
                 StopRequest stop;
                 ::raise(SIGTERM);
               }
               StopRequest::forget();
               ::raise(SIGTERM);
               return 0;
             }) == -SIGTERM);
}

BOOST_AUTO_TEST_CASE(a_new_job_of_the_process_begins_without_the_request) {
  BOOST_TEST(end_of([] {
               {
                 const StopRequest stop;
                 ::raise(SIGTERM);
               }
               {
                 const StopRequest stop;
                 if (stop.is_made()) return 1;
                 ::raise(SIGUSR1);
                 if (stop.signal() != SIGUSR1) return 2;
                 StopRequest::forget();
                 if (stop.is_made()) return 3;
                 ::raise(SIGTERM);
                 if (stop.signal() != SIGTERM) return 4;
                 StopRequest::forget();
               }
               ::raise(SIGTERM);
               return 5;
             }) == -SIGTERM);
}

BOOST_AUTO_TEST_CASE(a_handler_of_the_programs_own_is_called_and_put_back) {
  BOOST_TEST(end_of([] {
               ::signal(SIGUSR1, [](int) { own_calls = own_calls + 1; });
               struct sigaction own{};
               own.sa_flags = SA_SIGINFO;
               own.sa_sigaction = [](int, siginfo_t* info, void*) {
                 own_calls = own_calls + (info->si_pid == ::getpid() ? 10 : 1000);
               };
               ::sigaction(SIGTERM, &own, nullptr);
               {
                 const StopRequest stop;
                 ::raise(SIGUSR1);
                 ::raise(SIGTERM);
                 if (stop.signal() != SIGUSR1 || own_calls != 11) return 1;
                 StopRequest::forget();
               }
               ::raise(SIGUSR1);
               ::raise(SIGTERM);
               return own_calls == 22 ? 0 : 2;
             }) == 0);
}

BOOST_AUTO_TEST_CASE(a_signal_that_is_ignored_stays_ignored) {
  BOOST_TEST(end_of([] {
               ::signal(SIGTERM, SIG_IGN);
               {
                 const StopRequest stop;
                 ::raise(SIGTERM);
                 if (stop.is_made()) return 1;
                 ::raise(SIGUSR1);
                 if (stop.signal() != SIGUSR1) return 2;
               }
               ::raise(SIGTERM);
               return 0;
             }) == 0);
}

BOOST_AUTO_TEST_CASE(a_process_that_is_forked_from_the_job_can_be_ended) {
  BOOST_TEST(end_of([] {
               const StopRequest stop;
               Process child([] {
                 for (;;) ::pause();
                 return 0;
               });
               ::kill(child.pid, SIGTERM);
               return child.end() == -SIGTERM && !stop.is_made() ? 0 : 1;
             }) == 0);
  BOOST_TEST(end_of([] {
               const StopRequest stop;
               return Process([] {
                        const StopRequest own;
                        ::raise(SIGTERM);
                        return own.signal();
                      })
                   .end();
             }) == SIGTERM);
}

BOOST_AUTO_TEST_CASE(a_process_that_does_not_come_to_an_end_is_ended) {
  for (int signal : {SIGTERM, SIGUSR1}) {
    Process process([signal] {
      ::setenv("LOCKSTEP_GRACE_SECONDS", "0.05", 1);
      const StopRequest stop;
      ::raise(signal);
      for (;;) ::pause();
      return 0;
    });
    const std::string name = signal == SIGTERM ? "SIGTERM" : "SIGUSR1";
    BOOST_TEST(process.words() ==
               "lockstep: " + name +
                   " asked this process to stop 0.05 s ago, and its step and the checkpoint have "
                   "not come to an end; it ends now, and the newest checkpoint is an older one: "
                   "raise LOCKSTEP_GRACE_SECONDS\n");
    BOOST_TEST(process.end() == 128 + signal);
  }
  // One of the two is ignored: the limit holds for the other.
  Process process([] {
    ::setenv("LOCKSTEP_GRACE_SECONDS", "0.05", 1);
    ::signal(SIGTERM, SIG_IGN);
    const StopRequest stop;
    ::raise(SIGUSR1);
    for (;;) ::pause();
    return 0;
  });
  BOOST_TEST(process.words().starts_with("lockstep: SIGUSR1 asked"));
  BOOST_TEST(process.end() == 138);
}

BOOST_AUTO_TEST_CASE(the_limit_holds_while_a_computation_never_ends) {
  Process process([] {
    ::setenv("LOCKSTEP_GRACE_SECONDS", "0.05", 1);
    const StopRequest stop;
    ::raise(SIGTERM);
    volatile unsigned steps = 0;
    for (;;) steps = steps + 1;
    return 0;
  });
  BOOST_TEST(process.words().starts_with("lockstep: SIGTERM asked"));
  BOOST_TEST(process.end() == 143);
}

BOOST_AUTO_TEST_CASE(after_finished_there_is_no_limit) {
  BOOST_TEST(end_of([] {
               ::setenv("LOCKSTEP_GRACE_SECONDS", "0.2", 1);
               StopRequest stop;
               ::raise(SIGTERM);
               stop.finished();
               detail::sleep_for(std::chrono::milliseconds(400));
               return stop.signal();
             }) == SIGTERM);
}

BOOST_AUTO_TEST_CASE(a_limit_that_is_no_time_is_an_error) {
  Process process([] {
    ::setenv("LOCKSTEP_GRACE_SECONDS", "soon", 1);
    const StopRequest stop;
    return 0;
  });
  BOOST_TEST(
      process.words() ==
      "lockstep: launch: LOCKSTEP_GRACE_SECONDS is 'soon'; give it a number of seconds above "
      "0");
  BOOST_TEST(process.end() == 99);
}

BOOST_AUTO_TEST_CASE(stopped_says_why_and_what_was_saved) {
  const Stopped stopped(SIGTERM, "run/step-000000000012.safetensors");
  BOOST_TEST(stopped.what() ==
             "lockstep: stopped on request (SIGTERM); the state is saved: "
             "run/step-000000000012.safetensors; start the job again with --resume to go on");
  BOOST_TEST(stopped.signal() == SIGTERM);
  BOOST_TEST(stopped.saved() == "run/step-000000000012.safetensors");
  BOOST_TEST(Stopped(0, "").what() ==
             std::string("lockstep: stopped on request; no checkpoint was wanted, so nothing is "
                         "saved"));
  BOOST_TEST(std::string(Stopped(SIGUSR1, "a").what()).find("(SIGUSR1)") != std::string::npos);
  BOOST_TEST(stopped_status == 75);
}

BOOST_AUTO_TEST_SUITE_END()
