// SPDX-License-Identifier: Apache-2.0
// Ranks with different jobs find out when they wrap their models, and all name the difference.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>

#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(agreement)

namespace {

using namespace train;

template <Name Second, class T>
struct Net {
  using Parameters = ParameterList<Parameter<"first", float, 3>, Parameter<Second, T, 2, 5>>;
  double forward(auto&, int) { return 0; }
  void backward(auto&, int) {}
};

struct Flexible {
  using Parameters =
      ParameterList<Parameter<"first", float, 3>, Parameter<"second", float, 2, dynamic>>;
  std::size_t width;
  void shapes(auto& shape) const { shape("second"_p, 2, width); }
  double forward(auto&, int) { return 0; }
  void backward(auto&, int) {}
};

template <class Buffered>
struct Running {
  using Parameters = ParameterList<Parameter<"first", float, 3>>;
  using Buffers = BufferList<Buffer<"mean", Buffered, 3>>;
  double forward(auto&, int) { return 0; }
  void backward(auto&, int) {}
};

using Usual = Net<"second", float>;

/// Rank `odd` wraps B, the others A.
template <class A, class B>
Ends wrap(std::size_t world, std::size_t odd) {
  return ranks::run(As::processes, world, [&](Shared& comm) {
    if (comm.rank() == Rank{odd}) {
      B other(comm);
    } else {
      A usual(comm);
    }
  });
}

template <class... Ps>
using Ddp = DistributedDataParallel<Usual, Ps...>;

}  // namespace

BOOST_AUTO_TEST_CASE(another_name_is_named) {
  using Other = DistributedDataParallel<Net<"secnod", float>>;
  all_say(wrap<Ddp<>, Other>(3, 2),
          "ranks have different jobs: rank 0 has \"parameter second float 2 x 5\" and rank 2 has "
          "\"parameter secnod float 2 x 5\"");
}

BOOST_AUTO_TEST_CASE(another_element_type_is_named) {
  using Other = DistributedDataParallel<Net<"second", double>>;
  all_say(wrap<Ddp<>, Other>(2, 0),
          "rank 0 has \"parameter second double 2 x 5\" and rank 1 has \"parameter second float 2 "
          "x 5\"");
}

BOOST_AUTO_TEST_CASE(another_dynamic_extent_is_named) {
  const Ends ends = ranks::run(As::processes, 3, [](Shared& comm) {
    const std::size_t width = comm.rank() == Rank{1} ? 6 : 5;
    DistributedDataParallel<Flexible> ddp(comm, Flexible{width});
  });
  all_say(ends,
          "rank 0 has \"parameter second float 2 x 5\" and rank 1 has \"parameter second float 2 "
          "x 6\"");
}

BOOST_AUTO_TEST_CASE(another_buffer_is_named) {
  const Ends ends =
      wrap<DistributedDataParallel<Running<float>>, DistributedDataParallel<Running<double>>>(2, 1);
  all_say(ends, "rank 0 has \"buffer mean float 3\" and rank 1 has \"buffer mean double 3\"");
}

BOOST_AUTO_TEST_CASE(one_parameter_more_is_named) {
  const Ends ends =
      wrap<DistributedDataParallel<Running<float>>, DistributedDataParallel<Usual>>(2, 1);
  all_say(ends, "and rank 1 has \"parameter second float 2 x 5\"");
}

BOOST_AUTO_TEST_CASE(another_policy_is_named) {
  const Ends ends = wrap<Ddp<>, Ddp<Clip<0.5>>>(2, 1);
  all_say(ends, "rank 0 has \"policy lockstep::Clip<");
  all_say(wrap<Ddp<Optimizer<SGD>>, Ddp<Optimizer<AdamW>>>(3, 1),
          "rank 0 has \"policy lockstep::Optimizer<lockstep::SGD>\" and rank 1 has \"policy "
          "lockstep::Optimizer<lockstep::AdamW>\"");
}

BOOST_AUTO_TEST_CASE(a_model_that_cannot_say_its_shapes_ends_all_ranks) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    const std::size_t width = comm.rank() == Rank{1} ? static_cast<std::size_t>(-2) : 5;
    DistributedDataParallel<Flexible> ddp(comm, Flexible{width});
  });
  all_say(ends, "tensor second is larger than memory can be");
}

BOOST_AUTO_TEST_SUITE_END()
