// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a checkpoint keeps numbers, bool, std::string, std::vector of numbers
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/values.hpp"

using namespace lockstep;

inline StateValues values_of_program() {
#ifdef REJECT
  static std::vector<std::string> names;
#else
  static std::vector<double> names;
#endif
  return StateValues().add("names", names);
}
