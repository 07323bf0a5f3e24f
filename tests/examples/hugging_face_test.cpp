// SPDX-License-Identifier: Apache-2.0
// The files of example gpt2.
#include <boost/test/unit_test.hpp>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "gpt2/hugging_face.hpp"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(examples_hugging_face)

using gpt2::HuggingFaceFile;
using gpt2::HuggingFaceTensor;

const std::vector<HuggingFaceTensor> tensors = {{"bias", {3}, {7, 8, 9}},
                                                {"wte", {2, 3}, {1, 2, 3, 4, 5, 6, 0, 0, 0}}};

void expect_words(const std::string& words, const std::function<void()>& f) {
  BOOST_CHECK_EXCEPTION(f(), std::exception, [&](const std::exception& error) {
    BOOST_TEST_INFO(error.what());
    return std::string(error.what()).find(words) != std::string::npos;
  });
}

BOOST_AUTO_TEST_CASE(padding_is_not_written_and_is_zero_when_read) {
  const TemporaryFolder folder;
  const std::string path = folder / "model";
  gpt2::write_hugging_face(path, tensors);
  std::vector<float> wte(9, -1);
  HuggingFaceFile(path).read("wte", {2, 3}, wte);
  BOOST_TEST(wte == tensors[1].numbers);
}

BOOST_AUTO_TEST_CASE(a_file_that_does_not_fit_is_an_error_that_names_the_tensor) {
  const TemporaryFolder folder;
  const std::string path = folder / "model";
  gpt2::write_hugging_face(path, tensors);
  std::vector<float> wte(9);
  const auto read = [&](const char* name, const std::vector<std::size_t>& shape) {
    HuggingFaceFile(path).read(name, shape, wte);
  };
  expect_words("[2,3] instead of [3,2] as the shape of wte", [&] { read("wte", {3, 2}); });
  expect_words("[2,3] instead of [3,3] as the shape of wte", [&] { read("wte", {3, 3}); });
  expect_words("lacks wpe", [&] { read("wpe", {2, 3}); });
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  expect_words("ends inside of wte", [&] { read("wte", {2, 3}); });
  std::filesystem::resize_file(path, 30);
  expect_words("has no header", [&] { read("wte", {2, 3}); });
  expect_words("is no safetensors file", [] { HuggingFaceFile("/dev/null"); });
}

BOOST_AUTO_TEST_CASE(a_part_of_a_tensor_is_not_written) {
  const TemporaryFolder folder;
  const std::string path = folder / "model";
  expect_words("only a part of w is here", [&] {
    gpt2::write_hugging_face(path, std::vector<HuggingFaceTensor>{{"w", {2, 3}, {1, 2}}});
  });
  BOOST_TEST(!std::filesystem::exists(path));
}

BOOST_AUTO_TEST_SUITE_END()
