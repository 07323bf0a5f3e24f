// SPDX-License-Identifier: Apache-2.0
// Checkpoints of several files: pieces joined, shards that are missing, swapped or of another save.
#include "lockstep/detail/checkpoint/reader.hpp"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"
#include "checkpoint/sample.hpp"

BOOST_AUTO_TEST_SUITE(checkpoint_reader)

namespace {

using namespace checkpoint;
using namespace lockstep;
using namespace lockstep::detail;

/// A tensor of this many elements, each its own number plus `salt`.
struct Values {
  std::vector<std::uint32_t> numbers;
  explicit Values(std::size_t count, std::uint32_t salt = 0) : numbers(count) {
    for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<std::uint32_t>(i) + salt;
  }
  std::span<const std::byte> part(std::size_t first, std::size_t count) const {
    return std::as_bytes(std::span(numbers).subspan(first, count));
  }
};

/// A checkpoint of rank 0's file and one shard per further rank, as a sharded job writes it: the
/// parameter `w` of 6 x 10 whole, its state `m` cut at `cuts`.
struct Sharded {
  Folder folder;
  std::string path = folder / "model.safetensors";
  Values parameter{60, 1000};
  Values state{60};
  std::vector<ShardFile> shards;

  TensorToWrite piece(std::size_t first, std::size_t count) const {
    return {piece_name("lockstep/state/w/m", first),
            ElementKind::u32,
            {count},
            state.part(first, count)};
  }

  /// Writes the pieces between the cuts, the first into the main file. `change` may spoil them.
  template <class Change>
  void write(const std::vector<std::size_t>& cuts, std::string_view token, const Change& change) {
    FileToWrite main;
    shards.clear();
    std::size_t first = 0;
    for (std::size_t rank = 0; rank <= cuts.size(); ++rank) {
      const std::size_t end = rank < cuts.size() ? cuts[rank] : 60;
      FileToWrite file;
      file.tensors.push_back(piece(first, end - first));
      change(rank, rank == 0 ? main : file);
      if (rank == 0) {
        main.tensors.push_back(file.tensors[0]);
        main.tensors.push_back({"w", ElementKind::u32, {6, 10}, parameter.part(0, 60)});
      } else {
        file.facts.add("rank", rank).add("token", token);
        const std::string name = text({"model.", token, ".rank-", rank, ".safetensors"});
        shards.push_back(write_file(folder / name, file));
      }
      first = end;
    }
    main.facts.add(index_of(shards));
    write_file(path, main);
  }
  void write(const std::vector<std::size_t>& cuts, std::string_view token = "aa") {
    write(cuts, token, [](std::size_t, FileToWrite&) {});
  }

  std::string error() const {
    return error_of([&] { CheckpointReader(path).verify(); });
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(pieces_are_one_tensor_wherever_they_are_cut) {
  for (std::uint64_t stream = 0; stream < 40; ++stream) {
    Random random{stream};
    std::vector<std::size_t> cuts(random.below(6));
    for (std::size_t& cut : cuts) cut = random.below(61);
    std::ranges::sort(cuts);
    Sharded checkpoint;
    checkpoint.write(cuts);
    const CheckpointReader reader(checkpoint.path);
    reader.verify();
    BOOST_TEST(reader.shards().size() == cuts.size());
    BOOST_TEST(reader.tensors().size() == 2u);
    const StoredTensor* const state = reader.find("lockstep/state/w/m");
    BOOST_TEST_REQUIRE(state != nullptr);
    BOOST_TEST((state->shape == std::vector<std::uint64_t>{6, 10}));
    BOOST_TEST(state->pieces.size() == cuts.size() + 1);
    BOOST_TEST((state->kind() == ElementKind::u32));
    for (int i = 0; i < 30; ++i) {
      const std::size_t first = random.below(61);
      std::vector<std::uint32_t> part(random.below(61 - first));
      reader.read(*state, first, part.size(), reinterpret_cast<std::byte*>(part.data()));
      BOOST_TEST(std::ranges::equal(std::as_bytes(std::span(part)),
                                    checkpoint.state.part(first, part.size())));
    }
    BOOST_TEST(!error_of([&] { reader.read(*state, 60, 1, nullptr); }).empty());
    BOOST_TEST(!error_of([&] { reader.read(*state, ~std::uint64_t{0}, 2, nullptr); }).empty());
  }
}

BOOST_AUTO_TEST_CASE(a_shard_that_is_missing_is_named) {
  Sharded checkpoint;
  checkpoint.write({20, 40});
  fs::remove(checkpoint.folder / checkpoint.shards[1].name);
  const std::string error = checkpoint.error();
  BOOST_TEST(holds(error, "model.safetensors' is not whole: "), error);
  BOOST_TEST(holds(error, "model.aa.rank-2.safetensors' cannot be read: No such file"), error);
  BOOST_TEST(holds(error, "; bring all its files into one folder"), error);
}

BOOST_AUTO_TEST_CASE(shards_that_are_swapped_are_found) {
  Sharded checkpoint;
  checkpoint.write({20, 40});
  const std::string a = checkpoint.folder / checkpoint.shards[0].name;
  const std::string b = checkpoint.folder / checkpoint.shards[1].name;
  fs::rename(a, a + ".kept");
  fs::rename(b, a);
  fs::rename(a + ".kept", b);
  BOOST_TEST(
      holds(checkpoint.error(), "rank-1.safetensors' is not the one that was saved with it"));
}

BOOST_AUTO_TEST_CASE(a_shard_of_another_save_is_found) {
  Sharded checkpoint;
  checkpoint.write({20, 40}, "aa");
  const ShardFile old = checkpoint.shards[0];
  checkpoint.state = Values(60, 7);
  checkpoint.write({20, 40}, "bb");
  const std::string newer = checkpoint.folder / checkpoint.shards[0].name;
  BOOST_TEST(checkpoint.error() == "");
  BOOST_TEST(fs::file_size(newer) == old.bytes);
  fs::rename(checkpoint.folder / old.name, newer);
  BOOST_TEST(
      holds(checkpoint.error(), "rank-1.safetensors' is not the one that was saved with it"));
}

BOOST_AUTO_TEST_CASE(damage_within_a_shard_is_found_and_named) {
  Sharded checkpoint;
  checkpoint.write({20, 40});
  const std::string path = checkpoint.folder / checkpoint.shards[0].name;
  const std::string bytes = content(path);
  Random random{5};
  for (int i = 0; i < 200; ++i) {
    std::string flipped = bytes;
    const std::size_t bit = random.below(8 * bytes.size());
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    put(path, flipped);
    BOOST_TEST(holds(checkpoint.error(), "rank-1.safetensors"), "bit " << bit);
  }
  for (std::size_t size = 0; size < bytes.size(); size += 64) {
    put(path, std::string_view(bytes).substr(0, size));
    BOOST_TEST(holds(checkpoint.error(), "rank-1.safetensors"), "cut at " << size);
  }
  put(path, bytes);
  BOOST_TEST(checkpoint.error() == "");
}

BOOST_AUTO_TEST_CASE(pieces_that_do_not_fit_are_rejected) {
  const auto error = [](const auto& spoil) {
    Sharded checkpoint;
    checkpoint.write({20, 40}, "aa", [&](std::size_t rank, FileToWrite& file) {
      if (rank == 1) spoil(checkpoint, file);
    });
    return checkpoint.error();
  };
  BOOST_TEST(error([](auto&, FileToWrite&) {}) == "");
  const auto replace = [](std::size_t first, std::size_t count) {
    return [=](Sharded& checkpoint, FileToWrite& file) {
      file.tensors[0] = checkpoint.piece(first, count);
    };
  };
  BOOST_TEST(holds(error(replace(20, 19)), "the pieces of 'lockstep/state/w/m' lack element 39"));
  BOOST_TEST(holds(error(replace(21, 19)), "lack element 20"));
  BOOST_TEST(holds(error(replace(20, 21)), "overlap at element 40"));
  BOOST_TEST(holds(error(replace(19, 21)), "overlap at element 19"));
  BOOST_TEST(holds(error(replace(0, 20)), "overlap at element 0"));
  BOOST_TEST(holds(error([](Sharded& checkpoint, FileToWrite& file) {
                     file.tensors.push_back(checkpoint.piece(59, 1));
                     file.tensors.back().name = piece_name("lockstep/state/w/m", 60);
                   }),
                   "have 61 elements of 60"));
  BOOST_TEST(
      holds(error([](Sharded&, FileToWrite& file) { file.tensors[0].kind = ElementKind::i32; }),
            "have different types"));
  BOOST_TEST(holds(error([](Sharded& checkpoint, FileToWrite& file) {
                     file.tensors.push_back(checkpoint.piece(0, 60));
                     file.tensors.back().name = "w";
                   }),
                   "'w' is in '"));
  BOOST_TEST(holds(error([](Sharded& checkpoint, FileToWrite& file) {
                     file.tensors.push_back(checkpoint.piece(0, 60));
                     file.tensors.back().name = "lockstep/state/v/m@0";
                   }),
                   "nothing says how large 'lockstep/state/v/m' is"));
}

BOOST_AUTO_TEST_CASE(shapes_come_from_the_facts_too) {
  const Folder folder;
  const Values values(12);
  FileToWrite file;
  file.tensors.push_back({"v@0", ElementKind::u32, {5}, values.part(0, 5)});
  file.tensors.push_back({"v@5", ElementKind::u32, {7}, values.part(5, 7)});
  file.tensors.push_back({"u@5", ElementKind::u32, {7}, values.part(5, 7)});
  file.facts = JsonLine(R"("shapes":{"v":[3,4]})");
  write_file(folder / "a", file);
  const CheckpointReader reader(folder / "a");
  BOOST_TEST((reader.find("v")->shape == std::vector<std::uint64_t>{3, 4}));
  BOOST_TEST(reader.find("u@5") != nullptr);  // nothing says that this is a piece
  const auto shape = [&](std::string_view shape) {
    file.facts = JsonLine(text({R"("shapes":{"v":)", shape, "}"}));
    write_file(folder / "a", file);
    return error_of([&] { CheckpointReader{folder / "a"}; });
  };
  BOOST_TEST(holds(shape("[13]"), "have 12 elements of 13"));
  BOOST_TEST(holds(shape("[1099511627776,1099511627776]"), "is too large"));
  BOOST_TEST(holds(shape("\"x\""), "shapes.v is a text instead of an array"));
}

BOOST_AUTO_TEST_CASE(parameters_may_be_named_like_pieces) {
  const Folder folder;
  const Values values(4);
  FileToWrite file;
  for (const char* name : {"w", "w@2", "lockstep/buffer/0/w@2", "lockstep/state/w@2/m"})
    file.tensors.push_back({name, ElementKind::u32, {4}, values.part(0, 4)});
  file.tensors.push_back({"lockstep/buffer/1/w@0", ElementKind::u32, {3}, values.part(0, 3)});
  file.tensors.push_back({"lockstep/buffer/1/w@3", ElementKind::u32, {1}, values.part(3, 1)});
  write_file(folder / "a", file);
  const CheckpointReader reader(folder / "a");
  for (const char* name :
       {"w", "w@2", "lockstep/buffer/0/w@2", "lockstep/state/w@2/m", "lockstep/buffer/1/w"})
    BOOST_TEST((reader.find(name) != nullptr && reader.find(name)->count == 4), name);
  BOOST_TEST(reader.tensors().size() == 5u);
}

BOOST_AUTO_TEST_SUITE_END()
