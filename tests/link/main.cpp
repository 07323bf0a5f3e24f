// SPDX-License-Identifier: Apache-2.0
// Translation units that include everything must link, and must agree on every constant; one that
// is header-only must agree with those that use the library.
#include <cstdio>

#include "job.hpp"

int main() {
  const lockstep::Score score{"accuracy", 0.5, 2};
  const bool agree = link_test::other_fingerprint() == link_test::Job::fingerprint() &&
                     link_test::other_offset() == link_test::offset() &&
                     link_test::text_by_library(score) == link_test::text_without_library(score);
  std::puts(agree ? "all translation units agree" : "translation units disagree");
  return agree ? 0 : 1;
}
