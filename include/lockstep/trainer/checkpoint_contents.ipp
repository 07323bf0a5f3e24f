// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `checkpoint_contents.hpp`.

#include <algorithm>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <variant>

#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/half.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/checkpoint_contents.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string stored_name(const KeptPiece& piece) {
  if (piece.name.starts_with(reserved_prefix))
    fail("save", {"the name ", piece.name, " begins with ", reserved_prefix},
         "give the tensor another name: these are the library's");
  switch (piece.role) {
    case KeptRole::state:
      return text({"lockstep/state/", piece.name, "/", piece.state});
    case KeptRole::local:
      return text({"lockstep/local/", piece.rank, "/", piece.name, "/", piece.state});
    case KeptRole::buffer:
      if (piece.rank != 0) return text({"lockstep/buffer/", piece.rank, "/", piece.name});
      break;
    case KeptRole::parameter:
      break;
  }
  return std::string(piece.name);
}

LOCKSTEP_INLINE StoredName parse_stored_name(std::string_view name) {
  using Kind = StoredName::Kind;
  if (!name.starts_with(reserved_prefix)) return {Kind::plain, name, {}, {}};
  const std::string_view rest = name.substr(reserved_prefix.size());
  const auto after = [&](std::string_view prefix) {
    return rest.starts_with(prefix) ? rest.substr(prefix.size()) : std::string_view();
  };
  if (const std::string_view state = after("state/"); !state.empty()) {
    const std::size_t slash = state.rfind('/');
    if (slash != std::string_view::npos)
      return {Kind::state, state.substr(0, slash), state.substr(slash + 1), {}};
  }
  if (const std::string_view of_rank = after("buffer/"); !of_rank.empty()) {
    const std::size_t slash = of_rank.find('/');
    if (slash != std::string_view::npos)
      return {Kind::buffer, of_rank.substr(slash + 1), of_rank.substr(0, slash), {}};
  }
  if (const std::string_view local = after("local/"); !local.empty()) {
    const std::size_t first = local.find('/');
    const std::size_t last = local.rfind('/');
    if (first != std::string_view::npos && first < last)
      return {Kind::local, local.substr(first + 1, last - first - 1), local.substr(0, first),
              local.substr(last + 1)};
  }
  return {Kind::other, name, {}, {}};
}

LOCKSTEP_INLINE std::string renamed(const StoredName& stored, std::string_view name) {
  switch (stored.kind) {
    case StoredName::Kind::state:
      return text({"lockstep/state/", name, "/", stored.extra});
    case StoredName::Kind::buffer:
      return text({"lockstep/buffer/", stored.extra, "/", name});
    case StoredName::Kind::local:
      return text({"lockstep/local/", stored.extra, "/", name, "/", stored.state});
    default:
      return std::string(name);
  }
}

LOCKSTEP_INLINE std::string utc_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char words[32];
  return {words, std::strftime(words, sizeof words, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

// The program's values.

LOCKSTEP_INLINE bool is_tensor(const SavedValue& value) {
  return value.kind == ValueKind::text || value.kind == ValueKind::numbers;
}
/// `whose` is a rank, or `common`.
LOCKSTEP_INLINE std::string value_tensor_name(std::string_view whose, std::string_view name) {
  return text({"lockstep/value/", whose, "/", name});
}

/// Calls `f(std::type_identity<T>{})` with the type of a number.
template <class F>
void with_number(ElementKind kind, const F& f) {
  const auto with = [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((static_cast<std::size_t>(kind) == I + 1
          ? f(std::type_identity<std::tuple_element_t<I + 1, ElementTypes>>{})
          : void()),
     ...);
  };
  with(std::make_index_sequence<element_kinds - 1>{});
}

LOCKSTEP_INLINE Json json_of(const SavedValue& value) {
  Json json = Json::object().add("type", value.type());
  if (value.kind == ValueKind::truth) {
    json.add("value", value.bytes.front() != 0);
  } else if (value.kind == ValueKind::random_stream) {
    std::uint64_t state[2] = {};
    std::memcpy(state, value.bytes.data(), sizeof state);
    json.add("value", Json::array_of(state));
  } else if (value.kind == ValueKind::number) {
    with_number(value.element, [&]<class T>(std::type_identity<T>) {
      T number{};
      std::memcpy(&number, value.bytes.data(), sizeof number);
      if constexpr (std::integral<T>) {
        json.add("value", Json(number));
      } else {
        json.add("value", Json(static_cast<double>(static_cast<Accumulator<T>>(number))));
      }
    });
  }
  return json;
}

/// The bytes of a number. A number that its type cannot hold was written by nobody.
LOCKSTEP_INLINE std::string number_bytes(const JsonEntry& entry, ElementKind element) {
  std::string bytes;
  with_number(element, [&]<class T>(std::type_identity<T>) {
    T number{};
    if constexpr (std::signed_integral<T>) {
      const std::int64_t value = entry.integer();
      if (!std::in_range<T>(value)) entry.fail("is too large for its type");
      number = static_cast<T>(value);
    } else if constexpr (std::integral<T>) {
      const std::uint64_t value = entry.natural();
      if (!std::in_range<T>(value)) entry.fail("is too large for its type");
      number = static_cast<T>(value);
    } else {
      number = static_cast<T>(static_cast<Accumulator<T>>(entry.real()));
    }
    bytes.assign(reinterpret_cast<const char*>(&number), sizeof number);
  });
  return bytes;
}

LOCKSTEP_INLINE SavedValue value_of(const JsonEntry& entry, std::string name) {
  SavedValue value{std::move(name), ValueKind::number, ElementKind::unsupported, {}};
  std::string_view type = entry.at("type").text();
  if (type == "bool") {
    value.kind = ValueKind::truth;
    value.element = ElementKind::u8;
    value.bytes.assign(1, entry.at("value").boolean() ? '\1' : '\0');
  } else if (type == "text") {
    value.kind = ValueKind::text;
    value.element = ElementKind::u8;
  } else if (type == "RandomStream") {
    value.kind = ValueKind::random_stream;
    value.element = ElementKind::u64;
    const std::vector<std::uint64_t> state = entry.at("value").naturals();
    if (state.size() != 2) entry.fail("is no state of a random stream");
    value.bytes.assign(reinterpret_cast<const char*>(state.data()), 2 * sizeof state[0]);
  } else {
    if (type.ends_with("[]")) {
      value.kind = ValueKind::numbers;
      type.remove_suffix(2);
    }
    for (std::size_t kind = 1; kind != element_kinds; ++kind)
      if (element_name(static_cast<ElementKind>(kind)) == type)
        value.element = static_cast<ElementKind>(kind);
    if (value.element == ElementKind::unsupported) entry.fail("has a type that nobody knows");
    if (value.kind == ValueKind::number)
      value.bytes = number_bytes(entry.at("value"), value.element);
  }
  return value;
}

LOCKSTEP_INLINE Json json_of(const std::vector<SavedValue>& values) {
  Json json = Json::object();
  for (const SavedValue& value : values) json.add(value.name, json_of(value));
  return json;
}

LOCKSTEP_INLINE void add_value_tensors(std::string_view whose,
                                       const std::vector<SavedValue>& values,
                                       std::vector<TensorToWrite>& to) {
  for (const SavedValue& value : values) {
    if (!is_tensor(value)) continue;
    to.push_back({value_tensor_name(whose, value.name),
                  value.element,
                  {value.bytes.size() / element_size(value.element)},
                  std::as_bytes(std::span(value.bytes))});
  }
}

LOCKSTEP_INLINE void add_value_tensors(const CheckpointFacts& facts,
                                       std::vector<TensorToWrite>& to) {
  for (std::size_t rank = 0; rank != facts.values.size(); ++rank)
    add_value_tensors(std::to_string(rank), facts.values[rank], to);
  add_value_tensors("common", facts.common, to);
}

LOCKSTEP_INLINE std::vector<SavedValue> read_values(const CheckpointReader& reader,
                                                    const JsonEntry& entries,
                                                    std::string_view whose) {
  std::vector<SavedValue> values;
  for (std::size_t i = 0; i != entries.size(); ++i) {
    SavedValue value = value_of(entries.member(i), std::string(entries.member_name(i)));
    if (is_tensor(value)) {
      const StoredTensor* const stored = reader.find(value_tensor_name(whose, value.name));
      if (stored == nullptr || stored->kind() != value.element)
        entries.member(i).fail("has no such tensor");
      value.bytes.resize(stored->count * element_size(value.element));
      reader.read(*stored, 0, stored->count, reinterpret_cast<std::byte*>(value.bytes.data()));
    }
    values.push_back(std::move(value));
  }
  return values;
}

LOCKSTEP_INLINE std::vector<SavedValue> read_values(const CheckpointReader& reader,
                                                    std::size_t rank) {
  const std::optional<JsonEntry> all = reader.facts().find("values");
  if (!all || rank >= all->size()) return {};
  return read_values(reader, all->item(rank), std::to_string(rank));
}

LOCKSTEP_INLINE std::vector<SavedValue> read_common_values(const CheckpointReader& reader) {
  const std::optional<JsonEntry> common = reader.facts().find("common");
  return common ? read_values(reader, *common, "common") : std::vector<SavedValue>();
}

// Everything else.

LOCKSTEP_INLINE Json json_of(const ReplicaProgress& progress) {
  Json json = Json::object();
  json.add("updates", progress.updates);
  json.add("counted", progress.counted);
  json.add("skipped", progress.skipped);
  json.add("epoch", progress.epoch);
  json.add("knows_epoch", progress.knows_epoch);
  json.add("curve_ahead", progress.curve_ahead);
  json.add("micro_batches", 0);  // of a step under way, for older readers
  if (progress.newest_buffers) json.add("newest_buffers", *progress.newest_buffers);
  if (progress.random_seed) json.add("random_seed", *progress.random_seed);
  if (progress.loss_scale) {
    json.add("loss_scale", Json::object()
                               .add("scale", static_cast<double>(progress.loss_scale->scale))
                               .add("good_steps", progress.loss_scale->good_steps));
  }
  Json numbers = Json::object();
  for (const NamedNumber& number : progress.numbers)
    numbers.set(number.name, std::visit([](auto value) { return Json(value); }, number.value));
  json.add("numbers", std::move(numbers));
  return json;
}

LOCKSTEP_INLINE ReplicaProgress progress_of(const JsonEntry& entry) {
  ReplicaProgress progress;
  progress.updates = entry.at("updates").natural();
  progress.counted = entry.at("counted").natural();
  progress.skipped = entry.at("skipped").natural();
  progress.epoch = entry.at("epoch").natural();
  progress.knows_epoch = entry.at("knows_epoch").boolean();
  progress.curve_ahead = entry.at("curve_ahead").natural();
  if (const auto newest = entry.find("newest_buffers")) progress.newest_buffers = newest->natural();
  if (const auto seed = entry.find("random_seed")) progress.random_seed = seed->natural();
  if (const auto scale = entry.find("loss_scale")) {
    progress.loss_scale.emplace();
    progress.loss_scale->scale = static_cast<float>(scale->at("scale").real());
    progress.loss_scale->good_steps = static_cast<std::uint32_t>(scale->at("good_steps").natural());
  }
  const JsonEntry numbers = entry.at("numbers");
  for (std::size_t i = 0; i != numbers.size(); ++i) {
    const JsonEntry number = numbers.member(i);
    NamedNumber& named = progress.numbers.emplace_back();
    named.name = numbers.member_name(i);
    if (const auto* natural = number.json().get_if<std::uint64_t>()) {
      named.value = *natural;
    } else if (const auto* integer = number.json().get_if<std::int64_t>()) {
      named.value = *integer;
    } else {
      named.value = number.real();
    }
  }
  return progress;
}

LOCKSTEP_INLINE Json json_of(const SamplerState& state) {
  Json json = Json::object();
  json.add("samples", state.samples);
  json.add("world", state.world.value());
  json.add("seed", state.seed.value());
  json.add("rule", state.rule);
  json.add("epoch", state.epoch.value());
  json.add("first", state.first);
  json.add("position", state.position);
  return json;
}

LOCKSTEP_INLINE SamplerState sampler_state_of(const JsonEntry& entry) {
  SamplerState state;
  state.samples = entry.at("samples").natural();
  state.world = WorldSize{entry.at("world").natural()};
  state.seed = Seed{entry.at("seed").natural()};
  state.rule = entry.at("rule").natural();
  state.epoch = Epoch{entry.at("epoch").natural()};
  state.first = entry.at("first").natural();
  state.position = entry.at("position").natural();
  return state;
}

LOCKSTEP_INLINE Json parameters_only_facts() {
  return Json::object().add("version", version).add("parameters_only", true);
}

LOCKSTEP_INLINE bool has_parameters_only(const CheckpointReader& reader) {
  return reader.facts().find("parameters_only").has_value();
}

LOCKSTEP_INLINE Json json_of(const CheckpointFacts& facts) {
  Json json = Json::object();
  json.add("version", facts.version);
  json.add("time", facts.time);
  json.add("policies", Json::array_of(facts.shape.policies));
  json.add("fingerprint", checksum_text(facts.shape.fingerprint));
  json.add("world", facts.shape.world);
  json.add("epoch", facts.epoch);
  json.add("step", facts.progress.updates);
  if (facts.best) json.add("best", *facts.best);
  if (!facts.scores.empty()) {
    Json scores = Json::object();
    for (const Score& score : facts.scores)
      scores.set(score.name, Json::object().add("mean", score.mean).add("count", score.count));
    json.add("scores", std::move(scores));
  }
  json.add("progress", json_of(facts.progress));
  json.add("gradients", Json::object()
                            .add("replicas", facts.shape.replicas)
                            .add("divisor", facts.shape.gradient_divisor)
                            .add("micro_batches", facts.shape.micro_batches));
  if (facts.position) json.add("sampler", json_of(*facts.position));
  Json values = Json::array();
  bool any = false;
  for (const std::vector<SavedValue>& of_rank : facts.values) {
    any = any || !of_rank.empty();
    values.push(json_of(of_rank));
  }
  if (any) json.add("values", std::move(values));
  if (!facts.common.empty()) json.add("common", json_of(facts.common));
  return json;
}

/// A number of ranks, over which loops are made.
LOCKSTEP_INLINE std::size_t rank_count(const JsonEntry& entry) {
  constexpr std::uint64_t most = std::uint64_t{1} << 20;
  const std::uint64_t count = entry.natural();
  if (count == 0 || count > most) entry.fail("is no number of ranks");
  return count;
}

LOCKSTEP_INLINE CheckpointFacts read_facts(const CheckpointReader& reader) {
  const JsonEntry entry = reader.facts();
  CheckpointFacts facts;
  facts.version = entry.at("version").text();
  facts.time = entry.at("time").text();
  const JsonEntry policies = entry.at("policies");
  for (std::size_t i = 0; i != policies.size(); ++i)
    facts.shape.policies.push_back(policies.item(i).text());
  facts.shape.fingerprint = entry.at("fingerprint").checksum();
  facts.shape.world = rank_count(entry.at("world"));
  facts.epoch = entry.at("epoch").natural();
  if (const auto best = entry.find("best")) facts.best = best->real();
  if (const auto scores = entry.find("scores")) {
    std::vector<Score> all;
    for (std::size_t i = 0; i != scores->size(); ++i)
      all.push_back({std::string(scores->member_name(i)), scores->member(i).at("mean").real(),
                     scores->member(i).at("count").real()});
    facts.scores = Scores(std::move(all));
  }
  facts.progress = progress_of(entry.at("progress"));
  facts.micro_batches_under_way = entry.at("progress").at("micro_batches").natural();
  const JsonEntry gradients = entry.at("gradients");
  facts.shape.replicas = rank_count(gradients.at("replicas"));
  facts.shape.gradient_divisor = gradients.at("divisor").real();
  if (!(facts.shape.gradient_divisor >= 1 &&
        facts.shape.gradient_divisor <= static_cast<double>(facts.shape.replicas)))
    gradients.at("divisor").fail("is not between 1 and the number of replicas");
  facts.shape.micro_batches = gradients.at("micro_batches").natural();
  if (const auto sampler = entry.find("sampler")) facts.position = sampler_state_of(*sampler);
  return facts;
}

}  // namespace lockstep::detail
