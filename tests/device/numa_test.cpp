// SPDX-License-Identifier: Apache-2.0
// Which cores are near a GPU, on made-up hosts.
#include "lockstep/detail/device/numa.hpp"

#include <sched.h>

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "lockstep/detail/core/thread.hpp"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(numa)

using namespace lockstep::detail;

namespace {

/// The files of a host that the kernel would show under /sys.
class Host {
 public:
  explicit Host(const std::string& nodes) { write("devices/system/node/online", nodes); }

  Host& node(const std::string& number, const std::string& cores) {
    return write("devices/system/node/node" + number + "/cpulist", cores);
  }
  Host& gpu(const std::string& bus_id, const std::string& node) {
    return write("bus/pci/devices/" + bus_id + "/numa_node", node);
  }

  /// Where a thread with these cores goes: `1: 4-7`, or nothing.
  std::string place(const std::string& bus_id, const std::string& allowed) const {
    const auto found = numa_node(root_.path, bus_id, parse_cores(allowed));
    return found ? std::to_string(found->node) + ": " + cores_text(found->cores) : "";
  }

 private:
  Host& write(const std::string& path, const std::string& line) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << line << "\n";
    return *this;
  }

  TemporaryFolder root_;
};

}  // namespace

BOOST_AUTO_TEST_CASE(lists_are_those_of_the_kernel) {
  for (const char* const list : {"", "0", "0-3", "0-3,8,10-11", "56-111,168-223"})
    BOOST_TEST(cores_text(parse_cores(list)) == list);
  BOOST_TEST((parse_cores("2-4,7\n") == Cores{2, 3, 4, 7}));
  BOOST_TEST(parse_cores("-1").empty());
  BOOST_TEST(parse_cores("no list").empty());
}

BOOST_AUTO_TEST_CASE(a_thread_goes_to_the_cores_of_its_gpus_node) {
  Host host("0-1");
  host.node("0", "0-3,8-11").node("1", "4-7,12-15");
  host.gpu("0000:1b:00.0", "0").gpu("0000:c3:00.0", "1");
  BOOST_TEST(host.place("0000:1b:00.0", "0-15") == "0: 0-3,8-11");
  BOOST_TEST(host.place("0000:c3:00.0", "0-15") == "1: 4-7,12-15");
}

BOOST_AUTO_TEST_CASE(it_never_gets_a_core_that_it_had_not) {
  Host host("0-1");
  host.node("0", "0-3").node("1", "4-7").gpu("0000:c3:00.0", "1");
  BOOST_TEST(host.place("0000:c3:00.0", "2-5") == "1: 4-5");
  BOOST_TEST(host.place("0000:c3:00.0", "0-3") == "");  // the user has put it elsewhere
  BOOST_TEST(host.place("0000:c3:00.0", "6-7") == "");  // it is there already
}

BOOST_AUTO_TEST_CASE(where_nothing_is_known_nothing_is_done) {
  Host one("0");
  one.node("0", "0-7").gpu("0000:1b:00.0", "0");
  BOOST_TEST(one.place("0000:1b:00.0", "0-7") == "");
  Host two("0-1");
  two.node("0", "0-3").node("1", "4-7").gpu("0000:1b:00.0", "-1").gpu("0000:1c:00.0", "5");
  BOOST_TEST(two.place("0000:1b:00.0", "0-7") == "");  // the firmware does not say
  BOOST_TEST(two.place("0000:1c:00.0", "0-7") == "");  // a node that is not there
  BOOST_TEST(two.place("0000:99:00.0", "0-7") == "");  // a virtual GPU
  BOOST_TEST(!numa_node("/no/such/folder", "0000:1b:00.0", {0, 1}));
}

BOOST_AUTO_TEST_CASE(a_thread_stays_and_so_do_the_threads_that_it_starts) {
  const Cores before = allowed_cores();
  BOOST_REQUIRE(!before.empty());
  std::thread([&] {
    const Cores one{before.back()};
    BOOST_TEST(core_count() == before.size());
    BOOST_TEST(stay_at({0, one}));
    BOOST_TEST((allowed_cores() == one));
    BOOST_TEST(core_count() == 1u);
    BOOST_TEST(!has_free_core(1));
    std::thread([&] { BOOST_TEST((allowed_cores() == one)); }).join();
  }).join();
  BOOST_TEST((allowed_cores() == before));  // the others are free
}

BOOST_AUTO_TEST_CASE(a_core_is_free_beside_fewer_busy_threads_than_cores) {
  const std::size_t cores = core_count();
  BOOST_TEST(has_free_core(0));
  BOOST_TEST(has_free_core(cores - 1) == (cores > 1 || cores - 1 == 0));
  BOOST_TEST(!has_free_core(8192));
}

BOOST_AUTO_TEST_CASE(the_environment_turns_it_off) {
  ::unsetenv("LOCKSTEP_NUMA");
  BOOST_TEST(wants_numa());
  ::setenv("LOCKSTEP_NUMA", "0", 1);
  BOOST_TEST(!wants_numa());
  ::setenv("LOCKSTEP_NUMA", "1", 1);
  BOOST_TEST(wants_numa());
  ::unsetenv("LOCKSTEP_NUMA");
}

BOOST_AUTO_TEST_SUITE_END()
