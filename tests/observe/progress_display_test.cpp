// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/observe/display.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

using namespace lockstep;
using namespace std::chrono_literals;

namespace {

/// Time that passes when a test says so, and counts how often it was asked for.
detail::DisplayClock::time_point clock_of_tests;
using Display = ProgressDisplay;

/// Shows the summary of the epoch, as a job does.
EpochSummary end_epoch(ProgressDisplay& display) {
  EpochSummary all = display.summary();
  display.print(all.text());
  return all;
}

/// Displays of all tests here go by it.
struct FakeTime {
  FakeTime() { detail::DisplayClock::fake = &clock_of_tests; }
  ~FakeTime() { detail::DisplayClock::fake = nullptr; }
};

}  // namespace

BOOST_FIXTURE_TEST_SUITE(observe_progress_display, FakeTime)

namespace {

/// A file in memory that is, or is not, a terminal.
struct Screen {
  char* bytes = nullptr;
  std::size_t size = 0;
  std::FILE* file = open_memstream(&bytes, &size);

  Screen() = default;
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;
  ~Screen() {
    std::fclose(file);
    std::free(bytes);
  }
  detail::Terminal terminal(std::size_t columns) const { return {file, true, columns, false}; }
  detail::Terminal pipe() const { return {.file = file}; }
  std::string text() const { return {bytes, size}; }

  /// What a person sees: each '\r' goes back, each "\033[K" erases the rest of the line.
  std::vector<std::string> seen() const {
    std::vector<std::string> lines(1);
    std::size_t column = 0;
    for (std::size_t i = 0; i < size; ++i) {
      std::string& line = lines.back();
      if (bytes[i] == '\n') {
        lines.emplace_back();
        column = 0;
      } else if (bytes[i] == '\r') {
        column = 0;
      } else if (std::string_view(bytes + i, size - i).starts_with("\033[K")) {
        line.resize(column);
        i += 2;
      } else {
        line.resize(std::max(line.size(), column + 1), ' ');
        line[column++] = bytes[i];
      }
    }
    return lines;
  }
  std::size_t count(char c) const {
    return static_cast<std::size_t>(std::ranges::count(text(), c));
  }
};

EpochSummary in_flight() {
  EpochSummary now{.epoch = 3, .epochs = 10, .steps = 812, .samples = 812 * 32, .seconds = 8.12};
  now.loss = 0.41234;
  return now;
}

std::string line_of(std::size_t columns) {
  return detail::progress_line(in_flight(), 1875, {nullptr, true, columns, false});
}

/// Sets a variable of the environment, or removes it, until the end of the block.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }

 private:
  void set(const char* value) const {
    if (value != nullptr)
      setenv(name_, value, 1);
    else
      unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> before_;
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_line_gives_up_the_bar_then_rate_loss_and_time) {
  BOOST_TEST(line_of(90) ==
             "epoch 3/10  [##########              ]   812/1875  loss 0.4123  3200 samples/s  "
             "0:11 left");
  BOOST_TEST(line_of(71) ==
             "epoch 3/10  [##   ]   812/1875  loss 0.4123  3200 samples/s  0:11 left");
  BOOST_TEST(line_of(70) == "epoch 3/10   812/1875  loss 0.4123  3200 samples/s  0:11 left");
  BOOST_TEST(line_of(60) == "epoch 3/10  [####      ]   812/1875  loss 0.4123  0:11 left");
  BOOST_TEST(line_of(40) == "epoch 3/10   812/1875  0:11 left");
  BOOST_TEST(line_of(12) == "epoch 3/10 ");
  BOOST_TEST(line_of(1) == "");
  BOOST_TEST(line_of(0) == "");
  for (std::size_t columns = 0; columns < 300; ++columns) {
    BOOST_TEST_REQUIRE(line_of(columns).size() <= std::max<std::size_t>(columns, 1) - 1);
  }
  BOOST_TEST(detail::progress_line(in_flight(), 1875, {}) ==
             "epoch 3/10   812/1875  loss 0.4123  3200 samples/s  0:11 left");
}

BOOST_AUTO_TEST_CASE(the_bar_is_coloured_only_where_colour_is_wanted) {
  const auto bar = [](bool color) {
    return detail::progress_line(in_flight(), 1875, {nullptr, true, 90, color});
  };
  BOOST_TEST(bar(true).find("[\033[32m##########\033[0m  ") != std::string::npos);
  BOOST_TEST(bar(true).size() == bar(false).size() + 9);
}

BOOST_AUTO_TEST_CASE(what_is_left_follows_from_the_rate) {
  EpochSummary now = in_flight();
  const auto left = [&](std::uint64_t steps, double seconds) {
    now.steps = steps;
    now.seconds = seconds;
    const std::string line = detail::progress_line(now, 1000, {});
    return line.substr(line.rfind("  ") + 2);
  };
  BOOST_TEST(left(250, 10) == "0:30 left");
  BOOST_TEST(left(999, 10) == "0:00 left");
  BOOST_TEST(left(1000, 10) == "0:00 left");
  BOOST_TEST(left(1001, 10) == "0:00 left");
  BOOST_TEST(left(100, 100) == "15:00 left");
  BOOST_TEST(left(1, 10) == "2:46:30 left");
}

BOOST_AUTO_TEST_CASE(what_is_not_known_is_not_shown) {
  EpochSummary now;
  BOOST_TEST(detail::progress_line(now, 0, {}) == "epoch 1  0 steps");
  BOOST_TEST(detail::progress_line(now, 10, {nullptr, true, 40, false}) ==
             "epoch 1  [                     ]   0/10");
  now.steps = 5;
  now.samples = 10;
  now.seconds = 4;
  BOOST_TEST(detail::progress_line(now, 0, {nullptr, true, 80, false}) ==
             "epoch 1  5 steps  2.5 samples/s");
}

BOOST_AUTO_TEST_CASE(numbers_read_well) {
  BOOST_TEST(value_text(0.41234) == "0.4123");
  BOOST_TEST(value_text(0) == "0.0000");
  BOOST_TEST(value_text(-12.5) == "-12.5000");
  BOOST_TEST(value_text(0.0000312) == "3.120e-05");
  BOOST_TEST(value_text(1e30) == "1.000e+30");
  BOOST_TEST(value_text(std::nan("")) == "nan");
  BOOST_TEST(detail::rate_text(54321.4) == "54321");
  BOOST_TEST(detail::rate_text(3.21) == "3.2");
  BOOST_TEST(detail::clock_text(3723) == "1:02:03");
  BOOST_TEST(detail::clock_text(59.6) == "1:00");
  BOOST_TEST(detail::clock_text(1e300) == "?");
  BOOST_TEST(detail::duration_text(12.34) == "12.3 s");
  BOOST_TEST(detail::duration_text(59.96) == "1:00");
}

BOOST_AUTO_TEST_CASE(a_summary_is_a_line_for_people_and_one_for_programs) {
  EpochSummary all = in_flight();
  all.scores = Scores({{"accuracy", 0.97123, 10000}});
  BOOST_TEST(all.text() ==
             "epoch 3/10  812 steps  loss 0.4123  accuracy 0.9712  3200 samples/s  8.1 s");
  all.tokens = 1024;
  all.flops = 1e9;
  all.peak_flops = 8e12;
  BOOST_TEST(
      all.text() ==
      "epoch 3/10  812 steps  loss 0.4123  accuracy 0.9712  3200 samples/s  3276800 tokens/s  "
      "3200 GFLOP/s (40.0% of the peak)  8.1 s");
  const auto read = nlohmann::json::parse(all.json().text());
  BOOST_TEST(read.at("epoch") == 3);
  BOOST_TEST(read.at("samples") == 812 * 32);
  BOOST_TEST(read.at("seconds").get<double>() == 8.12);
  BOOST_TEST(read.at("loss").get<double>() == 0.41234);
  BOOST_TEST(read.at("accuracy").get<double>() == 0.97123);
  BOOST_TEST(!nlohmann::json::parse(EpochSummary().json().text()).contains("loss"));
}

BOOST_AUTO_TEST_CASE(a_terminal_shows_one_line_that_becomes_the_summary) {
  const Screen screen;
  Display display(screen.terminal(80));
  for (int epoch = 1; epoch <= 2; ++epoch) {
    display.begin_epoch(static_cast<std::uint64_t>(epoch), 2, 100);
    for (int step = 0; step < 100; ++step) {
      clock_of_tests += 50ms;
      display.step(10, step < 50 ? 3 : 1);
      if (step == 49) {
        BOOST_TEST(screen.seen().back() ==
                   "epoch " + std::to_string(epoch) +
                       "/2  [#########         ]   50/100  loss 3.0000  200 samples/s  0:03 left");
      }
    }
    const EpochSummary all = end_epoch(display);
    BOOST_TEST(all.steps == 100u);
    BOOST_TEST(all.samples == 1000u);
    BOOST_TEST(all.seconds == 5);
    BOOST_TEST(*all.loss == 2);
  }
  const std::vector<std::string> expected{"epoch 1/2  100 steps  loss 2.0000  200 samples/s  5.0 s",
                                          "epoch 2/2  100 steps  loss 2.0000  200 samples/s  5.0 s",
                                          ""};
  BOOST_TEST(screen.seen() == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_terminal_is_redrawn_ten_times_a_second_at_most) {
  const Screen screen;
  Display display(screen.terminal(80));
  display.begin_epoch(1, 1, 1'000'000);
  detail::DisplayClock::fake_looks = 0;
  for (int step = 0; step < 1'000'000; ++step) {
    clock_of_tests += 10us;
    display.step(1, 1);
  }
  BOOST_TEST(screen.count('\r') <= 101u);  // in ten seconds
  BOOST_TEST(screen.count('\r') >= 95u);
  BOOST_TEST(detail::DisplayClock::fake_looks < 70'000);
}

BOOST_AUTO_TEST_CASE(steps_that_become_slow_are_soon_shown_each) {
  const Screen screen;
  Display display(screen.terminal(80));
  display.begin_epoch(1, 1, 1000);
  for (int step = 0; step < 500; ++step) {
    clock_of_tests += 1us;
    display.step(1);
  }
  std::size_t drawn = screen.count('\r');
  for (int step = 0; step < 16; ++step) {
    clock_of_tests += 1s;
    display.step(1);
  }
  BOOST_TEST(screen.count('\r') > drawn);
  drawn = screen.count('\r');
  for (int step = 0; step < 10; ++step) {
    clock_of_tests += 1s;
    display.step(1);
  }
  BOOST_TEST(screen.count('\r') == drawn + 10);
}

BOOST_AUTO_TEST_CASE(elsewhere_there_are_plain_lines_seldom) {
  const Screen screen;
  Display display(screen.pipe());
  display.begin_epoch(1, 2, 100);
  for (int step = 0; step < 100; ++step) {
    clock_of_tests += 10ms;
    display.step(10, 1);
  }
  end_epoch(display);
  display.begin_epoch(2, 2, 100);
  for (int step = 0; step < 100; ++step) {
    clock_of_tests += 250ms;
    display.step(10, 1);
  }
  end_epoch(display);
  BOOST_TEST(screen.text() ==
             "epoch 1/2  100 steps  loss 1.0000  1000 samples/s  1.0 s\n"
             "epoch 2/2   40/100  loss 1.0000  40.0 samples/s  0:15 left\n"
             "epoch 2/2   80/100  loss 1.0000  40.0 samples/s  0:05 left\n"
             "epoch 2/2  100 steps  loss 1.0000  40.0 samples/s  25.0 s\n");
}

BOOST_AUTO_TEST_CASE(lines_of_the_program_and_its_end_leave_no_piece_of_the_bar) {
  const Screen screen;
  {
    Display display(screen.terminal(80));
    display.begin_epoch(1, 1, 10);
    display.print("short");
    clock_of_tests += 1s;
    display.step(1);
    BOOST_TEST(screen.seen().back().starts_with("epoch 1/1  ["));
  }
  const std::vector<std::string> expected{"short", ""};
  BOOST_TEST(screen.seen() == expected, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(what_is_known_only_at_the_end_is_in_the_summary) {
  const Screen screen;
  Display display(screen.pipe());
  display.begin_epoch(1, 1, 1);
  clock_of_tests += 1s;
  display.step(4);
  EpochSummary all = display.summary();
  BOOST_TEST(!all.loss.has_value());
  all.loss = 0.5;
  all.scores = Scores({{"accuracy", 1, 4}});
  display.print(all.text());
  BOOST_TEST(screen.text() ==
             "epoch 1/1  1 steps  loss 0.5000  accuracy 1.0000  4.0 samples/s  1.0 s\n");
}

BOOST_AUTO_TEST_CASE(a_display_without_a_file_counts) {
  Display display;
  display.begin_epoch(1, 1, 2);
  clock_of_tests += 20s;
  display.step(4, 1);
  BOOST_TEST(end_epoch(display).samples == 4u);
}

BOOST_AUTO_TEST_CASE(an_epoch_goes_on_with_the_figures_that_it_had) {
  Display display;
  display.begin_epoch(3, 10, 100);
  clock_of_tests += 2s;
  display.go_on({.epoch = 3, .epochs = 10, .steps = 5, .samples = 20, .seconds = 8, .loss = 0.5});
  display.step(4, 0.25);
  const EpochSummary now = display.summary();
  BOOST_TEST((now.steps == 6u && now.samples == 24u && now.seconds == 10 && display.steps() == 6u));
  BOOST_TEST(*now.loss == (20 * 0.5 + 4 * 0.25) / 24);
}

BOOST_AUTO_TEST_CASE(who_has_work_after_each_step_is_told_of_each) {
  Display display;
  display.begin_epoch(1, 1, 100);
  int looks = 0;
  for (int i = 0; i < 40; ++i) looks += display.step(1) ? 1 : 0;
  BOOST_TEST(looks < 10);
  display.look_at_every_step();
  display.begin_epoch(1, 1, 100);
  for (int i = 0; i < 40; ++i) BOOST_TEST(display.step(1, 0.5));
}

BOOST_AUTO_TEST_CASE(a_file_is_no_terminal_and_the_environment_can_forbid_one) {
  const Variable term("TERM", "xterm");
  const Variable columns(detail::columns_variable, "57");
  std::FILE* file = std::tmpfile();
  BOOST_TEST(!detail::detect_terminal(file).is_terminal);
  std::fclose(file);

  // stdout as a rank of lockstep's launcher has it: a pipe.
  int ends[2];
  BOOST_REQUIRE(pipe(ends) == 0);
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  dup2(ends[1], STDOUT_FILENO);
  const detail::Terminal told = detail::detect_terminal(stdout);
  const detail::Terminal other = detail::detect_terminal(stderr);
  const detail::Terminal plain = [] {
    const Variable no_color("NO_COLOR", "1");
    return detail::detect_terminal(stdout);
  }();
  const detail::Terminal dumb = [] {
    const Variable term("TERM", "dumb");
    return detail::detect_terminal(stdout);
  }();
  const detail::Terminal untold = [] {
    const Variable columns(detail::columns_variable, nullptr);
    return detail::detect_terminal(stdout);
  }();
  dup2(before, STDOUT_FILENO);
  for (int fd : {before, ends[0], ends[1]}) close(fd);

  BOOST_TEST((told.is_terminal && told.columns == 57 && told.color && told.file == stdout));
  BOOST_TEST((other.columns != 57));
  BOOST_TEST((plain.is_terminal && !plain.color));
  BOOST_TEST((!dumb.is_terminal && !untold.is_terminal));
}

BOOST_AUTO_TEST_CASE(a_style_overrules_what_stdout_is) {
  const Variable term("TERM", "xterm");
  std::FILE* file = std::tmpfile();
  const auto with = [&](ProgressStyle style) { return detail::detect_terminal(file, style); };
  BOOST_TEST(with(ProgressStyle::bar).is_terminal);
  BOOST_TEST(!with(ProgressStyle::bar).is_own);
  BOOST_TEST(!with(ProgressStyle::automatic).is_terminal);
  BOOST_TEST(!with(ProgressStyle::lines).is_terminal);
  BOOST_TEST(!with(ProgressStyle::lines).is_quiet);
  BOOST_TEST(with(ProgressStyle::none).is_quiet);
  std::fclose(file);

  const Variable told(detail::progress_variable, "lines");
  BOOST_TEST((detail::progress_style() == ProgressStyle::lines));
  detail::chosen_progress_style = ProgressStyle::bar;
  BOOST_TEST((detail::progress_style() == ProgressStyle::bar));
  detail::chosen_progress_style.reset();
  const Variable wrong(detail::progress_variable, "loud");
  BOOST_CHECK_THROW(detail::progress_style(), Error);
}

BOOST_AUTO_TEST_CASE(a_terminal_that_mpirun_made_is_none) {
  const Variable term("TERM", "xterm");
  const int leader = ::posix_openpt(O_RDWR | O_NOCTTY);
  BOOST_REQUIRE((leader >= 0 && ::grantpt(leader) == 0 && ::unlockpt(leader) == 0));
  std::FILE* const follower = std::fopen(::ptsname(leader), "r+");
  BOOST_REQUIRE(follower != nullptr);
  const winsize narrow{.ws_row = 5, .ws_col = 33, .ws_xpixel = 0, .ws_ypixel = 0};
  BOOST_REQUIRE(::ioctl(leader, TIOCSWINSZ, &narrow) == 0);
  const detail::Terminal plain = detail::detect_terminal(follower, ProgressStyle::automatic);
  BOOST_TEST((plain.is_terminal && plain.is_own && plain.columns == 33));
  {
    const Variable rank("OMPI_COMM_WORLD_RANK", "0");
    BOOST_TEST(!detail::detect_terminal(follower, ProgressStyle::automatic).is_terminal);
    BOOST_TEST(detail::detect_terminal(follower, ProgressStyle::bar).is_terminal);
  }
  std::fclose(follower);
  ::close(leader);
}

BOOST_AUTO_TEST_CASE(no_style_shows_nothing_but_what_the_program_prints) {
  const Screen screen;
  Display display({.file = screen.file, .is_quiet = true});
  display.begin_epoch(1, 1, 10);
  for (int step = 0; step < 10; ++step) {
    clock_of_tests += 20s;
    display.step(1);
  }
  display.print("own");
  BOOST_TEST(screen.text() == "own\n");
}

namespace {

/// A terminal that this process writes to by itself, seen through a pipe. Like a terminal's, its
/// buffer is flushed at the end of every line.
struct OwnScreen {
  int ends[2] = {};
  std::FILE* file = nullptr;
  std::string got;

  OwnScreen() {
    BOOST_REQUIRE(::pipe2(ends, O_NONBLOCK) == 0);
    file = ::fdopen(ends[1], "w");
    std::setvbuf(file, nullptr, _IOLBF, BUFSIZ);
  }
  OwnScreen(const OwnScreen&) = delete;
  OwnScreen& operator=(const OwnScreen&) = delete;
  ~OwnScreen() {
    std::fclose(file);
    ::close(ends[0]);
  }
  detail::Terminal terminal() const { return {file, true, 60, false, true}; }

  /// All lines that a person has seen so far, and the last, which is under way.
  std::vector<std::string> seen() {
    char bytes[4096];
    for (ssize_t n = 0; (n = ::read(ends[0], bytes, sizeof bytes)) > 0;) {
      got.append(bytes, static_cast<std::size_t>(n));
    }
    const Screen screen;
    std::fwrite(got.data(), 1, got.size(), screen.file);
    std::fflush(screen.file);
    return screen.seen();
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(what_the_program_prints_itself_does_not_mix_with_the_bar) {
  OwnScreen screen;
  Display display(screen.terminal());
  display.begin_epoch(1, 1, 10);
  BOOST_TEST(screen.seen().back().starts_with("epoch 1/1  ["));
  std::fprintf(screen.file, "short\n");
  const std::vector<std::string> printed{"short", ""};
  BOOST_TEST(screen.seen() == printed, boost::test_tools::per_element());

  clock_of_tests += 1s;
  display.step(1);
  BOOST_TEST(screen.seen().back().starts_with("epoch 1/1  ["));

  std::fprintf(screen.file, "half a");  // the bar stays away from a line that has begun
  clock_of_tests += 1s;
  display.step(1);
  std::fprintf(screen.file, " line\n");
  const std::vector<std::string> whole{"short", "half a line", ""};
  BOOST_TEST(screen.seen() == whole, boost::test_tools::per_element());

  clock_of_tests += 1s;
  display.step(1);
  std::fprintf(screen.file, "unfinished");
  display.print("epoch");
  const std::vector<std::string> all{"short", "half a line", "unfinished", "epoch", ""};
  BOOST_TEST(screen.seen() == all, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
