// SPDX-License-Identifier: Apache-2.0
// Disks that are full, read-only or broken, and folders that go away: every error is clear, older
// checkpoints stay, and nothing half-written is left. The disk is a tmpfs in a mount namespace of
// the test's own; system calls that a tmpfs does not let fail are made to, by a filter (seccomp).
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/checkpoint/folder.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "temporary_folder.hpp"

BOOST_FIXTURE_TEST_SUITE(checkpoint_disk, Watchdog)

namespace {

using namespace lockstep;
using checkpoint_tests::Process;
using detail::CheckpointFolder;
namespace fs = std::filesystem;

constexpr int is_skipped = 77;
constexpr std::size_t page = 4096;

/// For processes, in which Boost.Test's checks must not be used.
void require(bool ok, const std::string& what) {
  if (!ok) throw std::runtime_error(what);
}

void require_error(auto make, const std::vector<std::string>& parts) {
  const std::string words = error_of(make);
  for (const std::string& part : parts) {
    require(words.find(part) != std::string::npos, "'" + words + "' lacks '" + part + "'");
  }
}

/// Gives this process a view of the file systems that is its own; false where that is not allowed.
bool own_mounts() {
  if (::geteuid() == 0 && ::unshare(CLONE_NEWNS) == 0) {
    return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
  }
  const std::string user = std::to_string(::geteuid());
  const std::string group = std::to_string(::getegid());
  if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
  std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  return ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

bool mount_disk(const std::string& path, const char* limits) {
  return own_mounts() && ::mount("none", path.c_str(), "tmpfs", 0, limits) == 0;
}

/// From now on these system calls of this process fail.
void let_fail(std::initializer_list<long> calls, int error) {
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (long call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  require(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
              ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
          "no filter");
}

/// The system calls by which the C library may rename or link; not every machine has the older
/// ones.
const std::initializer_list<long> renames{
#if defined(SYS_rename)
    SYS_rename,
#endif
#if defined(SYS_renameat)
    SYS_renameat,
#endif
    SYS_renameat2};
const std::initializer_list<long> links{
#if defined(SYS_link)
    SYS_link,
#endif
    SYS_linkat};

/// A header of three pages and data of eight, so that each can fail by itself.
void write(const std::string& path, double value) {
  const std::vector<double> numbers(8 * page / sizeof(double), value);
  detail::FileToWrite file;
  file.tensors.push_back(
      {"a", ElementKind::f64, {numbers.size()}, std::as_bytes(std::span(numbers))});
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
  const auto newest = detail::newest_valid_checkpoint(
      folder, [](const std::string& path) { detail::CheckpointReader(path).verify(); },
      [](const detail::FoundCheckpoint& other, const std::string& why) {
        throw std::runtime_error(other.path + ": " + why);
      });
  require(newest && newest->step == step, "another is the newest");
}

/// A file that leaves so many pages free on a disk.
void leave_free(const std::string& folder, std::size_t pages) {
  fs::remove(folder + "/filler");
  struct statvfs room{};
  require(::statvfs(folder.c_str(), &room) == 0 && room.f_bsize == page, "no statvfs");
  const std::string bytes((room.f_bavail - pages) * page, 'f');
  std::ofstream(folder + "/filler") << bytes;
  require(::statvfs(folder.c_str(), &room) == 0 && room.f_bavail == pages, "another room");
}

/// Runs `f(folder)` in a process with a disk of its own.
void on_disk(const char* limits, auto f) {
  const TemporaryFolder folder;
  Process process([&] {
    if (!mount_disk(folder.path, limits)) return is_skipped;
    f(folder.path);
    return 0;
  });
  const std::string words = process.words();
  const int status = process.end();
  if (status == is_skipped && words.empty()) {
    std::printf("skipped: %s (no mount namespace here)\n",
                boost::unit_test::framework::current_test_case().full_name().c_str());
    return;
  }
  BOOST_TEST(words.empty(), words);
  BOOST_TEST(status == 0);
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
    require_error([&] { folder.offer_best(1, 0.5); },
                  {"best.score", "cannot be written: No space left on device", "make room there"});
    require_newest(path, 1, {first});
  });
}

BOOST_AUTO_TEST_CASE(a_full_disk_leaves_the_best_copy_and_its_score) {
  on_disk("size=1m", [](const std::string& path) {
    const CheckpointOptions options{.folder = path, .keep = 2, .best_by = "accuracy"};
    {
      CheckpointFolder folder(options);
      save(folder, 1);
      folder.offer_best(1, 0.5);
      save(folder, 2);
      leave_free(path, 0);
      require_error([&] { folder.offer_best(2, 0.6); },
                    {"best.score", "cannot be written: No space left on device"});
      require(folder.best_score() == 0.5, "another score");
      require_newest(path, 2, {first, second, "best.safetensors", "best.score"});
    }
    // The lock needs no room.
    CheckpointFolder folder(options);
    require(folder.best_score() == 0.5, "another score after a resume");
    leave_free(path, 1);
    require(folder.offer_best(2, 0.6), "not the best");
  });
}

BOOST_AUTO_TEST_CASE(a_disk_that_does_not_sync_or_rename_loses_nothing) {
  const auto fails = [](std::initializer_list<long> calls, int error, const std::string& words) {
    return [calls, error, words](const std::string& path) {
      CheckpointFolder folder({.folder = path, .keep = 1, .best_by = "accuracy"});
      save(folder, 1);
      let_fail(calls, error);
      require_error([&] { save(folder, 2); },
                    {"'" + folder.path_of(2) + "' cannot be written: " + words});
      require_newest(path, 1, {first});
      require_error([&] { folder.offer_best(1, 0.5); }, {"best.score", words});
      require(!folder.best_score(), "a score");
      require_newest(path, 1, {first});
    };
  };
  on_disk("size=1m", fails({SYS_fsync}, EIO, "Input/output error"));
  on_disk("size=1m", fails({SYS_fsync}, EDQUOT, "Disk quota exceeded"));
  on_disk("size=1m", fails(renames, ENOSPC, "No space left on device"));
  on_disk("size=1m", fails({SYS_pwritev, SYS_write, SYS_pwrite64}, EIO, "Input/output error"));
}

BOOST_AUTO_TEST_CASE(a_file_system_without_hard_links_has_a_copy_of_the_best) {
  on_disk("size=1m", [](const std::string& path) {
    let_fail(links, EPERM);
    const CheckpointOptions options{.folder = path, .keep = 1, .best_by = "accuracy"};
    {
      CheckpointFolder folder(options);
      save(folder, 1);
      require(folder.offer_best(1, 0.5), "not the best");
      struct stat status{};
      require(::stat(folder.best_path().c_str(), &status) == 0 && status.st_nlink == 1, "a link");
      save(folder, 2);
      for (std::size_t pages = 1; pages < pages_of_file; ++pages) {
        leave_free(path, pages);  // one of them for the new score, before the old one's is free
        require_error([&] { folder.offer_best(2, 0.6); },
                      {"best.safetensors", "cannot be written: No space left on device"});
        detail::CheckpointReader(folder.best_path()).verify();
        require_newest(path, 2, {second, "best.safetensors", "best.score"});
      }
    }
    CheckpointFolder folder(options);
    require(folder.best_score() == 0.5, "another score");
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
    require_error([&] { folder.offer_best(1, 0.5); }, {"best.score", "Permission denied"});
    require_newest(folder.path(), 1, {first});
    ::chmod(folder.path().c_str(), 0777);
    return 0;
  });
  BOOST_TEST(process.words().empty(), process.words());
  const int status = process.end();
  if (status == is_skipped) std::puts("skipped: a folder without permission (no other user here)");
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
