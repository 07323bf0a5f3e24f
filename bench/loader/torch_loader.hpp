// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What is asked of a loader, and PyTorch's DataLoader, which is asked the same.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "files.hpp"
#include "python_peer.hpp"

namespace bench {

/// What is asked of a loader, by the names that loader.py knows.
struct Case {
  std::string source;
  bool transform;
  std::size_t batch;
  std::size_t workers;
  bool batched = false;  ///< PyTorch's data set is indexed with a list, and nothing is collated

  Case with(std::size_t count, bool without_collation = false) const {
    return {source, transform, batch, count, without_collation};
  }
  std::string text() const {
    return source + (transform ? ", augmented" : "") + ", batch " + std::to_string(batch) + ", " +
           std::to_string(workers) + (workers == 1 ? " worker" : " workers");
  }
};

/// What came out of an epoch, whichever way it came: places count, and so do all bytes.
struct Contents {
  std::uint64_t labels = 0;
  double total = 0;
  std::size_t count = 0;

  void add(const Samples& batch) {
    for (std::size_t i = 0; i != batch.size(); ++i)
      labels += (count + i) * static_cast<std::uint64_t>(batch.labels[i]);
    for (const float x : batch.inputs) total += x;
    count += batch.size();
  }
};

/// loader.py, if PyTorch is here.
class TorchLoader {
 public:
  TorchLoader(const std::string& folder, std::size_t samples)
      : peer_(LOCKSTEP_SOURCE_DIR "/bench/loader/loader.py", {folder, std::to_string(samples)}),
        samples_(static_cast<double>(samples)) {}

  bool knows(const Case& asked) const {
    if (!peer_.is_there()) return false;
    if (asked.batched && (asked.transform || asked.source == "lmdb")) return false;
    return asked.source != "lmdb" || peer_.hello()["lmdb"].is_string();
  }
  std::string text() const {
    if (!peer_.is_there()) return "no PyTorch here: its columns stay empty";
    const auto& lmdb = peer_.hello()["lmdb"];
    return "PyTorch " + peer_.hello()["torch"].get<std::string>() + ", numpy " +
           peer_.hello()["numpy"].get<std::string>() +
           (lmdb.is_string() ? ", lmdb " + lmdb.get<std::string>() : ", no lmdb");
  }

  /// Seconds of an epoch. Where every image is changed, an eighth of it is enough to know.
  double run(const Case& asked, std::uint64_t epoch) {
    const nlohmann::json said = ask(asked, epoch, asked.transform ? 8 : 1, false);
    return said["seconds"].get<double>() * samples_ / said["count"].get<double>();
  }
  Contents contents(const Case& asked, std::uint64_t epoch) {
    const nlohmann::json said = ask(asked, epoch, 1, true);
    return {said["labels"], said["total"], said["count"]};
  }

 private:
  nlohmann::json ask(const Case& asked, std::uint64_t epoch, int world, bool check) {
    return peer_.ask(nlohmann::json{
        {"source", asked.source},
        {"transform", asked.transform},
        {"batch", asked.batch},
        {"workers", asked.workers},
        {"batched", asked.batched},
        {"epoch", epoch},
        {"world", world},
        {"check", check}}.dump());
  }
  PythonPeer peer_;
  double samples_;
};

}  // namespace bench
