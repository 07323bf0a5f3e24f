// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model lists its tensors at run time, so that their keys are numbers
#include "lockstep/detail/bucket/step.hpp"

using namespace lockstep;

struct Net {
  using Elements = ElementList<float>;
  void tensors(TensorList& list) const { list.parameter("w", ElementKind::f32, {3}); }
};

#ifdef REJECT
void use(const detail::BareStep<Net>& step) { step.ready("w"_p); }
#else
void use(const detail::BareStep<Net>& step) { step.ready(0); }
#endif
