// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of what writes metrics: event files and Prometheus's text.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/observe/prometheus.hpp"
#include "lockstep/detail/observe/tensorboard.hpp"

namespace lockstep::detail {

/// CRC-32C, as TensorFlow masks it.
LOCKSTEP_INLINE std::uint32_t masked_crc(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit != 8; ++bit) crc = crc >> 1 ^ (0x82f63b78u & (0u - (crc & 1)));
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/// Fields of a message in the encoding of protocol buffers.
class ProtocolFields {
 public:
  ProtocolFields& number(unsigned field, std::uint64_t value) {
    varint(field << 3);
    return varint(value);
  }
  ProtocolFields& real(unsigned field, double value) {
    varint(field << 3 | 1);
    return raw(value);
  }
  ProtocolFields& small_real(unsigned field, float value) {
    varint(field << 3 | 5);
    return raw(value);
  }
  ProtocolFields& text(unsigned field, std::string_view value) {
    varint(field << 3 | 2);
    varint(value.size());
    bytes_ += value;
    return *this;
  }
  ProtocolFields& reals(unsigned field, const std::vector<double>& values) {
    return text(field,
                {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)});
  }
  const std::string& bytes() const { return bytes_; }

 private:
  ProtocolFields& varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
    return *this;
  }
  /// Both formats and machines are little-endian.
  ProtocolFields& raw(const auto& value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }

  std::string bytes_;
};

inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

LOCKSTEP_INLINE EventFile::EventFile(const std::string& folder) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  path_ = text({folder, "/events.out.tfevents.", static_cast<std::uint64_t>(wall_seconds()), ".",
                host, ".", ::getpid(), ".", random_id().substr(24)});
  ::mkdir(folder.c_str(), 0777);
  file_ =
      Descriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666));
  if (!file_)
    fail("TensorBoard", {"'", path_, "' cannot be made: ", error_text(errno)},
         "name a folder that rank 0 may write to");
  write(ProtocolFields().real(1, wall_seconds()).text(3, "brain.Event:2").bytes());
}

LOCKSTEP_INLINE void EventFile::add(std::string_view tag, double value, std::uint64_t step) {
  add_value(tag, ProtocolFields().small_real(2, static_cast<float>(value)).bytes(), step);
}

LOCKSTEP_INLINE void EventFile::add(std::string_view tag, const Histogram& histogram,
                                    std::uint64_t step) {
  if (histogram.count == 0) return;
  const std::string fields = ProtocolFields()
                                 .real(1, histogram.min)
                                 .real(2, histogram.max)
                                 .real(3, histogram.count)
                                 .real(4, histogram.sum)
                                 .real(5, histogram.squares)
                                 .reals(6, histogram.limits)
                                 .reals(7, histogram.counts)
                                 .bytes();
  add_value(tag, ProtocolFields().text(5, fields).bytes(), step);
}

LOCKSTEP_INLINE void EventFile::add_value(std::string_view tag, std::string_view fields,
                                          std::uint64_t step) {
  const std::string value = ProtocolFields().text(1, tag).bytes() + std::string(fields);
  const std::string summary = ProtocolFields().text(1, value).bytes();
  write(ProtocolFields().real(1, wall_seconds()).number(2, step).text(5, summary).bytes());
}

LOCKSTEP_INLINE void EventFile::write(std::string_view event) {
  const std::uint64_t size = event.size();
  std::string record(reinterpret_cast<const char*>(&size), sizeof size);
  const auto add_crc = [&](std::string_view of) {
    const std::uint32_t crc = masked_crc(of);
    record.append(reinterpret_cast<const char*>(&crc), sizeof crc);
  };
  add_crc(std::string(record));
  record += event;
  add_crc(event);
  if (!write_all(file_.get(), record))
    fail("TensorBoard", {"'", path_, "' cannot be written: ", error_text(errno)},
         "make room on its disk, or leave --tensorboard out", Rank{0});
}

LOCKSTEP_INLINE PrometheusText::PrometheusText(std::string_view job) {
  labels_ = "job=\"";
  for (const char c : job) {
    if (c == '"' || c == '\\') labels_ += '\\';
    labels_ += c;
  }
  labels_ += '"';
}

/// Prometheus writes NaN and infinities as Go does.
inline std::string prometheus_number(double value) {
  if (value != value) return "NaN";
  if (value - value != 0) return value > 0 ? "+Inf" : "-Inf";
  std::string text;
  append_json_number(text, value);
  return text;
}

LOCKSTEP_INLINE PrometheusText& PrometheusText::add(std::string_view name, std::string_view help,
                                                    double value) {
  const bool only_grows = name.ends_with("_total");
  text_ += detail::text({"# HELP ", name, " ", help, "\n# TYPE ", name,
                         only_grows ? " counter\n" : " gauge\n", name, "{", labels_, "} ",
                         prometheus_number(value), "\n"});
  return *this;
}

LOCKSTEP_INLINE PrometheusText& PrometheusText::add_score(const Score& score) {
  if (!std::exchange(has_scores_, true))
    text_ += "# HELP lockstep_score The latest evaluation.\n# TYPE lockstep_score gauge\n";
  text_ += detail::text({"lockstep_score{", labels_, ",name=\"", printable(score.name, ""), "\"} ",
                         prometheus_number(score.mean), "\n"});
  return *this;
}

LOCKSTEP_INLINE void write_prometheus(const std::string& path, const PrometheusText& metrics,
                                      Rank rank) {
  const std::string written = path + ".new";
  const Descriptor file(::open(written.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file || !write_all(file.get(), metrics.text()) ||
      ::rename(written.c_str(), path.c_str()) != 0) {
    fail("Prometheus", {"'", path, "' cannot be written: ", error_text(errno)},
         "name a file in a folder that rank 0 may write to", rank);
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE TensorBoard::Watch::Watch(Session& session, const ObserverPaths& paths)
    : Observer<TensorBoard>::Watch(session, paths) {
  if (!paths.tensorboard.empty() && session.rank() == Rank{0}) file_.emplace(paths.tensorboard);
}

LOCKSTEP_INLINE Prometheus::Watch::Watch(Session& session, const ObserverPaths& paths)
    : Observer<Prometheus>::Watch(session, paths), job_(session.membership().job) {
  if (session.rank() == Rank{0}) path_ = paths.prometheus;
}

}  // namespace lockstep
