// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Files that Python's `torch.save` has written, as values of LibTorch.
///
/// LibTorch's own `pickle_load` rejects a `state_dict()`, which is an OrderedDict with an
/// attribute. Nothing of a file is executed: an object of a class that is not known becomes a text
/// with the name of that class, so that a model can be taken from a file that has more.

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>

#include <cstring>
#include <fstream>
#include <map>
#include <unordered_map>

#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/torch/ivalue.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// The type of a storage class or of a dtype (`FloatStorage`, `float32`); none for other names.
inline std::optional<at::ScalarType> pickled_type(std::string_view name) {
  static constexpr std::pair<std::string_view, at::ScalarType> types[] = {
      {"torch.FloatStorage", at::kFloat},
      {"torch.DoubleStorage", at::kDouble},
      {"torch.HalfStorage", at::kHalf},
      {"torch.BFloat16Storage", at::kBFloat16},
      {"torch.LongStorage", at::kLong},
      {"torch.IntStorage", at::kInt},
      {"torch.ShortStorage", at::kShort},
      {"torch.CharStorage", at::kChar},
      {"torch.ByteStorage", at::kByte},
      {"torch.BoolStorage", at::kBool},
      {"torch.ComplexFloatStorage", at::kComplexFloat},
      {"torch.storage.UntypedStorage", at::kByte},
      {"torch.uint16", at::kUInt16},
      {"torch.uint32", at::kUInt32},
      {"torch.uint64", at::kUInt64},
      {"torch.float8_e4m3fn", at::kFloat8_e4m3fn},
      {"torch.float8_e5m2", at::kFloat8_e5m2}};
  for (const auto& [known, type] : types)
    if (known == name) return type;
  return std::nullopt;
}

/// The part of Python's pickle machine (protocols 2 to 5) that data needs. A storage is a flat
/// tensor here, and a class or function a text.
class Unpickler {
 public:
  /// A storage's bytes, by its key.
  using ReadStorage = std::function<std::pair<at::DataPtr, std::size_t>(const std::string& key)>;

  /// Tensors come to `device`.
  Unpickler(std::string path, std::string_view code, ReadStorage read, at::Device device = at::kCPU)
      : path_(std::move(path)), code_(code), read_(std::move(read)), device_(device) {}

  c10::IValue run() {
    for (;;) {
      const auto op = static_cast<unsigned char>(take(1)[0]);
      if (op != '.') {
        execute(op);
      } else {
        c10::IValue result = pop();
        if (!stack_.empty() || !marks_.empty()) damaged("its pickle ends with values left over");
        return result;
      }
    }
  }

 private:
  using Values = std::vector<c10::IValue>;

  [[noreturn]] void damaged(std::string_view problem) const {
    fail("load_pt", {"'", path_, "' is damaged, or not written by torch.save: ", problem},
         "save it in Python again: torch.save(model.state_dict(), path)");
  }

  std::string_view take(std::uint64_t bytes) {
    if (bytes > code_.size() - at_) damaged("its pickle ends too early");
    const std::string_view taken = code_.substr(at_, bytes);
    at_ += bytes;
    return taken;
  }
  template <class T>
  T number() {
    T value{};
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const std::size_t end = code_.find('\n', at_);
    if (end == std::string_view::npos) damaged("a line of its pickle has no end");
    const std::string_view text = take(end - at_);
    take(1);
    return text;
  }
  double big_endian_double() {
    std::string bytes(take(sizeof(double)));
    std::ranges::reverse(bytes);
    double value = 0;
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  c10::IValue integer_of(std::string_view bytes) {
    if (bytes.size() > sizeof(std::int64_t)) return "<an integer of more than 64 bits>";
    std::uint64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    return static_cast<std::int64_t>(value);
  }

  void push(c10::IValue value) { stack_.push_back(std::move(value)); }

  /// A list, dictionary or tuple. All are kept, so that no later one has the address of another.
  struct Container {
    c10::IValue kept;
    std::size_t levels = 1;  // of containers in each other, itself the first
    bool is_inside = false;  // of another one
  };
  void push_tuple(Values values) {
    const c10::IValue tuple = known(c10::ivalue::Tuple::create(values));
    for (const c10::IValue& value : values) put_into(tuple, value);
    push(tuple);
  }
  const c10::IValue& known(const c10::IValue& made) {
    return containers_.try_emplace(made.internalToPointer(), Container{made}).first->second.kept;
  }
  /// Before a value is put into a container: whoever walks through values, and their destructors,
  /// call themselves for each level. Pickles fill a container before they put it into another one.
  void put_into(const c10::IValue& outer, const c10::IValue& inner) {
    if (!inner.isPtrType()) return;
    const auto found = containers_.find(inner.internalToPointer());
    if (found == containers_.end()) return;
    found->second.is_inside = true;
    Container& around = containers_.at(outer.internalToPointer());
    around.levels = std::max(around.levels, found->second.levels + 1);
    if (around.is_inside)
      damaged("a value is filled after it was put into another, or is in itself");
    if (around.levels > most_levels)
      damaged(text({"its values lie in each other, more than ", most_levels, " deep"}));
  }

  /// The values since the last mark are out of reach.
  c10::IValue& top() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back()))
      damaged("its pickle uses a value where there is none");
    return stack_.back();
  }
  c10::IValue pop() {
    c10::IValue value = std::move(top());
    stack_.pop_back();
    return value;
  }
  Values pop(std::size_t count) {
    Values values(count);
    while (count-- != 0) values[count] = pop();
    return values;
  }
  Values pop_to_mark() {
    if (marks_.empty()) damaged("its pickle goes back to a mark where there is none");
    Values values = pop(stack_.size() - marks_.back());
    marks_.pop_back();
    return values;
  }
  const c10::IValue& remembered(std::uint64_t key) const {
    const auto found = memo_.find(key);
    if (found == memo_.end()) damaged("its pickle recalls a value that it has not kept");
    return found->second;
  }

  /// Items for an object of a class that is not known are left out.
  void set_items(const Values& values) {
    if (values.size() % 2 != 0) damaged("a dictionary has a key without a value");
    if (!top().isGenericDict()) return;
    PythonDict dict = top().toGenericDict();
    for (std::size_t i = 0; i != values.size(); i += 2) {
      const c10::IValue& key = values[i];
      // Only Python can hash keys of other types, and no state has such.
      if (!key.isString() && !key.isInt() && !key.isDouble() && !key.isBool()) continue;
      put_into(top(), values[i + 1]);
      dict.insert_or_assign(key, values[i + 1]);
    }
  }
  void append_items(const Values& values) {
    if (!top().isList()) return;
    PythonList list = top().toList();
    for (const c10::IValue& value : values) {
      put_into(top(), value);
      list.push_back(value);
    }
  }

  void execute(unsigned char op) {
    switch (op) {
      case 0x80:  // PROTO
        if (const auto version = number<std::uint8_t>(); version < 2 || version > 5)
          damaged("its pickle has another protocol");
        return;
      case 0x95:  // FRAME
        take(8);
        return;
      case '(':
        marks_.push_back(stack_.size());
        return;
      case '0':
        pop();
        return;
      case 'N':
        return push({});
      case 0x88:
        return push(true);
      case 0x89:
        return push(false);
      case 'K':
        return push(std::int64_t{number<std::uint8_t>()});
      case 'M':
        return push(std::int64_t{number<std::uint16_t>()});
      case 'J':
        return push(std::int64_t{number<std::int32_t>()});
      case 0x8a:
        return push(integer_of(take(number<std::uint8_t>())));
      case 'G':
        return push(big_endian_double());
      case 'X':
      case 'T':
      case 'B':
        return push(std::string(take(number<std::uint32_t>())));
      case 'U':
      case 'C':
      case 0x8c:
        return push(std::string(take(number<std::uint8_t>())));
      case 0x8d:
      case 0x8e:
        return push(std::string(take(number<std::uint64_t>())));
      case '}':
        return push(known(make_dict()));
      case ']':
      case 0x8f:  // EMPTY_SET
        return push(known(make_list()));
      case ')':
        return push_tuple({});
      case 't':
        return push_tuple(pop_to_mark());
      case 0x85:
      case 0x86:
      case 0x87:
        return push_tuple(pop(op - std::size_t{0x84}));
      case 'a':
        return append_items(pop(1));
      case 'e':
      case 0x90:  // ADDITEMS
        return append_items(pop_to_mark());
      case 's':
        return set_items(pop(2));
      case 'u':
        return set_items(pop_to_mark());
      case 'q':
        return remember(number<std::uint8_t>());
      case 'r':
        return remember(number<std::uint32_t>());
      case 0x94:  // MEMOIZE
        return remember(memo_.size());
      case 'h':
        return push(remembered(number<std::uint8_t>()));
      case 'j':
        return push(remembered(number<std::uint32_t>()));
      case 'c': {
        const std::string module(line());
        return push(module + "." + std::string(line()));
      }
      case 0x93: {  // STACK_GLOBAL
        const Values names = pop(2);
        return push(text_of(names[0]) + "." + text_of(names[1]));
      }
      case 'Q':
        return push(storage_of(pop()));
      case 'R':
      case 0x81: {  // NEWOBJ
        const Values call = pop(2);
        const auto arguments = elements_of(call[1]);
        if (!arguments) damaged("a function is called without a tuple");
        const c10::IValue result = result_of(text_of(call[0]), *arguments);
        return push(result.isGenericDict() || result.isList() ? known(result) : result);
      }
      case 'b':  // BUILD gives attributes to an object, such as a state_dict's _metadata.
        pop();
        top();
        return;
      default:
        damaged(
            text({"its pickle has the opcode ", static_cast<int>(op), ", which no data needs"}));
    }
  }
  void remember(std::uint64_t key) { memo_.insert_or_assign(key, top()); }

  const std::string& text_of(const c10::IValue& value) const {
    if (!value.isString()) damaged("the name of a class is no text");
    return value.toStringRef();
  }
  const at::Tensor& tensor_of(const c10::IValue& value) const {
    if (!value.isTensor()) damaged("a tensor has no storage");
    return value.toTensor();
  }
  std::int64_t natural_of(const c10::IValue& value) const {
    if (!value.isInt() || value.toInt() < 0) damaged("a size is no natural number");
    return value.toInt();
  }
  std::vector<std::int64_t> naturals_of(const c10::IValue& value) const {
    const auto elements = elements_of(value);
    if (!elements) damaged("a shape is no tuple");
    std::vector<std::int64_t> all;
    for (const c10::IValue& each : *elements) all.push_back(natural_of(each));
    return all;
  }

  /// A flat tensor, from ('storage', class, key, location, count). The location does not matter:
  /// everything is read into the host's memory.
  c10::IValue storage_of(const c10::IValue& id) {
    const auto parts = elements_of(id);
    if (!parts || parts->size() != 5) damaged("a storage is not described as torch.save does");
    const std::string& of = text_of((*parts)[1]);
    const auto type = pickled_type(of);
    if (!type) damaged(text({"its tensors are made of ", of, ", which is not known here"}));
    const std::string& key = text_of((*parts)[2]);
    auto found = storages_.find(key);
    if (found == storages_.end()) {
      auto [data, bytes] = read_(key);
      found = storages_
                  .emplace(key, at::Storage(at::Storage::use_byte_size_t(), bytes, std::move(data)))
                  .first;
    }
    const std::size_t count = found->second.nbytes() / c10::elementSize(*type);
    return at::empty({0}, *type).set_(found->second, 0, {static_cast<std::int64_t>(count)}, {1});
  }

  /// (storage, offset, sizes, strides, ...)
  c10::IValue view_of(at::Tensor storage, c10::ArrayRef<c10::IValue> arguments) const {
    const std::int64_t first = natural_of(arguments[1]);
    const std::vector<std::int64_t> sizes = naturals_of(arguments[2]);
    const std::vector<std::int64_t> strides = naturals_of(arguments[3]);
    if (sizes.size() != strides.size()) damaged("a tensor has more sizes than strides");
    bool is_empty = false;
    __int128 last = first;
    for (std::size_t i = 0; i != sizes.size(); ++i) {
      is_empty = is_empty || sizes[i] == 0;
      last += static_cast<__int128>(sizes[i] - 1) * strides[i];
      if (last > std::numeric_limits<std::int64_t>::max()) break;
    }
    if (!is_empty && last >= storage.numel()) damaged("a tensor is larger than its storage");
    if (is_empty) return at::empty(sizes, storage.options().device(device_));
    return at::empty({0}, storage.options())
        .set_(storage.storage(), first, sizes, strides)
        .to(device_);
  }

  c10::IValue result_of(const std::string& function, c10::ArrayRef<c10::IValue> arguments) const {
    const std::size_t count = arguments.size();
    if (function == "collections.OrderedDict" || function == "collections.defaultdict" ||
        function == "collections.Counter") {
      const bool is_copy = count != 0 && arguments[count - 1].isGenericDict();
      return is_copy ? arguments[count - 1] : c10::IValue(make_dict());
    }
    if (function == "torch.Size" || function == "builtins.set" || function == "__builtin__.set")
      return count == 0 ? c10::IValue(make_list()) : arguments[0];
    // LibTorch's own pickles say the types of lists and dictionaries so.
    if ((function == "torch._utils._rebuild_parameter" ||
         function.starts_with("torch.jit._pickle.")) &&
        count != 0)
      return arguments[0];
    if (function == "torch._utils._rebuild_tensor_v2" && count >= 4)
      return view_of(tensor_of(arguments[0]), arguments);
    if (function == "torch._utils._rebuild_tensor_v3" && count >= 7) {
      const auto type = pickled_type(text_of(arguments[6]));
      if (!type) damaged(text({"a tensor is made of ", text_of(arguments[6])}));
      const at::Tensor bytes = tensor_of(arguments[0]);
      const auto size = static_cast<std::int64_t>(c10::elementSize(*type));
      return view_of(at::empty({0}, *type).set_(bytes.storage(), 0, {bytes.numel() / size}, {1}),
                     arguments);
    }
    return text({"<", function, ">"});
  }

  static constexpr std::size_t most_levels = 256;  // a checkpoint has about six

  std::string path_;
  std::string_view code_;
  ReadStorage read_;
  at::Device device_;
  std::size_t at_ = 0;
  std::unordered_map<const void*, Container> containers_;
  Values stack_;
  std::vector<std::size_t> marks_;  // sizes of the stack
  std::map<std::uint64_t, c10::IValue> memo_;
  std::map<std::string, at::Storage> storages_;
};

/// Zip archives, which is what `torch.save` writes, begin so.
inline bool is_zip_archive(const std::string& path) {
  std::array<char, 4> begin{};
  return std::ifstream(path, std::ios::binary).read(begin.data(), 4) &&
         std::string_view(begin.data(), 4) == "PK\3\4";
}

}  // namespace lockstep::detail

namespace lockstep {

inline namespace torch_modules {

/// Python's `torch.load(path, map_location)`: dictionaries, lists, texts, numbers and tensors of a
/// file of `torch.save`, such as a state_dict or a dictionary of several. No code of the file runs.
/// **Ranks** this one alone.
inline c10::IValue load_pt(const std::string& path, at::Device map_location = at::kCPU) {
  const auto reject = [&](std::string_view problem) {
    detail::fail("load_pt", {"'", path, "' ", problem},
                 "name a file that torch.save has written since PyTorch 1.6");
  };
  if (!detail::is_zip_archive(path)) reject("cannot be read, or is no file of torch.save");
  try {
    caffe2::serialize::PyTorchStreamReader archive(path);
    if (!archive.hasRecord("data.pkl") || archive.hasRecord("constants.pkl"))
      reject("is an archive of something else (of TorchScript, for example)");
    if (archive.hasRecord("byteorder")) {
      const auto [order, size] = archive.getRecord("byteorder");
      if (std::string_view(static_cast<const char*>(order.get()), size) != "little")
        reject("was written on a machine with another byte order");
    }
    const auto [code, size] = archive.getRecord("data.pkl");
    const auto read = [&](const std::string& key) -> std::pair<at::DataPtr, std::size_t> {
      auto [data, bytes] = archive.getRecord("data/" + key);
      return {std::move(data), bytes};
    };
    return detail::Unpickler(path, {static_cast<const char*>(code.get()), size}, read, map_location)
        .run();
  } catch (const c10::Error& error) {
    detail::fail("load_pt", {"'", path, "' is damaged: ", error.what_without_backtrace()},
                 "put back a copy of the file");
  }
}

}  // namespace torch_modules

}  // namespace lockstep

LOCKSTEP_COLD_END
