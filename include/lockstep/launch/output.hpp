// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The output of ranks: cut into lines, prefixed, and passed on whole.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/bytes.hpp"

namespace lockstep {

/// Cuts what arrives in arbitrary pieces into lines. A line longer than `max_line` is passed on in
/// pieces of that size, each a line of its own: memory is bounded, whatever a rank prints.
class LineCutter {
 public:
  static constexpr std::size_t max_line = 64_KiB;

  /// Calls `sink(std::string_view)` for every line that is complete, without its newline.
  template <class Sink>
  void feed(std::string_view bytes, Sink&& sink) {
    while (!bytes.empty()) {
      const std::size_t newline = bytes.find('\n');
      const std::size_t room = max_line - partial_.size();
      const std::size_t count = std::min({newline, room, bytes.size()});
      partial_ += bytes.substr(0, count);
      bytes.remove_prefix(count);
      const bool complete = !bytes.empty() && bytes.front() == '\n';
      if (complete) bytes.remove_prefix(1);
      if (complete || partial_.size() == max_line) emit(sink);
    }
  }

  /// The last line, if no newline ended it.
  template <class Sink>
  void finish(Sink&& sink) {
    if (!partial_.empty()) emit(sink);
  }

 private:
  template <class Sink>
  void emit(Sink& sink) {
    sink(std::string_view(partial_));
    partial_.clear();
  }

  std::string partial_;
};

/// Text on its way to the launcher's own stdout and stderr. Strictly one piece after another, since
/// both are often the same terminal or file, and never blocking, since a launcher stuck behind a
/// pager could not end its ranks. The streams are not made non-blocking: that would hit everybody
/// else who has them open. Instead, a write no longer than a page follows poll()'s word that there
/// is room for one.
class OutputQueue {
 public:
  bool is_empty() const { return pieces_.empty(); }
  /// Time to stop reading from ranks.
  bool is_full() const { return bytes_ >= 1_MiB; }
  /// Which stream is to be polled for POLLOUT.
  int next_stream() const { return pieces_.front().stream; }

  void push(int stream, std::string_view text) {
    if (stream < 3 && closed_[stream]) return;
    bytes_ += text.size();
    if (!pieces_.empty() && pieces_.back().stream == stream) {
      pieces_.back().text += text;
    } else {
      pieces_.push_back({stream, std::string(text)});
    }
  }

  /// Writes a page at most, after poll() has said that the next stream takes it.
  void write_some() {
    constexpr std::size_t page = 4_KiB;
    Piece& piece = pieces_.front();
    const std::size_t count = std::min(page, piece.text.size() - piece.written);
    const ssize_t n = ::write(piece.stream, piece.text.data() + piece.written, count);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) {
      // Nobody reads it any more (`| head`). The ranks go on; that stream is silent.
      const int stream = piece.stream;
      closed_[stream] = true;
      std::erase_if(pieces_, [stream](const Piece& p) { return p.stream == stream; });
      bytes_ = 0;
      for (const Piece& p : pieces_) bytes_ += p.text.size() - p.written;
      return;
    }
    piece.written += static_cast<std::size_t>(n);
    bytes_ -= static_cast<std::size_t>(n);
    if (piece.written == piece.text.size()) pieces_.pop_front();
  }

  void clear() {
    pieces_.clear();
    bytes_ = 0;
  }

 private:
  struct Piece {
    int stream = 1;
    std::string text;
    std::size_t written = 0;
  };

  std::deque<Piece> pieces_;
  std::size_t bytes_ = 0;
  bool closed_[3] = {};
};

}  // namespace lockstep
