// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One object of every type that is asked for, as the state of member templates.

#include <memory>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// A class whose members are templates over batches cannot declare a member for each type of batch.
/// This has one object for each type, made at its first use and found by comparing addresses.
class TypedStorage {
 public:
  template <class T>
  T& get() {
    for (const auto& [key, value] : values_) {
      if (key == &key_of<T>) return *static_cast<T*>(value.get());
    }
    values_.emplace_back(&key_of<T>, std::make_shared<T>());  // keeps how T is destroyed
    return *static_cast<T*>(values_.back().second.get());
  }

 private:
  template <class T>
  static constexpr char key_of = 0;

  std::vector<std::pair<const char*, std::shared_ptr<void>>> values_;
};

}  // namespace lockstep::detail
