// SPDX-License-Identifier: Apache-2.0
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/launch/program_options.hpp"

using namespace lockstep;
using Words = std::vector<std::string>;

BOOST_AUTO_TEST_SUITE(program_options)

namespace {

ProgramOptions options_of(Words words, bool speaks = true) {
  words.insert(words.begin(), "trainer");
  return {words, speaks};
}

void expect_error(const std::function<void()>& f, const std::string& part) {
  try {
    f();
    BOOST_ERROR("no error with '" + part + "'");
  } catch (const Error& error) {
    BOOST_TEST(std::string(error.what()).find(part) != std::string::npos, error.what());
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(an_option_has_the_type_of_its_default_and_is_written_in_both_ways) {
  ProgramOptions options = options_of({"--epochs", "2", "--lr=1e-3", "--verbose", "--first-name",
                                       "a b", "--shift", "-3", "--no=false"});
  BOOST_TEST(options.option("epochs", 8) == 2);
  BOOST_TEST(options.option("lr", 0.1) == 1e-3);
  BOOST_TEST(options.option("verbose", false));
  BOOST_TEST(options.option("first_name", "x") == std::string("a b"));
  BOOST_TEST(options.option("shift", 0) == -3);
  BOOST_TEST(!options.option("no", true));
  BOOST_TEST(options.option("steps", std::uint64_t{100}) == 100u);
  BOOST_TEST(options.option("momentum", 0.9f) == 0.9f);
  BOOST_TEST(options.option("folder", std::string("run")) == "run");
  BOOST_TEST(options.option("epochs", 8) == 2);  // as often as one likes
  BOOST_TEST((options.arguments() == Words{"trainer"}));
  options.close();
}

BOOST_AUTO_TEST_CASE(a_value_of_another_kind_is_an_error_that_says_what_is_expected) {
  const auto ask = [](Words words, auto otherwise) {
    return [words, otherwise] { options_of(words).option("n", otherwise); };
  };
  expect_error(ask({"--n", "two"}, 8),
               "lockstep: launch: --n is 'two'; give it a whole number from -2147483648 to "
               "2147483647");
  expect_error(ask({"--n", "2x"}, 8), "--n is '2x'");
  expect_error(ask({"--n="}, 8), "--n is ''");
  expect_error(ask({"--n", "-1"}, 8u), "--n is '-1'; give it a whole number from 0 to 4294967295");
  expect_error(ask({"--n", "300"}, std::uint8_t{1}), "from 0 to 255");
  expect_error(ask({"--n", "99999999999999999999"}, std::uint64_t{1}), "whole number");
  expect_error(ask({"--n", "1.5"}, 8), "whole number");
  expect_error(ask({"--n", "fast"}, 0.1), "--n is 'fast'; give it a number");
  expect_error(ask({"--n", "nan"}, 0.1), "give it a number");
  expect_error(ask({"--n=maybe"}, false), "--n is 'maybe'; give it true or false");
  expect_error(ask({"--n"}, 8), "--n has no value; give it one, as in --n 8");
  expect_error(ask({"--n", "--m"}, "text"), "--n has no value; give it one, as in --n text");
  expect_error(ask({"--n", "1", "--n=2"}, 8), "--n is given twice");
}

BOOST_AUTO_TEST_CASE(what_nobody_asks_for_is_an_error_that_names_the_nearest_or_all) {
  const auto close = [](Words words) {
    return [words] {
      ProgramOptions options = options_of(words);
      options.option("epochs", 8);
      options.option("lr", 0.1);
      options.close();
    };
  };
  expect_error(close({"--epoch", "2"}), "there is no option --epoch; did you mean --epochs?");
  expect_error(close({"--epoch=2"}), "there is no option --epoch; did you mean --epochs?");
  expect_error(close({"--warmup", "2"}),
               "there is no option --warmup; this program has --epochs, --lr; --help prints all");
  expect_error(close({"--epochs", "2", "3"}), "nothing in this program reads '3'");
  options_of({"3"}).close();  // `main` may have read it
  expect_error(
      [] {
        ProgramOptions job = options_of({"3"});
        job.leave_to_job();
        job.close();
      },
      "nothing in this program reads '3'");
  expect_error([] { options_of({"--epochs", "2"}).close(); },
               "there is no option --epochs; this program has none of its own");
  close({})();
  close({"--lr", "1"})();
}

BOOST_AUTO_TEST_CASE(a_program_that_reads_its_own_words_has_no_unknown_ones) {
  ProgramOptions own = options_of({"--anything", "goes"});
  BOOST_TEST((own.arguments() == Words{"trainer", "--anything", "goes"}));
  own.close();

  // Together with options, the words that are left are read; what looks like an option is none of
  // them.
  ProgramOptions both = options_of({"data", "--epochs", "2", "-", "-3"});
  BOOST_TEST(both.option("epochs", 8) == 2);
  BOOST_TEST((both.arguments() == Words{"trainer", "data", "-", "-3"}));
  both.close();
  ProgramOptions slip = options_of({"data", "--epoch", "2"});
  slip.option("epochs", 8);
  slip.arguments();
  expect_error([&] { slip.close(); }, "did you mean --epochs?");
}

BOOST_AUTO_TEST_CASE(what_stands_behind_two_dashes_is_the_programs_own_and_they_are_no_argument) {
  ProgramOptions options = options_of({"a", "--epochs", "2", "--", "--seed", "7", "--", "--x"});
  const detail::Flag flags[] = {{"--seed", "N", "of everything"}};
  BOOST_TEST((options.take(flags) == Words{"trainer"}));
  BOOST_TEST(options.option("epochs", 8) == 2);
  BOOST_TEST((options.arguments() == Words{"trainer", "a", "--seed", "7", "--", "--x"}));
  options.close();
  ProgramOptions behind = options_of({"--", "--rank", "7"});
  BOOST_TEST(behind.option("rank", 0) == 7);
  behind.close();
  ProgramOptions cut = options_of({"--epochs", "--", "2"});
  expect_error([&] { cut.option("epochs", 8); }, "--epochs has no value");
}

BOOST_AUTO_TEST_CASE(jobs_take_their_options_once_and_all_of_them_see_them) {
  const detail::Flag flags[] = {{"--seed", "N", "of everything"}, {"--resume", "", "go on"}};
  ProgramOptions options = options_of({"--seed", "7", "--epochs", "2", "--resume"});
  const Words taken{"trainer", "--seed=7", "--resume"};
  BOOST_TEST((options.take(flags) == taken));
  BOOST_TEST((options.take(flags) == taken));
  BOOST_TEST(options.takers() == 2u);
  expect_error([&] { options.option("seed", 1); }, "--seed, which is an option of lockstep's own");
  BOOST_TEST(options.option("epochs", 8) == 2);
  options.close();
  expect_error([] { options_of({}).option("ranks", 1); }, "an option of lockstep's own");
  expect_error([] { options_of({}).option("--epochs", 1); }, "without dashes");
}

BOOST_AUTO_TEST_CASE(an_option_that_is_asked_for_too_late_is_an_error) {
  ProgramOptions options = options_of({});
  options.option("epochs", 8);
  options.close();
  BOOST_TEST(options.option("epochs", 8) == 8);
  expect_error([&] { options.option("lr", 0.1); }, "ask for all options first");
}

BOOST_AUTO_TEST_CASE(a_first_use_of_the_session_leaves_the_options_of_jobs_that_follow) {
  const detail::Flag flags[] = {{"--seed", "N", "of everything"}};
  const auto before = std::exchange(detail::program_job_flags, flags);
  ProgramOptions options = options_of({"--seed", "7", "--resumes"});
  expect_error([&] { options.close(ProgramOptions::Readers::some); }, "no option --resumes");
  ProgramOptions later = options_of({"--seed", "7", "read later"});
  later.option("epochs", 8);
  later.close(ProgramOptions::Readers::some);
  expect_error([&] { ProgramOptions(later).close(); }, "there is no option --seed");
  later.take(flags);
  later.arguments();
  later.close();
  detail::program_job_flags = before;
}

BOOST_AUTO_TEST_CASE(ranks_that_do_not_speak_fail_because_of_the_one_that_does) {
  for (const bool speaks : {true, false}) {
    try {
      options_of({"--n", "x"}, speaks).option("n", 1);
      BOOST_ERROR("no error");
    } catch (const Error& error) {
      BOOST_TEST(error.is_consequence() == !speaks);
      BOOST_TEST(error.operation() == "launch");  // nobody starts such a job again
    }
  }
}

BOOST_AUTO_TEST_CASE(help_names_the_programs_options_with_their_defaults) {
  ProgramOptions options = options_of({});
  options.option("epochs", 8, "passes over the data");
  options.option("lr", 2e-3);
  options.option("verbose", false, "say more");
  options.option("folder", "run");
  const std::string help = detail::help_text("/usr/bin/trainer", {}, options.asked(), "a note");
  BOOST_TEST(help.starts_with("usage: trainer [OPTIONS]"));
  for (const char* line :
       {"\nOptions of this program:\n  --epochs N              passes over the data (8)\n",
        "\n  --lr X                  (0.002)\n", "\n  --verbose               say more\n",
        "\n  --folder TEXT           (run)\n\na note\n", "\n  --ranks N  "}) {
    BOOST_TEST(help.find(line) != std::string::npos, std::string(line) + " in " + help);
  }
  ProgramOptions asking({"trainer"}, true, true);
  asking.option("epochs", 8);
  BOOST_CHECK_THROW(asking.close(ProgramOptions::Readers::some), detail::HelpAsked);
  BOOST_CHECK_THROW(asking.close(), detail::HelpAsked);
}

BOOST_AUTO_TEST_CASE(a_program_without_launch_has_options_too) {
  std::string words[] = {"tool", "--replicas", "3", "--help", "--", "--help"};
  char* argv[] = {words[0].data(), words[1].data(), words[2].data(),
                  words[3].data(), words[4].data(), words[5].data()};
  ProgramOptions plain(3, argv);
  BOOST_TEST(plain.option("replicas", 0u) == 3u);
  BOOST_TEST(plain.option("ranks", 0u) == 0u);  // there is no launcher that takes it
  BOOST_TEST(!plain.finish());
  ProgramOptions helping(6, argv);
  BOOST_TEST(helping.asks_for_help());
  BOOST_TEST((helping.arguments() == Words{"tool", "--replicas", "3", "--help"}));
}

BOOST_AUTO_TEST_SUITE_END()
