// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo's buffers with waits that another thread can end.
///
/// When a connection breaks, Gloo wakes a waiting thread only if no part of its message has been
/// sent or received. Otherwise the thread waits until Gloo's time limit, which ends all
/// connections. So Gloo's buffers are wrapped, and the watching thread ends their waits.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/library.hpp"

namespace lockstep::detail::over_gloo {

/// Thrown out of Gloo's algorithms when their waits are ended.
struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("the wait was ended") {}
};

class AbortableBuffer;

/// All buffers of a context, to end their waits together.
class Waits {
 public:
  /// Ends every wait, now and from now on.
  void abort();
  bool is_aborted() const {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }
  void raise_abort() const {
    if (is_aborted()) throw Aborted();
  }

  void add(AbortableBuffer* buffer) {
    const std::lock_guard lock(mutex_);
    buffers_.push_back(buffer);
  }
  void remove(AbortableBuffer* buffer) {
    const std::lock_guard lock(mutex_);
    std::erase(buffers_, buffer);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<AbortableBuffer*> buffers_;
  bool aborted_ = false;
};

class AbortableBuffer : public ::gloo::transport::UnboundBuffer {
 public:
  using Milliseconds = std::chrono::milliseconds;

  AbortableBuffer(std::unique_ptr<::gloo::transport::UnboundBuffer> buffer,
                  std::shared_ptr<Waits> waits)
      : UnboundBuffer(buffer->ptr, buffer->size),
        buffer_(std::move(buffer)),
        waits_(std::move(waits)) {
    waits_->add(this);
  }
  AbortableBuffer(const AbortableBuffer&) = delete;
  AbortableBuffer& operator=(const AbortableBuffer&) = delete;
  ~AbortableBuffer() override { waits_->remove(this); }

  // Gloo's time limit is not used: the watching thread has its own.
  bool waitRecv(int* rank, Milliseconds) override {
    waits_->raise_abort();
    if (!buffer_->waitRecv(rank, for_ever)) throw Aborted();
    return true;
  }
  bool waitSend(int* rank, Milliseconds) override {
    waits_->raise_abort();
    if (!buffer_->waitSend(rank, for_ever)) throw Aborted();
    return true;
  }
  void abortWaitRecv() override { buffer_->abortWaitRecv(); }
  void abortWaitSend() override { buffer_->abortWaitSend(); }

  void send(int to, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    waits_->raise_abort();
    buffer_->send(to, slot, offset, bytes);
  }
  void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    waits_->raise_abort();
    buffer_->recv(from, slot, offset, bytes);
  }
  void recv(std::vector<int> from, std::uint64_t slot, std::size_t offset,
            std::size_t bytes) override {
    waits_->raise_abort();
    buffer_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  static constexpr Milliseconds for_ever = std::chrono::hours(24 * 365);

  std::unique_ptr<::gloo::transport::UnboundBuffer> buffer_;
  std::shared_ptr<Waits> waits_;
};

inline void Waits::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  for (AbortableBuffer* buffer : buffers_) {
    buffer->abortWaitRecv();
    buffer->abortWaitSend();
  }
}

/// Stands between Gloo's algorithms and its transport, to wrap the buffers.
class AbortableTransport : public ::gloo::transport::Context {
 public:
  AbortableTransport(std::shared_ptr<::gloo::transport::Context> transport,
                     std::shared_ptr<Waits> waits)
      : Context(transport->rank, transport->size),
        transport_(std::move(transport)),
        waits_(std::move(waits)) {}

  std::unique_ptr<::gloo::transport::Pair>& getPair(int rank) override {
    return transport_->getPair(rank);
  }
  std::unique_ptr<::gloo::transport::Pair>& createPair(int rank) override {
    return transport_->createPair(rank);
  }
  std::unique_ptr<::gloo::transport::UnboundBuffer> createUnboundBuffer(void* data,
                                                                        std::size_t size) override {
    return std::make_unique<AbortableBuffer>(transport_->createUnboundBuffer(data, size), waits_);
  }

 private:
  std::shared_ptr<::gloo::transport::Context> transport_;
  std::shared_ptr<Waits> waits_;
};

}  // namespace lockstep::detail::over_gloo
