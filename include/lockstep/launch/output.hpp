// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The output of ranks: cut into lines, prefixed, and passed on whole.

#include <unistd.h>

#include <cerrno>
#include <deque>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/utility.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The beginning of a status line that fits a terminal. Escape sequences take no room and are kept,
/// also those behind the cut, which end a colour; of a UTF-8 character only the first byte counts.
/// A character in the last column makes some terminals begin a new line.
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

/// Cuts text that arrives in arbitrary pieces into lines. A line longer than `max_line` is passed
/// on in pieces of that size, each a line of its own, so that memory is bounded. Text that ends in
/// '\r' instead of '\n' is a status line, as on a terminal: the next text takes its place.
class LineCutter {
 public:
  static constexpr std::size_t max_line = 64_KiB;

  /// Takes a line or a status line, without the character that ended it. An empty status takes the
  /// last one away.
  using Take = FunctionRef<void(std::string_view text, bool is_status)>;

  /// Calls `take` for every line and status line that is complete.
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

  /// The last line, if no newline ended it.
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
  bool is_ended_ = false;    // a '\r' has ended what is in `partial_`
  bool has_status_ = false;  // a status line was the last output
};

/// Text on its way to the launcher's own stdout and stderr. Pieces are written strictly in order,
/// since both are often the same terminal or file, and never block, since a launcher stuck behind a
/// pager could not end its ranks. The streams are not made non-blocking, because other processes
/// share them. Instead, at most a page is written after poll() has said that there is room.
///
/// Where stdout is a terminal, its last line may be a status line. It is removed before anything
/// else is printed, and drawn again when there is nothing more to print.
class OutputQueue {
 public:
  explicit OutputQueue(bool is_terminal = false) : is_terminal_(is_terminal) {}

  bool is_empty() const { return pieces_.empty(); }
  /// Is it time to stop reading from ranks?
  bool is_full() const { return bytes_ >= 1_MiB; }
  /// Which stream is to be polled for POLLOUT.
  int next_stream() const { return pieces_.front().stream; }

  void push(int stream, std::string_view text) {
    hide_status();
    append(stream, text);
  }

  /// Puts `text` in the place of the last status line; an empty one takes it away.
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

  /// Writes a page at most, after poll() has said that the next stream takes it.
  void write_some() {
    constexpr std::size_t page = 4_KiB;
    Piece& piece = pieces_.front();
    const std::size_t count = std::min(page, piece.text.size() - piece.written);
    ssize_t n = ::write(piece.stream, piece.text.data() + piece.written, count);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n < 0) {
      // The stream's reader has gone (`| head`). The ranks go on, and this stream stays silent.
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
  // Erases from the cursor on. It is in the first column, since all text ends in '\r' or '\n'.
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
    const auto columns = terminal_columns(1);  // of now: windows change
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
  bool is_status_shown_ = false;  // once everything before it is written
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
