// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/observe/summary.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

using namespace lockstep;
namespace fs = std::filesystem;

BOOST_AUTO_TEST_SUITE(observe_log_file)

namespace {

struct Folder {
  fs::path path = fs::temp_directory_path() / ("lockstep-log-" + std::to_string(getpid()));
  Folder() { fs::create_directory(path); }
  ~Folder() { fs::remove_all(path); }
  std::string file() const { return path / "run.jsonl"; }
};

std::string content(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

auto says(std::string text) {
  return [text](const Error& error) {
    BOOST_TEST(error.what() == text);
    return true;
  };
}

}  // namespace

BOOST_AUTO_TEST_CASE(lines_are_there_as_soon_as_they_are_written) {
  const Folder folder;
  detail::LogFile log(folder.file(), Rank{0});
  BOOST_TEST(static_cast<bool>(log));
  log.write(JsonLine().add("epoch", 1));
  BOOST_TEST(content(folder.file()) == "{\"epoch\":1}\n");
  log.write(JsonLine().add("epoch", 2));
  BOOST_TEST(content(folder.file()) == "{\"epoch\":1}\n{\"epoch\":2}\n");
  detail::LogFile(folder.file(), Rank{0}).write(JsonLine());
  BOOST_TEST(content(folder.file()) == "{\"epoch\":1}\n{\"epoch\":2}\n{}\n");
}

BOOST_AUTO_TEST_CASE(only_rank_0_touches_the_file) {
  const Folder folder;
  detail::LogFile log(folder.file(), Rank{1});
  log.write(JsonLine().add("epoch", 1));
  detail::LogFile().write(JsonLine());
  BOOST_TEST(!log);
  BOOST_TEST(!fs::exists(folder.file()));
}

BOOST_AUTO_TEST_CASE(a_path_that_cannot_be_opened_is_an_error) {
  BOOST_CHECK_EXCEPTION(
      detail::LogFile("/no/such/folder/run.jsonl", Rank{0}), Error,
      says("lockstep: rank 0, log: '/no/such/folder/run.jsonl' cannot be opened: No such file or "
           "directory; make its folder first, or name another file"));
  BOOST_CHECK_EXCEPTION(detail::LogFile("/", Rank{0}), Error,
                        says("lockstep: rank 0, log: '/' cannot be opened: Is a directory; name a "
                             "file that may be written"));
}

BOOST_AUTO_TEST_CASE(a_full_disk_is_an_error) {
  detail::LogFile log("/dev/full", Rank{0});
  BOOST_CHECK_EXCEPTION(log.write(JsonLine().add("epoch", 1)), Error,
                        says("lockstep: rank 0, log: '/dev/full' cannot be written: No space left "
                             "on device; make room there, or name a file elsewhere"));
}

BOOST_AUTO_TEST_CASE(half_a_line_does_not_stay_when_room_runs_out) {
  const Folder folder;
  detail::LogFile log(folder.file(), Rank{0});
  log.write(JsonLine().add("epoch", 1));
  // A file that may not grow beyond 20 bytes takes the first part of a line, like a disk that
  // fills.
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{20, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  BOOST_CHECK_THROW(log.write(JsonLine().add("text", std::string(100, 'x'))), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  log.write(JsonLine().add("epoch", 2));
  BOOST_TEST(content(folder.file()) == "{\"epoch\":1}\n{\"epoch\":2}\n");
}

BOOST_AUTO_TEST_SUITE_END()
