// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/checkpoint/folder.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "temporary_folder.hpp"

BOOST_FIXTURE_TEST_SUITE(checkpoint_folder, Watchdog)

namespace {

using namespace lockstep;
using namespace std::chrono_literals;
using checkpoint_tests::Process;
using detail::CheckpointFolder;
namespace fs = std::filesystem;
using Names = std::vector<std::string>;

const double nan = std::numeric_limits<double>::quiet_NaN();

/// Writes a file of one tensor, and says what an index says of it.
detail::ShardFile write(const std::string& path, const std::string& tensor, double value,
                        const std::vector<detail::ShardFile>& shards = {},
                        std::optional<double> score = std::nullopt,
                        const std::string& name = "accuracy") {
  detail::FileToWrite file;
  if (score) {
    const JsonLine one = JsonLine().add_exact("mean", *score).add("count", 1.0);
    file.facts.add("scores", JsonLine().add(name, one));
  }
  file.tensors.push_back(
      {tensor, ElementKind::f64, {1}, std::as_bytes(std::span<const double>(&value, 1))});
  if (!shards.empty()) file.facts.add(detail::index_of(shards));
  return detail::write_file(path, file);
}

/// Writes the checkpoint of a step; with a token, also the shard of a second rank.
void write_step(const std::string& folder, std::uint64_t step, const std::string& token = "",
                std::optional<double> score = std::nullopt,
                const std::string& score_name = "accuracy") {
  std::vector<detail::ShardFile> shards;
  const std::string name = detail::checkpoint_name(step);
  const auto value = static_cast<double>(step);
  if (!token.empty()) {
    const std::string shard =
        name.substr(0, name.find('.')) + "." + token + ".rank-1-of-2.safetensors";
    shards.push_back(write(folder + "/" + shard, "b", value));
  }
  write(folder + "/" + name, "a", value, shards, score, score_name);
}

void save(CheckpointFolder& folder, std::uint64_t step, const std::string& token = "") {
  write_step(folder.path(), step, token);
  folder.saved(step);
}

/// Writes the checkpoint of a step once more, with a score, and offers it.
bool offer(CheckpointFolder& folder, std::uint64_t step, double score,
           const std::string& name = "accuracy", const std::string& token = "") {
  write_step(folder.path(), step, token, score, name);
  return folder.offer_best(step);
}

/// Changes a byte in the middle of a file's data.
void flip(const std::string& path) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x55');
  BOOST_TEST_REQUIRE(file.good());
}

void put(const std::string& path) { std::ofstream(path) << "text"; }

/// The files in a folder in order, without the lock.
Names listing(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename() != ".lock") names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Names steps(std::initializer_list<std::uint64_t> numbers, const Names& others = {}) {
  Names names = others;
  for (std::uint64_t step : numbers) names.push_back(detail::checkpoint_name(step));
  std::sort(names.begin(), names.end());
  return names;
}

double value_in(const std::string& path) {
  const detail::CheckpointReader reader(path);
  reader.verify();
  double value = 0;
  reader.read(*reader.find("a"), 0, 1, reinterpret_cast<std::byte*>(&value));
  return value;
}

struct Skipped {
  Names paths;
  Names reasons;
  void operator()(const std::string& path, const std::string& why) {
    paths.push_back(path);
    reasons.push_back(why);
  }
};

CheckpointOptions options(const std::string& folder, std::size_t keep = 3,
                          const std::string& best_by = "") {
  return {.folder = folder, .keep = keep, .best_by = best_by};
}

/// Two checkpoints, the first of which is the best.
void save_two_with_best(const std::string& path, std::size_t keep) {
  CheckpointFolder folder(options(path, keep, "accuracy"));
  save(folder, 1);
  offer(folder, 1, 0.5);
  save(folder, 2);
}

const Names best_files{"best.safetensors"};

}  // namespace

BOOST_AUTO_TEST_CASE(names_say_the_step_and_nothing_else_is_taken_for_one) {
  BOOST_TEST(detail::checkpoint_name(1200) == "step-000000001200.safetensors");
  BOOST_TEST(detail::checkpoint_name(~std::uint64_t{0}) == "step-18446744073709551615.safetensors");
  for (std::uint64_t step : {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{999'999'999'999},
                             std::uint64_t{1'000'000'000'000}, ~std::uint64_t{0}}) {
    BOOST_TEST((detail::checkpoint_step(detail::checkpoint_name(step)) == step));
  }
  for (const char* name :
       {"", "step-.safetensors", "step-1.safetensors", "step-00000000000x.safetensors",
        "step-000000001200.safetensors.tmp-1", "step-000000001200.ab.rank-1-of-2.safetensors",
        "best.safetensors", "step-0000000000012.safetensors", "x-step-000000001200.safetensors",
        "step--00000000012.safetensors", "step-99999999999999999999.safetensors",
        "step-000000001200"}) {
    BOOST_TEST(!detail::checkpoint_step(name), name);
  }
  BOOST_TEST(detail::shard_stem("step-000000001200.ab12.rank-3-of-8.safetensors") ==
             "step-000000001200");
  BOOST_TEST(detail::shard_stem("a.b.ab12.rank-13-of-18.safetensors") == "a.b");
  for (const char* name :
       {"", ".safetensors", "a.rank-3-of-8.safetensors", "rank-3-of-8.safetensors",
        "a..rank-3-of-8.safetensors", "a.b.rank-x-of-8.safetensors", "a.b.rank-3-of-.safetensors",
        "a.b.rank-3-of-8.safetensors.tmp-1", "12.safetensors", "-of-1.safetensors"}) {
    BOOST_TEST(detail::shard_stem(name).empty(), name);
  }
}

BOOST_AUTO_TEST_CASE(a_missing_folder_is_made_with_those_above_it) {
  const TemporaryFolder outer;
  const std::string path = outer / "a/b/run";
  {
    const CheckpointFolder folder(options(path + "//"));
    BOOST_TEST(folder.path() == path);
    BOOST_TEST(folder.path_of(12) == path + "/step-000000000012.safetensors");
    BOOST_TEST(folder.best_path() == path + "/best.safetensors");
  }
  const CheckpointFolder again(options(path));
  put(outer / "file");
  expect_error([&] { CheckpointFolder(options(outer / "file")); },
               "lockstep: checkpoints: the folder '" + outer.path + "/file' cannot be made: '" +
                   outer.path + "/file' is no folder");
  expect_error([&] { CheckpointFolder(options(outer / "file/run")); }, "cannot be made: ");
  expect_error([&] { CheckpointFolder(options("/proc/run")); },
               "the folder '/proc/run' cannot be made: No such file or directory");
}

BOOST_AUTO_TEST_CASE(one_job_at_a_time_has_the_folder) {
  const TemporaryFolder outer;
  const CheckpointFolder folder(options(outer.path));
  expect_error([&] { CheckpointFolder(options(outer.path), 0ms); }, "belongs to a job that still");
}

BOOST_AUTO_TEST_CASE(the_newest_valid_one_is_found_and_the_others_are_named) {
  const TemporaryFolder outer;
  for (std::uint64_t step : {900, 1000, 1100, 1200}) write_step(outer.path, step);
  flip(outer / detail::checkpoint_name(1200));
  fs::resize_file(outer / detail::checkpoint_name(1100), 40);
  put(outer / "step-2.safetensors");
  fs::create_directory(outer / detail::checkpoint_name(3000));
  CheckpointFolder folder(options(outer.path));
  Skipped skipped;
  const auto found = folder.newest_valid(skipped);
  BOOST_TEST_REQUIRE(found.has_value());
  BOOST_TEST(*found == folder.path_of(1000));
  BOOST_TEST(skipped.paths == Names({folder.path_of(1200), folder.path_of(1100)}),
             boost::test_tools::per_element());
  BOOST_TEST(skipped.reasons[0].find("a") != std::string::npos);
  BOOST_TEST(!skipped.reasons[1].empty());
}

BOOST_AUTO_TEST_CASE(an_empty_folder_has_no_checkpoint) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path));
  Skipped skipped;
  BOOST_TEST(!folder.newest_valid(skipped).has_value());
  BOOST_TEST(skipped.paths.empty());
  folder.begin_at(0);
}

BOOST_AUTO_TEST_CASE(a_checkpoint_whose_shard_is_missing_or_changed_is_skipped) {
  const TemporaryFolder outer;
  write_step(outer.path, 1, "aa");
  write_step(outer.path, 2, "bb");
  write_step(outer.path, 3, "cc");
  fs::remove(outer / "step-000000000003.cc.rank-1-of-2.safetensors");
  flip(outer / "step-000000000002.bb.rank-1-of-2.safetensors");
  CheckpointFolder folder(options(outer.path));
  Skipped skipped;
  const auto found = folder.newest_valid(skipped);
  BOOST_TEST_REQUIRE(found.has_value());
  BOOST_TEST(*found == folder.path_of(1));
  BOOST_TEST(skipped.paths.size() == 2u);
}

BOOST_AUTO_TEST_CASE(the_best_copy_is_the_last_resort) {
  const TemporaryFolder outer;
  save_two_with_best(outer.path, 1);
  CheckpointFolder folder(options(outer.path, 1, "accuracy"));
  flip(folder.path_of(2));
  Skipped skipped;
  const auto found = folder.newest_valid(skipped);
  BOOST_TEST_REQUIRE(found.has_value());
  BOOST_TEST(*found == folder.best_path());
  BOOST_TEST(value_in(*found) == 1);
  BOOST_TEST(skipped.paths == Names({folder.path_of(2)}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_file_of_another_program_is_no_checkpoint) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path));
  write_step(outer.path, 1);
  std::ofstream(folder.path_of(2), std::ios::binary) << std::string("\x02\0\0\0\0\0\0\0{}", 10);
  Skipped skipped;
  BOOST_TEST(folder.newest_valid(skipped).value() == folder.path_of(1));
  BOOST_TEST(skipped.reasons.at(0).find("was not written by lockstep") != std::string::npos,
             skipped.reasons.at(0));
}

BOOST_AUTO_TEST_CASE(a_job_that_would_overtake_another_run_is_rejected) {
  const TemporaryFolder outer;
  write_step(outer.path, 100);
  CheckpointFolder folder(options(outer.path));
  expect_error([&] { folder.begin_at(0); }, "lockstep: launch: '",
               "holds a checkpoint of step 100, and this job begins at step 0",
               "add --resume to go on from there, or name another folder");
  folder.begin_at(100);
  folder.begin_at(150);
  // One that is known to be invalid stands in nobody's way.
  write_step(outer.path, 200);
  flip(folder.path_of(200));
  expect_error([&] { folder.begin_at(100); }, "step 200");
  Skipped skipped;
  BOOST_TEST(folder.newest_valid(skipped).value() == folder.path_of(100));
  folder.begin_at(100);
}

BOOST_AUTO_TEST_CASE(the_last_ones_stay) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path, 2));
  save(folder, 10);
  BOOST_TEST(listing(outer.path) == steps({10}), boost::test_tools::per_element());
  save(folder, 20);
  BOOST_TEST(listing(outer.path) == steps({10, 20}), boost::test_tools::per_element());
  save(folder, 30);
  BOOST_TEST(listing(outer.path) == steps({20, 30}), boost::test_tools::per_element());
  save(folder, 30);
  BOOST_TEST(listing(outer.path) == steps({20, 30}), boost::test_tools::per_element());
  save(folder, 1'000'000'000'000);
  BOOST_TEST(listing(outer.path) == steps({30, 1'000'000'000'000}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(nothing_is_deleted_where_all_are_kept) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path, keep_all));
  for (std::uint64_t step = 1; step <= 6; ++step) save(folder, step);
  BOOST_TEST(listing(outer.path).size() == 6u);
}

BOOST_AUTO_TEST_CASE(only_valid_ones_count_among_those_that_stay) {
  const TemporaryFolder outer;
  for (std::uint64_t step : {10, 20, 30, 40}) write_step(outer.path, step);
  flip(outer / detail::checkpoint_name(40));
  flip(outer / detail::checkpoint_name(10));
  CheckpointFolder folder(options(outer.path, 2));
  Skipped skipped;
  BOOST_TEST(folder.newest_valid(skipped).value() == folder.path_of(30));
  folder.begin_at(30);
  // 20 was not looked at and 40 is known to be invalid; with 30 and 35 there are two, so all else
  // can go.
  write_step(outer.path, 35);
  BOOST_TEST(listing(outer.path) == steps({10, 20, 30, 35, 40}), boost::test_tools::per_element());
  folder.saved(35);
  BOOST_TEST(listing(outer.path) == steps({30, 35}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(ones_that_were_not_looked_at_stay_until_there_are_enough) {
  const TemporaryFolder outer;
  for (std::uint64_t step : {10, 20, 30}) write_step(outer.path, step);
  CheckpointFolder folder(options(outer.path, 3));
  Skipped skipped;
  folder.newest_valid(skipped);
  save(folder, 40);
  BOOST_TEST(listing(outer.path) == steps({10, 20, 30, 40}), boost::test_tools::per_element());
  save(folder, 50);
  BOOST_TEST(listing(outer.path) == steps({30, 40, 50}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(shards_go_with_their_checkpoint) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path, 1));
  save(folder, 1, "aa");
  BOOST_TEST(listing(outer.path).size() == 2u);
  // The shard of a second rank that is ahead: its checkpoint is not there yet.
  write(outer / "step-000000000003.cc.rank-1-of-2.safetensors", "b", 3);
  save(folder, 2, "bb");
  BOOST_TEST(listing(outer.path) == steps({2}, {"step-000000000002.bb.rank-1-of-2.safetensors",
                                                "step-000000000003.cc.rank-1-of-2.safetensors"}),
             boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(what_dead_jobs_left_is_removed_and_nothing_else) {
  const TemporaryFolder outer;
  write_step(outer.path, 1, "aa");
  write_step(outer.path, 2);
  const Names kept{"best.txt",
                   "model.v2.rank-0-of-8.safetensors",
                   "notes.tmp-1",
                   "step-000000000001.aa.rank-1-of-2.safetensors",
                   "step-000000000001.safetensors",
                   "step-000000000002.safetensors"};
  for (const char* name :
       {"best.txt", "model.v2.rank-0-of-8.safetensors", "notes.tmp-1",
        // These are left from saves that were interrupted.
        "step-000000000003.safetensors.tmp-0123456789abcdef", "mine.safetensors.tmp-01",
        "best.safetensors.tmp-01", "step-000000000001.dd.rank-1-of-2.safetensors",
        "step-000000000003.cc.rank-1-of-2.safetensors",
        "step-000000000003.cc.rank-1-of-2.safetensors.tmp-22"}) {
    put(outer / name);
  }
  const CheckpointFolder folder(options(outer.path));
  BOOST_TEST(listing(outer.path) == kept, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(shards_of_a_checkpoint_that_cannot_be_read_stay) {
  const TemporaryFolder outer;
  write_step(outer.path, 1, "aa");
  fs::resize_file(outer / detail::checkpoint_name(1), 20);
  const CheckpointFolder folder(options(outer.path));
  BOOST_TEST(listing(outer.path).size() == 2u);
}

BOOST_AUTO_TEST_CASE(a_folder_that_is_in_use_is_not_cleaned_up) {
  const TemporaryFolder outer;
  const CheckpointFolder folder(options(outer.path));
  put(outer / "step-000000000003.safetensors.tmp-01");
  expect_error([&] { CheckpointFolder(options(outer.path), 0ms); }, "belongs to a job");
  BOOST_TEST(listing(outer.path).size() == 1u);
}

BOOST_AUTO_TEST_CASE(the_best_copy_outlives_its_checkpoint) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path, 1, "accuracy"));
  BOOST_TEST(!folder.best_score().has_value());
  save(folder, 1);
  BOOST_TEST(offer(folder, 1, 0.5));
  save(folder, 2);
  BOOST_TEST(!offer(folder, 2, 0.4));
  BOOST_TEST(!offer(folder, 2, 0.5));
  save(folder, 3);
  BOOST_TEST(listing(outer.path) == steps({3}, best_files), boost::test_tools::per_element());
  BOOST_TEST(value_in(folder.best_path()) == 1);
  BOOST_TEST(offer(folder, 3, 0.75));
  BOOST_TEST(value_in(folder.best_path()) == 3);
  BOOST_TEST((folder.best_score() == 0.75));
  BOOST_TEST(!folder.offer_best(3));
  BOOST_TEST(offer(folder, 3, 0.8));
  BOOST_TEST(listing(outer.path) == steps({3}, best_files), boost::test_tools::per_element());
  struct stat best{};
  BOOST_TEST_REQUIRE(::stat(folder.best_path().c_str(), &best) == 0);
  BOOST_TEST(best.st_nlink == 2u);
}

BOOST_AUTO_TEST_CASE(nan_is_never_the_best) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path, 1, "loss"));
  save(folder, 1);
  BOOST_TEST(!offer(folder, 1, nan, "loss"));
  BOOST_TEST(!fs::exists(folder.best_path()));
  BOOST_TEST(offer(folder, 1, std::numeric_limits<double>::infinity(), "loss"));
  BOOST_TEST(offer(folder, 1, 2, "loss"));
  save(folder, 2);
  BOOST_TEST(!offer(folder, 2, nan, "loss"));
  BOOST_TEST(value_in(folder.best_path()) == 1);
  BOOST_TEST(offer(folder, 2, 1, "loss"));
  BOOST_TEST(value_in(folder.best_path()) == 2);
}

BOOST_AUTO_TEST_CASE(the_best_score_survives_a_resume) {
  const TemporaryFolder outer;
  const double score = 0.1 + 0.2;
  {
    CheckpointFolder folder(options(outer.path, 2, "test accuracy"));
    save(folder, 1);
    offer(folder, 1, score, "test accuracy");
  }
  CheckpointFolder folder(options(outer.path, 2, "test accuracy"));
  BOOST_TEST_REQUIRE(folder.best_score().has_value());
  BOOST_TEST(*folder.best_score() == score);
  save(folder, 2);
  BOOST_TEST(!offer(folder, 2, score, "test accuracy"));
  BOOST_TEST(offer(folder, 2, std::nextafter(score, 1.0), "test accuracy"));
}

BOOST_AUTO_TEST_CASE(a_score_of_another_name_or_another_file_does_not_count) {
  const TemporaryFolder outer;
  save_two_with_best(outer.path, 2);
  BOOST_TEST(!CheckpointFolder(options(outer.path, 2, "f1")).best_score().has_value());
  BOOST_TEST(!CheckpointFolder(options(outer.path, 2, "accuracy2")).best_score().has_value());
  BOOST_TEST(!CheckpointFolder(options(outer.path, 2, "")).best_score().has_value());
  BOOST_TEST(CheckpointFolder(options(outer.path, 2, "accuracy")).best_score().has_value());
  fs::remove(outer / "best.safetensors");
  fs::copy_file(outer / detail::checkpoint_name(2), outer / "best.safetensors");
  BOOST_TEST(!CheckpointFolder(options(outer.path, 2, "accuracy")).best_score().has_value());
}

BOOST_AUTO_TEST_CASE(a_job_that_dies_before_its_best_copy_is_made_up_for_when_it_resumes) {
  const TemporaryFolder outer;
  const CheckpointOptions by_accuracy = options(outer.path, 2, "accuracy");
  const auto resume = [](const CheckpointOptions& options) {
    CheckpointFolder folder(options);
    Skipped skipped;
    BOOST_TEST(folder.newest_valid(skipped).has_value());
    return folder.best_score();
  };
  write(outer / detail::checkpoint_name(1), "a", 1, {}, 0.5);
  BOOST_TEST(!resume(options(outer.path, 2, "f1")).has_value());
  BOOST_TEST(!resume(options(outer.path, 2)).has_value());
  BOOST_TEST((resume(by_accuracy) == 0.5));
  BOOST_TEST(value_in(outer / "best.safetensors") == 1);
  for (double worse : {0.4, nan}) {
    write(outer / detail::checkpoint_name(2), "a", 2, {}, worse);
    BOOST_TEST((resume(by_accuracy) == 0.5));
    BOOST_TEST(value_in(outer / "best.safetensors") == 1);
  }
  write(outer / detail::checkpoint_name(3), "a", 3, {}, 0.6);
  BOOST_TEST((resume(by_accuracy) == 0.6));
  BOOST_TEST(value_in(outer / "best.safetensors") == 3);
}

BOOST_AUTO_TEST_CASE(a_best_copy_that_cannot_be_read_has_no_score) {
  const TemporaryFolder outer;
  save_two_with_best(outer.path, 2);
  fs::resize_file(outer / "best.safetensors", 12);
  BOOST_TEST(!CheckpointFolder(options(outer.path, 2, "accuracy")).best_score().has_value());
}

BOOST_AUTO_TEST_CASE(shards_of_the_best_copy_stay_as_long_as_it_does) {
  const TemporaryFolder outer;
  const std::string first = "step-000000000001.aa.rank-1-of-2.safetensors";
  const std::string second = "step-000000000002.bb.rank-1-of-2.safetensors";
  const std::string third = "step-000000000003.cc.rank-1-of-2.safetensors";
  {
    CheckpointFolder folder(options(outer.path, 1, "accuracy"));
    save(folder, 1, "aa");
    offer(folder, 1, 0.5, "accuracy", "aa");
    save(folder, 2, "bb");
    BOOST_TEST(listing(outer.path) == steps({2}, {best_files[0], first, second}),
               boost::test_tools::per_element());
    BOOST_TEST(value_in(folder.best_path()) == 1);
  }
  // A job that begins anew takes them for no orphans.
  CheckpointFolder folder(options(outer.path, 1, "accuracy"));
  BOOST_TEST(value_in(folder.best_path()) == 1);
  save(folder, 3, "cc");
  BOOST_TEST(offer(folder, 3, 0.6, "accuracy", "cc"));
  BOOST_TEST(listing(outer.path) == steps({3}, {best_files[0], third}),
             boost::test_tools::per_element());
  BOOST_TEST(value_in(folder.best_path()) == 3);
}

BOOST_AUTO_TEST_CASE(a_broken_best_copy_can_be_replaced) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer.path, 1, "accuracy"));
  put(folder.best_path());
  save(folder, 1);
  save(folder, 2);
  BOOST_TEST(offer(folder, 2, 0.5));
  BOOST_TEST(value_in(folder.best_path()) == 2);
  save(folder, 3);
  BOOST_TEST(listing(outer.path) == steps({3}, best_files), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_folder_that_is_gone_is_an_error_before_anything_is_written) {
  const TemporaryFolder outer;
  CheckpointFolder folder(options(outer / "run", 1, "accuracy"));
  save(folder, 1);
  folder.require();
  fs::remove_all(folder.path());
  expect_error([&] { folder.require(); }, "was removed or replaced while the job ran");
  expect_error([&] { folder.offer_best(1); }, "was removed or replaced while the job ran");
}

BOOST_AUTO_TEST_SUITE_END()
