// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `run_log.hpp`.

#include <cstdio>
#include <ctime>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/run_log.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void add_policy(JsonLine& policies, std::string_view axis,
                                std::string_view spelling) {
  std::string plain(spelling);
  const std::string number = text({dynamic});
  const auto replace_all = [&](std::string_view part, std::string_view by) {
    for (std::size_t at = plain.find(part); at != std::string::npos; at = plain.find(part, at)) {
      plain.replace(at, part.size(), by);
      at += by.size();
    }
  };
  replace_all("lockstep::", "");
  replace_all("detail::", "");
  replace_all(number, "dynamic");
  policies.add(axis, plain);
}

LOCKSTEP_INLINE JsonLine run_header(WorldSize world, Seed seed, std::uint64_t fingerprint,
                                    const JsonLine& policies) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char time[32];
  std::strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%SZ", &utc);
  char digits[32];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(fingerprint));
  JsonLine run;
  run.add("time", static_cast<const char*>(time)).add("lockstep", version);
  run.add("world", world.value()).add("seed", seed.value());
  // As text: most readers of JSON round numbers of this size.
  run.add("fingerprint", static_cast<const char*>(digits)).add("policies", policies);
  return JsonLine().add("run", run);
}

}  // namespace lockstep::detail
