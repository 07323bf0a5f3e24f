// SPDX-License-Identifier: Apache-2.0
// Disks that are full, read-only or broken, and folders that go away: every error is clear, older
// checkpoints stay, and nothing half-written is left.
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdio>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/checkpoint/folder.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"

BOOST_FIXTURE_TEST_SUITE(checkpoint_disk, Watchdog)

namespace {

using namespace lockstep;
using namespace checkpoint_tests;
using detail::CheckpointFolder;
namespace fs = std::filesystem;

/// A header of three pages and data of eight, so that each can fail by itself. The value is also
/// its accuracy.
void write(const std::string& path, double value) {
  const std::vector<double> numbers(8 * page / sizeof(double), value);
  detail::FileToWrite file;
  file.tensors.push_back(
      {"a", ElementKind::f64, {numbers.size()}, std::as_bytes(std::span(numbers))});
  const JsonLine score = JsonLine().add("mean", value).add("count", 1.0);
  file.facts.add("scores", JsonLine().add("accuracy", score));
  file.metadata.emplace_back("text", std::string(2 * page + page / 2, 'x'));
  detail::write_file(path, file);
}
constexpr std::size_t pages_of_file = 11;

void save(CheckpointFolder& folder, std::uint64_t step) {
  folder.require();
  write(folder.path_of(step), static_cast<double>(step));
  folder.saved(step);
}

/// The newest valid checkpoint is that of `step`, no other is invalid, and nothing else is there.
void require_newest(const std::string& folder, std::uint64_t step, std::vector<std::string> files) {
  std::vector<std::string> found = detail::files_in(folder);
  std::erase_if(found, [](const std::string& name) { return name == ".lock" || name == "filler"; });
  std::sort(found.begin(), found.end());
  std::sort(files.begin(), files.end());
  std::string names;
  for (const std::string& name : found) names += " " + name;
  require(found == files, "there are" + names);
  const auto newest =
      detail::newest_valid_checkpoint(folder, [](const std::string& other, const std::string& why) {
        throw std::runtime_error(other + ": " + why);
      });
  require(newest == folder + "/" + detail::checkpoint_name(step), "another is the newest");
}

const std::string first = detail::checkpoint_name(1);
const std::string second = detail::checkpoint_name(2);

/// A checkpoint is tried with every number of free pages until there is room for it.
void fill(const std::string& path) {
  CheckpointFolder folder({.folder = path, .keep = 1});
  save(folder, 1);
  for (std::size_t pages = 0; pages < pages_of_file; ++pages) {
    leave_free(path, pages);
    require_error([&] { save(folder, 2); },
                  {"'" + folder.path_of(2) + "' cannot be written: No space left on device"});
    require_newest(path, 1, {first});
  }
  leave_free(path, pages_of_file);
  save(folder, 2);
  require_newest(path, 2, {second});
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_full_disk_is_noticed_before_anything_is_written) {
  on_disk("size=1m", fill);
}

BOOST_AUTO_TEST_CASE(a_disk_that_fills_at_any_byte_loses_nothing) {
  on_disk("size=1m", [](const std::string& path) {
    // As on file systems that cannot reserve room: the data, then the header find none.
    let_fail({SYS_fallocate}, EOPNOTSUPP);
    fill(path);
  });
}

BOOST_AUTO_TEST_CASE(a_disk_without_room_for_another_name_loses_nothing) {
  // The folder itself, .lock and the first checkpoint.
  on_disk("size=1m,nr_inodes=3", [](const std::string& path) {
    CheckpointFolder folder({.folder = path, .keep = 1, .best_by = "accuracy"});
    save(folder, 1);
    require_error([&] { save(folder, 2); }, {"No space left on device"});
    require_error(
        [&] { folder.offer_best(1); },
        {"best.safetensors", "cannot be written: No space left on device", "make room there"});
    require_newest(path, 1, {first});
  });
}

BOOST_AUTO_TEST_CASE(a_full_disk_has_room_for_the_best_copy) {
  on_disk("size=1m", [](const std::string& path) {
    const CheckpointOptions options{.folder = path, .keep = 2, .best_by = "accuracy"};
    {
      CheckpointFolder folder(options);
      save(folder, 1);
      folder.offer_best(1);
      save(folder, 2);
      leave_free(path, 0);
      require(folder.offer_best(2), "not the best");
      require_newest(path, 2, {first, second, "best.safetensors"});
    }
    // The lock needs no room.
    const CheckpointFolder folder(options);
    require(folder.best_score() == 2, "another score after a resume");
  });
}

BOOST_AUTO_TEST_CASE(a_disk_that_does_not_sync_or_rename_loses_nothing) {
  const auto fails = [](std::initializer_list<long> calls, int error, const std::string& words,
                        bool fails_to_link = true) {
    return [calls, error, words, fails_to_link](const std::string& path) {
      CheckpointFolder folder({.folder = path, .keep = 1, .best_by = "accuracy"});
      save(folder, 1);
      let_fail(calls, error);
      require_error([&] { save(folder, 2); },
                    {"'" + folder.path_of(2) + "' cannot be written: " + words});
      require_newest(path, 1, {first});
      if (!fails_to_link) return;
      require_error([&] { folder.offer_best(1); }, {"best.safetensors", words});
      require(!folder.best_score(), "a score");
    };
  };
  on_disk("size=1m", fails({SYS_fsync}, EIO, "Input/output error"));
  on_disk("size=1m", fails({SYS_fsync}, EDQUOT, "Disk quota exceeded"));
  on_disk("size=1m", fails(renames, ENOSPC, "No space left on device"));
  on_disk("size=1m",
          fails({SYS_pwritev, SYS_write, SYS_pwrite64}, EIO, "Input/output error", false));
}

BOOST_AUTO_TEST_CASE(a_file_system_without_hard_links_has_a_copy_of_the_best) {
  on_disk("size=1m", [](const std::string& path) {
    let_fail(links, EPERM);
    const CheckpointOptions options{.folder = path, .keep = 1, .best_by = "accuracy"};
    {
      CheckpointFolder folder(options);
      save(folder, 1);
      require(folder.offer_best(1), "not the best");
      struct stat status{};
      require(::stat(folder.best_path().c_str(), &status) == 0 && status.st_nlink == 1, "a link");
      save(folder, 2);
      for (std::size_t pages = 0; pages < pages_of_file; ++pages) {
        leave_free(path, pages);
        require_error([&] { folder.offer_best(2); },
                      {"best.safetensors", "cannot be written: No space left on device"});
        detail::CheckpointReader(folder.best_path()).verify();
        require_newest(path, 2, {second, "best.safetensors"});
      }
    }
    CheckpointFolder folder(options);
    require(folder.best_score() == 1, "another score");
  });
}

BOOST_AUTO_TEST_CASE(a_read_only_folder_is_an_error_at_the_start_and_can_be_read) {
  on_disk("size=1m", [](const std::string& path) {
    const std::string run = path + "/run";
    {
      CheckpointFolder folder({.folder = run});
      save(folder, 1);
    }
    require(::mount("none", path.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0, "no ro");
    require_error(
        [&] { CheckpointFolder({.folder = run}); },
        {"lockstep: checkpoints: '" + run + "/.lock' cannot be opened: Read-only file system",
         "name a folder in which this job may write"});
    require_error([&] { CheckpointFolder({.folder = path + "/other"}); },
                  {"the folder '" + path + "/other' cannot be made: Read-only file system",
                   "name a folder that exists or may be made"});
    require_error([&] { write(run + "/" + second, 2); }, {"Read-only file system"});
    require_newest(run, 1, {first});
  });
}

BOOST_AUTO_TEST_CASE(a_folder_that_may_no_longer_be_written_keeps_what_it_has) {
  const TemporaryFolder outer;
  Process process([&] {
    // Root may write everywhere.
    if (::geteuid() == 0 && (::chmod(outer.path.c_str(), 0777) != 0 || ::setuid(65534) != 0)) {
      return is_skipped;
    }
    CheckpointFolder folder({.folder = outer / "run", .keep = 1, .best_by = "accuracy"});
    save(folder, 1);
    ::chmod(folder.path().c_str(), 0555);
    folder.require();
    require_error([&] { save(folder, 2); },
                  {"'" + folder.path_of(2) + "' cannot be written: Permission denied"});
    require_error([&] { folder.offer_best(1); }, {"best.safetensors", "Permission denied"});
    require_newest(folder.path(), 1, {first});
    ::chmod(folder.path().c_str(), 0777);
    return 0;
  });
  BOOST_TEST(process.words().empty(), process.words());
  const int status = process.end();
  if (status == is_skipped) say_skipped("a folder without permission (no other user here)");
  BOOST_TEST((status == 0 || status == is_skipped));
}

BOOST_AUTO_TEST_CASE(a_folder_that_is_removed_while_the_job_runs_is_named) {
  const TemporaryFolder outer;
  CheckpointFolder folder({.folder = outer / "run", .keep = 1});
  save(folder, 1);
  fs::rename(outer / "run", outer / "elsewhere");
  expect_error([&] { save(folder, 2); }, "'" + folder.path() + "' was removed or replaced");
  expect_error([&] { write(folder.path_of(2), 2); },
               "'" + folder.path_of(2) + "' cannot be written: No such file or directory");
  BOOST_TEST(!fs::exists(outer / "run"));
  require_newest(outer / "elsewhere", 1, {first});
  // Back again, it is the same folder.
  fs::rename(outer / "elsewhere", outer / "run");
  save(folder, 2);
  require_newest(folder.path(), 2, {second});
}

BOOST_AUTO_TEST_SUITE_END()
