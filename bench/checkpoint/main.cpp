// SPDX-License-Identifier: Apache-2.0
// Saving and loading GPT-2's tensors with AdamW's states: lockstep against torch.save and
// torch.load, Python's safetensors, and a plain write + fsync of as many bytes, by turns; how long
// a step waits for an asynchronous save, against the copy alone; and the memory that all this
// takes.
//
//   bench_checkpoint [--width 768] [--rounds 7] [--folder build/bench]
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "files.hpp"
#include "load.hpp"
#include "lockstep/lockstep.hpp"
#include "measure.hpp"
#include "model.hpp"
#include "options.hpp"
#include "peer.hpp"
#include "rounds.hpp"

namespace {

using namespace bench;
using Ddp = DistributedDataParallel<Gpt, World<1>, Optimizer<AdamW>>;

/// A job that trains, and everything that is saved of it as plain bytes beside it.
class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : options_(options),
        ddp_(comm_, Gpt{options.width}),
        bytes_(12 * Gpt{options.width}.elements()),
        plain_(bytes_),
        python_(options.width, "cpu") {
    if (python_.has_torch() && python_.parameters() * 12 != bytes_)
      throw std::runtime_error("peers.py has other tensors");
    std::memset(plain_.data(), 1, bytes_);
    ddp_.step(0);
    ddp_.step(0);
    std::printf("%.1f M parameters with AdamW's states, %.0f MB, %zu cores; %s\n\n",
                static_cast<double>(bytes_) / 12e6, static_cast<double>(bytes_) / 1e6, cores(),
                python_.text().c_str());
    std::fflush(stdout);
  }

  void run() {
    RatioTable table(static_cast<double>(bytes_) / (1 << 20));
    saving(table);
    loading(table, "load", [](const std::string&) {});
    loading(table, "load, file not in memory", forget_cached);
    stalling(table);
    std::printf("\n");
    memory(table);
    table.write("checkpoint");
  }

 private:
  /// A turn that writes a file anew.
  Turn writing(const std::string& name, const std::string& file, auto run) {
    return {name, run, [this, file] { std::filesystem::remove(folder_.file(file)); }};
  }
  Turn by_python(const std::string& command, const std::string& file) {
    return {command, [this, command, file] { return python_.run(command, folder_.file(file)); }};
  }

  void saving(RatioTable& table) {
    std::vector<Turn> turns = {
        writing("own", "own", [&] { return seconds_of([&] { save(ddp_, folder_.file("own")); }); }),
        writing("plain", "plain",
                [&] {
                  return seconds_of([&] { write_plainly(folder_.file("plain"), plain_.bytes()); });
                }),
    };
    const auto add = [&](const std::string& command, const std::string& file) {
      turns.push_back(
          writing(command, file, [=, this] { return python_.run(command, folder_.file(file)); }));
    };
    if (python_.has_torch()) {
      add("save_torch", "torch");
      add("save_torch_synced", "torch");
    }
    if (python_.has_safetensors()) {
      add("save_safetensors", "python");
      add("save_safetensors_synced", "python");
    }
    Results t = take_turns(turns, options_.rounds);
    table.row("save against write + fsync of as many bytes", t["own"], t["plain"], 0.9);
    table.row("save against torch.save + fsync", t["own"], t["save_torch_synced"], 1.5);
    table.row("save against torch.save, which leaves it in memory", t["own"], t["save_torch"], 1.5);
    table.row("save against safetensors.save_file + fsync", t["own"], t["save_safetensors_synced"],
              0);
    table.row("save against safetensors.save_file, in memory", t["own"], t["save_safetensors"], 0);
  }

  void loading(RatioTable& table, const std::string& what, void (*before)(const std::string&)) {
    const auto turn = [&](const std::string& name, const std::string& file, auto run) {
      return Turn{name, run, [this, before, file] { before(folder_.file(file)); }};
    };
    std::vector<Turn> turns = {
        turn("own", "own", [&] { return seconds_of([&] { load(ddp_, folder_.file("own")); }); }),
        turn("plain", "plain",
             [&] {
               return seconds_of([&] { read_plainly(folder_.file("plain"), plain_.bytes()); });
             }),
    };
    const auto add = [&](const std::string& command, const std::string& file) {
      turns.push_back(
          turn(command, file, [=, this] { return python_.run(command, folder_.file(file)); }));
    };
    if (python_.has_torch()) {
      add("load_torch", "torch");
      add("load_torch_into_job", "torch");
    }
    if (python_.has_safetensors()) {
      add("load_safetensors", "python");
      add("load_safetensors_into_job", "python");
    }
    const bool cached = what == "load";
    Results t = take_turns(turns, options_.rounds);
    table.row(what + " against torch.load", t["own"], t["load_torch"], cached ? 2 : 0);
    table.row(what + " against torch.load + load_state_dict", t["own"], t["load_torch_into_job"],
              0);
    table.row(what + " against safetensors.load_file, which maps it", t["own"],
              t["load_safetensors"], 0);
    table.row(what + " against safetensors.load_file + copy", t["own"],
              t["load_safetensors_into_job"], 0);
    table.row(what + " against read of as many bytes", t["own"], t["plain"], 0);
  }

  /// What the loop waits for, between two steps.
  void stalling(RatioTable& table) {
    Bytes copy(bytes_);
    std::memset(copy.data(), 1, bytes_);
    std::vector<double> during;
    const auto steps_while_writing = [&] {  // no turn of its own: it follows an asynchronous save
      const auto begin = Clock::now();
      ddp_.step(0);
      during.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
      saver_.finish(ddp_);
    };
    Results t = take_turns(
        {{"copy",
          [&] { return seconds_of([&] { std::memcpy(copy.data(), plain_.data(), bytes_); }); }},
         {"step", [&] { return seconds_of([&] { ddp_.step(0); }); }},
         {"stall",
          [&] {
            const double seconds = seconds_of(
                [&] { saver_.save(ddp_, folder_.file("asynchronous"), {.asynchronous = true}); });
            steps_while_writing();
            return seconds;
          }}},
        options_.rounds);
    table.row("step waits for an asynchronous save, over the copy alone", t["stall"], t["copy"],
              1.15, true);
    table.row("step while a file is written, over one undisturbed", summary(during), t["step"], 0,
              true);
  }

  void memory(RatioTable& table) {
    table.memory("memory of a save", most_memory_of([&] { save(ddp_, folder_.file("own")); }), 1);
    table.memory("memory of an asynchronous save", most_memory_of([&] {
                   Saver fresh;
                   fresh.save(ddp_, folder_.file("own"), {.asynchronous = true});
                   fresh.finish(ddp_);
                 }),
                 1);
    table.memory("memory of a load", most_memory_of([&] { load(ddp_, folder_.file("own")); }), 1);
  }

  /// Memory that `operator new` would not fill with zeros.
  class Bytes {
   public:
    explicit Bytes(std::size_t count) : count_(count), bytes_(new std::byte[count]) {}
    std::byte* data() { return bytes_.get(); }
    std::span<std::byte> bytes() { return {bytes_.get(), count_}; }

   private:
    std::size_t count_;
    std::unique_ptr<std::byte[]> bytes_;
  };

  BenchOptions options_;
  LoopbackCommunicator comm_;
  Ddp ddp_;
  Saver saver_;
  std::size_t bytes_;
  Bytes plain_;
  SavingPeer python_;
  ContestantFiles folder_{options_.folder};
};

}  // namespace

int main(int argc, char** argv) try {
  const OthersLoad others;
  Bench(parse_options(argc, argv)).run();
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench checkpoint: %s\n", error.what());
  return 1;
}
