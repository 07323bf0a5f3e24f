// SPDX-License-Identifier: Apache-2.0
// GPT-2 124M, trained on all GPUs: a model with its own passes, whose step is one CUDA graph.
//
//   examples/gpt2/tokens.py text /usr/share/doc              any text, as files of tokens
//   ./gpt2 --tokens text --ranks gpu                         trains, and says something at the end
//   ./gpt2 --tokens text --weights model.safetensors         begins with Hugging Face's weights
//   ./gpt2 --tokens text --write trained.safetensors         writes what transformers can load
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gpt2/gpt2.cuh"
#include "gpt2/hugging_face.hpp"
#include "lockstep/data.hpp"
#include "lockstep/nccl.cuh"

namespace {

using namespace lockstep;

using Model = gpt2::Gpt2<>;
using Job = Trainer<Model, Backend<Nccl>, Device<Cuda>, CapturedStep, Precision<Mixed<BFloat16>>,
                    Optimizer<AdamW>, ParameterGroups<NoDecay<>>, Schedule<Cosine>, Clip<1>>;

/// Windows of a file of tokens. The label is of no use in training.
struct TokenRows {
  using sample_type = LabelledSample<std::uint16_t, std::int32_t>;
  TokenDataset<std::uint16_t> tokens;

  std::size_t size() const { return tokens.size(); }
  void prepare(std::span<const std::size_t> indices) const { tokens.prepare(indices); }
  void read(std::size_t i, sample_type& out) const {
    std::span<const std::uint16_t> window;
    tokens.read(i, window);
    out = {window, 0};
  }
};
auto token_rows(const std::string& path) {
  return TokenRows{
             TokenDataset<std::uint16_t>(path, Model::context, {.vocabulary = Model::vocabulary})} |
         stacked();
}

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

/// The algorithms of products, which rank 0 has in a file, or tries.
std::string agreed_algorithms(Session& session, const std::string& path, std::size_t windows) {
  if (session.rank() != Rank{0}) return session.store().get("gpt2/algorithms");
  const std::string known = read_file(path);
  const std::string chosen = Model::choose(windows, known);
  if (chosen != known) std::ofstream(path) << chosen;
  session.store().set("gpt2/algorithms", chosen);
  return chosen;
}

/// Goes on with the beginning of a text, a token after the other. All ranks call it.
std::string sample(Job& job, const std::string& folder, std::size_t length, double temperature) {
  std::vector<std::string> pieces;
  std::ifstream file(folder + "/pieces.txt");
  for (std::string hex; std::getline(file, hex);) {
    std::string& piece = pieces.emplace_back();
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
      piece += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  }
  const TokenDataset<std::uint16_t> data(folder + "/validation.bin", Model::context);
  std::span<const std::uint16_t> start;
  data.read(0, start);
  constexpr std::size_t given = 32;
  std::vector<std::uint16_t> window(Model::context + 1);
  std::copy_n(start.begin(), given, window.begin());
  RandomStream random(Seed{1});
  for (std::size_t place = given; place != std::min(given + length, Model::context); ++place) {
    const InMemoryDataset<std::uint16_t, std::int32_t> one(
        window, std::vector{static_cast<std::int32_t>(place) - 1});
    const auto rows = job.predict(one, {.batch_size = 1, .gather = Gather::all});
    const auto scores = rows[0];
    const float largest = *std::ranges::max_element(scores);
    double sum = 0;
    for (const float score : scores) sum += std::exp((score - largest) / temperature);
    double left = random.uniform() * sum;
    std::size_t token = 0;
    for (; token + 1 < scores.size(); ++token) {
      left -= std::exp((scores[token] - largest) / temperature);
      if (left < 0) break;
    }
    window[place] = static_cast<std::uint16_t>(token);
  }
  std::string text;
  for (std::size_t i = 0; i != std::min(given + length, Model::context); ++i) {
    if (i == given) text += " >>> ";
    if (window[i] < pieces.size()) text += pieces[window[i]];
  }
  return text;
}

/// The float weights behind those of 16 bits, as Hugging Face's file has them.
void write(Job& job, const std::string& path) {
  std::vector<gpt2::HuggingFaceTensor> tensors;
  job.for_each_parameter([&](std::string_view name, auto view) {
    tensors.push_back({std::string(name), Model::shape_in_file(name, view), {}});
  });
  job.for_each_state([&](std::string_view parameter, std::string_view state, auto view) {
    if (state != "master") return;
    auto& numbers = std::ranges::find(tensors, parameter, &gpt2::HuggingFaceTensor::name)->numbers;
    numbers.resize(view.size());
    check_cuda(cudaMemcpy(numbers.data(), view.data_handle(), numbers.size() * sizeof(float),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
  });
  if (job.rank() == Rank{0}) gpt2::write_hugging_face(path, tensors);
}

void train(Session& session) {
  const auto folder = session.option("tokens", "text", "a folder that tokens.py has made");
  const auto weights = session.option("weights", "", "a file of Hugging Face's to begin with");
  const auto written = session.option("write", "", "a file for Hugging Face");
  const auto file = session.option("algorithms", "gpt2.algorithms", "chosen ones are kept here");
  const std::size_t windows = session.option("windows", 16u, "of 1024 tokens, on each rank");
  const std::size_t epochs = session.option("epochs", 1u, "passes over the text");
  const double rate = session.option("lr", 6e-4, "learning rate");
  const std::size_t length = session.option("sample", 200u, "tokens to say at the end");
  const std::string algorithms = agreed_algorithms(session, file, windows);
  Job job(session, [&](Session&) { return Model(algorithms, weights); });
  job.optimizer().lr = rate;
  job.optimizer().weight_decay = 0.1;
  const auto text = token_rows(folder + "/train.bin");
  const auto validation = token_rows(folder + "/validation.bin");
  for (auto epoch : job.epochs(epochs)) {
    for (const auto& batch : epoch.batches(text, windows)) job.step(batch);
    job.evaluate(validation, windows, "validation");
  }
  if (!written.empty()) write(job, written);
  if (length == 0) return;
  const std::string said = sample(job, folder, length, 0.8);
  job.on_rank0([&](auto log) { log.print(said); });
}

}  // namespace

int main(int argc, char** argv) { return launch(argc, argv, train); }
