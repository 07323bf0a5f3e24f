// SPDX-License-Identifier: Apache-2.0
// What --ranks gpu, cpu and auto count, on hosts that are made up as folders.
#include "lockstep/detail/launch/host.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/launch/program_options.hpp"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(host)

namespace {

using namespace lockstep;
using Cpus = std::vector<std::size_t>;

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text << '\n';
}

/// A host with these GPUs' devices.
void add_gpus(const TemporaryFolder& root, std::size_t count) {
  for (std::size_t i = 0; i != count; ++i) write(root / ("dev/nvidia" + std::to_string(i)), "");
  for (const char* other : {"dev/nvidiactl", "dev/nvidia-uvm", "dev/null"}) write(root / other, "");
}

/// Its CPUs, each with the list of those with which it shares its L3; an empty list: it has none.
void add_cpus(const TemporaryFolder& root, const std::vector<std::string>& sharing) {
  for (std::size_t i = 0; i != sharing.size(); ++i) {
    const std::string cpu = root / ("sys/devices/system/cpu/cpu" + std::to_string(i) + "/cache/");
    write(cpu + "index0/level", "1");
    write(cpu + "index0/shared_cpu_list", std::to_string(i));
    write(cpu + "index1/level", "2");
    write(cpu + "index1/shared_cpu_list", std::to_string(i));
    if (sharing[i].empty()) continue;
    write(cpu + "index2/level", "3");
    write(cpu + "index2/shared_cpu_list", sharing[i]);
  }
}
void add_nodes(const TemporaryFolder& root, const std::vector<std::string>& cpus) {
  write(root / "sys/devices/system/node/online", "0-" + std::to_string(cpus.size() - 1));
  for (std::size_t i = 0; i != cpus.size(); ++i)
    write(root / ("sys/devices/system/node/node" + std::to_string(i) + "/cpulist"), cpus[i]);
}

}  // namespace

BOOST_AUTO_TEST_CASE(gpus_are_those_that_cuda_shows) {
  const TemporaryFolder root;
  add_gpus(root, 4);
  const std::pair<const char*, std::size_t> expected[] = {
      {nullptr, 4},
      {"", 0},
      {"-1", 0},
      {"2", 1},
      {"3,1", 2},
      {"0,1,2,3", 4},
      {"0,1,-1,2", 2},
      {"0,9,1", 1},  // an entry that names no GPU ends the list
      {"0,,1", 1},
      {"none", 0},
      {" 0, 1", 2},
      {"0,1,0", 0},  // CUDA has none then
      {"0,00", 0},
      {"GPU-8f6d,GPU-11aa", 2},
      {"GPU-8f6d,1", 1},
      {"GPU-8f6d,GPU-8f6d", 0},
      {"MIG-a,MIG-b,MIG-c,MIG-d,MIG-e", 5},  // slices may be more than GPUs
  };
  for (const auto& [list, count] : expected)
    BOOST_TEST(detail::count_gpus(root.path, list) == count,
               (list != nullptr ? list : "unset")
                   << ": " << detail::count_gpus(root.path, list) << " instead of " << count);
}

BOOST_AUTO_TEST_CASE(without_devices_the_drivers_list_counts) {
  const TemporaryFolder root;
  add_gpus(root, 0);
  BOOST_TEST(detail::count_gpus(root.path, nullptr) == 0u);
  BOOST_TEST(detail::count_gpus(root.path, "0,1") == 0u);
  BOOST_TEST(detail::count_gpus(root.path, "GPU-8f6d") == 0u);
  write(root / "proc/driver/nvidia/gpus/0000:01:00.0/information", "");
  write(root / "proc/driver/nvidia/gpus/0000:02:00.0/information", "");
  BOOST_TEST(detail::count_gpus(root.path, nullptr) == 2u);
}

BOOST_AUTO_TEST_CASE(lists_of_cpus_are_ranges) {
  BOOST_TEST((detail::parse_cpu_list("0-2,8,10-11\n") == Cpus{0, 1, 2, 8, 10, 11}));
  BOOST_TEST(detail::parse_cpu_list("").empty());
  BOOST_TEST(detail::parse_cpu_list("\n").empty());
}

BOOST_AUTO_TEST_CASE(groups_of_cpus_share_a_cache_inside_of_a_node) {
  const TemporaryFolder one, chiplets, sockets, plain;
  add_cpus(one, {"0-3", "0-3", "0-3", "0-3"});
  add_nodes(one, {"0-3"});
  BOOST_TEST(detail::count_core_groups(one.path, {0, 1, 2, 3}) == 1u);

  add_cpus(chiplets, {"0-1", "0-1", "2-3", "2-3"});
  add_nodes(chiplets, {"0-3"});
  BOOST_TEST(detail::count_core_groups(chiplets.path, {0, 1, 2, 3}) == 2u);
  BOOST_TEST(detail::count_core_groups(chiplets.path, {2, 3}) == 1u);  // taskset -c 2,3

  add_cpus(sockets, {"", "", "", ""});  // whose L3 sysfs does not know
  add_nodes(sockets, {"0,2", "1,3"});
  BOOST_TEST(detail::count_core_groups(sockets.path, {0, 1, 2, 3}) == 2u);

  BOOST_TEST(detail::count_core_groups(plain.path, {0, 1}) == 1u);  // no sysfs
}

BOOST_AUTO_TEST_CASE(this_host_has_groups_of_the_cpus_that_it_allows) {
  const Cpus cpus = detail::allowed_cpus();
  BOOST_TEST(cpus.size() == detail::core_count());
  BOOST_TEST(detail::count_core_groups("", cpus) <= cpus.size());
}

BOOST_AUTO_TEST_CASE(words_for_a_number_of_ranks) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  BOOST_TEST(detail::parse_ranks("--ranks", "12").first == 12u);
  BOOST_TEST(detail::parse_ranks("--ranks", "cpu").first == detail::core_count());
  const auto groups = detail::parse_ranks("--ranks", "auto");
  BOOST_TEST(groups.first == detail::count_core_groups("", detail::allowed_cpus()));
  BOOST_TEST(groups.second == "group of CPUs that share a cache");
  const Cpus devices{0, 2, 5};
  for (const char* word : {"gpu", "auto"}) {
    const auto chosen = detail::parse_ranks("--ranks", word, devices);
    BOOST_TEST((chosen.first == 3u && chosen.second == "GPU"));
  }
  expect_error([] { detail::parse_ranks("--ranks", "gpu"); },
               "--ranks is gpu, and this host shows no GPU (CUDA_VISIBLE_DEVICES is empty)",
               "--ranks auto, --ranks cpu or a number");
  for (const char* slip : {"gpus", "GPU", "all", "", "-2", "2x"})
    expect_error([&] { detail::parse_ranks("--ranks", slip); },
                 std::string("--ranks is '") + slip + "'", "a number, or gpu, cpu or auto");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
}

BOOST_AUTO_TEST_CASE(lists_of_devices_are_numbers) {
  ::unsetenv("LOCKSTEP_SHARE_GPUS");
  BOOST_TEST((detail::parse_devices("--devices", "0,2,5") == Cpus{0, 2, 5}));
  BOOST_TEST((detail::parse_devices("--devices", "3") == Cpus{3}));
  for (const char* slip : {"", "0,", ",1", "0;1", "cuda:0", "-1", "0, 1"})
    expect_error([&] { detail::parse_devices("--devices", slip); },
                 std::string("--devices is '") + slip + "'", "0,2,5");
  expect_error([] { detail::parse_devices("--devices", "1,0,1"); }, "which has 1 twice",
               "LOCKSTEP_SHARE_GPUS=1");
  ::setenv("LOCKSTEP_SHARE_GPUS", "1", 1);
  BOOST_TEST((detail::parse_devices("--devices", "1,0,1") == Cpus{1, 0, 1}));
  ::unsetenv("LOCKSTEP_SHARE_GPUS");
}

BOOST_AUTO_TEST_SUITE_END()
