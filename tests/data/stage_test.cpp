// SPDX-License-Identifier: Apache-2.0
// Copies on a host's own disk: made once for all ranks, whole or not at all, used again while their
// source stays as it was; and what is said where a disk is full or a copier dies.
#include "lockstep/detail/data/stage.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/disk.hpp"
#include "checkpoint/process.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "temporary_folder.hpp"

BOOST_FIXTURE_TEST_SUITE(data_stage, Watchdog)

namespace {

using namespace lockstep;
using namespace checkpoint_tests;
using namespace std::chrono_literals;
namespace fs = std::filesystem;
using Names = std::set<std::string>;

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string put(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
  return path;
}

std::string numbers(std::size_t bytes, unsigned seed = 1) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>((seed = seed * 1664525 + 1013904223) >> 24);
  return text;
}

Names names_in(const std::string& folder) {
  Names names;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    names.insert(fs::relative(entry.path(), folder).string());
  return names;
}

/// What staging leaves in a folder: the copy, its record and the lock.
Names staged(const std::string& name, std::initializer_list<std::string> inside = {}) {
  Names names{name, "." + name + ".staged", "." + name + ".lock"};
  for (const std::string& each : inside) names.insert(name + "/" + each);
  return names;
}

std::uint64_t inode(const std::string& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

/// Changes the bytes of a file, and not its time.
void change_silently(const std::string& path, const std::string& bytes) {
  const auto time = fs::last_write_time(path);
  put(path, bytes);
  fs::last_write_time(path, time);
}

/// So many bytes were written by this process.
std::uint64_t written_bytes() {
  std::ifstream in("/proc/self/io");
  for (std::string word; in >> word;) {
    std::uint64_t bytes = 0;
    if (word == "wchar:" && in >> bytes) return bytes;
  }
  throw std::runtime_error("no /proc/self/io");
}

/// A source outside of the folder into which it is staged.
struct Source : TemporaryFolder {
  TemporaryFolder to;
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_file_is_copied_and_its_copy_used_again) {
  const Source source;
  for (const std::size_t bytes : {0, 1, 5000, 3'000'000}) {
    const std::string name = "train-" + std::to_string(bytes);
    const std::string from = put(source / name, numbers(bytes));
    const std::string scratch = source.to / "deep/er";
    const std::string local = stage_locally(from, scratch + "//");
    BOOST_TEST(local == scratch + "/" + name);
    BOOST_TEST((content(local) == numbers(bytes)));
    BOOST_TEST((fs::last_write_time(local) == fs::last_write_time(from)));
    const std::uint64_t first = inode(local);
    BOOST_TEST(stage_locally(source / "./" + name, scratch) == local);
    BOOST_TEST(stage_locally(from, scratch) == local);
    BOOST_TEST(inode(local) == first);
    BOOST_TEST((names_in(scratch) == staged(name)));
    fs::remove_all(scratch);
  }
}

BOOST_AUTO_TEST_CASE(a_source_that_has_changed_is_copied_again) {
  const Source source;
  const std::string from = put(source / "a", "first");
  const std::string local = stage_locally(from, source.to.path);
  std::ifstream old(local);
  put(from, "longer");
  BOOST_TEST(content(stage_locally(from, source.to.path)) == "longer");
  // Whoever has the old copy open keeps it.
  BOOST_TEST((std::string(std::istreambuf_iterator<char>(old), {}) == "first"));
  change_silently(from, "LONGER");
  fs::last_write_time(from, fs::last_write_time(from) + 1ns);
  BOOST_TEST(content(stage_locally(from, source.to.path)) == "LONGER");
  // A link that leads elsewhere is the same source, changed.
  put(source / "b", "b");
  fs::create_symlink("a", source / "newest");
  BOOST_TEST(content(stage_locally(source / "newest", source.to.path)) == "LONGER");
  fs::remove(source / "newest");
  fs::create_symlink("b", source / "newest");
  BOOST_TEST(content(stage_locally(source / "newest", source.to.path)) == "b");
  // A file may become a folder, and a folder a file.
  fs::remove(from);
  fs::create_directory(from);
  put(from + "/inside", "x");
  BOOST_TEST(content(stage_locally(from, source.to.path) + "/inside") == "x");
  fs::remove_all(from);
  put(from, "file");
  BOOST_TEST(content(stage_locally(from, source.to.path)) == "file");
}

BOOST_AUTO_TEST_CASE(a_folder_is_copied_with_all_that_is_in_it) {
  const Source source;
  const std::string from = source / "set.lmdb";
  fs::create_directories(from + "/deep/empty");
  put(from + "/data.mdb", numbers(100'000));
  put(from + "/lock.mdb", "who reads it there");
  put(from + "/deep/b.gz", "as it is");
  put(from + "/deep/a name\nin lines", "a");
  fs::create_symlink("../data.mdb", from + "/deep/link");
  const std::string local = stage_locally(from + "/", source.to.path);
  BOOST_TEST(local == (source.to / "set.lmdb"));
  const Names expected = staged("set.lmdb", {"data.mdb", "deep", "deep/empty", "deep/b.gz",
                                             "deep/a name\nin lines", "deep/link"});
  BOOST_TEST((names_in(source.to.path) == expected));
  BOOST_TEST((content(local + "/data.mdb") == numbers(100'000)));
  BOOST_TEST((content(local + "/deep/link") == numbers(100'000)));
  const std::uint64_t first = inode(local);
  put(from + "/lock.mdb", "another reader");
  BOOST_TEST(stage_locally(from, source.to.path) == local);
  BOOST_TEST(inode(local) == first);
  // The copy has what the source has, and no more.
  fs::remove(from + "/deep/link");
  put(from + "/new", "new");
  stage_locally(from, source.to.path);
  Names changed = expected;
  changed.erase("set.lmdb/deep/link");
  changed.insert("set.lmdb/new");
  BOOST_TEST((names_in(source.to.path) == changed));
  // A file of the copy that is gone, or was written to, is not used.
  fs::remove(local + "/deep/b.gz");
  stage_locally(from, source.to.path);
  put(local + "/new", "NEW");
  stage_locally(from, source.to.path);
  BOOST_TEST(content(local + "/new") == "new");
  BOOST_TEST((names_in(source.to.path) == changed));
}

BOOST_AUTO_TEST_CASE(the_documented_staging_feeds_a_data_set) {
  const Source source;
  const std::string shared = source / "tiny";
  const std::string scratch = source.to.path;
  fs::create_directory(shared);
  write_npy(shared + "/images.npy", std::vector<float>{1, 2, 3, 4}, {2, 2});
  write_npy(shared + "/labels.npy", std::vector<std::int32_t>{7, 5});
  // clang-format off
const std::string local = stage_locally(shared, scratch);  // every rank; one of a host copies
const auto train = npy_dataset<float, std::int32_t>(local + "/images.npy", local + "/labels.npy");
  // clang-format on
  BOOST_TEST(train.size() == 2u);
}

/// Ranks of one or several jobs, that know nothing of each other.
BOOST_AUTO_TEST_CASE(one_process_of_a_host_copies) {
  for (const std::size_t world : {1, 2, 4}) {
    const Source source;
    const std::string bytes = numbers(1'000'000);
    const std::string from = source / "set";
    fs::create_directory(from);
    put(from + "/data", bytes);
    int gate[2];
    BOOST_TEST_REQUIRE(::pipe(gate) == 0);
    std::deque<Process> ranks;
    for (std::size_t rank = 0; rank != world; ++rank) {
      ranks.emplace_back([&] {
        ::close(gate[1]);
        char none;
        [[maybe_unused]] const ssize_t n = ::read(gate[0], &none, 1);  // until all are there
        const std::uint64_t before = written_bytes();
        const std::string local = stage_locally(from, source.to.path);
        const bool has_copied = written_bytes() - before >= bytes.size();
        require(content(local + "/data") == bytes, "other bytes");
        return has_copied ? 1 : 0;
      });
    }
    ::close(gate[0]);
    ::close(gate[1]);
    int copies = 0;
    for (Process& rank : ranks) {
      BOOST_TEST(rank.words().empty(), rank.words());
      copies += rank.end();
    }
    BOOST_TEST(copies == 1);
    BOOST_TEST((names_in(source.to.path) == staged("set", {"data"})));
  }
}

BOOST_AUTO_TEST_CASE(one_thread_of_a_process_copies) {
  const Source source;
  const std::string from = put(source / "a", numbers(1'000'000));
  const std::uint64_t before = written_bytes();
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back(
        [&] { wrong += !error_of([&] { stage_locally(from, source.to.path); }).empty(); });
  }
  for (std::thread& thread : threads) thread.join();
  BOOST_TEST(wrong == 0);
  BOOST_TEST(written_bytes() - before < 1'500'000u);
  BOOST_TEST((content(source.to / "a") == numbers(1'000'000)));
}

BOOST_AUTO_TEST_CASE(a_copier_that_is_killed_leaves_what_the_next_one_removes) {
  const std::initializer_list<long> copying{SYS_sendfile};
  const std::initializer_list<long> setting_the_time{SYS_utimensat};
  const std::initializer_list<long> syncing{SYS_fsync};
  for (const auto& moment : {copying, setting_the_time, syncing, renames}) {
    for (const bool is_folder : {false, true}) {
      const Source source;
      const std::string from = source / "set";
      if (is_folder) fs::create_directory(from);
      put(is_folder ? from + "/data" : from, numbers(50'000));
      Process copier([&] {
        let_kill(moment);
        stage_locally(from, source.to.path);
        return 0;
      });
      BOOST_TEST(copier.end() == -SIGSYS);
      BOOST_TEST(!fs::exists(source.to / "set"));
      const auto left = names_in(source.to.path);
      BOOST_TEST(std::any_of(left.begin(), left.end(),
                             [](const std::string& name) { return name.find(".set.tmp-") == 0; }));
      stage_locally(from, source.to.path);
      BOOST_TEST(
          (names_in(source.to.path) == (is_folder ? staged("set", {"data"}) : staged("set"))));
    }
  }
}

/// The record is written first: a copier that dies then leaves the old copy under a new record.
BOOST_AUTO_TEST_CASE(a_record_without_its_copy_is_not_believed) {
  const Source source;
  const std::string from = put(source / "a", "first");
  const std::string local = stage_locally(from, source.to.path);
  fs::rename(local, source.to / "old");
  put(from, "other");
  stage_locally(from, source.to.path);
  fs::rename(source.to / "old", local);
  BOOST_TEST(content(stage_locally(from, source.to.path)) == "other");
  fs::remove(local);
  BOOST_TEST(content(stage_locally(from, source.to.path)) == "other");
}

BOOST_AUTO_TEST_CASE(a_copy_that_is_damaged_is_made_again) {
  const Source source;
  const std::string from = put(source / "a", "content");
  const std::string local = stage_locally(from, source.to.path);
  const auto stages_again = [&](const std::string& words) {
    Process process([&] { return stage_locally(from, source.to.path) == local ? 0 : 1; });
    BOOST_TEST(process.words().find(words) != std::string::npos, process.words());
    BOOST_TEST(process.end() == 0);
    BOOST_TEST(content(local) == "content");
  };
  put(local, "contents");
  stages_again("lockstep: stage_locally: '" + local +
               "' is not as it was staged; it is staged again\n");
  put(local, "Content");
  stages_again("'" + local + "' is not as it was staged");
  fs::remove(local);
  stages_again("");
  for (const std::string& record : {content(source.to / ".a.staged").substr(1), std::string("x"),
                                    content(source.to / ".a.staged") + "\n"}) {
    put(source.to / ".a.staged", record);
    stages_again("");
  }
}

BOOST_AUTO_TEST_CASE(a_source_that_changes_while_it_is_copied_is_an_error) {
  const Source source;
  const std::string folder = source / "set";
  fs::create_directory(folder);
  const std::string file = put(folder + "/a", numbers(1'000'000));
  for (const std::string& from : {file, folder}) {
    std::atomic<bool> is_over = false;
    std::atomic<int> writes = 0;
    std::thread writer([&] {
      std::ofstream out(file, std::ios::app);
      while (!is_over) {
        out << "more" << std::flush;
        ++writes;
      }
    });
    while (writes == 0) std::this_thread::yield();
    // The writer may be asleep just then: it is tried until it is not.
    std::string words;
    for (int tries = 0; words.empty() && tries != 1000; ++tries) {
      fs::remove_all(source.to / fs::path(from).filename().string());
      words = error_of([&] { stage_locally(from, source.to.path); });
    }
    is_over = true;
    writer.join();
    BOOST_TEST(words.find("stage_locally: '" + from +
                          "' changed while it was copied; stage it when "
                          "nothing writes to it any more") != std::string::npos,
               words);
  }
  BOOST_TEST((!fs::exists(source.to / "a") && !fs::exists(source.to / "set")));
}

BOOST_AUTO_TEST_CASE(others_wait_for_the_copier_and_say_for_whom) {
  const Source source;
  const std::string from = put(source / "a", "a");
  Process owner([&] {
    const int lock = ::open((source.to / ".a.lock").c_str(), O_RDWR | O_CREAT, 0666);
    require(::flock(lock, LOCK_EX) == 0, "no lock");
    const std::string line = detail::owner_text() + ", 5 of 10 bytes so far    ";
    require(::write(lock, line.data(), line.size()) == std::ssize(line), "not written");
    say("locked");
    for (;;) ::pause();
    return 0;
  });
  BOOST_TEST(owner.words(6) == "locked");
  const std::string who = "is being staged by process " + std::to_string(owner.pid) + " on ";
  expect_error([&] { stage_locally(from, source.to.path, 30ms); },
               "'" + (source.to / "a") + "' " + who, ", 5 of 10 bytes so far",
               "which has made no progress for 0.03 s; end that process, or give stage_locally a "
               "longer patience");
  Process other([&] { return stage_locally(from, source.to.path, 20s) == "" ? 1 : 0; });
  const std::string line = other.words(150);
  BOOST_TEST(line.find("lockstep: stage_locally: '" + (source.to / "a") + "' " + who) == 0u, line);
  ::kill(owner.pid, SIGKILL);
  BOOST_TEST(other.end() == 0);
  BOOST_TEST(other.words().find("; waiting for it\n") != std::string::npos);
  BOOST_TEST(content(source.to / "a") == "a");
}

BOOST_AUTO_TEST_CASE(a_full_disk_is_noticed_before_anything_is_written) {
  on_disk("size=1m", [](const std::string& disk) {
    const TemporaryFolder source;
    const std::string from = source / "set";
    fs::create_directory(from);
    put(from + "/a", numbers(5 * page));
    put(from + "/b", numbers(3 * page));
    stage_locally(put(source / "other", "o"), disk);
    // Eight pages, one for the lock's text and one for the record.
    for (std::size_t pages = 0; pages < 10; ++pages) {
      leave_free(disk, pages);
      require_error([&] { stage_locally(from, disk); },
                    {"lockstep: stage_locally: '" + disk + "' has no room for '" + from +
                         "' (No space left on device): 32768 bytes are needed and " +
                         std::to_string((std::max(pages, std::size_t{1}) - 1) * page) + " are free",
                     "make room there, or name a folder on another disk"});
      Names left = staged("other");
      left.merge(Names{"filler", ".set.lock"});
      require(names_in(disk) == left, "something is left");
    }
    leave_free(disk, 10);
    require(content(stage_locally(from, disk) + "/b") == numbers(3 * page), "other bytes");
  });
}

BOOST_AUTO_TEST_CASE(a_disk_that_does_not_write_sync_or_rename_leaves_nothing) {
  const auto fails = [](std::initializer_list<long> calls, int error, const std::string& words) {
    return [calls, error, words](const std::string& disk) {
      const TemporaryFolder source;
      const std::string file = put(source / "a", "first");
      const std::string folder = source / "b";
      fs::create_directory(folder);
      put(folder + "/data", "first");
      stage_locally(file, disk);
      stage_locally(folder, disk);
      put(file, "second");
      put(folder + "/data", "second");
      let_fail(calls, error);
      for (const std::string& from : {file, folder})
        require_error([&] { stage_locally(from, disk); }, {"cannot be written: " + words});
      require(content(disk + "/a") == "first", "the old file is gone");
      require(content(disk + "/b/data") == "first", "the old folder is gone");
      Names left = staged("a");
      left.merge(staged("b", {"data"}));
      require(names_in(disk) == left, "something is left");
    };
  };
  on_disk("size=1m", fails({SYS_fsync}, EIO, "Input/output error"));
  on_disk("size=1m", fails(renames, EROFS, "Read-only file system"));
  on_disk("size=1m", fails({SYS_sendfile}, EIO, "Input/output error"));
}

BOOST_AUTO_TEST_CASE(a_copy_on_a_read_only_disk_is_used_again) {
  on_disk("size=1m", [](const std::string& disk) {
    const TemporaryFolder source;
    const std::string from = put(source / "a", "first");
    stage_locally(from, disk);
    require(::mount("none", disk.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) == 0, "no ro");
    require(content(stage_locally(from, disk)) == "first", "other bytes");
    put(from, "second");
    require_error([&] { stage_locally(from, disk); },
                  {".a.lock' cannot be written: Read-only file system"});
    require_error([&] { stage_locally(from, disk + "/new"); },
                  {"stage_locally: the folder '" + disk + "/new' cannot be made"});
  });
}

BOOST_AUTO_TEST_CASE(what_is_not_a_copy_stays) {
  const Source source;
  const std::string from = put(source / "a", "a");
  fs::create_directory(source / "b");
  const std::string other = put(source / "b/a", "b");
  const std::string local = put(source.to / "a", "mine");
  expect_error([&] { stage_locally(from, source.to.path); },
               "'" + local +
                   "' is there, and was not staged; remove it if it is not needed, or "
                   "name another folder");
  BOOST_TEST(content(local) == "mine");
  fs::remove(local);
  stage_locally(from, source.to.path);
  expect_error([&] { stage_locally(other, source.to.path); },
               "'" + local + "' is a copy of '" + from + "', and not a copy of '" + other + "'");
  BOOST_TEST(content(local) == "a");
  fs::remove(local);
  BOOST_TEST(content(stage_locally(other, source.to.path)) == "b");
  // What is there already needs no copy.
  BOOST_TEST(stage_locally(from, source.path) == from);
  BOOST_TEST(content(from) == "a");
  // Names that look like a temporary's stay, too.
  put(source / "a.tmp-0123456789abcdef", "t");
  stage_locally(source / "a.tmp-0123456789abcdef", source.to.path);
  put(other, "changed");
  stage_locally(other, source.to.path);
  Names expected = staged("a");
  expected.merge(staged("a.tmp-0123456789abcdef"));
  BOOST_TEST((names_in(source.to.path) == expected));
}

BOOST_AUTO_TEST_CASE(what_cannot_be_staged_is_named) {
  const Source source;
  const std::string to = source.to.path;
  expect_error([&] { stage_locally(source / "none", to); },
               "stage_locally: '" + (source / "none") + "' cannot be read: No such file",
               "check the path");
  expect_error([&] { stage_locally("", to); }, "stage_locally: ");
  expect_error([&] { stage_locally("/", to); }, "'/' has no name");
  expect_error([&] { stage_locally("/dev/null", to); },
               "'/dev/null' is neither a file nor a folder");
  const std::string folder = source / "set";
  fs::create_directory(folder);
  fs::create_directory_symlink(".", folder + "/loop");
  expect_error([&] { stage_locally(folder, to); },
               "'" + folder + "/loop' leads to a folder that it is in");
  fs::remove(folder + "/loop");
  fs::create_symlink("nowhere", folder + "/broken");
  expect_error([&] { stage_locally(folder, to); },
               folder + "/broken' cannot be read: No such file");
  fs::remove(folder + "/broken");
  BOOST_TEST_REQUIRE(::mkfifo((folder + "/fifo").c_str(), 0600) == 0);
  expect_error([&] { stage_locally(folder, to); }, "/fifo' is neither a file nor a folder");
  fs::remove(folder + "/fifo");
  expect_error([&] { stage_locally(folder, folder + "/inside"); },
               "'" + folder + "/inside' is inside of '" + folder + "'");
  put(source / "file", "");
  expect_error([&] { stage_locally(folder, source / "file/in"); }, "cannot be made",
               "is no folder");
}

BOOST_AUTO_TEST_SUITE_END()
