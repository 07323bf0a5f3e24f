// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Tensors over lockstep's memory, which the program may keep for longer than that exists.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/detail/core/error.hpp"

namespace lockstep::detail {

/// Memory as a tensor with its own storage; of a slice, `torch::save` would write all the storage.
inline at::Tensor tensor_at(const void* data, at::IntArrayRef sizes, at::ScalarType type,
                            at::Device device) {
  return at::from_blob(const_cast<void*>(data), sizes,
                       at::TensorOptions().dtype(type).device(device));
}

/// The storages of tensors in an arena. Before the arena is freed, each that is still in use gets
/// memory of its own. It stays the same storage, so all that share it go on with valid values: the
/// tensor, its views, `detach`ed aliases, and graphs of autograd that have saved any of them.
class ArenaStorages {
 public:
  ArenaStorages() = default;
  ArenaStorages(const ArenaStorages&) = delete;
  ArenaStorages& operator=(const ArenaStorages&) = delete;
  ~ArenaStorages() { release(); }

  at::Tensor tensor_at(const void* data, at::IntArrayRef sizes, at::ScalarType type,
                       at::Device device) {
    at::Tensor made = detail::tensor_at(data, sizes, type, device);
    storages_.push_back(made.storage());
    return made;
  }

  /// Copies the values of storages that others use. A storage whose values cannot be copied, since
  /// memory is short or the GPU has failed, loses them: an access throws. Destructors call this, so
  /// a failure is reported late, unless an exception is on its way already. **Host** blocks.
  void release() noexcept {
    std::exception_ptr failure;
    std::size_t lost = 0;
    for (c10::Storage& storage : storages_) {
      if (storage.use_count() == 1 || storage.nbytes() == 0) continue;
      c10::StorageImpl& kept = *storage.unsafeGetStorageImpl();
      try {
        own(kept);
      } catch (...) {
        if (++lost == 1) failure = std::current_exception();
        forget(kept);
      }
    }
    storages_.clear();
    if (failure && std::uncaught_exceptions() == 0) report(failure, lost);
  }

 private:
  static void own(c10::StorageImpl& storage) {
    const c10::DeviceGuard on(storage.device());
    c10::Allocator* const allocator = c10::GetAllocator(storage.device_type());
    // The last steps may be in flight on a stream that LibTorch does not know.
    synchronize(storage.device());
    at::DataPtr copy = allocator->clone(storage.data(), storage.nbytes());
    synchronize(storage.device());
    storage.set_data_ptr_noswap(std::move(copy));
    storage.set_allocator(allocator);
    storage.set_resizable(true);
  }
  static void synchronize(at::Device device) {
    if (device.is_cpu()) return;
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }

  /// Older releases of LibTorch have no such message: there the tensor has no memory.
  static void forget(auto& storage) noexcept {
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
    if constexpr (requires {
                    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
                  }) {
      try {
        storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
            "lockstep: this tensor has lost its values: they could not be copied when the job that "
            "had them in its memory ended");
      } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for words either
      }
    }
  }

  static void report(const std::exception_ptr& failure, std::size_t lost) noexcept {
    std::exception_ptr late = failure;
    try {
      const std::string reason = error_of(failure).problem();
      fail("torch",
           {lost, lost == 1 ? " tensor" : " tensors",
            " of the program lost values at the end of the job, whose memory they were in, and "
            "from which they could not be copied: ",
            std::string_view(reason).substr(0, reason.find('\n'))},
           "keep memory free for a copy of the tensors, or let them end before the job");
    } catch (...) {
      late = std::current_exception();
    }
    report_late_failure(late);
  }

  std::vector<c10::Storage> storages_;
};

}  // namespace lockstep::detail
