// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/strategy/gradients.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>

#include "lockstep/detail/bucket/layout.hpp"
#include "message_of.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(gradient_readiness)

using namespace lockstep::detail;

namespace {

/// Three buckets: d and c, b, a.
struct Net {
  using Parameters = ParameterList<Parameter<"a", float, 10>, Parameter<"b", double, 20>,
                                   Parameter<"c", float, 2>, Parameter<"d", float, 10>>;
};
using Where = detail::Layout<Net, Buckets<BucketLimits{45, 1}>>;
static_assert(Where::plan().bucket_count == 3);

/// The same, known at run time.
struct ListedNet {
  using Elements = ElementList<float, double>;
  void tensors(TensorList& list) const {
    list.parameter("a", ElementKind::f32, {10});
    list.parameter("b", ElementKind::f64, {20});
    list.parameter("c", ElementKind::f32, {2});
    list.parameter("d", ElementKind::f32, {10});
  }
};
using ListedWhere = detail::Layout<ListedNet, Buckets<BucketLimits{45, 1}>>;

/// Calls `check(readiness)` for a layout that the compiler knows and for one that it does not.
void for_both(auto check) {
  const Where where;
  Readiness<Where> known(where);
  check(known);
  const ListedWhere listed_where{ListedNet{}};
  Readiness<ListedWhere> listed(listed_where);
  check(listed);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_bucket_is_complete_with_its_last_gradient_whatever_the_order) {
  for_both([](auto& readiness) {
    readiness.reset();
    readiness.mark(2);
    BOOST_TEST(!readiness.is_complete(0));
    readiness.mark(1);
    BOOST_TEST((!readiness.is_complete(0) && readiness.is_complete(1)));
    readiness.mark(3);
    BOOST_TEST((readiness.is_complete(0) && !readiness.is_complete(2)));
    BOOST_TEST(!readiness.all_ready());
    readiness.mark(0);
    BOOST_TEST((readiness.is_complete(2) && readiness.all_ready()));
  });
}

BOOST_AUTO_TEST_CASE(a_new_pass_begins_with_nothing) {
  for_both([](auto& readiness) {
    readiness.reset();
    for (const std::size_t p : {0, 1, 2, 3}) readiness.mark(p);
    readiness.reset();
    for (const std::size_t b : {0, 1, 2}) BOOST_TEST(!readiness.is_complete(b));
    for (const std::size_t p : {0, 1, 2, 3}) BOOST_TEST(!readiness.is_ready(p));
    BOOST_TEST(!readiness.all_ready());
  });
}

BOOST_AUTO_TEST_CASE(a_gradient_that_comes_twice_and_one_that_does_not_exist_are_rejected) {
  for_both([](auto& readiness) {
    readiness.reset();
    readiness.mark(1);
    BOOST_TEST(message_of([&] { readiness.mark(1); })
                   .find("the gradient of b was marked ready "
                         "twice") != std::string::npos);
    BOOST_TEST(message_of([&] { readiness.mark(4); }).find("parameter 4 of 4 was marked ready") !=
               std::string::npos);
  });
}

BOOST_AUTO_TEST_CASE(missing_gradients_are_named_eight_at_the_most) {
  for_both([](auto& readiness) {
    readiness.reset();
    readiness.mark(1);
    BOOST_TEST(readiness.missing_names([](std::size_t) { return true; }) == "a, c, d");
  });
  struct Many {
    using Parameters = ParameterList<Repeat<"block", 11, ParameterList<Parameter<"w", float, 3>>>>;
  };
  const detail::Layout<Many> where;
  Readiness<detail::Layout<Many>> readiness(where);
  readiness.reset();
  readiness.mark(0);
  BOOST_TEST(readiness.missing_names([](std::size_t) { return true; }) ==
             "block.1.w, block.2.w, block.3.w, block.4.w, block.5.w, block.6.w, block.7.w, "
             "block.8.w and 2 more");
}

BOOST_AUTO_TEST_SUITE_END()
