// SPDX-License-Identifier: Apache-2.0
/// @file What tests of LibTorch's modules include most of the time, compiled once before them all.
/// Each test includes what it uses nevertheless. There is no `#pragma once`: g++ warns of one in a
/// header that it compiles by itself.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/data.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim.h>

#include <boost/test/unit_test.hpp>

#include "lockstep/lockstep.hpp"
#include "lockstep/torch_checkpoint.hpp"
#include "lockstep/torch_optim.hpp"

#if LOCKSTEP_HAS_GLOO
#include "lockstep/gloo.hpp"
#endif
