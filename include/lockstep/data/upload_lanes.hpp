// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a replica keeps for each data set whose batches it was given.

#include <algorithm>
#include <memory>
#include <vector>

namespace lockstep::detail {

/// One lane for each data set, which is known by what its batches share, `Key`. A lane ends when
/// its data set is gone and another one comes.
template <class Lane, class Key>
class UploadLanes {
 public:
  Lane& of(const std::shared_ptr<Key>& key) {
    for (const Entry& entry : lanes_)
      if (!entry.key.owner_before(key) && !key.owner_before(entry.key)) return *entry.lane;
    std::erase_if(lanes_, [](const Entry& entry) { return entry.key.expired(); });
    lanes_.push_back({key, std::make_unique<Lane>(key)});
    return *lanes_.back().lane;
  }

 private:
  struct Entry {
    std::weak_ptr<Key> key;
    std::unique_ptr<Lane> lane;
  };
  std::vector<Entry> lanes_;
};

}  // namespace lockstep::detail
