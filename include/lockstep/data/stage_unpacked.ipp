// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stage_unpacked.hpp`.

#include <fcntl.h>
#include <zlib.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/data/stage_source.hpp"
#include "lockstep/data/stage_unpacked.hpp"
#include "lockstep/launch/file_faults.hpp"

namespace lockstep {

namespace detail {

LOCKSTEP_INLINE void read_gzip(int file, const std::string& path, StageSink sink) {
  constexpr std::string_view operation = "stage_unpacked";
  struct Close {
    void operator()(gzFile stream) const { gzclose(stream); }
  };
  const int own = ::fcntl(file, F_DUPFD_CLOEXEC, 0);  // zlib closes what it reads
  if (own < 0) fail_reading(operation, path, errno);
  const std::unique_ptr<gzFile_s, Close> stream(gzdopen(own, "rb"));
  if (!stream) fail_reading(operation, path, ENOMEM);
  gzbuffer(stream.get(), 256_KiB);
  std::vector<std::byte> buffer(1_MiB);
  constexpr std::string_view again = "copy or download the file again";
  for (bool is_first = true;; is_first = false) {
    const int count = gzread(stream.get(), buffer.data(), static_cast<unsigned>(buffer.size()));
    if (is_first && gzdirect(stream.get()) == 1)
      fail(operation, {"'", path, "' is not compressed by gzip"}, "give it a name without .gz");
    int code = Z_OK;
    const char* const words = gzerror(stream.get(), &code);
    if (code == Z_BUF_ERROR) fail(operation, {"the gzip stream of '", path, "' ends early"}, again);
    if (code == Z_ERRNO) fail_reading(operation, path, errno);
    if (count < 0 || code != Z_OK)
      fail(operation, {"the gzip stream of '", path, "' is damaged: ", words}, again);
    if (count == 0) return;
    sink(std::span(buffer).first(static_cast<std::size_t>(count)),
         static_cast<std::uint64_t>(gzoffset(stream.get())));
  }
}

}  // namespace detail

LOCKSTEP_INLINE std::string stage_unpacked(const std::string& path, const std::string& folder,
                                           const StageOptions& options) {
  constexpr detail::StageRule rule{"stage_unpacked", "an unpacked copy", ".gz", detail::read_gzip};
  return detail::stage(rule, path, folder, options);
}

}  // namespace lockstep
