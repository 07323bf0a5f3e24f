// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The names that programs with LibTorch modules use, in `lockstep` and in `torch`.

namespace torch {}

namespace lockstep {

/// What stands here is found as `lockstep::X` and as `lockstep::torch::X`.
inline namespace torch_modules {}

/// An alias, not a namespace of its own: with one, `torch::Tensor` would be ambiguous in every
/// program that says `using namespace lockstep`.
namespace torch = ::torch;

}  // namespace lockstep

namespace torch {

/// LibTorch's own names come first: a directive is looked at only where `torch` has no such name.
using namespace ::lockstep::torch_modules;

}  // namespace torch
