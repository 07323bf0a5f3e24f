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

LOCKSTEP_INLINE void write_prometheus(const std::string& path, std::string_view job,
                                      const EpochSummary& now, std::uint64_t updates,
                                      double learning_rate) {
  std::string labels = "job=\"";
  for (const char c : job) {
    if (c == '"' || c == '\\') labels += '\\';
    labels += c;
  }
  labels += '"';
  std::string all;
  const auto describe = [&](std::string_view name, std::string_view help) {
    all += text({"# HELP ", name, " ", help, "\n# TYPE ", name,
                 name.ends_with("_total") ? " counter\n" : " gauge\n"});
  };
  const auto add_value = [&](std::string_view name, std::string_view label, double value) {
    all += text({name, "{", labels, label, "} "});
    if (std::isfinite(value)) {
      append_json_number(all, value);
    } else {  // as Go does
      all += std::isnan(value) ? "NaN" : value > 0 ? "+Inf" : "-Inf";
    }
    all += "\n";
  };
  const auto add = [&](std::string_view name, std::string_view help, double value) {
    describe(name, help);
    add_value(name, "", value);
  };
  add("lockstep_epoch", "The epoch, from 1.", static_cast<double>(now.epoch));
  add("lockstep_updates_total", "Updates of the optimizer.", static_cast<double>(updates));
  add("lockstep_learning_rate", "The learning rate.", learning_rate);
  add("lockstep_samples_per_second", "Samples a second, of all ranks.", now.samples_per_second());
  add("lockstep_resident_bytes", "The memory of rank 0's process.", resident_bytes());
  if (now.tokens > 0)
    add("lockstep_tokens_per_second", "Tokens a second, of all ranks.", now.tokens_per_second());
  if (now.flops > 0)
    add("lockstep_flops_per_second", "The model's arithmetic a second, of all ranks.",
        now.flops_per_second());
  if (now.utilisation() > 0)
    add("lockstep_mfu", "Model FLOP utilisation, from 0 to 1.", now.utilisation());
  if (now.loss) add("lockstep_loss", "The epoch's mean loss so far.", *now.loss);
  if (!now.scores.empty()) describe("lockstep_score", "The latest evaluation.");
  for (const Score& score : now.scores)
    add_value("lockstep_score", text({",name=\"", printable(score.name, ""), "\""}), score.mean);

  const std::string written = path + ".new";
  const Descriptor file(::open(written.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file || !write_all(file.get(), all) || ::rename(written.c_str(), path.c_str()) != 0)
    fail("Prometheus", {"'", path, "' cannot be written: ", error_text(errno)},
         "name a file in a folder that rank 0 may write to", Rank{0});
}

}  // namespace lockstep::detail
