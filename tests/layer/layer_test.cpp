// SPDX-License-Identifier: Apache-2.0
// Includes point only the way docs/architecture.md's layer table allows.
#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

BOOST_AUTO_TEST_SUITE(layers)

namespace {

using Folders = std::set<std::string>;

/// The table: what each folder may include directly. What those may include, it may too.
const std::map<std::string, Folders> table{
    {"core", {}},
    {"policy", {"core"}},
    {"model", {"policy"}},
    {"topology", {"policy"}},
    {"bucket", {"model", "device"}},
    {"launch", {"core", "device"}},
    {"device", {"policy"}},
    {"comm", {"device", "launch", "topology"}},
    {"optim", {"bucket"}},
    {"data", {"core", "comm"}},
    {"strategy", {"comm", "bucket", "optim", "hook", "checkpoint"}},
    {"norm", {"comm", "bucket"}},
    {"hook", {"comm", "bucket"}},
    {"checkpoint", {"comm", "bucket", "optim", "data", "observe"}},
    {"observe", {"comm", "bucket"}},
    {"trainer",
     {"data", "strategy", "norm", "hook", "checkpoint", "observe", "launch", "topology", "model"}},
    {"torch", {"trainer", "data", "strategy", "norm", "checkpoint", "launch", "model"}},
};

void add_reachable(const std::string& folder, Folders& reachable) {
  if (!reachable.insert(folder).second) return;
  for (const std::string& next : table.at(folder)) add_reachable(next, reachable);
}

/// The include lines of a header in `folder` that the table forbids.
std::vector<std::string> forbidden_includes(const std::string& folder, const std::string& text) {
  Folders allowed;
  add_reachable(folder, allowed);
  std::vector<std::string> found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t begin = line.find("lockstep/");
    if (!line.starts_with("#include") || begin == std::string::npos) continue;
    const std::string name = line.substr(begin + std::string("lockstep/").size());
    const std::size_t slash = name.find('/');
    const bool umbrella = name.starts_with("lockstep.hpp");
    const bool in_folder = slash != std::string::npos;
    if (umbrella || (in_folder && !allowed.contains(name.substr(0, slash)))) found.push_back(line);
  }
  return found;
}

}  // namespace

BOOST_AUTO_TEST_CASE(the_check_itself_can_fail) {
  BOOST_TEST(forbidden_includes("core", "#include \"lockstep/model/model.hpp\"").size() == 1u);
  BOOST_TEST(forbidden_includes("topology", "#include <lockstep/model/model.hpp>").size() == 1u);
  BOOST_TEST(forbidden_includes("bucket", "#include \"lockstep/lockstep.hpp\"").size() == 1u);
  BOOST_TEST(forbidden_includes("bucket", "#include \"lockstep/core/name.hpp\"").empty());
  BOOST_TEST(forbidden_includes("model", "#include \"lockstep/version.hpp\"").empty());
}

BOOST_AUTO_TEST_CASE(includes_point_only_where_the_layer_table_allows) {
  namespace fs = std::filesystem;
  const fs::path root = fs::path(LOCKSTEP_SOURCE_DIR) / "include" / "lockstep";
  std::size_t headers = 0;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (!entry.is_regular_file() || entry.path().parent_path() == root) continue;
    const std::string folder = *fs::relative(entry.path(), root).begin();
    BOOST_TEST_REQUIRE(table.contains(folder), folder + " is not in the layer table");
    std::ifstream in(entry.path());
    const std::string text(std::istreambuf_iterator<char>(in), {});
    for (const std::string& line : forbidden_includes(folder, text)) {
      BOOST_ERROR(entry.path().string() + " must not have " + line);
    }
    BOOST_TEST(text.starts_with("// SPDX-License-Identifier: Apache-2.0\n#pragma once\n/// @file "),
               entry.path().string() + " does not begin as headers begin here");
    ++headers;
  }
  BOOST_TEST(headers > 30u);
}

BOOST_AUTO_TEST_SUITE_END()
