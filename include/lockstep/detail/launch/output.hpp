// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The output of ranks, forwarded in whole lines with a prefix.

#include <unistd.h>

#include <cerrno>
#include <deque>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/terminal.hpp"
#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/core/utility.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The part of a status line that fits a terminal without its last column, after which some wrap.
/// Escape sequences take no columns and are kept after the cut too, where they may reset a colour.
inline std::string fitted(std::string_view line, std::size_t columns) {
  std::size_t room = columns == 0 ? 0 : columns - 1;
  std::string fits;
  for (std::size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '\033') {
      const std::size_t begin = i++;
      if (i < line.size() && line[i] == '[') ++i;
      while (i < line.size() && (line[i] < '@' || line[i] > '~')) ++i;
      fits += line.substr(begin, i + 1 - begin);
      continue;
    }
    const bool goes_on = (static_cast<unsigned char>(line[i]) & 0xc0) == 0x80;
    if (!goes_on && room == 0) {
      while (i + 1 < line.size() && line[i + 1] != '\033') ++i;
      continue;
    }
    if (!goes_on) --room;
    fits += line[i];
  }
  return fits;
}

/// Splits text into lines of at most `max_line`. Text before '\r' is a status line, to be replaced.
class LineCutter {
 public:
  static constexpr std::size_t max_line = 64_KiB;

  /// Takes a line or a status line, without its terminator. An empty status removes the last one.
  using Take = FunctionRef<void(std::string_view text, bool is_status)>;

  void feed(std::string_view bytes, Take take) {
    while (!bytes.empty()) {
      if (bytes.front() == '\n') {
        if (std::exchange(has_status_, false)) take({}, true);
        emit(take);
        bytes.remove_prefix(1);
      } else if (bytes.front() == '\r') {
        // The text is kept: if a newline follows, it was a line.
        if (!partial_.empty()) take(partial_, true);
        has_status_ = is_ended_ = true;
        bytes.remove_prefix(1);
      } else {
        if (std::exchange(is_ended_, false)) partial_.clear();
        if (partial_.size() == max_line) emit(take);
        const std::size_t end = std::min(bytes.find_first_of("\r\n"), bytes.size());
        const std::size_t count = std::min(end, max_line - partial_.size());
        partial_ += bytes.substr(0, count);
        bytes.remove_prefix(count);
      }
    }
  }

  void finish(Take take) {
    if (!partial_.empty() && !is_ended_) emit(take);
  }

 private:
  void emit(Take take) {
    take(partial_, false);
    partial_.clear();
    is_ended_ = false;
  }

  std::string partial_;
  bool is_ended_ = false;    // '\r' has terminated `partial_`
  bool has_status_ = false;  // the last output was a status line
};

/// Text for the launcher's stdout and stderr, in order, since both are often one terminal or file.
/// It never blocks, since a launcher blocked by a pager could not end its ranks. The streams stay
/// blocking, because other processes share them: at most a page is written after poll() reports
/// space. On a terminal the last line may be a status line, erased before other output and redrawn.
class OutputQueue {
 public:
  explicit OutputQueue(bool is_terminal = false) : is_terminal_(is_terminal) {}

  bool is_empty() const { return pieces_.empty(); }
  /// Should reading from ranks pause?
  bool is_full() const { return bytes_ >= 1_MiB; }
  int next_stream() const { return pieces_.front().stream; }

  void push(int stream, std::string_view text) {
    hide_status();
    append(stream, text);
  }

  /// Replaces the status line; an empty text removes it.
  void push_status(std::string_view prefix, std::string_view text) {
    if (!is_terminal_) return;
    if (text.ends_with(erase_line)) text.remove_suffix(erase_line.size());
    drop_status();
    if (text.empty()) return;
    status_ = detail::text({prefix, text});
    show_status();
  }
  void drop_status() {
    status_.clear();
    hide_status();
  }

  void write_some() {
    constexpr std::size_t page = 4_KiB;
    Piece& piece = pieces_.front();
    const std::size_t count = std::min(page, piece.text.size() - piece.written);
    ssize_t n = ::write(piece.stream, piece.text.data() + piece.written, count);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) {
      // The reader is gone (`| head`). Ranks continue without this stream.
      closed_[piece.stream] = true;
      n = static_cast<ssize_t>(piece.text.size() - piece.written);
    }
    piece.written += static_cast<std::size_t>(n);
    bytes_ -= static_cast<std::size_t>(n);
    if (piece.written == piece.text.size()) pieces_.pop_front();
    if (pieces_.empty() && !is_status_shown_ && !status_.empty()) show_status();
  }

  void clear() {
    pieces_.clear();
    bytes_ = 0;
  }

 private:
  // Erases from the cursor on, which is in the first column, since all text ends in '\r' or '\n'.
  static constexpr std::string_view erase_line = "\033[K";

  struct Piece {
    int stream = 1;
    std::string text;
    std::size_t written = 0;
  };

  void hide_status() {
    if (std::exchange(is_status_shown_, false)) append(1, erase_line);
  }
  void show_status() {
    const auto columns = terminal_columns(1);  // queried each time: windows change
    append(1, columns ? fitted(status_, *columns) : status_);
    append(1, "\r");
    is_status_shown_ = true;
  }

  void append(int stream, std::string_view text) {
    if (text.empty() || (stream < 3 && closed_[stream])) return;
    bytes_ += text.size();
    if (!pieces_.empty() && pieces_.back().stream == stream) {
      pieces_.back().text += text;
    } else {
      pieces_.push_back({stream, std::string(text)});
    }
  }

  std::deque<Piece> pieces_;
  std::size_t bytes_ = 0;
  bool closed_[3] = {};
  bool is_terminal_;
  std::string status_;
  bool is_status_shown_ = false;  // once the queue is written
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
