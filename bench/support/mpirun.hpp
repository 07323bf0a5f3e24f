// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks of this program that mpirun starts, and a file by which they share memory with it.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "processes.hpp"

namespace bench {

/// A zeroed T in a file, shared by all who map it.
template <class T>
class SharedFile {
 public:
  explicit SharedFile(const std::filesystem::path& path) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ::ftruncate(file, sizeof(T)) != 0)
      throw std::runtime_error("cannot make " + path.string());
    data_ = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    if (data_ == MAP_FAILED) throw std::runtime_error("cannot map " + path.string());
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  ~SharedFile() { ::munmap(data_, sizeof(T)); }

  T& operator*() const { return *static_cast<T*>(data_); }
  T* operator->() const { return static_cast<T*>(data_); }

 private:
  void* data_;
};

/// Runs `main` with the arguments `mpi PATH` on so many ranks, which are not bound to cores, as
/// those of other peers are not. Says on stderr where that fails, and returns whether it went well.
inline bool run_by_mpirun(std::size_t ranks, int seconds, const std::filesystem::path& path) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command =
      "mpirun=$(command -v mpirun.openmpi || command -v mpirun) && export OMPI_ALLOW_RUN_AS_ROOT=1 "
      "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 && exec timeout " +
      std::to_string(seconds) + " \"$mpirun\" --oversubscribe --bind-to none -n " +
      std::to_string(ranks) + " '" + self + "' mpi '" + path.string() + "'";
  if (std::system(command.c_str()) == 0) return true;
  std::fprintf(stderr, "mpirun of %zu ranks failed\n", ranks);
  return false;
}

}  // namespace bench
