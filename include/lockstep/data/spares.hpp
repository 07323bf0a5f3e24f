// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Objects that threads borrow, so that the memory in them is used again.

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace lockstep::detail {

/// As many objects as were ever borrowed at a time. Unlike thread-local ones they end with their
/// owner, and a thread may borrow two. A copy of an owner begins with none.
template <class T>
class Spares {
 public:
  Spares() = default;
  Spares(const Spares&) noexcept {}
  Spares& operator=(const Spares&) noexcept { return *this; }
  ~Spares() = default;

  class Loan {
   public:
    explicit Loan(Spares& spares) : spares_(spares), object_(spares.take()) {}
    ~Loan() { spares_.give_back(std::move(object_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

    T& operator*() const { return *object_; }
    T* operator->() const { return object_.get(); }

   private:
    Spares& spares_;
    std::unique_ptr<T> object_;
  };

  Loan borrow() { return Loan(*this); }

 private:
  std::unique_ptr<T> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!spares_.empty()) {
        std::unique_ptr<T> object = std::move(spares_.back());
        spares_.pop_back();
        return object;
      }
      ++made_;
      spares_.reserve(made_);  // so that giving back cannot fail
    }
    return std::make_unique<T>();
  }
  void give_back(std::unique_ptr<T> object) noexcept {
    const std::lock_guard lock(mutex_);
    spares_.push_back(std::move(object));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> spares_;
  std::size_t made_ = 0;
};

}  // namespace lockstep::detail
