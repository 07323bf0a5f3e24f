// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The threads of a played kernel's block, which may wait for each other: each runs until it
/// waits or ends, and then the next one does, on one thread of the host.

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace played {

class Block {
 public:
  /// The one whose threads this thread of the host plays.
  static Block& get() {
    thread_local Block block;
    return block;
  }

  /// Calls `enter(i)` whenever thread i goes on, and `thread()` to run it, the last one first.
  /// Threads that never wait run one after the other, without a stack of their own for each.
  void run(unsigned threads, const std::function<void(unsigned)>& enter,
           const std::function<void()>& thread) {
    enter_ = &enter;
    thread_ = &thread;
    next_ = threads;
    while (next_ != 0) resume(take());
    while (!waiting_.empty()) {
      for (Fiber* const fiber : std::exchange(waiting_, {})) {
        enter(fiber->index);
        resume(*fiber);
      }
    }
    for (auto& fiber : used_) free_.push_back(std::move(fiber));
    used_.clear();
  }

  /// The running thread waits until all that have not ended do.
  void wait() {
    Fiber& own = *running_;
    waiting_.push_back(&own);
    swapcontext(&own.context, &scheduler_);
  }

 private:
  static constexpr std::size_t stack_bytes = std::size_t{128} << 10;
  struct Fiber {
    ucontext_t context{};
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
    unsigned index = 0;
  };

  Fiber& take() {
    if (free_.empty()) free_.push_back(std::make_unique<Fiber>());
    used_.push_back(std::move(free_.back()));
    free_.pop_back();
    Fiber& fiber = *used_.back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = &scheduler_;
    makecontext(&fiber.context, [] { get().play(); }, 0);
    return fiber;
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    swapcontext(&scheduler_, &fiber.context);
  }

  void play() {
    Fiber& own = *running_;
    while (next_ != 0) {
      own.index = --next_;
      (*enter_)(own.index);
      (*thread_)();
    }
  }

  ucontext_t scheduler_{};
  std::vector<std::unique_ptr<Fiber>> free_;
  std::vector<std::unique_ptr<Fiber>> used_;
  std::vector<Fiber*> waiting_;
  Fiber* running_ = nullptr;
  unsigned next_ = 0;
  const std::function<void(unsigned)>* enter_ = nullptr;
  const std::function<void()>* thread_ = nullptr;
};

}  // namespace played
