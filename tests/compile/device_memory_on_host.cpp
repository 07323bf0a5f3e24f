// SPDX-License-Identifier: Apache-2.0
// nvcc has errors of its own for such calls from the host.
// expect: lockstep: this view is of device memory, which host code cannot read or write
// compilers: g++
#include "lockstep/detail/core/view.hpp"

using namespace lockstep;

#ifdef REJECT
float first(DeviceView<float, 3> view) { return view(0); }
#else
float first(HostView<float, 3> view) { return view(0); }
#endif
