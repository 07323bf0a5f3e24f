// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whose functions Gloo's are in a program that has LibTorch beside it.

#include <dlfcn.h>

#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail::over_gloo {

/// LibTorch exports the functions of a Gloo of its own, without its headers and of another version.
/// Where the linker names LibTorch first, these are called with objects of the installed Gloo, and
/// the program dies without a word. So it is told beforehand.
inline void require_own_library(Rank rank) {
  // gloo::transport::tcp::CreateDevice, which both have
  void* const found = ::dlsym(RTLD_DEFAULT, "_ZN4gloo9transport3tcp12CreateDeviceERKNS1_4attrE");
  Dl_info info{};
  if (found == nullptr || ::dladdr(found, &info) == 0 || info.dli_fname == nullptr) return;
  const std::string_view file = info.dli_fname;
  if (file.find("libtorch") == std::string_view::npos) return;
  throw Error("Backend<Gloo>", "the program calls the Gloo inside " + std::string(file),
              "link Gloo before LibTorch (-Wl,--no-as-needed -lgloo -ltorch ...), or with CMake's "
              "lockstep::gloo",
              rank);
}

}  // namespace lockstep::detail::over_gloo
