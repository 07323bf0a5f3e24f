// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/checkpoint/checkpoints.hpp"

#include <boost/test/unit_test.hpp>
#include <condition_variable>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "thread_count.hpp"

BOOST_FIXTURE_TEST_SUITE(checkpoint_background, Watchdog)

namespace {

using namespace lockstep;
using checkpoint_tests::Process;
using detail::BackgroundWriter;
using detail::LateFailures;

/// Lets work go on when the test says so.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

[[noreturn]] void no_room() { throw Error("save", "'x' cannot be written: no room", "make room"); }

void await_end(const BackgroundWriter& writer) {
  while (writer.is_busy()) detail::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

BOOST_AUTO_TEST_CASE(work_is_done_beside_its_owner) {
  Gate gate;
  bool is_done = false;
  BackgroundWriter writer(Rank{0});
  BOOST_TEST(!writer.is_busy());
  writer.start([&] {
    gate.pass();
    is_done = true;
  });
  BOOST_TEST(writer.is_busy());
  writer.rethrow();
  gate.open();
  writer.wait();
  BOOST_TEST(is_done);
  BOOST_TEST(!writer.is_busy());
  writer.wait();
}

BOOST_AUTO_TEST_CASE(a_second_piece_of_work_waits) {
  Gate gate;
  int done = 0;
  BackgroundWriter writer(Rank{0});
  writer.start([&] {
    gate.pass();
    ++done;
  });
  gate.open();
  writer.start([&] { done *= 2; });
  writer.wait();
  BOOST_TEST(done == 2);
}

BOOST_AUTO_TEST_CASE(what_work_owns_is_freed_before_it_counts_as_done) {
  BackgroundWriter writer(Rank{0});
  for (bool fails : {false, true}) {
    auto owned = std::make_unique<int>(3);
    std::weak_ptr<int> seen;
    auto shared = std::make_shared<int>(4);
    seen = shared;
    writer.start([owned = std::move(owned), shared = std::move(shared), fails] {
      if (fails) no_room();
    });
    await_end(writer);
    BOOST_TEST(seen.expired());
  }
  BOOST_TEST((writer.take_failure() != nullptr));
}

BOOST_AUTO_TEST_CASE(a_failure_is_thrown_once_at_the_next_call) {
  BackgroundWriter writer(Rank{0});
  const auto fail = [&] {
    writer.start(no_room);
    await_end(writer);
  };
  fail();
  expect_error([&] { writer.rethrow(); }, "lockstep: save: 'x' cannot be written");
  writer.rethrow();
  fail();
  expect_error([&] { writer.wait(); }, "lockstep: save: 'x' cannot be written");
  writer.wait();
  fail();
  bool is_run = false;
  expect_error([&] { writer.start([&] { is_run = true; }); },
               "lockstep: save: 'x' cannot be written");
  BOOST_TEST(!is_run);
  fail();
  BOOST_TEST((writer.take_failure() != nullptr));
  BOOST_TEST((writer.take_failure() == nullptr));
  writer.start([&] { is_run = true; });
  writer.wait();
  BOOST_TEST(is_run);
}

BOOST_AUTO_TEST_CASE(no_thread_is_left) {
  const std::size_t before = thread_count();
  for (int i = 0; i < 20; ++i) {
    BackgroundWriter writer(Rank{0});
    int done = 0;
    for (int k = 0; k < 5; ++k) writer.start([&] { ++done; });
    BOOST_TEST(thread_count() <= before + 1);
    writer.wait();
    BOOST_TEST(done == 5);
    writer.start([] {});
  }
  BOOST_TEST(thread_count() == before);
}

BOOST_AUTO_TEST_CASE(a_failure_that_nobody_saw_is_told_at_the_end) {
  LateFailures late;
  {
    BackgroundWriter writer(Rank{3});
    writer.start(no_room);
  }
  const auto told = late.take();
  BOOST_TEST_REQUIRE(told.has_value());
  BOOST_TEST((told->rank() == Rank{3}));
  BOOST_TEST(told->problem() == "'x' cannot be written: no room");
  BOOST_TEST(!late.take().has_value());
  {
    BackgroundWriter writer(Rank{3});
    writer.start(no_room);
    BOOST_CHECK_THROW(writer.wait(), Error);
  }
  BOOST_TEST(!late.take().has_value());
}

BOOST_AUTO_TEST_CASE(a_failure_that_nobody_listens_to_is_printed_with_its_rank) {
  Process alone([] {
    {
      BackgroundWriter(Rank{2}).start(no_room);
    }
    {
      BackgroundWriter(Rank{2}).start([] { throw std::runtime_error("odd"); });
    }
    {
      BackgroundWriter(Rank{2}).start([] { throw 1; });
    }
    {
      const LateFailures late;
      {
        BackgroundWriter(Rank{5}).start(no_room);
      }
      detail::write_all(2, "now\n");
    }
    return 4;
  });
  const std::string words =
      "lockstep: rank 2, save: 'x' cannot be written: no room; make room\n"
      "lockstep: rank 2: odd\n"
      "lockstep: rank 2: an exception that is no std::exception\n"
      "now\n"
      "lockstep: rank 5, save: 'x' cannot be written: no room; make room\n";
  BOOST_TEST(alone.words() == words);
  BOOST_TEST(alone.end() == 4);
}

BOOST_AUTO_TEST_CASE(a_late_failure_makes_launch_return_1_and_is_printed_once) {
  const auto launched = [](int returned) {
    return Process([returned] {
      char name[] = "program";
      char* arguments[] = {name, nullptr};
      return launch(1, arguments, [returned](Session& session) {
        BackgroundWriter(session.rank()).start(no_room);
        return returned;
      });
    });
  };
  const std::string words = "lockstep: rank 0, save: 'x' cannot be written: no room; make room\n";
  Process good = launched(0);
  BOOST_TEST(good.words() == words);
  BOOST_TEST(good.end() == 1);
  Process bad = launched(6);
  BOOST_TEST(bad.words() == words);
  BOOST_TEST(bad.end() == 6);
  Process threads([] {
    char name[] = "program";
    char flag[] = "--ranks=2";
    char* arguments[] = {name, flag, nullptr};
    return launch_threads(2, arguments, [](Session& session) {
      if (session.rank() == Rank{1}) BackgroundWriter(session.rank()).start(no_room);
    });
  });
  BOOST_TEST(threads.words() ==
             "lockstep: rank 1, save: 'x' cannot be written: no room; make room\n");
  BOOST_TEST(threads.end() == 1);
}

BOOST_AUTO_TEST_SUITE_END()
