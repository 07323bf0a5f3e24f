// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random bytes from the system: job ids, secrets, nonces.

#include <sys/random.h>

#include <cerrno>
#include <cstddef>
#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/descriptor.hpp"

namespace lockstep::detail {

inline std::string random_bytes(std::size_t count) {
  std::string bytes(count, '\0');
  for (std::size_t done = 0; done < count;) {
    const ssize_t n = ::getrandom(bytes.data() + done, count - done, 0);
    if (n > 0) {
      done += static_cast<std::size_t>(n);
    } else if (errno != EINTR) {
      fail("launch", {"the system has no random numbers: ", error_text(errno)},
           "allow getrandom() where this runs");
    }
  }
  return bytes;
}

/// 128 random bits as 32 hexadecimal digits.
inline std::string random_id() {
  std::string text;
  for (char c : random_bytes(16)) {
    text += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

}  // namespace lockstep::detail
