// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Samples with inputs and a label as bytes: what `write_lmdb` writes where no other encoding
/// is given, and `lmdb_dataset<X, Y>` reads.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <ranges>
#include <span>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/data/sample.hpp"

namespace lockstep::detail {

/// The front of a record; the inputs follow. It has 24 bytes, and keys have eight: so in a set of
/// one type of inputs all nodes of a page begin at multiples of its size, and inputs are read where
/// they lie.
struct LabelledRecord {
  static constexpr std::array<char, 4> own_mark{'L', 'S', 'R', '1'};

  std::array<char, 4> mark = own_mark;
  ElementKind input{};
  ElementKind label{};
  std::uint16_t zero = 0;
  std::uint64_t width = 0;           ///< the number of inputs
  std::array<std::byte, 8> value{};  ///< the label, in its first bytes
};
static_assert(sizeof(LabelledRecord) == 24 && std::endian::native == std::endian::little);

/// The front of a record of such inputs and labels; throws where these bytes are none.
LabelledRecord labelled_record(std::span<const std::byte> record, ElementKind input,
                               ElementKind label);

template <class X, class Y>
void encode_labelled(const std::ranges::contiguous_range auto& inputs, const Y& label,
                     std::vector<std::byte>& out) {
  static_assert(Element<X> && Element<Y>,
                "lockstep: a record of inputs and a label holds numbers of the library's element "
                "types; give write_lmdb an encoding of these samples: encode(sample, bytes)");
  LabelledRecord front;
  front.input = element_kind<X>();
  front.label = element_kind<Y>();
  front.width = std::ranges::size(inputs);
  std::memcpy(front.value.data(), &label, sizeof label);
  const std::size_t bytes = front.width * sizeof(X);
  out.clear();
  out.resize(sizeof front + bytes);
  std::memcpy(out.data(), &front, sizeof front);
  if (bytes != 0) std::memcpy(out.data() + sizeof front, std::ranges::data(inputs), bytes);
}

/// The sample of a record, whose inputs stay where they lie.
template <class X, class Y>
void decode_labelled(std::span<const std::byte> record, LabelledSample<X, Y>& out) {
  const LabelledRecord front = labelled_record(record, element_kind<X>(), element_kind<Y>());
  std::memcpy(&out.label, front.value.data(), sizeof(Y));
  // labelled_record has seen that there are as many, at an address that is fit for them.
  out.inputs = {reinterpret_cast<const X*>(record.data() + sizeof front), front.width};
}

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/labelled_record.ipp"
#endif
