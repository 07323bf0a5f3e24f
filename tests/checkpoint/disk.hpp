// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Disks that are full or broken: a tmpfs in a mount namespace of a test's own. System calls
/// that a tmpfs does not let fail are made to, by a filter (seccomp).

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "require.hpp"
#include "skipped.hpp"
#include "temporary_folder.hpp"

namespace checkpoint_tests {

using ::require;

constexpr int is_skipped = 77;
constexpr std::size_t page = 4096;

inline void require_error(auto make, const std::vector<std::string>& parts) {
  const std::string words = error_of(make);
  for (const std::string& part : parts) {
    require(words.find(part) != std::string::npos, "'" + words + "' lacks '" + part + "'");
  }
}

/// Gives this process a view of the file systems that is its own; false where that is not allowed.
inline bool own_mounts() {
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

inline bool mount_disk(const std::string& path, const char* limits) {
  return own_mounts() && ::mount("none", path.c_str(), "tmpfs", 0, limits) == 0;
}

/// From now on these system calls of this process have this outcome.
inline void filter_calls(std::initializer_list<long> calls, unsigned outcome) {
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (long call : calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(call), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, outcome));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  require(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
              ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
          "no filter");
}

/// From now on these system calls of this process fail.
inline void let_fail(std::initializer_list<long> calls, int error) {
  filter_calls(calls, SECCOMP_RET_ERRNO | static_cast<unsigned>(error));
}

/// From now on these system calls kill this process, as SIGKILL does at this moment.
inline void let_kill(std::initializer_list<long> calls) {
  filter_calls(calls, SECCOMP_RET_KILL_PROCESS);
}

/// The system calls by which the C library may rename or link; not every machine has the older
/// ones.
inline const std::initializer_list<long> renames{
#if defined(SYS_rename)
    SYS_rename,
#endif
#if defined(SYS_renameat)
    SYS_renameat,
#endif
    SYS_renameat2};
inline const std::initializer_list<long> links{
#if defined(SYS_link)
    SYS_link,
#endif
    SYS_linkat};

/// A file that leaves so many pages free on a disk.
inline void leave_free(const std::string& folder, std::size_t pages) {
  std::filesystem::remove(folder + "/filler");
  struct statvfs room{};
  require(::statvfs(folder.c_str(), &room) == 0 && room.f_bsize == page, "no statvfs");
  const std::string bytes((room.f_bavail - pages) * page, 'f');
  std::ofstream(folder + "/filler") << bytes;
  require(::statvfs(folder.c_str(), &room) == 0 && room.f_bavail == pages, "another room");
}

/// Runs `f(folder)` in a process with a disk of its own.
inline void on_disk(const char* limits, auto f) {
  const TemporaryFolder folder;
  Process process([&] {
    if (!mount_disk(folder.path, limits)) return is_skipped;
    f(folder.path);
    return 0;
  });
  const std::string words = process.words();
  const int status = process.end();
  if (status == is_skipped && words.empty()) {
    say_skipped(boost::unit_test::framework::current_test_case().full_name() +
                " (no mount namespace here)");
    return;
  }
  BOOST_TEST(words.empty(), words);
  BOOST_TEST(status == 0);
}

}  // namespace checkpoint_tests
