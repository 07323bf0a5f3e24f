// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `image_dataset.hpp`.

#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/data/image_dataset.hpp"

namespace lockstep {

LOCKSTEP_INLINE ImageDataset::ImageDataset(SharedBytes pixels, SharedBytes labels,
                                           std::size_t classes, Normalization normalization,
                                           const std::string& origin)
    : pixels_(std::move(pixels)), labels_(std::move(labels)), origin_(origin), classes_(classes) {
  width_ = labels_.empty() ? 0 : pixels_.size() / labels_.size();
  if (width_ * labels_.size() != pixels_.size()) {
    detail::fail(origin,
                 {pixels_.size(), " pixels are no whole images for ", labels_.size(), " labels"},
                 "give one label for every image");
  }
  for (std::size_t i = 0; i != labels_.size(); ++i) {
    if (labels_[i] < classes_) continue;
    detail::fail(origin, {"label ", labels_[i], " of sample ", i, ", with ", classes_, " classes"},
                 "set the number of classes, or check that the labels belong to these images");
  }
  for (std::size_t byte = 0; byte != values_.size(); ++byte) {
    values_[byte] =
        (static_cast<float>(byte) / 255.f - normalization.mean) / normalization.deviation;
  }
}

LOCKSTEP_INLINE void ImageDataset::fail_index(std::size_t index) const {
  detail::fail(origin_, {"there is no sample ", index, ": there are ", size()},
               "ask for samples below their number");
}

}  // namespace lockstep
