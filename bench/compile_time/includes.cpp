// SPDX-License-Identifier: Apache-2.0
#include "includes.hpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "compile.hpp"

namespace bench {
namespace {

constexpr double target = 1.0 / 8;

Cost cost_of(const std::filesystem::path& folder, const std::string& name,
             const std::string& header, const std::vector<std::string>& flags) {
  const auto source = folder / name;
  std::ofstream(source) << "#include <" << header << ">\nint main() {}\n";
  return compile(source, flags);
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

nlohmann::json measure_includes(const std::filesystem::path& folder) {
  const auto print = [](const char* header, const Cost& cost) {
    std::printf("| `%s` | %.2f | %.0f |\n", header, cost.seconds, cost.megabytes);
    std::fflush(stdout);
  };
  std::printf("\n| nothing but | seconds | MiB |\n|---|---|---|\n");
  const Cost own = cost_of(folder, "include_lockstep.cpp", "lockstep/lockstep.hpp", {});
  print("lockstep/lockstep.hpp", own);
  nlohmann::json row{{"measure", "#14: g++ seconds to include everything, against torch/torch.h"},
                     {"lockstep", own.seconds},
                     {"peer", nullptr},
                     {"ratio", nullptr},
                     {"target", target},
                     {"met", false}};
  const auto headers = torch_headers();
  if (!headers) {
    std::printf("| `torch/torch.h` | - (not installed) | - |\n");
    return row;
  }
  const Cost torch =
      cost_of(folder, "include_torch.cpp", "torch/torch.h",
              {"-isystem", *headers, "-isystem", *headers + "/torch/csrc/api/include"});
  print("torch/torch.h", torch);
  const double ratio = own.seconds / torch.seconds;
  std::printf("\nincluding: %.3f of PyTorch's time, target <= %.3f: %s\n", ratio, target,
              ratio <= target ? "met" : "not met");
  row["peer"] = torch.seconds;
  row["ratio"] = ratio;
  row["met"] = ratio <= target;
  return row;
}

}  // namespace bench
