// SPDX-License-Identifier: Apache-2.0
// What a model costs the compiler: g++'s time and memory at 10 to 10,000 parameters, beside an
// empty program with the same includes, so that the growth can be seen apart from the start. Then
// what whole programs and single includes cost, beside including PyTorch.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "compile.hpp"
#include "programs.hpp"

namespace {

/// With more, a machine of a few cores cannot compile a program on each.
constexpr double most_megabytes = 4096;

/// How many different shapes the parameters have. Every shape is a type of its own.
enum class Shapes { few, all_different };

/// With more parameters in it, a function of the model becomes what g++'s register allocation
/// spends its time on: it grows with the square.
constexpr std::size_t most_in_function = 1000;

/// A model of `count` parameters that reads each, writes each gradient and says each is ready.
std::string program(std::size_t count, Shapes shapes) {
  const auto name = [](std::size_t i) { return "\"layers." + std::to_string(i) + ".weight\""; };
  std::string declarations;
  std::string forward;
  std::string backward;
  for (std::size_t i = 0; i < count; ++i) {
    if (i != 0 && i % most_in_function == 0) {
      const std::string part = std::to_string(i / most_in_function);
      forward += "    return sum + forward_" + part + "(step);\n  }\n  float forward_" + part +
                 "(auto& step) {\n    float sum = 0;\n";
      backward += "    backward_" + part + "(step, batch);\n  }\n  void backward_" + part +
                  "(auto& step, const Batch& batch) {\n";
    }
    const std::size_t columns = shapes == Shapes::few ? 16 + i % 12 : 16 + i;
    declarations += (i == 0 ? "" : ",\n      ") + std::string("Parameter<") + name(i) +
                    ", float, 8, " + std::to_string(columns) + ">";
    forward += "    sum += step.param(" + name(i) + "_p)(0, 0);\n";
    backward +=
        "    step.grad(" + name(i) + "_p)(0, 0) = batch.x;\n    step.ready(" + name(i) + "_p);\n";
  }
  std::string text =
      "#include <lockstep/detail/device/device.hpp>\n#include <lockstep/detail/model/model.hpp>\n"
      "#include <lockstep/detail/trainer/trainer.hpp>\nusing namespace lockstep;\n";
  if (count == 0) return text + "int main() {}\n";
  return text +
         "struct Batch { float x; };\nstruct Net {\n  using Parameters = ParameterList<\n      " +
         declarations + ">;\n  float forward(auto& step, const Batch&) {\n    float sum = 0;\n" +
         forward + "    return sum;\n  }\n  void backward(auto& step, const Batch& batch) {\n" +
         backward +
         "  }\n};\n"
         "using Job = Trainer<Net, ParallelStrategy<DDP>, World<4>>;\n"
         "static_assert(detail::require_model<Net, Job::bare_step, Batch>());\n"
         "int main() {\n"
         "  const HostArena arena(Job::layout::plan().bytes);\n"
         "  Net net;\n"
         "  Job::bare_step step(net, {arena.data(), arena.data()});\n"
         "  net.forward(step, Batch{1});\n"
         "  net.backward(step, Batch{1});\n"
         "  return static_cast<int>(Job::fingerprint());\n"
         "}\n";
}

}  // namespace

int main() {
  const std::filesystem::path folder = LOCKSTEP_SOURCE_DIR "/build/bench/compile_time";
  std::filesystem::create_directories(folder);
  std::printf(
      "g++ -std=c++20 -c, one model per program, every parameter read, written and made ready\n\n");
  std::printf("| parameters | shapes | seconds | MiB | ms per parameter | target | met |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  nlohmann::json rows = nlohmann::json::array();
  double empty = 0;
  bool all_met = true;
  const auto measure = [&](std::size_t count, Shapes shapes, double target) {
    const auto source =
        folder / (std::to_string(count) + (shapes == Shapes::few ? "" : "_different") + ".cpp");
    std::ofstream(source) << program(count, shapes);
    const bench::Cost best = bench::compile(source, {}, count > 1000 ? 1 : 2);
    if (count == 0) empty = best.seconds;
    const double each = count == 0 ? 0 : 1000 * (best.seconds - empty) / static_cast<double>(count);
    const char* const kind = count == 0 ? "-" : shapes == Shapes::few ? "12" : "all different";
    const bool met = target == 0 || (best.seconds < target && best.megabytes < most_megabytes);
    all_met &= met;
    std::printf("| %zu | %s | %.1f | %.0f | %.1f | %s | %s |\n", count, kind, best.seconds,
                best.megabytes, each,
                target == 0 ? "" : ("< " + std::to_string(static_cast<int>(target)) + " s").c_str(),
                target == 0 ? ""
                : met       ? "yes"
                            : "no");
    std::fflush(stdout);
    rows.push_back(
        {{"measure", "g++ seconds, " + std::to_string(count) + " parameters, shapes: " + kind},
         {"lockstep", best.seconds},
         {"peer", empty},
         {"ratio", best.seconds / empty},
         {"target", target == 0 ? nlohmann::json(nullptr) : nlohmann::json(target)},
         {"met", met}});
  };
  measure(0, Shapes::few, 0);
  measure(10, Shapes::few, 0);
  measure(100, Shapes::few, 0);
  measure(1000, Shapes::few, 15);
  measure(1000, Shapes::all_different, 0);
  measure(10000, Shapes::few, 120);
  for (const auto& row : bench::measure_programs(folder)) rows.push_back(row);
  std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/compile_time.json") << rows.dump(2) << "\n";
  return all_met ? 0 : 1;
}
