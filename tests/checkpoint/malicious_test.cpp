// SPDX-License-Identifier: Apache-2.0
// Files that nobody has written by accident: each an error in words, at once and in little memory.
#include <sys/resource.h>
#include <sys/stat.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/core/json.hpp"

BOOST_AUTO_TEST_SUITE(checkpoint_malicious)

namespace {

using namespace checkpoint;
using namespace lockstep::detail;

struct Files : Folder {
  /// What is said about a file of these bytes.
  std::string error(std::string_view bytes) const {
    const std::string path = put(*this / "bad.safetensors", bytes);
    const std::string error = error_of([&] { CheckpointReader(path).verify(); });
    BOOST_TEST((error.empty() || holds(error, "bad.safetensors")), error);
    return error;
  }
  std::string of_header(std::string_view header, std::string_view data = {}) const {
    return error(file_of(header, data));
  }
  /// A file of one tensor.
  std::string of_tensor(std::string_view type, std::string_view shape, std::string_view offsets,
                        std::size_t data) const {
    return of_header(text({"{\"w\":{\"dtype\":\"", type, "\",\"shape\":", shape,
                           ",\"data_offsets\":", offsets, "}}"}),
                     std::string(data, 'x'));
  }
};

std::string tensor(std::string_view name, std::uint64_t begin, std::uint64_t end) {
  return text({"\"", name, "\":{\"dtype\":\"U8\",\"shape\":[", end - begin, "],\"data_offsets\":[",
               begin, ",", end, "]}"});
}

/// A header that lockstep could have written, with facts of any kind and right checksums.
std::string signed_file(std::string_view facts) {
  constexpr std::string_view zeros = "0000000000000000";
  std::string entry;
  append_json_string(entry, text({"{\"header\":\"", zeros, "\"", facts, "}"}));
  std::string bytes = file_of(text({"{\"__metadata__\":{\"lockstep\":", entry, "}}"}));
  const std::string digest = checksum_text(Checksum().add(bytes).value());
  return bytes.replace(bytes.find(zeros, 8), 16, digest);
}

}  // namespace

BOOST_AUTO_TEST_CASE(lengths_of_headers) {
  const Files files;
  BOOST_TEST(holds(files.error(""), "it has 0 bytes"));
  BOOST_TEST(holds(files.error("1234567"), "it has 7 bytes"));
  BOOST_TEST(holds(files.error(std::string(8, '\0')), "its header has 0 bytes"));
  BOOST_TEST(holds(files.error(std::string(100, '\0')), "its header has 0 bytes"));
  BOOST_TEST(holds(files.error(std::string(16, '\xff')), "claims 18446744073709551615 bytes"));
  const auto claim = [&](std::uint64_t length) {
    std::string bytes = file_of("{}");
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i));
    return files.error(bytes);
  };
  BOOST_TEST(holds(claim(100'000'001), "100000000 are allowed"));
  BOOST_TEST(holds(claim(std::uint64_t{1} << 63), "are allowed"));
  BOOST_TEST(holds(claim(100'000'000), "and 2 are there"));
  BOOST_TEST(holds(claim(3), "and 2 are there"));
  BOOST_TEST(holds(claim(1), "its header has 1 bytes"));
  BOOST_TEST(claim(2).empty());  // a file of no tensors
}

BOOST_AUTO_TEST_CASE(offsets) {
  const Files files;
  const auto two = [&](std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d,
                       std::size_t data) {
    return files.of_header(text({"{", tensor("a", a, b), ",", tensor("b", c, d), "}"}),
                           std::string(data, 'x'));
  };
  BOOST_TEST(two(0, 4, 4, 8, 8).empty());
  BOOST_TEST(two(4, 8, 0, 4, 8).empty());  // the order of the header is free
  BOOST_TEST(two(0, 4, 4, 4, 4).empty());
  BOOST_TEST(holds(two(0, 4, 2, 6, 6), "'b' overlaps"));
  BOOST_TEST(holds(two(0, 4, 0, 4, 8), "overlaps"));
  BOOST_TEST(holds(two(0, 4, 2, 2, 4), "'b' overlaps"));
  BOOST_TEST(holds(two(0, 4, 5, 8, 8), "no tensor has the bytes before that of 'b'"));
  BOOST_TEST(holds(two(1, 4, 4, 8, 8), "no tensor has the bytes before that of 'a'"));
  BOOST_TEST(holds(two(0, 4, 4, 9, 8), "'b' ends at byte 9 of 8"));
  BOOST_TEST(holds(two(0, 4, 4, 8, 9), "its tensors have 8 bytes, and 9 are there"));
  BOOST_TEST(holds(files.of_tensor("U8", "[1]", "[5,4]", 8), "ends at 4, before it begins"));
  BOOST_TEST(
      holds(files.of_tensor("U8", "[8]", "[18446744073709551608,0]", 8), "before it begins"));
  BOOST_TEST(holds(files.of_tensor("U8", "[18446744073709551615]", "[0,18446744073709551615]", 8),
                   "'w' of shape [18446744073709551615]"));
  BOOST_TEST(holds(files.of_tensor("U8", "[0]", "[9,9]", 8), "no tensor has the bytes before"));
  for (const char* wrong : {"[]", "[0]", "[0,8,8]"})
    BOOST_TEST(holds(files.of_tensor("U8", "[8]", wrong, 8), "other than two offsets"));
}

BOOST_AUTO_TEST_CASE(integers_and_shapes_that_overflow) {
  const Files files;
  BOOST_TEST(files.of_tensor("F32", "[2,1]", "[0,8]", 8).empty());
  for (const char* wrong :
       {"[18446744073709551616]", "[-1]", "[2.0]", "[2e0]", "[\"2\"]", "[null]", "[[2]]", "2", "{}",
        "[02]", "[true]", "[1e999]", "[99999999999999999999999999999999999999]"}) {
    BOOST_TEST(!files.of_tensor("F32", wrong, "[0,8]", 8).empty(), wrong);
  }
  for (const char* wrong : {"[0,18446744073709551616]", "[0,8.0]", "[-8,0]", "[\"0\",8]", "[0,8"})
    BOOST_TEST(!files.of_tensor("F32", "[2]", wrong, 8).empty(), wrong);
  for (const char* wrong :
       {"[4294967296,4294967296,4294967296]", "[4294967296,4294967296]", "[4611686018427387906]",
        "[2305843009213693952]", "[4294967296,4294967296,0]", "[3]", "[1]", "[]", "[2,2]"}) {
    BOOST_TEST(holds(files.of_tensor("F32", wrong, "[0,8]", 8), "and type F32 has 8 bytes"), wrong);
  }
  BOOST_TEST(files.of_tensor("F32", "[0,18446744073709551615]", "[0,0]", 0).empty());
  BOOST_TEST(holds(files.of_tensor("F4", "[3]", "[0,1]", 1), "has 1 bytes"));
  BOOST_TEST(files.of_tensor("F4", "[4]", "[0,2]", 2).empty());
  std::string axes = "[1";
  for (int i = 0; i < 100'000; ++i) axes += ",1";
  BOOST_TEST(holds(files.of_tensor("U8", axes + "]", "[0,1]", 1), "more than 64 axes"));
}

BOOST_AUTO_TEST_CASE(names) {
  const Files files;
  const auto twice = text({"{", tensor("a", 0, 4), ",", tensor("\\u0061", 4, 8), "}"});
  BOOST_TEST(holds(files.of_header(twice, "12345678"), "the name 'a' twice"));
  const auto not_utf8 = text({"{", tensor("\xff\xfe", 0, 4), "}"});
  BOOST_TEST(holds(files.of_header(not_utf8, "1234"), "a text is not UTF-8"));
  const auto overlong = text({"{", tensor("\xc0\xaf", 0, 4), "}"});
  BOOST_TEST(holds(files.of_header(overlong, "1234"), "a text is not UTF-8"));
  const auto surrogate = text({"{", tensor("\\ud800", 0, 4), "}"});
  BOOST_TEST(holds(files.of_header(surrogate, "1234"), "surrogate"));
  BOOST_TEST(
      holds(files.of_header(R"({"__metadata__":{},"__metadata__":{}})"), "'__metadata__' twice"));
  BOOST_TEST(holds(files.of_header(R"({"__metadata__":{"a":"1","a":"2"}})"), "the name 'a' twice"));
}

BOOST_AUTO_TEST_CASE(wrong_types) {
  const Files files;
  for (const char* header :
       {"[]",
        "\"a\"",
        "12",
        "null",
        "{} {}",
        " {}",
        "{}x",
        R"({"w":[]})",
        R"({"w":{}})",
        R"({"w":1})",
        R"({"w":null})",
        R"({"w":{"dtype":"U8","shape":[0]}})",
        R"({"w":{"dtype":"U8","data_offsets":[0,0]}})",
        R"({"w":{"shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"F128","shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":8,"shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}})",
        R"({"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}})",
        R"({"__metadata__":[]})",
        R"({"__metadata__":{"a":1}})",
        R"({"__metadata__":{"a":{"b":"c"}}})",
        R"({"__metadata__":null})",
        R"({"__metadata__":{"lockstep":"{}"}})",
        R"({"__metadata__":{"lockstep":""}})",
        R"({"__metadata__":{"lockstep":"{\"header\":\"00"}})",
        R"({"__metadata__":{"lockstep":"{\"header\":\"0000000000000000\"}"}})",
        R"({"__metadata__":{"writer":"lockstep 1"}})"}) {
    BOOST_TEST(!files.of_header(header).empty(), header);
  }
  BOOST_TEST(files.of_header(R"({"__metadata__":{"writer":"torch"}})").empty());
}

BOOST_AUTO_TEST_CASE(facts_with_right_checksums_and_wrong_contents) {
  const Files files;
  BOOST_TEST(files.error(signed_file(R"(,"checksums":{})")) == "");
  BOOST_TEST(holds(files.error(signed_file("")), "has no 'checksums'"));
  BOOST_TEST(holds(files.error(signed_file(R"(,"checksums":[])")), "instead of an object"));
  BOOST_TEST(holds(files.error(signed_file(R"(,"checksums":{"w":"0000000000000000"})")),
                   "a checksum of 'w' and no such tensor"));
  BOOST_TEST(
      holds(files.error(signed_file(R"(,"checksums":{},"checksums":{})")), "'checksums' twice"));
  const auto index = [&](std::string_view files_entry) {
    return files.error(signed_file(text({",\"checksums\":{},\"files\":", files_entry})));
  };
  const auto named = [&](std::string_view name) {
    return index(text({R"([{"name":")", name, R"(","bytes":9,"digest":"0123456789abcdef"}])"}));
  };
  BOOST_TEST(index("[]") == "");
  for (const char* name :
       {"", ".", "..", "/etc/passwd", "../secret", "a/b", "a/", "bad.safetensors", "a\\u0000b"}) {
    BOOST_TEST(holds(named(name), "files[0].name is not the name of another file"), name);
  }
  BOOST_TEST(holds(named("gone.safetensors"), "is not whole: "));
  BOOST_TEST(holds(named("gone.safetensors"), "No such file or directory"));
  BOOST_TEST(holds(named(std::string(10'000, 'a')), "is not whole: "));
  for (const char* wrong :
       {"{}", "1", "null", "[1]", "[{}]", R"([{"name":1,"bytes":9,"digest":"0123456789abcdef"}])",
        R"([{"name":"a","bytes":-9,"digest":"0123456789abcdef"}])",
        R"([{"name":"a","bytes":18446744073709551616,"digest":"0123456789abcdef"}])",
        R"([{"name":"a","bytes":9,"digest":"0123456789ABCDEF"}])",
        R"([{"name":"a","bytes":9,"digest":"0123456789abcdef"},
            {"name":"a","bytes":9,"digest":"0123456789abcdef"}])"}) {
    BOOST_TEST(!index(wrong).empty(), wrong);
  }
  const auto shapes = [&](std::string_view entry) {
    return files.error(signed_file(text({",\"checksums\":{},\"shapes\":", entry})));
  };
  BOOST_TEST(shapes(R"({"w":[1]})") == "");
  BOOST_TEST(!shapes("[1]").empty());
}

BOOST_AUTO_TEST_CASE(brackets_within_brackets) {
  const Files files;
  std::string arrays(100'000, '[');
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  for (const std::string& deep : {arrays, objects}) {
    BOOST_TEST(!files.of_header(deep).empty());
    BOOST_TEST(!files.of_header("{\"w\":" + deep).empty());
    BOOST_TEST(!files.of_header("{\"__metadata__\":" + deep).empty());
    BOOST_TEST(!files.of_header("{\"w\":{\"shape\":" + deep).empty());
    BOOST_TEST(holds(files.error(signed_file(",\"checksums\":{},\"a\":" + deep)), "too deep"));
  }
}

BOOST_AUTO_TEST_CASE(what_is_no_file_at_all) {
  const Files files;
  const auto error = [](const std::string& path) {
    return error_of([&] { CheckpointReader{path}; });
  };
  BOOST_TEST(error(files / "none") ==
             "lockstep: checkpoint: '" + (files / "none") +
                 "' cannot be read: No such file or directory; check the path");
  BOOST_TEST(holds(error(files.path), "name a file, not a folder"));
  BOOST_TEST_REQUIRE(::mkfifo((files / "pipe").c_str(), 0666) == 0);
  BOOST_TEST(holds(error(files / "pipe"), "no regular file"));  // and nobody waits for a writer
  BOOST_TEST(holds(error("/dev/zero"), "no regular file"));
}

BOOST_AUTO_TEST_CASE(memory_is_bounded) {
  // Headers filled with what costs most.
  const Files files;
  const auto peak = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;  // KiB
  };
  const long before = peak();
  std::string many = "{\"w\":{\"dtype\":\"U8\",\"shape\":[1";
  while (many.size() < 1'000'000) many += ",1";
  BOOST_TEST(!files.of_header(many).empty());
  many = "{\"w\":{\"data_offsets\":[0";
  while (many.size() < 1'000'000) many += ",0";
  BOOST_TEST(!files.of_header(many).empty());
  many = ",\"checksums\":{},\"a\":[0";
  while (many.size() < 1'000'000) many += ",0";
  BOOST_TEST(files.error(signed_file(many + "]")) == "");
  BOOST_TEST(peak() - before < 300'000);
}

BOOST_AUTO_TEST_SUITE_END()
