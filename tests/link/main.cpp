// SPDX-License-Identifier: Apache-2.0
// Two translation units that include everything must link, and must agree on every constant.
#include <cstdio>

#include "job.hpp"

int main() {
  const bool agree = link_test::other_fingerprint() == link_test::Job::fingerprint() &&
                     link_test::other_offset() == link_test::offset();
  std::puts(agree ? "two translation units agree" : "two translation units disagree");
  return agree ? 0 : 1;
}
