// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/launch/output.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstdio>
#include <string>
#include <string_view>

using namespace lockstep;
using lockstep::detail::LineCutter;
using lockstep::detail::OutputQueue;

BOOST_AUTO_TEST_SUITE(launch_output)

namespace {

/// What a cutter makes of `pieces`: lines end in '|', status lines in '~'.
std::string cut(std::initializer_list<std::string_view> pieces) {
  LineCutter cutter;
  std::string result;
  const auto take = [&](std::string_view text, bool is_status) {
    result += std::string(text) + (is_status ? "~" : "|");
  };
  for (std::string_view piece : pieces) cutter.feed(piece, take);
  cutter.finish(take);
  return result;
}

/// What a queue writes to stdout while `f` fills it, and until it is empty.
template <class F>
std::string written(bool is_terminal, F&& f) {
  int ends[2];
  BOOST_REQUIRE(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  dup2(ends[1], STDOUT_FILENO);
  OutputQueue queue(is_terminal);
  f(queue);
  while (!queue.is_empty()) queue.write_some();
  dup2(before, STDOUT_FILENO);
  char bytes[4096];
  const ssize_t n = read(ends[0], bytes, sizeof bytes);
  for (int fd : {before, ends[0], ends[1]}) close(fd);
  return n > 0 ? std::string(bytes, static_cast<std::size_t>(n)) : "";
}

}  // namespace

BOOST_AUTO_TEST_CASE(lines_are_put_together_from_pieces) {
  BOOST_TEST(cut({"one\ntwo", " and a half\n", "\n", "no newline"}) ==
             "one|two and a half||no newline|");
  BOOST_TEST(cut({""}) == "");
}

BOOST_AUTO_TEST_CASE(what_a_carriage_return_ends_is_a_status_line) {
  BOOST_TEST(cut({"10%\r20%\r", "done\n"}) == "10%~20%~~done|");
  BOOST_TEST(cut({"10", "%\rline\n"}) == "10%~~line|");
  BOOST_TEST(cut({"\r10%", "\r20%", "\rdone\n"}) == "10%~20%~~done|");
  BOOST_TEST(cut({"10%\r"}) == "10%~");
}

BOOST_AUTO_TEST_CASE(a_newline_after_it_makes_it_a_line_all_the_same) {
  BOOST_TEST(cut({"dos\r\nunix\n"}) == "dos~~dos|unix|");
  BOOST_TEST(cut({"dos\r", "\n\r\n"}) == "dos~~dos|~|");
}

BOOST_AUTO_TEST_CASE(long_lines_come_in_pieces_and_leave_no_empty_line) {
  const std::string full(LineCutter::max_line, 'x');
  BOOST_TEST(cut({full, "\nnext\n"}) == full + "|next|");
  BOOST_TEST(cut({full + full + "y\n"}) == full + "|" + full + "|y|");
}

BOOST_AUTO_TEST_CASE(a_status_line_makes_room_for_lines_and_comes_back) {
  const auto fill = [](OutputQueue& queue) {
    queue.push_status("[rank 0] ", "50%");
    queue.push(1, "one\n");
    queue.push(1, "two\n");
  };
  BOOST_TEST(written(true, fill) == "[rank 0] 50%\r\033[Kone\ntwo\n[rank 0] 50%\r");
  BOOST_TEST(written(false, fill) == "one\ntwo\n");
}

BOOST_AUTO_TEST_CASE(a_status_line_is_replaced_and_taken_away) {
  BOOST_TEST(written(true, [](OutputQueue& queue) {
               queue.push_status("[rank 0] ", "99%\033[K");
               queue.push_status("[rank 1] ", "5%");
               queue.push_status("[rank 1] ", "\033[K");
               queue.push(1, "line\n");
               queue.drop_status();
             }) == "[rank 0] 99%\r\033[K[rank 1] 5%\r\033[Kline\n");
}

BOOST_AUTO_TEST_CASE(a_status_line_fits_the_terminal) {
  BOOST_TEST(detail::fitted("[rank 0] 50%", 80) == "[rank 0] 50%");
  BOOST_TEST(detail::fitted("[rank 0] 50%", 13) == "[rank 0] 50%");
  BOOST_TEST(detail::fitted("[rank 0] 50%", 12) == "[rank 0] 50");
  BOOST_TEST(detail::fitted("[rank 0] 50%", 1) == "");
  BOOST_TEST(detail::fitted("[rank 0] 50%", 0) == "");
  BOOST_TEST(detail::fitted("[\033[32m####\033[0m  ] 50%", 4) == "[\033[32m##\033[0m");
  BOOST_TEST(detail::fitted("\u2588\u2588\u2588 50%", 3) == "\u2588\u2588");
  BOOST_TEST(detail::fitted("x\033[", 3) == "x\033[");
}

BOOST_AUTO_TEST_SUITE_END()
