// SPDX-License-Identifier: Apache-2.0
#include "programs.hpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "compile.hpp"

namespace bench {
namespace {

/// What a user compiles, and what it may take: -O2, the processor's seconds.
struct Program {
  const char* name;
  std::filesystem::path source;
  std::vector<std::string> flags;
  double seconds;        // the target
  double megabytes = 0;  // the target, if there is one
};

std::filesystem::path include_alone(const std::filesystem::path& folder, const std::string& name,
                                    const std::string& header) {
  const auto source = folder / name;
  std::ofstream(source) << "#include <" << header << ">\nint main() {}\n";
  return source;
}

/// The folder of PyTorch's headers, if there is one.
std::optional<std::string> torch_headers() {
  const char* const programs = std::getenv("LOCKSTEP_TORCH");
  if (programs == nullptr) return std::nullopt;
  const std::string command =
      "PATH=" + std::string(programs) +
      ":$PATH python3 -c 'from importlib.util import find_spec; "
      "print(find_spec(\"torch\").submodule_search_locations[0])' 2>/dev/null";
  FILE* const output = popen(command.c_str(), "r");
  if (output == nullptr) return std::nullopt;
  char line[4096] = "";
  const bool read = std::fgets(line, sizeof line, output) != nullptr;
  if (pclose(output) != 0 || !read) return std::nullopt;
  std::string package(line);
  package.pop_back();  // the end of the line
  if (!std::filesystem::exists(package + "/include/torch/csrc/api/include/torch/torch.h"))
    return std::nullopt;
  return package + "/include";
}

}  // namespace

nlohmann::json measure_programs(const std::filesystem::path& folder) {
  const std::filesystem::path root = LOCKSTEP_SOURCE_DIR;
  const std::vector<std::string> examples = {"-I" + (root / "examples").string(), "-isystem",
                                             LOCKSTEP_EIGEN};
  const auto umbrella = include_alone(folder, "umbrella.cpp", "lockstep/lockstep.hpp");
  const std::vector<Program> programs = {
      {"README's program, header-only", root / "tests/consume/main.cpp", {}, 12, 600},
      {"README's program, compiled", root / "tests/consume/main.cpp", {"-DLOCKSTEP_COMPILED"}, 4},
      {"`lockstep/lockstep.hpp` alone, header-only", umbrella, {}, 3},
      {"`lockstep/lockstep.hpp` alone, compiled", umbrella, {"-DLOCKSTEP_COMPILED"}, 1.2},
      {"example 03, header-only", root / "examples/03_fashion_mnist.cpp", examples, 18},
  };
  nlohmann::json rows = nlohmann::json::array();
  std::printf("\n| g++ -O2 | seconds | MiB | target | met |\n|---|---|---|---|---|\n");
  const auto print = [&](const std::string& name, const Cost& cost, double seconds,
                         double megabytes) {
    const bool met = cost.seconds <= seconds && (megabytes == 0 || cost.megabytes <= megabytes);
    std::printf("| %s | %.2f | %.0f | %g s", name.c_str(), cost.seconds, cost.megabytes, seconds);
    if (megabytes != 0) std::printf(", %g MiB", megabytes);
    std::printf(" | %s |\n", met ? "yes" : "no");
    std::fflush(stdout);
    rows.push_back({{"measure", "g++ -O2 seconds: " + name},
                    {"lockstep", cost.seconds},
                    {"peer", nullptr},
                    {"ratio", nullptr},
                    {"target", seconds},
                    {"met", met}});
  };
  Cost include_all;
  for (const Program& program : programs) {
    std::vector<std::string> flags = program.flags;
    flags.insert(flags.begin(), "-O2");
    const Cost cost = compile(program.source, flags);
    print(program.name, cost, program.seconds, program.megabytes);
    if (program.source == umbrella && program.flags.empty()) include_all = cost;
  }
  const auto headers = torch_headers();
  if (!headers) {
    std::printf("| `torch/torch.h` | - (not installed) | - | | |\n");
    return rows;
  }
  const std::vector<std::string> flags = {"-O2", "-isystem", *headers, "-isystem",
                                          *headers + "/torch/csrc/api/include"};
  const Cost torch = compile(include_alone(folder, "torch.cpp", "torch/torch.h"), flags);
  std::printf("| `torch/torch.h` alone | %.2f | %.0f | | |\n", torch.seconds, torch.megabytes);
  Cost adapter = compile(include_alone(folder, "adapter.cpp", "lockstep/torch.hpp"), flags);
  adapter.seconds -= torch.seconds;
  print("`lockstep/torch.hpp`, beyond `torch/torch.h`", adapter, 5, 0);
  const double ratio = include_all.seconds / torch.seconds;
  constexpr double target = 1.0 / 8;
  std::printf("\nincluding: %.3f of PyTorch's time, target <= %.3f: %s\n", ratio, target,
              ratio <= target ? "met" : "not met");
  rows.push_back({{"measure", "#14: g++ seconds to include everything, against torch/torch.h"},
                  {"lockstep", include_all.seconds},
                  {"peer", torch.seconds},
                  {"ratio", ratio},
                  {"target", target},
                  {"met", ratio <= target}});
  return rows;
}

}  // namespace bench
