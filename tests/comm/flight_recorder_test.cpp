// SPDX-License-Identifier: Apache-2.0
// What the flight recorder keeps, and what it writes; tests/flight_recorder reads it after real
// hangs.

#include "lockstep/detail/comm/call/flight_recorder.hpp"

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "contents.hpp"
#include "lockstep/comm.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;
using namespace lockstep::detail;

BOOST_AUTO_TEST_SUITE(flight_recorder)

namespace {

constexpr Rank unused{77};  // no other test has a recorder of this rank of a job

Call sum_of(std::size_t count) { return calls::AllReduce<float, Sum>{{}, {}, count}.call(); }

FlightRecorder recorder_of(Rank job_rank) {
  return {"shm", GroupMember{"world", Rank{1}, WorldSize{4}, job_rank}};
}

Json parsed(const std::string& text) { return Json::parse(text, "the record"); }

}  // namespace

BOOST_AUTO_TEST_CASE(the_last_calls_are_kept_in_their_order_with_how_far_they_came) {
  FlightRecorder recorder = recorder_of(unused);
  BOOST_TEST(recorder.records().empty());
  const std::size_t made = FlightRecorder::kept + 300;
  for (std::size_t i = 1; i <= made; ++i) {
    const std::uint64_t number = recorder.schedule(sum_of(i));
    BOOST_TEST_REQUIRE(number == i);
    if (i + 2 <= made) recorder.start(number);
    if (i + 1 < made) recorder.complete(number);
  }
  recorder.start(1);  // overwritten long ago
  const auto records = recorder.records();
  BOOST_TEST_REQUIRE(records.size() == FlightRecorder::kept);
  for (std::size_t i = 0; i != records.size(); ++i) {
    const CallRecord& record = records[i];
    BOOST_TEST_REQUIRE(record.number == 301 + i);
    BOOST_TEST_REQUIRE(record.sequence == record.number);
    BOOST_TEST_REQUIRE(record.call.count == record.number);
    BOOST_TEST_REQUIRE((record.started != 0) == (record.number + 2 <= made));
    BOOST_TEST_REQUIRE((record.completed != 0) == (record.number + 1 < made));
    if (record.completed != 0) {
      BOOST_TEST_REQUIRE(record.scheduled <= record.started);
      BOOST_TEST_REQUIRE(record.started <= record.completed);
    }
    if (i != 0) BOOST_TEST_REQUIRE(records[i - 1].scheduled <= record.scheduled);
  }
  BOOST_TEST(recorder.records(made - 3).size() == 3u);
}

BOOST_AUTO_TEST_CASE(another_thread_reads_whole_records_while_calls_are_made) {
  FlightRecorder recorder = recorder_of(unused);
  std::atomic<bool> ends = false;
  std::thread writer([&] {
    for (std::size_t i = 1; i <= 20000; ++i) {
      const std::uint64_t number = recorder.schedule(sum_of(i));
      recorder.start(number);
      recorder.complete(number);
    }
    ends = true;
  });
  std::size_t torn = 0;
  while (!ends) {
    for (const CallRecord& record : recorder.records())
      torn += record.call.count != record.number || record.sequence != record.number;
  }
  writer.join();
  BOOST_TEST(torn == 0u);
}

BOOST_AUTO_TEST_CASE(messages_are_numbered_for_themselves) {
  FlightRecorder recorder = recorder_of(unused);
  recorder.schedule(sum_of(1));
  recorder.schedule(calls::send<float>({}, Rank{3}).call());
  recorder.schedule(sum_of(1));
  const auto records = recorder.records();
  BOOST_TEST(records[1].is_message());
  BOOST_TEST(records[1].sequence == 1u);
  BOOST_TEST(records[2].sequence == 2u);
}

BOOST_AUTO_TEST_CASE(a_record_has_the_fields_of_pytorchs) {
  FlightRecorder recorder = recorder_of(unused);
  recorder.complete(recorder.schedule(sum_of(10)));
  auto gather = calls::AllGather<double>{{}, {}, 5}.call();
  gather.part_of = JobCall::evaluate;
  recorder.start(recorder.schedule(gather));
  recorder.schedule(calls::send<std::int32_t>({}, Rank{3}).call());
  const Json record = parsed(flight_record(unused));
  const JsonEntry whole(record, "the record");
  BOOST_TEST(whole.at("rank").natural() == 77u);
  BOOST_TEST(whole.at("pg_config").at("world").at("size").natural() == 4u);
  const JsonEntry entries = whole.at("entries");
  BOOST_TEST_REQUIRE(entries.items().size() == 3u);
  const auto text = [&](std::size_t i, const char* name) {
    return entries.item(i).at(name).text();
  };
  BOOST_TEST(text(0, "profiling_name") == "shm:all_reduce");
  BOOST_TEST(text(0, "operation") == "sum");
  BOOST_TEST(text(0, "state") == "completed");
  BOOST_TEST(text(1, "profiling_name") == "shm:all_gather");
  BOOST_TEST(text(1, "state") == "started");
  BOOST_TEST(entries.item(1).at("frames").item(0).at("name").text() == "evaluate");
  BOOST_TEST(entries.item(1).at("input_sizes").item(0).item(0).natural() == 5u);
  BOOST_TEST(entries.item(1).at("output_sizes").item(0).item(0).natural() == 20u);
  BOOST_TEST(entries.item(1).at("input_dtypes").item(0).text() == "Double");
  BOOST_TEST(text(2, "profiling_name") == "shm:send 1->3");
  BOOST_TEST(text(2, "state") == "scheduled");
  BOOST_TEST(!entries.item(2).find("time_discovered_completed_ns"));
  const std::uint64_t begun = entries.item(0).at("time_created_ns").natural();
  const std::uint64_t ended = entries.item(0).at("time_discovered_completed_ns").natural();
  BOOST_TEST(begun <= ended);
  const auto now = static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
  BOOST_TEST(ended <= now);
  BOOST_TEST(now - begun < 60'000'000'000u);  // it is the time of day
}

BOOST_AUTO_TEST_CASE(communicators_and_their_groups_record_under_names_of_their_own) {
  const TemporaryFolder folder;
  spawn<2>([&](const Membership& member, Store& store) {
    auto comm = make_shm_communicator(member, store, "outer");
    auto group = new_group(comm, {Rank{1}});
    float value[] = {1};
    comm.all_reduce(value);
    if (group) group->all_reduce(value);
    dump_flight_recorder(folder.path, member.rank);
  });
  for (const std::size_t rank : {0, 1}) {
    const Json record = parsed(contents(text({folder.path, "/rank_", rank, ".json"})));
    const JsonEntry whole(record, "the record");
    std::size_t of_world = 0;
    std::size_t of_group = 0;
    const JsonEntry entries = whole.at("entries");
    for (std::size_t i = 0; i != entries.items().size(); ++i) {
      const JsonEntry entry = entries.item(i);
      BOOST_TEST(entry.at("record_id").natural() == i);
      const bool reduces = entry.at("profiling_name").text() == "shm:all_reduce";
      if (!reduces) continue;
      const std::string group = entry.at("process_group").item(0).text();
      of_world += group == "outer";
      of_group += group == "outer/0.0";
      BOOST_TEST(entry.at("state").text() == "completed");
    }
    BOOST_TEST(of_world == 1u);
    BOOST_TEST(of_group == rank);
    BOOST_TEST(whole.at("pg_config").find("outer/0.0").has_value() == (rank == 1));
  }
}

BOOST_AUTO_TEST_CASE(a_folder_that_cannot_be_written_is_an_error) {
  BOOST_CHECK_THROW(dump_flight_recorder("/proc/nowhere", unused), Error);
}

BOOST_AUTO_TEST_SUITE_END()
