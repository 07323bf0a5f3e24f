// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The threads of an emulated kernel's block, which may wait for each other: each runs until
/// it waits or ends, and then the next one does, on one thread of the host.

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace emulated {

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
    go(own.place, scheduler_);
  }

 private:
  static constexpr std::size_t stack_bytes = std::size_t{128} << 10;
  /// Where a fiber goes on, or what has resumed it.
  using Place = void* [5];
  struct Fiber {
    Place place{};
    bool is_begun = false;
    std::unique_ptr<char[]> stack{new char[stack_bytes]};
    unsigned index = 0;
  };

  // Leaving one place and going on at another, without the system call of swapcontext, and without
  // the address sanitizer, which would look at a whole stack each time.
#if defined(__aarch64__)
  // clang has no __builtin_setjmp here. A place is a frame, an address and a stack; the compiler
  // saves all other registers, because they are named as changed.
  [[gnu::noinline, gnu::no_sanitize_address]] static void go(Place& from, Place& to) {
    register void** const leave asm("x0") = from;
    register void** const enter asm("x1") = to;
    asm volatile(
        "adr x2, 1f\n"
        "mov x3, sp\n"
        "stp x29, x2, [x0]\n"
        "str x3, [x0, #16]\n"
        "ldp x29, x2, [x1]\n"
        "ldr x3, [x1, #16]\n"
        "mov sp, x3\n"
        "br x2\n"
        "1:\n" ::"r"(leave),
        "r"(enter)
        : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15",
          "x16", "x17", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30",
          "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
          "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",
          "v27", "v28", "v29", "v30", "v31", "cc", "memory");
  }
  /// The same for a fiber that has not begun.
  static void begin(Place& from, Fiber& fiber) {
    void (*const play)() = [] { get().play(); };
    const auto top = reinterpret_cast<std::uintptr_t>(fiber.stack.get() + stack_bytes);
    fiber.place[1] = reinterpret_cast<void*>(play);
    fiber.place[2] = reinterpret_cast<void*>(top & ~std::uintptr_t{15});
    go(from, fiber.place);
  }
#else
  [[noreturn, gnu::noinline, gnu::no_sanitize_address]] static void jump(Place& to) {
    __builtin_longjmp(to, 1);  // not in the function that its own place is taken in
  }
  [[gnu::noinline, gnu::no_sanitize_address]] static void go(Place& from, Place& to) {
    if (__builtin_setjmp(from) == 0) jump(to);
  }
  /// The same for a fiber that has not begun.
  [[gnu::noinline, gnu::no_sanitize_address]] static void begin(Place& from, Fiber& fiber) {
    ucontext_t context{};
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = stack_bytes;
    makecontext(&context, [] { get().play(); }, 0);
    if (__builtin_setjmp(from) == 0) setcontext(&context);
  }
#endif

  Fiber& take() {
    if (free_.empty()) free_.push_back(std::make_unique<Fiber>());
    used_.push_back(std::move(free_.back()));
    free_.pop_back();
    return *used_.back();
  }

  void resume(Fiber& fiber) {
    running_ = &fiber;
    if (std::exchange(fiber.is_begun, true)) {
      go(scheduler_, fiber.place);
    } else {
      begin(scheduler_, fiber);
    }
  }

  /// A fiber plays threads as long as there are some, and then those of a later block.
  void play() {
    Fiber& own = *running_;
    while (true) {
      while (next_ != 0) {
        own.index = --next_;
        (*enter_)(own.index);
        (*thread_)();
      }
      go(own.place, scheduler_);
    }
  }

  Place scheduler_{};
  std::vector<std::unique_ptr<Fiber>> free_;
  std::vector<std::unique_ptr<Fiber>> used_;
  std::vector<Fiber*> waiting_;
  Fiber* running_ = nullptr;
  unsigned next_ = 0;
  const std::function<void(unsigned)>* enter_ = nullptr;
  const std::function<void()>* thread_ = nullptr;
};

}  // namespace emulated
