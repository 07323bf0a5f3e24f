// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/checkpoint/folder.hpp"

#include <sys/file.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "temporary_folder.hpp"

BOOST_FIXTURE_TEST_SUITE(checkpoint_lock, Watchdog)

namespace {

using namespace lockstep;
using namespace std::chrono_literals;
using checkpoint_tests::Process;
using checkpoint_tests::say;
using detail::FolderLock;

std::string text_of(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_second_job_is_told_who_has_the_folder) {
  const TemporaryFolder folder;
  Process other([&] {
    const FolderLock lock(folder.path);
    say("locked");
    for (;;) ::pause();
    return 0;
  });
  BOOST_TEST(other.words(6) == "locked");
  expect_error([&] { FolderLock(folder.path, 0ms); }, "lockstep: checkpoints: '" + folder.path,
               "belongs to a job that still runs: process " + std::to_string(other.pid),
               " on " + host_name() + ", /", " UTC", "end that job, or name another folder");
}

BOOST_AUTO_TEST_CASE(the_lock_of_a_process_that_was_killed_is_free_at_once) {
  const TemporaryFolder folder;
  for (int i = 0; i < 20; ++i) {
    Process other([&] {
      const FolderLock lock(folder.path);
      say("locked");
      for (;;) ::pause();
      return 0;
    });
    BOOST_TEST_REQUIRE(other.words(6) == "locked");
    BOOST_TEST(!error_of([&] { FolderLock(folder.path, 0ms); }).empty());
    ::kill(other.pid, SIGKILL);
    BOOST_TEST(other.end() == -SIGKILL);
    const FolderLock lock(folder.path, 0ms);
    BOOST_TEST(text_of(folder / ".lock").starts_with("process " + std::to_string(getpid())));
  }
}

BOOST_AUTO_TEST_CASE(a_job_waits_for_one_that_is_about_to_end) {
  const TemporaryFolder folder;
  Process other([&] {
    const FolderLock lock(folder.path);
    say("locked");
    ::usleep(200'000);
    return 7;
  });
  BOOST_TEST(other.words(6) == "locked");
  const FolderLock lock(folder.path, 20s);
  BOOST_TEST(other.end() == 7);
}

BOOST_AUTO_TEST_CASE(two_jobs_of_one_process_are_told_apart) {
  const TemporaryFolder folder;
  std::optional<FolderLock> first(folder.path);
  expect_error([&] { FolderLock(folder.path, 0ms); }, "process " + std::to_string(getpid()));
  FolderLock moved(std::move(*first));
  first.reset();
  expect_error([&] { FolderLock(folder.path, 0ms); }, "process " + std::to_string(getpid()));
  moved.require();
}

BOOST_AUTO_TEST_CASE(a_lock_that_is_given_back_names_nobody) {
  const TemporaryFolder folder;
  {
    const FolderLock lock(folder.path);
  }
  BOOST_TEST(text_of(folder / ".lock").empty());
  const FolderLock again(folder.path, 0ms);
}

BOOST_AUTO_TEST_CASE(programs_that_the_job_starts_do_not_have_its_lock) {
  const TemporaryFolder folder;
  std::optional<FolderLock> lock(folder.path);
  Process other([] { return ::execl("/bin/sleep", "sleep", "60", nullptr); });
  // The process is sleep, and not a copy of this one, when its end of the pipe says nothing and its
  // name has changed.
  const std::string comm = "/proc/" + std::to_string(other.pid) + "/comm";
  while (text_of(comm) != "sleep\n") ::usleep(1000);
  lock.reset();
  const FolderLock again(folder.path, 0ms);
}

BOOST_AUTO_TEST_CASE(a_folder_that_was_removed_or_replaced_is_noticed) {
  const TemporaryFolder outer;
  const std::string folder = outer / "run";
  std::filesystem::create_directory(folder);
  const FolderLock lock(folder);
  lock.require();
  std::filesystem::remove_all(folder);
  expect_error([&] { lock.require(); }, folder + "' was removed or replaced while the job ran");
  std::filesystem::create_directory(folder);
  const FolderLock other(folder, 0ms);
  other.require();
  expect_error([&] { lock.require(); }, folder + "' was removed or replaced while the job ran");
}

BOOST_AUTO_TEST_CASE(a_folder_that_is_not_there_is_an_error) {
  expect_error([] { FolderLock("/no/such/folder", 0ms); },
               "'/no/such/folder/.lock' cannot be opened: No such file or directory",
               "name a folder in which this job may write");
}

BOOST_AUTO_TEST_SUITE_END()
