// SPDX-License-Identifier: Apache-2.0
// For random shapes, worlds and positions: a job that goes on from a file ends with the bits
// of the one that wrote it, and a file that is handed on has the same tensors.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <filesystem>
#include <string>

#include "comm/repeat.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "train/checkpoint_files.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(checkpoint_properties)

namespace {

using namespace train;
using checkpoints::Folder;
using checkpoints::tensors_of;
using Network = PlainMlp<dynamic, dynamic, dynamic>;

// The jobs of property_test.cpp, which compiles them already.
using SharedJob = DistributedDataParallel<Network, Optimizer<AdamW>, Accumulate<2>, Clip<0.3>>;
using CopiesJob =
    DistributedDataParallel<Network, Sharding<Replicated>, Buckets<BucketLimits{200, 3000}>,
                            Optimizer<AdamW>, Accumulate<2>, Clip<0.3>>;

/// One job of a chain.
struct Hop {
  std::size_t in = 1, hidden = 1, out = 2;
  std::size_t world = 1;
  As as = As::processes;
  std::size_t first = 0;    // batch
  std::size_t stop = 1;     // batches before the save
  std::size_t batches = 2;  // of this hop
  bool asynchronous = false;
  std::string from;  // nothing for the first
  std::string folder;

  Network network() const { return network_of(in, hidden, out); }
  std::string text() const {
    return std::to_string(world) + (as == As::processes ? " processes, " : " threads, ") +
           std::to_string(in) + "-" + std::to_string(hidden) + "-" + std::to_string(out) +
           ", batches from " + std::to_string(first) + ", saved after " + std::to_string(stop) +
           " of " + std::to_string(batches) + (asynchronous ? ", asynchronously" : "");
  }
};

/// Goes on from the hop before and hands its file on; trains, with a save on the way; and once more
/// from that save.
template <class Job>
void run_hop(const Hop& hop) {
  const auto path = [&](const char* name) { return hop.folder + "/" + name + ".safetensors"; };
  const Ends ends = ranks::run(hop.as, hop.world, [&](Shared& comm) {
    const auto train = [&](Job& job, std::size_t begin, std::size_t end) {
      for (std::size_t s = hop.first + begin; s < hop.first + end; ++s)
        job.step(reference_batch(3, hop.in, hop.out, s, comm.rank().value()));
    };
    Job job(comm, hop.network());
    if (!hop.from.empty()) {
      load(job, hop.from);
      save(job, path("handed-on"));
    }
    job.optimizer().lr = 0.05;
    train(job, 0, hop.stop);
    Saver saver;
    saver.save(job, path("stop"), {.asynchronous = hop.asynchronous});
    train(job, hop.stop, hop.batches);
    saver.finish(job);
    save(job, path("end"));
    Job again(comm, hop.network());
    train(again, 0, 1);
    resume(again, path("stop"));
    train(again, hop.stop, hop.batches);
    save(again, path("again"));
  });
  for (std::size_t r = 0; r < hop.world; ++r)
    BOOST_TEST(ends[r] == "", hop.text() << ": rank " << r << ": " << ends[r]);
  BOOST_TEST((tensors_of(path("end")) == tensors_of(path("again"))), hop.text() << ": other bits");
  if (!hop.from.empty())
    BOOST_TEST((tensors_of(hop.from) == tensors_of(path("handed-on"))), hop.text()
                                                                            << ": other tensors");
}

}  // namespace

BOOST_AUTO_TEST_CASE(chains_of_jobs_of_any_shape_hand_on_the_same_bits) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(2, 40); ++i) {
    const Folder folder;
    Hop hop;
    hop.in = 1 + chance(40);
    hop.hidden = 1 + chance(40);
    hop.out = 2 + chance(20);
    for (int k = 0; k < 4; ++k) {
      hop.world = 1 + chance(4);
      hop.as = chance(4) == 0 ? As::threads : As::processes;
      hop.batches = 2 * (1 + chance(3));  // whole steps, which any world can go on from
      hop.stop = 2 * chance(static_cast<unsigned>(hop.batches / 2) + 1);
      hop.asynchronous = chance(2) == 0;
      hop.folder = folder / std::to_string(k);
      std::filesystem::create_directories(hop.folder);
      if (chance(2) == 0) {
        run_hop<SharedJob>(hop);
      } else {
        run_hop<CopiesJob>(hop);
      }
      hop.from = hop.folder + "/end.safetensors";
      hop.first += hop.batches;
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
