// SPDX-License-Identifier: Apache-2.0
#pragma once
// A fixture with a store, one client of it, and as many more as a case wants.

#include <chrono>
#include <string>

#include "launch/watchdog.hpp"
#include "lockstep/detail/store/server.hpp"
#include "lockstep/detail/store/store.hpp"

inline const std::string secret = "sesame";

struct Served : Watchdog {
  lockstep::detail::StoreServer server{secret};
  lockstep::Store store = another();

  lockstep::Store another() const {
    return {"127.0.0.1", server.port(), secret, std::chrono::seconds(5)};
  }
};
