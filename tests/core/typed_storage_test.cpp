// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/utility.hpp"

#include <boost/test/unit_test.hpp>
#include <string>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(typed_storage)

namespace {

template <int Number>
struct Counted {
  ~Counted() { ++ended; }
  int value = Number;
  static inline int ended = 0;
};

}  // namespace

BOOST_AUTO_TEST_CASE(every_type_has_one_object_that_stays_and_ends_with_the_storage) {
  {
    detail::TypedStorage storage;
    Counted<1>& first = storage.get<Counted<1>>();
    first.value = 7;
    BOOST_TEST(storage.get<Counted<2>>().value == 2);
    BOOST_TEST(storage.get<std::string>().empty());
    BOOST_TEST(&storage.get<Counted<1>>() == &first);
    BOOST_TEST(storage.get<Counted<1>>().value == 7);
    BOOST_TEST(Counted<1>::ended == 0);
  }
  BOOST_TEST(Counted<1>::ended == 1);
  BOOST_TEST(Counted<2>::ended == 1);
}

BOOST_AUTO_TEST_SUITE_END()
