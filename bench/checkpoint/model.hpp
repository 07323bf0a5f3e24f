// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file GPT-2's tensors at a width that is chosen when the program starts; peers.py has the same.
/// At 768 they are 124 M parameters, with AdamW's states 1.5 GB. There is nothing to compute: only
/// what is kept counts here.

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/model/tensor_list.hpp"

namespace bench {

using namespace lockstep;

struct Gpt {
  using Elements = ElementList<float>;
  std::size_t width = 768;
  std::size_t count = 148;

  void tensors(TensorList& list) const {
    const std::size_t d = width;
    const auto add = [&](const std::string& name, const std::vector<std::size_t>& extents) {
      list.parameter(name, element_kind<float>(), extents);
    };
    add("wte", {50257, d});
    add("wpe", {1024, d});
    for (int block = 0; block != 12; ++block) {
      const std::string name = "blocks." + std::to_string(block) + ".";
      add(name + "ln_1.weight", {d});
      add(name + "ln_1.bias", {d});
      add(name + "attn.weight", {3 * d, d});
      add(name + "attn.bias", {3 * d});
      add(name + "proj.weight", {d, d});
      add(name + "proj.bias", {d});
      add(name + "ln_2.weight", {d});
      add(name + "ln_2.bias", {d});
      add(name + "up.weight", {4 * d, d});
      add(name + "up.bias", {4 * d});
      add(name + "down.weight", {d, 4 * d});
      add(name + "down.bias", {d});
    }
    add("ln_f.weight", {d});
    add("ln_f.bias", {d});
  }

  static float forward(auto&, int) { return 0; }
  /// Gradients are what they are in memory: zeros.
  void backward(auto& step, int) const {
    for (std::size_t i = count; i-- != 0;) step.ready(i);
  }

  /// Of all parameters.
  std::size_t elements() const {
    std::size_t sum = 0;
    TensorList list = detail::list_tensors(*this);
    for (const auto& info : list.of(detail::TensorRole::parameter).infos) sum += info.count();
    return sum;
  }
};

}  // namespace bench
