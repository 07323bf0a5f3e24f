// SPDX-License-Identifier: Apache-2.0
// `Autocast` on the CPU: scopes end with what was before them, and no weight stays cast.
#include "lockstep/detail/torch/autocast.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>

#include <boost/test/unit_test.hpp>

BOOST_AUTO_TEST_SUITE(torch_autocast)

namespace {

using namespace lockstep;

bool is_on() { return at::autocast::is_autocast_enabled(at::kCPU); }
at::ScalarType type_of_product(const at::Tensor& x, const at::Tensor& weight) {
  return at::linear(x, weight).scalar_type();
}

}  // namespace

BOOST_AUTO_TEST_CASE(products_run_in_16_bits_inside_a_scope_only) {
  const at::Tensor x = at::ones({2, 3});
  const at::Tensor weight = at::ones({4, 3});
  {
    const Autocast cast(at::kCPU);
    BOOST_TEST((type_of_product(x, weight) == at::kBFloat16));
  }
  BOOST_TEST((type_of_product(x, weight) == at::kFloat));
}

BOOST_AUTO_TEST_CASE(scopes_nest_and_end_with_what_was_before) {
  const at::ScalarType before = at::autocast::get_autocast_dtype(at::kCPU);
  {
    const Autocast outer(at::kCPU, at::kHalf);
    {
      const auto exact = Autocast::off(at::kCPU);
      BOOST_TEST(!is_on());
      {
        const Autocast inner(at::kCPU);
        BOOST_TEST(is_on());
        BOOST_TEST((at::autocast::get_autocast_dtype(at::kCPU) == at::kBFloat16));
      }
      BOOST_TEST(!is_on());
    }
    BOOST_TEST(is_on());
    BOOST_TEST((at::autocast::get_autocast_dtype(at::kCPU) == at::kHalf));
  }
  BOOST_TEST(!is_on());
  BOOST_TEST((at::autocast::get_autocast_dtype(at::kCPU) == before));
}

BOOST_AUTO_TEST_CASE(a_weight_that_changes_between_scopes_is_cast_again) {
  const at::Tensor x = at::ones({1, 3});
  at::Tensor weight = at::ones({1, 3}).requires_grad_();
  const auto product = [&] {
    const Autocast cast(at::kCPU);
    return at::linear(x, weight).to(at::kFloat).item<float>();
  };
  BOOST_TEST(product() == 3.f);
  {
    const at::NoGradGuard quiet;
    weight.fill_(2);
  }
  BOOST_TEST(product() == 6.f);
}

BOOST_AUTO_TEST_SUITE_END()
