// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/trainer/options.hpp"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <string>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/checkpoint/folder.hpp"

BOOST_AUTO_TEST_SUITE(checkpoint_options)

namespace {

using namespace lockstep;
using namespace std::chrono_literals;
using Every = detail::CheckpointFlags::Every;

CheckpointOptions parsed(const std::vector<std::string>& words, CheckpointOptions program = {}) {
  std::vector<std::string> arguments{"program"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  const TrainerOptions options = parse_trainer_options(arguments);
  BOOST_TEST(options.arguments.size() == 1u);
  return options.checkpoint.over(std::move(program));
}

Every every(const std::string& text) {
  return *parse_trainer_options({"program", "--checkpoint-every=" + text}).checkpoint.every;
}

/// Options that are rejected, with these words.
void reject(const std::vector<std::string>& words, const std::string& problem,
            const std::string& advice) {
  expect_error([&] { parsed(words); }, "lockstep: launch: " + problem + "; ", advice);
}

}  // namespace

BOOST_AUTO_TEST_CASE(times_and_updates_are_told_apart) {
  BOOST_TEST((every("100") == Every{100, 0ms}));
  BOOST_TEST((every("18446744073709551615") == Every{~std::uint64_t{0}, 0ms}));
  BOOST_TEST((every("300s") == Every{0, 300s}));
  BOOST_TEST((every("5m") == Every{0, 5min}));
  BOOST_TEST((every("1h") == Every{0, 1h}));
  BOOST_TEST((every("2d") == Every{0, 48h}));
  BOOST_TEST((every("1.5h") == Every{0, 90min}));
  BOOST_TEST((every("0.0001s") == Every{0, 1ms}));
}

BOOST_AUTO_TEST_CASE(what_is_no_interval_is_an_error) {
  for (const char* text : {"", "0", "0s", "-5m", "-1", "5x", "m", "five", "5 m", "1h30m", "5mm",
                           "1.5", "+5", "nanm", "0x5", "5M"}) {
    expect_error([&] { every(text); },
                 std::string("lockstep: launch: --checkpoint-every is '") + text +
                     "'; give it a time above 0, such as 30s, 5m or 1h, or a number of updates "
                     "from 1, such as 100");
  }
  for (const char* text : {"18446744073709551616", "1e999s"}) {
    expect_error([&] { every(text); }, "this is more than can be counted; give a smaller number");
  }
  for (const char* text : {"9999999999999h", "infs"}) {
    expect_error([&] { every(text); }, "no run is as long as that; give a shorter time");
  }
}

BOOST_AUTO_TEST_CASE(the_command_line_comes_before_the_program) {
  const CheckpointOptions program{.folder = "program",
                                  .every_steps = 7,
                                  .every_time = 3s,
                                  .keep = 9,
                                  .best_by = "wer",
                                  .higher_is_better = false};
  const CheckpointOptions same = parsed({}, program);
  BOOST_TEST(same.folder == "program");
  BOOST_TEST(same.every_steps == 7u);
  BOOST_TEST((same.every_time == 3s));
  BOOST_TEST(same.keep == 9u);
  BOOST_TEST(!same.prefers_higher());
  BOOST_TEST(!same.resume);
  const CheckpointOptions other = parsed({"--checkpoint=run", "--checkpoint_every", "5m", "--keep",
                                          "2", "--best", "test_accuracy", "--resume"},
                                         program);
  BOOST_TEST(other.folder == "run");
  BOOST_TEST(other.every_steps == 0u);
  BOOST_TEST((other.every_time == 5min));
  BOOST_TEST(other.keep == 2u);
  BOOST_TEST(other.best_by == "test_accuracy");
  BOOST_TEST(other.prefers_higher());
  BOOST_TEST(other.resume);
  BOOST_TEST(parsed({"--resume"}, program).resume);
  BOOST_TEST(parsed({"--keep", "all"}, program).keep == keep_all);
}

BOOST_AUTO_TEST_CASE(without_options_there_are_no_checkpoints) {
  const CheckpointOptions none = parsed({});
  BOOST_TEST(none.folder.empty());
  BOOST_TEST(none.keep == 3u);
  BOOST_TEST(none.asynchronous);
}

BOOST_AUTO_TEST_CASE(options_that_cannot_be_meant_are_errors) {
  reject({"--resume"}, "--resume is given without --checkpoint", "add --checkpoint DIR");
  reject({"--checkpoint-every", "5m"}, "--checkpoint-every is given without --checkpoint", "add");
  reject({"--keep", "2"}, "--keep is given without --checkpoint", "add --checkpoint DIR");
  reject({"--best", "a"}, "--best is given without --checkpoint", "add --checkpoint DIR");
  reject({"--checkpoint", "--resume"}, "--checkpoint is '--resume'", "name a folder");
  reject({"--checkpoint="}, "--checkpoint is ''", "name a folder");
  reject({"--checkpoint"}, "--checkpoint has no value", "as in --checkpoint DIR");
  reject({"--checkpoint=a", "--checkpoint=b"}, "--checkpoint is given twice", "give it once");
  reject({"--resume=yes"}, "--resume takes no value", "leave the value out");
  for (const char* number : {"0", "-1", "many", "", "3.5"}) {
    reject({"--checkpoint=a", "--keep", number}, std::string("--keep is '") + number + "'",
           "give the number of checkpoints that stay, from 1, or all");
  }
  reject({"--checkpoint=a", "--keep", "99999999999999999999"}, "--keep is '99999999999999999999'",
         "give a smaller number");
  for (const char* score : {"", ":lower", "wer:", "wer:less"}) {
    reject({"--checkpoint=a", "--best", score}, std::string("--best is '") + score + "'",
           "name a score, such as test_accuracy, or wer:lower or f1:higher");
  }
  reject({"--checkpiont", "a"}, "there is no option --checkpiont", "did you mean --checkpoint?");
  reject({"--resum"}, "there is no option --resum", "did you mean --resume?");
  reject({"--checkpoint-evry=5"}, "there is no option --checkpoint-evry",
         "did you mean --checkpoint-every?");
}

BOOST_AUTO_TEST_CASE(which_score_is_better_follows_from_its_name_or_is_said) {
  const auto prefers_higher = [](const char* score) {
    return parsed({"--checkpoint=a", "--best", score}).prefers_higher();
  };
  BOOST_TEST(prefers_higher("test_accuracy"));
  BOOST_TEST(prefers_higher("f1"));
  BOOST_TEST(!prefers_higher("test_loss"));
  BOOST_TEST(!prefers_higher("error_rate"));
  BOOST_TEST(!prefers_higher("validation.perplexity"));
  BOOST_TEST(!prefers_higher("wer:lower"));
  BOOST_TEST(prefers_higher("lossless:higher"));
  BOOST_TEST(parsed({"--checkpoint=a", "--best", "wer:lower"}).best_by == "wer");
}

BOOST_AUTO_TEST_CASE(nonsense_of_the_programs_own_is_an_error_too) {
  const auto require = [](CheckpointOptions options) {
    return [options] { detail::plain_options(options); };
  };
  require({.folder = "a"})();
  expect_error(require({}), "lockstep: checkpoints: no folder is named");
  expect_error(require({.folder = "a", .keep = 0}), "keep is 0", "keep at least 1, or keep_all");
  expect_error(require({.folder = "a", .every_time = -5s}), "every_time is -5000 ms");
}

BOOST_AUTO_TEST_SUITE_END()
