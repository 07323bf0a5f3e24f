// SPDX-License-Identifier: Apache-2.0
// Loading across shapes of jobs, by other names and types; saving while training goes on; what is
// rejected, and that it changes nothing.
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/checkpoint/job.hpp"
#include "lockstep/detail/checkpoint/safetensors.hpp"
#include "lockstep/detail/checkpoint/values.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/checkpoint_case.hpp"

namespace {
/// How long a sync, and the first read of a large part of a file, take in this process.
std::atomic<int> sync_milliseconds{0};
std::atomic<int> read_milliseconds{0};
}  // namespace

// The C library's are behind these, which the program finds first.
extern "C" int fsync(int file) {
  if (const int slow = sync_milliseconds.load(); slow != 0) ::usleep(1000U * slow);
  return static_cast<int>(::syscall(SYS_fsync, file));
}
extern "C" ssize_t pread(int file, void* to, size_t bytes, off_t place) {
  if (const int slow = read_milliseconds.exchange(0); slow != 0) ::usleep(1000U * slow);
  return ::syscall(SYS_pread64, file, to, bytes, place);
}

BOOST_AUTO_TEST_SUITE(checkpoints_that_are_loaded)

namespace {

using namespace checkpoints;

using Copies = DistributedDataParallel<Ledger, Optimizer<AdamW>, Accumulate<2>,
                                       Sharding<Replicated>, Buckets<BucketLimits{100, 200}>>;

/// Something else in every number.
void disturb(auto& job, std::size_t rank) {
  job.optimizer().lr = 0.5;
  for (std::size_t s = 30; s < 34; ++s) job.step(entry_of(rank, s));
}

void disturb_replicas(auto& job, std::size_t replicas) {
  Entries batch;
  for (std::size_t r = 0; r < replicas; ++r) batch.all.push_back(entry_of(r, 31));
  for (int s = 0; s < 3; ++s) job.step(batch);
}

/// Loads what the last job has saved, and saves it again.
template <class Job>
void hand_on(std::size_t world, const std::string& from, const std::string& to) {
  all_well(world, [&](Shared& comm) {
    Job job(comm);
    disturb(job, comm.rank().value());
    const LoadReport report = load(job, from);
    require(report.missing.empty() && report.unexpected.empty(), "all names");
    require(job.updates() == 3 && job.optimizer().lr == 0.03, "counts and numbers");
    save(job, to);
  });
}

void require_same_tensors(const std::string& one, const std::string& other) {
  const auto first = tensors_of(one);
  const auto second = tensors_of(other);
  BOOST_TEST(first.size() == second.size());
  for (const auto& [name, bytes] : first) {
    const auto found = second.find(name);
    BOOST_TEST_REQUIRE((found != second.end()), name << " is missing in " << other);
    BOOST_TEST((found->second == bytes), name << " differs in " << other);
  }
}

std::size_t shards_of(const std::string& path) {
  return detail::CheckpointReader(path).shards().size();
}

/// The file of a shared job on two ranks after three updates.
void save_three_updates(const std::string& path, std::size_t world = 2) {
  all_well(world, [&](Shared& comm) {
    SharedAdam job(comm);
    job.optimizer().lr = 0.03;
    for (std::size_t s = 0; s < 6; ++s) job.step(entry_of(comm.rank().value(), s));
    save(job, path);
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(files_are_handed_on_from_shape_to_shape_with_the_same_bits) {
  const Folder folder;
  save_three_updates(folder / "0.safetensors", 1);
  hand_on<Copies>(2, folder / "0.safetensors", folder / "1.safetensors");
  hand_on<SharedAdam>(4, folder / "1.safetensors", folder / "2.safetensors");
  hand_on<SharedAdam>(2, folder / "2.safetensors", folder / "3.safetensors");
  hand_on<Copies>(1, folder / "3.safetensors", folder / "4.safetensors");
  hand_on<SharedAdam>(1, folder / "4.safetensors", folder / "5.safetensors");
  for (const char* name : {"1", "2", "3", "4", "5"})
    require_same_tensors(folder / "0.safetensors", folder / (std::string(name) + ".safetensors"));
  // Only states that ranks share in slices take files of their own: in the worlds of 4 and 2.
  for (const char* name : {"0", "1", "4", "5"})
    BOOST_TEST(shards_of(folder / (std::string(name) + ".safetensors")) == 0u);
  BOOST_TEST(shards_of(folder / "2.safetensors") > 1u);
  BOOST_TEST(shards_of(folder / "3.safetensors") == 1u);
  BOOST_TEST(folder.files().size() == 6u + shards_of(folder / "2.safetensors") + 1u);
}

namespace {

using Replicas = DataParallel<Ledger, Optimizer<AdamW>, Accumulate<2>>;
using ReplicasWithCopies =
    DataParallel<Ledger, Optimizer<AdamW>, Accumulate<2>, Sharding<Replicated>>;

/// What ranks have as batch `step`, as one batch.
Entries entries_of(std::size_t replicas, std::size_t step) {
  Entries entries;
  for (std::size_t r = 0; r < replicas; ++r) entries.all.push_back(entry_of(r, step));
  return entries;
}

/// Ranks are saved; replicas go on and save too; then ranks go on from the replicas' file. All end
/// with the bits of ranks that were never stopped.
template <class Dp, class Ddp>
void between_strategies(std::size_t world) {
  const Folder folder;
  const auto path = [&](const char* name) { return folder / (std::string(name) + ".safetensors"); };
  all_well(world, [&](Shared& comm) {
    Ddp job(comm);
    job.optimizer().lr = 0.03;
    for (std::size_t s = 0; s < 8; ++s) {
      job.step(entry_of(comm.rank().value(), s));
      if (s == 1) save(job, path("ddp-2"));
      if (s == 3) save(job, path("ddp-4"));
    }
    save(job, path("ddp-8"));
  });
  {
    Dp job({.replicas = world});
    disturb_replicas(job, world);
    const Resumed resumed = resume(job, path("ddp-2"));
    BOOST_TEST(resumed.step == 1u);
    BOOST_TEST(resumed.notes.empty());
    for (std::size_t s = 2; s < 8; ++s) {
      job.step(entries_of(world, s));
      if (s == 3) {
        Saver saver;
        saver.save(job, path("dp-4"), {.asynchronous = true});
        saver.finish(job);
        save(job, path("dp-4-at-once"));
      }
    }
    save(job, path("dp-8"));
    Dp again({.replicas = world});
    disturb_replicas(again, world);
    load(again, path("dp-8"));
    save(again, path("dp-again"));
  }
  all_well(world, [&](Shared& comm) {
    Ddp job(comm);
    disturb(job, comm.rank().value());
    resume(job, path("dp-4"));
    for (std::size_t s = 4; s < 8; ++s) job.step(entry_of(comm.rank().value(), s));
    save(job, path("back-8"));
  });
  require_same_tensors(path("dp-4"), path("ddp-4"));
  require_same_tensors(path("dp-4"), path("dp-4-at-once"));
  for (const char* name : {"dp-8", "dp-again", "back-8"})
    require_same_tensors(path("ddp-8"), path(name));
  for (const char* name : {"dp-4", "dp-8"}) BOOST_TEST(shards_of(path(name)) == 0u);
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_and_replicas_go_on_from_each_others_files_with_the_same_bits) {
  between_strategies<Replicas, SharedAdam>(1);
  between_strategies<Replicas, SharedAdam>(2);
  between_strategies<ReplicasWithCopies, SharedAdam>(3);
  between_strategies<Replicas, SharedAdam>(4);
}

BOOST_AUTO_TEST_CASE(rank_zeros_file_is_whole_and_a_new_one_replaces_all_files) {
  const Folder folder;
  const std::string path = folder / "model.safetensors";
  save_three_updates(path, 4);
  const detail::SafetensorsFile first(path);
  for (const char* name : {"a", "b", "c", "seen"})
    BOOST_TEST((first.find(name) != nullptr), name << " is not in rank 0's file");
  BOOST_TEST(*first.metadata("format") == "pt");
  BOOST_TEST(folder.files().size() == 1u + shards_of(path));
  save_three_updates(path, 2);
  BOOST_TEST(folder.files().size() == 2u);
  // A file that another name is linked to keeps its parts.
  std::filesystem::create_hard_link(path, folder / "best.safetensors");
  save_three_updates(path, 2);
  BOOST_TEST(folder.files().size() == 4u);
  BOOST_TEST(tensors_of(folder / "best.safetensors").size() == tensors_of(path).size());
}

BOOST_AUTO_TEST_CASE(names_are_translated_and_what_is_missing_is_reported) {
  const Folder folder;
  const std::string path = folder / "python.safetensors";
  std::vector<float> a(40, 1.5F);
  std::vector<double> b(70, 2.5);
  std::vector<double> c(3, 3.5);
  detail::FileToWrite file;
  const auto add = [&](const char* name, ElementKind kind, const auto& values) {
    file.tensors.push_back({name, kind, {values.size()}, std::as_bytes(std::span(values))});
  };
  add("module.a", ElementKind::f32, a);
  add("module.b", ElementKind::f64, b);
  add("head", ElementKind::f64, c);
  detail::write_file(path, file);
  for (const std::size_t world : {1, 2}) {
    all_well(world, [&](Shared& comm) {
      SharedAdam job(comm);
      disturb(job, comm.rank().value());
      const std::uint64_t before = bits_of(job);
      const auto strip = [](std::string_view name) {
        return std::string(name.starts_with("module.") ? name.substr(7) : name);
      };
      require_words(message_of([&] { load_parameters(job, path); }),
                    "load_parameters: '" + path +
                        "' does not fit this job: missing in the file: a, b, c, seen; unexpected "
                        "in the file: head, module.a, module.b; load a file of the same model");
      require_words(
          message_of([&] { load_parameters(job, path, {.strict = false, .rename = strip}); }),
          "type mismatch for module.b: F64 in the file, float in the job (.convert = "
          "true rounds it)");
      require_words(
          message_of([&] { load_parameters(job, path, {.rename = [](auto) { return "a"; }}); }),
          "become 'a'");
      require(bits_of(job) == before, "a file that does not fit has changed the job");
      const LoadReport report =
          load_parameters(job, path, {.strict = false, .rename = strip, .convert = true});
      require(report.missing == std::vector<std::string>{"c", "seen"}, "what is missing");
      require(report.unexpected == std::vector<std::string>{"head"}, "what is unexpected");
      require(value(job, 0, 39) == 1.5 && value(job, 1, 69) == 2.5, "the values of the file");
      require(job.optimizer().lr == 0.5 && job.updates() == 2, "the optimizer stays as it is");
      require_words(message_of([&] { load(job, path, {.strict = false}); }),
                    "call load_parameters");
    });
  }
}

BOOST_AUTO_TEST_CASE(names_that_differ_in_a_control_character_look_different_in_a_message) {
  const Folder folder;
  const std::string path = folder / "strange.safetensors";
  std::vector<double> values(40, 1.5);
  detail::FileToWrite file;
  for (const std::string& name : {std::string("a\0", 2), std::string("b\n\x1b[1m")})
    file.tensors.push_back(
        {name, ElementKind::f64, {values.size()}, std::as_bytes(std::span(values))});
  detail::write_file(path, file);
  all_well(1, [&](Shared& comm) {
    SharedAdam job(comm);
    require_words(message_of([&] { load_parameters(job, path); }),
                  "missing in the file: a, b, c, seen; unexpected in the file: a\\x00, "
                  "b\\x0a\\x1b[1m; load a file");
  });
}

std::string bytes_of_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

BOOST_AUTO_TEST_CASE(files_of_parameters_alone_are_the_same_bytes_for_the_same_parameters) {
  const Folder folder;
  const std::string first = folder / "first.safetensors";
  all_well(2, [&](Shared& comm) {
    SharedAdam job(comm);
    for (std::size_t s = 0; s < 6; ++s) job.step(entry_of(comm.rank().value(), s));
    save(job, first, {.parameters_only = true, .epoch = 3, .best = 0.5});
    require_words(message_of([&] { resume(job, first); }),
                  "resume: '" + first +
                      "' is a file of parameters and buffers only, and has no training state; "
                      "call load_parameters");
    require_words(message_of([&] { load(job, first); }),
                  "load: '" + first + "' is a file of param");
  });
  const std::string bytes = bytes_of_file(first);
  BOOST_TEST_REQUIRE(bytes.size() > 8u);
  // Other jobs, which have come to the same parameters in another way and at another time.
  const auto check = [&]<class Job>(std::type_identity<Job>, std::size_t world) {
    const std::string path = folder / "other.safetensors";
    all_well(world, [&](Shared& comm) {
      Job job(comm);
      disturb(job, comm.rank().value());
      load_parameters(job, first);
      save(job, path, {.parameters_only = true, .epoch = 7});
      Saver saver;
      saver.save(job, path + "-later", {.asynchronous = true, .parameters_only = true});
      saver.finish(job);
    });
    BOOST_TEST((bytes_of_file(path) == bytes), "other bytes on " << world << " ranks");
    BOOST_TEST((bytes_of_file(path + "-later") == bytes), "other bytes on " << world << " ranks");
  };
  for (const std::size_t world : {1, 2, 4}) {
    check(std::type_identity<SharedAdam>{}, world);
    check(std::type_identity<Copies>{}, world);
  }
}

/// A file that Python's safetensors has written.
struct FromPython {
  using Parameters =
      ParameterList<Parameter<"fc1.weight", float, 4, 3>, Parameter<"fc1.bias", double, 4>,
                    Parameter<"half", BFloat16, 5>>;
  using Buffers = BufferList<Buffer<"step", std::int64_t, 1>>;
};

BOOST_AUTO_TEST_CASE(a_file_of_pythons_is_loaded_into_a_model) {
  const char* const given = std::getenv("LOCKSTEP_REFERENCE");
  const std::string path =
      (given != nullptr ? std::string(given) : LOCKSTEP_SOURCE_DIR "/tests/reference") +
      "/python.safetensors";
  LoopbackCommunicator nobody;
  DistributedDataParallel<FromPython, World<1>> job(nobody);
  const LoadReport report = load_parameters(job, path, {.strict = false});
  BOOST_TEST(report.missing.empty());
  BOOST_TEST(report.unexpected == std::vector<std::string>{"empty"},
             boost::test_tools::per_element());
  std::ifstream in(path, std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(in), {}};
  // The file's header gives the offsets of its tensors.
  std::uint64_t header = 0;
  std::memcpy(&header, all.data(), sizeof header);
  const auto same = [&](std::size_t begin, const auto& view) {
    BOOST_TEST(std::memcmp(all.data() + 8 + header + begin, view.data_handle(),
                           view.size() * sizeof(*view.data_handle())) == 0);
  };
  same(0, job.buffer("step"_p));
  same(8, job.param("fc1.bias"_p));
  same(40, job.param("fc1.weight"_p));
  same(88, job.param("half"_p));
  BOOST_TEST(message_of([&] { load(job, path); }).find("call load_parameters") !=
             std::string::npos);
}

BOOST_AUTO_TEST_CASE(values_of_the_program_come_back_to_their_ranks) {
  const Folder folder;
  const std::string path = folder / "values.safetensors";
  using Job = SharedAdam;
  all_well(2, [&](Shared& comm) {
    Job job(comm);
    const auto me = static_cast<double>(comm.rank().value());
    double reward = 0.1 + me;
    float rate = 0.3F;
    std::int64_t count = -7;
    std::uint64_t large = ~std::uint64_t{0};
    bool done = true;
    std::string text("a \0 byte\xff", 9);
    std::vector<float> history{1.5F, static_cast<float>(me)};
    std::vector<std::uint8_t> none;
    RandomStream noise(Seed{3}, 5);
    noise.normal();
    std::string shared = "of rank " + std::to_string(comm.rank().value());
    save(job, path,
         {.values = {{"reward", reward},
                     {"rate", rate},
                     {"count", count},
                     {"large", large},
                     {"done", done},
                     {"text", text},
                     {"history", history},
                     {"none", none},
                     {"noise", noise}},
          .common = {{"shared", shared}}});
    double reward2 = 0;
    float rate2 = 0;
    std::int64_t count2 = 0;
    std::uint64_t large2 = 0;
    bool done2 = false;
    std::string text2 = "other";
    std::vector<float> history2(9);
    std::vector<std::uint8_t> none2(3);
    RandomStream noise2(Seed{0});
    std::string shared2;
    const Resumed resumed = resume(job, path,
                                   {.values = {{"noise", noise2},
                                               {"none", none2},
                                               {"history", history2},
                                               {"text", text2},
                                               {"done", done2},
                                               {"large", large2},
                                               {"count", count2},
                                               {"rate", rate2},
                                               {"reward", reward2}},
                                    .common = {{"shared", shared2}}});
    require(resumed.notes.empty(), "nothing to note");
    require(reward2 == reward && rate2 == rate && count2 == count && large2 == large && done2 &&
                text2 == text && history2 == history && none2.empty() && noise2() == noise() &&
                shared2 == "of rank 0",
            "values");
    float wrong = 8;
    int strange = 9;
    const std::uint64_t before = bits_of(job);
    require_words(message_of([&] {
                    resume(job, path, {.values = {{"reward", wrong}, {"strange", strange}}});
                  }),
                  "missing in the file: the value strange of rank 0, the value strange of rank 1; "
                  "type mismatch for the value reward is double in the file and float here");
    require(wrong == 8 && bits_of(job) == before, "values that do not fit change nothing");
    const Resumed some = resume(job, path, {.strict = false, .values = {{"strange", strange}}});
    require(strange == 9 && some.report.missing.size() == 2 && some.notes.size() == 10, "notes");
    require_words(message_of([&] { StateValues({{"x", reward}, {"x", rate}}); }), "the name x");
  });
  all_well(3, [&](Shared& comm) {
    Job job(comm);
    double reward = -1;
    std::string shared;
    const Resumed resumed =
        resume(job, path, {.values = {{"reward", reward}}, .common = {{"shared", shared}}});
    const std::size_t me = comm.rank().value();
    require(reward == (me == 2 ? -1 : 0.1 + static_cast<double>(me)), "a new rank keeps its own");
    require(shared == "of rank 0", "what is common");
  });
}

// ---- While training goes on

BOOST_AUTO_TEST_CASE(an_asynchronous_save_has_the_state_at_the_call) {
  for (const std::size_t world : {1, 2, 4}) {
    const Folder folder;
    all_well(world, [&](Shared& comm) {
      const std::size_t me = comm.rank().value();
      SharedAdam job(comm);
      std::vector<std::uint64_t> bits;
      {
        Saver saver;
        for (std::size_t s = 0; s < 12; ++s) {
          for (int micro = 0; micro != 2; ++micro) job.step(entry_of(me, s));
          const std::string path = folder / (std::to_string(s) + ".safetensors");
          saver.save(job, path, {.asynchronous = true, .epoch = s});
          bits.push_back(bits_of(job));
        }
        saver.finish(job);
        saver.finish(job);
      }
      for (std::size_t s = 0; s < 12; s += 3) {
        SharedAdam other(comm);
        disturb(other, me);
        const Resumed resumed = resume(other, folder / (std::to_string(s) + ".safetensors"));
        require(resumed.epoch == s && bits_of(other) == bits[s], "the state at the call");
      }
    });
  }
}

namespace {

/// A job without a model, whose copies come when it is told so.
struct SlowJob final : detail::StatefulJob {
  SlowJob() : StatefulJob({Rank{0}, 1, gather}) { is_one_process = true; }
  static std::vector<std::string> gather(std::string text) { return {std::move(text)}; }

  std::vector<detail::StateEntry> entries(detail::StateUse) const override {
    detail::StateEntry entry;
    entry.name = "x";
    entry.whole = {ElementKind::f32, 1, {1}};
    entry.hold(std::span<float>(number));
    return {entry};
  }
  detail::ReplicaProgress progress() const override { return {}; }
  void set_progress(const detail::ReplicaProgress&) const override {}
  void synchronize_buffers() const override {}
  std::shared_ptr<std::byte> make_memory(std::size_t bytes) const override {
    const auto memory = std::make_shared<HostArena>(bytes);
    return {memory, memory->data()};
  }
  void copy_out(std::span<const detail::StateCopy> copies) const override {
    for (const auto& copy : copies) std::memcpy(copy.to, copy.piece.data, sizeof(float));
  }
  void copy_in(const detail::StateEntry&, const std::byte*) const override {}
  std::function<void()> copies_waiter() const override {
    return [this] {
      while (!has_copied) detail::sleep_for(std::chrono::milliseconds(1));
    };
  }
  void abort(const char*) const override {}

  std::atomic<bool> has_copied = false;
  mutable float number[1] = {1};
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_save_waits_for_the_one_before_it) {
  const Watchdog watchdog;
  const Folder folder;
  SlowJob job;
  Saver saver;
  saver.save(job, folder / "first.safetensors", {.asynchronous = true});
  BOOST_TEST(saver.is_busy());
  job.number[0] = 2;
  job.has_copied = true;
  saver.save(job, folder / "second.safetensors", {.asynchronous = true});
  saver.finish(job);
  const float one = 1;
  const float two = 2;
  const auto tensor = [&](const char* name) { return tensors_of(folder / name).at("x"); };
  const auto text = [](const float& number) {
    return "[1]" + std::string(reinterpret_cast<const char*>(&number), sizeof number);
  };
  BOOST_TEST(tensor("first.safetensors") == text(one));
  BOOST_TEST(tensor("second.safetensors") == text(two));
  BOOST_TEST(folder.files().size() == 2u);
}

BOOST_AUTO_TEST_CASE(a_failure_of_one_ranks_part_is_told_to_all_and_the_job_goes_on) {
  for (const bool asynchronous : {false, true}) {
    for (const std::size_t failing : {0, 1}) {
      const Folder folder;
      std::filesystem::create_directories(folder / "gone");
      all_well(2, [&](Shared& comm) {
        const std::size_t me = comm.rank().value();
        SharedAdam job(comm);
        Saver saver;
        // One rank's folder is taken away under it.
        std::filesystem::current_path(me == failing ? folder / "gone" : folder.path);
        if (me == failing) std::filesystem::remove(folder / "gone");
        const std::string words = message_of([&] {
          saver.save(job, "part.safetensors", {.asynchronous = asynchronous});
          saver.finish(job);
        });
        require_words(words, "rank " + std::to_string(failing) + ", ");
        require_words(words, "part.");
        std::filesystem::current_path(folder.path);
        for (int micro = 0; micro != 2; ++micro) job.step(entry_of(me, 1));
        const std::string path = folder / "whole.safetensors";
        saver.save(job, path, {.asynchronous = asynchronous});
        saver.finish(job);
        const std::uint64_t bits = bits_of(job);
        load(job, path);
        require(bits_of(job) == bits, "what was saved after the failure");
      });
      // Rank 0 removes the parts of a save that has failed, unless its folder is gone.
      if (!asynchronous) BOOST_TEST(folder.files().size() == (failing == 0 ? 3u : 2u));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_job_that_has_gone_back_to_an_older_state_saves_in_time) {
  const Folder folder;
  const std::string run = folder / "run";
  all_well(2, [&](Shared& comm) {
    SharedAdam job(comm);
    Checkpoints checkpoints(
        job, {.folder = run, .every_steps = 2, .keep = keep_all, .asynchronous = false});
    const auto update = [&] {
      for (int micro = 0; micro != 2; ++micro) job.step(entry_of(comm.rank().value(), 1));
      checkpoints.step(job);
    };
    for (int i = 0; i != 6; ++i) update();
    require(job.updates() == 6, "other updates");
    load(job, run + "/step-000000000002.safetensors");
    comm.barrier();
    if (comm.rank() == Rank{0}) std::filesystem::remove(run + "/step-000000000004.safetensors");
    for (int i = 0; i != 2; ++i) update();
    require(job.updates() == 4, "other updates after going back");
  });
  BOOST_TEST(std::filesystem::exists(run + "/step-000000000004.safetensors"));
}

BOOST_AUTO_TEST_CASE(a_failure_is_also_thrown_by_the_next_save) {
  const Folder folder;
  all_well(2, [&](Shared& comm) {
    SharedAdam job(comm);
    Saver saver;
    saver.save(job, folder / "none/x.safetensors", {.asynchronous = true});
    while (saver.is_busy()) detail::sleep_for(std::chrono::milliseconds(1));
    const std::string words =
        message_of([&] { saver.save(job, folder / "y.safetensors", {.asynchronous = true}); });
    require_words(words, "none/x.");
    saver.finish(job);
  });
  BOOST_TEST(folder.files().empty());
}

// ---- Slow storage

/// Every rank must come through, though calls between ranks may take no longer than that.
void all_well_within(std::chrono::milliseconds limit, std::size_t world, auto f) {
  const Ends ends = ranks::run_processes(world, limit, f);
  for (std::size_t r = 0; r < world; ++r)
    BOOST_TEST(ends[r] == "", "rank " << r << " of " << world << ": " << ends[r]);
}

BOOST_AUTO_TEST_CASE(a_disk_slower_than_the_limit_of_calls_ends_no_job) {
  const Folder folder;
  const std::string quick = folder / "quick.safetensors";
  save_three_updates(quick);
  for (const std::size_t world : {2, 4}) {
    const std::string slow = folder / (std::to_string(world) + ".safetensors");
    all_well_within(std::chrono::seconds(1), world, [&](Shared& comm) {
      SharedAdam job(comm);
      // Another rank's disk than the first one's, too: states are saved in files of all ranks.
      const bool is_slow = comm.rank() == Rank{0} || comm.rank() == Rank{1};
      if (is_slow) read_milliseconds = 1500;
      load(job, quick);
      if (is_slow) sync_milliseconds = 700;  // a file and its folder are synced
      if (world == 4) return save(job, slow);
      Saver saver;
      saver.save(job, slow, {.asynchronous = true});
      for (const std::size_t s : {1, 2}) job.step(entry_of(comm.rank().value(), s));
      saver.save(job, slow + "-later", {.asynchronous = true});  // waits for the one before
      saver.finish(job);
    });
    require_same_tensors(slow, quick);
    for (const auto& entry : std::filesystem::directory_iterator(folder.path))
      BOOST_TEST(entry.path().string().find(".tmp-") == std::string::npos, entry.path());
  }
}

BOOST_AUTO_TEST_CASE(storage_without_any_progress_is_an_error_on_all_ranks_that_leaves_nothing) {
  const Folder folder;
  const detail::StoragePatience patience{std::chrono::milliseconds(20),
                                         std::chrono::milliseconds(100), std::chrono::seconds(1)};
  for (const std::size_t world : {2, 4}) {
    const ranks::Common<std::atomic<std::size_t>> over;
    all_well_within(std::chrono::seconds(2), world, [&](Shared& comm) {
      require(std::freopen((folder / "words").c_str(), "a", stderr) != nullptr, "no words");
      std::setvbuf(stderr, nullptr, _IONBF, 0);
      const auto gather = [&](std::string text) {
        return all_gather_objects(comm, std::move(text));
      };
      const detail::JointRanks ranks{comm.rank(), world, gather};
      const auto slow = [&] {  // and not dead
        for (int i = 0; comm.rank() == Rank{0} && i < 25; ++i) {
          ::usleep(100'000);
          detail::note_storage_progress();
        }
        return std::string("done");
      };
      require(detail::store_together(ranks, "save", slow, patience) ==
                  std::vector<std::string>(world, "done"),
              "other results");
      const auto dead = [&] {
        if (comm.rank() != Rank{0}) return std::string();
        const detail::TemporaryFile file("save", folder / "file", 8);
        while (*over + 1 != world) ::usleep(10'000);  // until the others have given up
        return std::string();
      };
      require_words(
          message_of([&] { detail::store_together(ranks, "save", dead, patience); }),
          "rank 0, save: its storage has made no progress for 1 s; see whether the disk or its "
          "server still answers");
      if (comm.rank() == Rank{0}) return;
      const auto files = [&] {
        return std::distance(std::filesystem::directory_iterator(folder.path), {});
      };
      for (int i = 0; files() != 1; ++i) {  // the words
        require(i < 1000, "a temporary file stays");
        ::usleep(10'000);
      }
      ++*over;
    });
  }
  std::ifstream words(folder / "words");
  const std::string said{std::istreambuf_iterator<char>(words), {}};
  BOOST_TEST(
      said.find("lockstep: rank 0, save: waiting for storage for 0 s; the other ranks wait") !=
          std::string::npos,
      said);
}

BOOST_AUTO_TEST_CASE(a_rank_that_ends_while_another_waits_for_its_disk_is_named) {
  const Folder folder;
  const Ends ends = ranks::run_processes(2, std::chrono::seconds(20), [&](Shared& comm) {
    SharedAdam job(comm);
    if (comm.rank() == Rank{0}) sync_milliseconds = 1000;
    if (comm.rank() == Rank{1}) {
      std::thread([] {
        ::usleep(500'000);
        ::_exit(0);
      }).detach();
    }
    save(job, folder / "file");
  });
  BOOST_TEST(ranks::tells_of_death(ends[0]), ends[0]);
}

// ---- What is rejected

BOOST_AUTO_TEST_CASE(files_that_do_not_fit_are_rejected_on_all_ranks_and_change_nothing) {
  const Folder folder;
  const std::string path = folder / "good.safetensors";
  save_three_updates(path);
  std::filesystem::create_directories(folder / "folder");
  {
    std::ofstream(folder / "words.safetensors") << "these are words, and no tensors at all";
  }
  const std::string flipped = folder / "flipped.safetensors";
  save_three_updates(flipped, 1);
  {
    std::fstream file(flipped, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-3, std::ios::end);
    const auto byte = static_cast<char>(file.get() ^ 16);
    file.seekp(-3, std::ios::end);
    file.put(byte);
  }
  for (const std::size_t world : {1, 2, 4}) {
    all_well(world, [&](Shared& comm) {
      SharedAdam job(comm);
      disturb(job, comm.rank().value());
      const std::uint64_t before = bits_of(job);
      const auto rejected = [&](const std::string& file, const std::string& words) {
        require_words(message_of([&] { load(job, file); }), words);
        require_words(message_of([&] { resume(job, file); }), words);
        require(bits_of(job) == before, file + " has changed the job");
      };
      rejected(folder / "none.safetensors", "none.safetensors'");
      rejected(folder / "folder", folder / "folder");
      rejected(folder / "words.safetensors", "words.safetensors'");
      rejected(flipped, "flipped.safetensors'");
      if (world > 1) {
        const std::string mine = folder / (comm.rank() == Rank{1} ? "good.safetensors" : "x");
        const std::string paths = "ranks were given different paths: rank 0 has '" +
                                  (folder / "x") + "' and rank 1 has '" + path + "'";
        rejected(mine, paths);
        require_words(message_of([&] { save(job, mine); }), "save: " + paths);
        require(!std::filesystem::exists(folder / "x"), "nothing was saved");
      }
      require_words(message_of([&] { save(job, folder / "no/such."); }), "no/such.");
      OwnBuffers other(comm);
      const std::uint64_t other_bits = bits_of(other);
      require_words(message_of([&] { load(other, path); }),
                    "missing in the file: lockstep/state/a/momentum_buffer, "
                    "lockstep/state/b/momentum_buffer, lockstep/state/c/momentum_buffer; "
                    "unexpected in the file: lockstep/state/a/exp_avg, ");
      require(bits_of(other) == other_bits, "another optimizer's file has changed the job");
      load(other, path, {.strict = false});
      require(other.updates() == 3, "what both have");
    });
  }
}

BOOST_AUTO_TEST_SUITE_END()
