// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model lists several element types
#include "lockstep/detail/bucket/step.hpp"

using namespace lockstep;

struct Net {
  using Elements = ElementList<float, double>;
  void tensors(TensorList& list) const { list.parameter("w", ElementKind::f32, {3}); }
};

#ifdef REJECT
void use(const detail::BareStep<Net>& step) { static_cast<void>(step.param(0)); }
#else
void use(const detail::BareStep<Net>& step) { static_cast<void>(step.param(Listed<float>{0})); }
#endif
