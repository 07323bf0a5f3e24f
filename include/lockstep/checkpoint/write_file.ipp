// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `write_file.hpp`.

#include <algorithm>
#include <string_view>

#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/json_string.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

/// Where everything lies in a file, and its header.
class FileLayout {
 public:
  FileLayout(const std::string& path, const FileToWrite& file) : path_(path), file_(file) {
    for (const TensorToWrite& tensor : file.tensors) {
      check_tensor(tensor);
      order_.push_back(&tensor);
    }
    check_names();
    std::size_t values = order_.size() + 2;  // with what is added to the facts
    check_facts(file.facts, 1, values);
    // The widest elements come first: then every element is aligned, without holes.
    std::ranges::sort(order_, [](const TensorToWrite* a, const TensorToWrite* b) {
      const unsigned width_a = a->element()->bits;
      const unsigned width_b = b->element()->bits;
      return width_a != width_b ? width_a > width_b : a < b;  // else as they were given
    });
    header_bytes_ = header(std::vector<std::uint64_t>(order_.size())).text.size();
    if (header_bytes_ - 8 > most_header_bytes) {
      refuse({"its header would have ", header_bytes_ - 8, " bytes and ", most_header_bytes,
              " are allowed"},
             "keep large values as tensors, not as numbers or texts");
    }
  }

  const std::vector<const TensorToWrite*>& order() const { return order_; }
  std::uint64_t header_bytes() const { return header_bytes_; }

  struct Header {
    std::string text;
    std::uint64_t digest;
  };

  /// The header, with the checksums of the tensors in order: its size does not depend on them.
  Header header(const std::vector<std::uint64_t>& checksums) const {
    std::string facts = text({"{\"header\":\"", no_digits});
    const std::size_t digits_in_facts = facts.size() - no_digits.size();
    facts += '"';
    if (const auto* const members = file_.facts.get_if<Json::Object>()) {
      for (const Json::Member& member : *members) {
        facts += ',';
        append_json_string(facts, member.first);
        facts += ':';
        member.second.append_to(facts);
      }
    }
    facts += ",\"checksums\":{";
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (i != 0) facts += ',';
      append_json_string(facts, order_[i]->name);
      facts += ":\"" + checksum_text(checksums[i]) + '"';
    }
    facts += "}}";

    std::string out(8, '\0');
    out += "{\"__metadata__\":{\"format\":\"pt\",\"writer\":";
    append_json_string(out, text({"lockstep ", version}));
    for (const auto& [key, value] : file_.metadata) {
      out += ',';
      append_json_string(out, key);
      out += ':';
      append_json_string(out, value);
    }
    out += ",\"lockstep\":";
    // The digits stand behind the quotation mark and `{"header":"` with its three marks escaped.
    const std::size_t digits = out.size() + 1 + digits_in_facts + 3;
    append_json_string(out, facts);
    out += '}';
    std::uint64_t place = 0;
    for (const TensorToWrite* const tensor : order_) {
      out += ',';
      append_json_string(out, tensor->name);
      out += text({":{\"dtype\":\"", tensor->element()->name, "\",\"shape\":["});
      for (std::size_t axis = 0; axis < tensor->shape.size(); ++axis) {
        if (axis != 0) out += ',';
        Word(tensor->shape[axis]).append_to(out);
      }
      const std::uint64_t end = place + tensor->data.size();
      out += text({"],\"data_offsets\":[", place, ",", end, "]}"});
      place = end;
    }
    out += '}';
    out.append(align_up(out.size(), 8) - out.size(), ' ');
    for (int i = 0; i < 8; ++i) out[i] = static_cast<char>((out.size() - 8) >> (8 * i));
    const std::uint64_t digest = Checksum().add(out).value();
    out.replace(digits, 16, checksum_text(digest));
    return {std::move(out), digest};
  }

 private:
  static constexpr std::string_view no_digits = "0000000000000000";

  [[noreturn]] void refuse(std::initializer_list<Word> problem, std::string_view advice) const {
    fail("checkpoint", {"'", path_, "' cannot be written: ", text(problem)}, advice);
  }

  void check_tensor(const TensorToWrite& tensor) const {
    const FileElement* const element = tensor.element();
    if (element == nullptr) {
      refuse({"tensor '", tensor.name, "' has elements that safetensors files do not have"},
             "save it in another type");
    }
    std::uint64_t bytes = element->bits / 8;
    bool fits = true;
    for (const std::uint64_t extent : tensor.shape) fits = fits && multiply(bytes, extent, bytes);
    if (!fits || bytes != tensor.data.size()) {
      refuse({"tensor '", tensor.name, "' of shape ", shape_text(tensor.shape), " has ",
              tensor.data.size(), " bytes of data"},
             "give it as many as its shape needs");
    }
  }

  void check_names() const {
    std::vector<std::string_view> names{"__metadata__"};
    for (const TensorToWrite& tensor : file_.tensors) names.push_back(tensor.name);
    check_distinct(std::move(names));
    std::vector<std::string_view> keys{"format", "writer", "lockstep"};
    for (const auto& [key, value] : file_.metadata) {
      keys.push_back(key);
      if (!is_utf8(value)) refuse({"the metadata of '", key, "' is not UTF-8"}, "write UTF-8");
    }
    check_distinct(std::move(keys));
    check(file_.facts.find("header") == nullptr && file_.facts.find("checksums") == nullptr,
          "leave 'header' and 'checksums' to the writer");
  }

  /// What is written must be read again, bit for bit.
  void check_facts(const Json& value, int depth, std::size_t& values) const {
    if (depth > Json::most_depth)
      refuse({"the values saved with it are too deep"}, "save flatter ones");
    if (++values > Json::most_values)
      refuse({"more than ", Json::most_values, " values are saved with it"},
             "save tensors instead");
    if (const auto* const text = value.get_if<std::string>(); text != nullptr && !is_utf8(*text))
      refuse({"the text '", *text, "' is not UTF-8"}, "save texts in UTF-8, and bytes as numbers");
    if (const auto* const items = value.get_if<Json::Array>()) {
      for (const Json& item : *items) check_facts(item, depth + 1, values);
    }
    if (const auto* const members = value.get_if<Json::Object>()) {
      std::vector<std::string_view> names;
      for (const Json::Member& member : *members) {
        names.push_back(member.first);
        check_facts(member.second, depth + 1, values);
      }
      check_distinct(std::move(names));
    }
  }

  void check_distinct(std::vector<std::string_view> names) const {
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    if (twice != names.end())
      refuse({"the name '", *twice, "' is there twice"}, "give everything a name of its own");
    for (const std::string_view name : names) {
      if (!is_utf8(name)) refuse({"the name '", name, "' is not UTF-8"}, "write names in UTF-8");
    }
  }

  const std::string& path_;
  const FileToWrite& file_;
  std::vector<const TensorToWrite*> order_;
  std::uint64_t header_bytes_ = 0;
};

LOCKSTEP_INLINE WrittenFile write_file(const std::string& path, const FileToWrite& file) {
  const FileLayout layout(path, file);
  std::uint64_t bytes = layout.header_bytes();
  for (const TensorToWrite* const tensor : layout.order()) bytes += tensor->data.size();

  TemporaryFile out("checkpoint", path, bytes);
  out.seek(layout.header_bytes());
  std::vector<std::uint64_t> checksums;
  for (const TensorToWrite* const tensor : layout.order()) {
    Checksum checksum;
    const std::size_t all = tensor->data.size();
    for (std::size_t at = 0; at != all;) {  // a chunk is still in the cache when it is written
      const std::size_t size = std::min(all - at, write_chunk_bytes);
      const auto chunk = tensor->read ? tensor->read(at, size) : tensor->data.subspan(at, size);
      checksum.add(chunk);
      out.append(chunk);
      if (tensor->read) out.flush();  // before its memory is used again
      at += size;
    }
    checksums.push_back(checksum.value());
  }
  const FileLayout::Header header = layout.header(checksums);
  out.seek(0);
  out.append(std::as_bytes(std::span(header.text)));
  out.commit();
  return {bytes, header.digest};
}

}  // namespace lockstep::detail
