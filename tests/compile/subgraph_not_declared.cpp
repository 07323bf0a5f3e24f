// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the job declares no sub-graph of this name
#include "lockstep/detail/bucket/subgraphs.hpp"

using namespace lockstep;

using Sets = Subgraphs<Subgraph<"with_adapter", "fc1.*", "adapter.*">>;

#ifdef REJECT
constexpr std::size_t set = detail::subgraph_number<Sets>("with_adaptor"_s);
#else
constexpr std::size_t set = detail::subgraph_number<Sets>("with_adapter"_s);
#endif
static_assert(set <= 1);
