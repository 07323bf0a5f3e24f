// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The iterator of every loader: `for (const auto& batch : loader)`.

#include <cstddef>
#include <iterator>

namespace lockstep::detail {

/// Takes batches by the loader's `next()`, which returns null at their end.
template <class Loader>
class BatchIterator {
 public:
  using value_type = typename Loader::batch_type;
  using difference_type = std::ptrdiff_t;

  explicit BatchIterator(Loader& loader) : loader_(&loader), batch_(loader.next()) {}

  const value_type& operator*() const { return *batch_; }
  const value_type* operator->() const { return batch_; }
  BatchIterator& operator++() {
    batch_ = loader_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  bool operator==(std::default_sentinel_t) const { return batch_ == nullptr; }

 private:
  Loader* loader_;
  const value_type* batch_;
};

}  // namespace lockstep::detail
