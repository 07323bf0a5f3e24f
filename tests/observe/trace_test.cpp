// SPDX-License-Identifier: Apache-2.0
// What a trace keeps; tests/trace looks at those of whole jobs.

#include "lockstep/trace.hpp"

#include <boost/test/unit_test.hpp>
#include <string>
#include <vector>

#include "contents.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/observe/observers.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(trace)

namespace {

static_assert(std::is_empty_v<Observers<>::Span> && std::is_empty_v<Observers<>::Watch>);
static_assert(!Observers<>::has(&ObserverPaths::trace) &&
              Observers<Trace>::has(&ObserverPaths::trace));

/// The names of a trace's spans, thread by thread.
std::vector<std::string> spans_of(const std::string& path) {
  const detail::Json json = detail::Json::parse(contents(path), path);
  const detail::JsonEntry events = detail::JsonEntry(json, path).at("traceEvents");
  std::vector<std::string> names;
  for (std::size_t i = 0; i != events.items().size(); ++i)
    if (events.item(i).at("ph").text() == "X") names.push_back(events.item(i).at("name").text());
  return names;
}

}  // namespace

BOOST_AUTO_TEST_CASE(spans_of_all_threads_of_the_library_are_in_the_file) {
  const TemporaryFolder folder;
  Session session = detail::join_alone();
  const std::string path = folder / "trace.json";
  {
    const TraceRecording recording(session, path);
    const Trace::Span outer({"outer"});
    {
      const Trace::Span inner({"inner", 3, 100});
    }
    detail::Thread(
        {"lockstep test", "a thread of this test"}, [] { const Trace::Span there({"there"}); },
        [](const std::exception_ptr&) {});
    Trace::count("loss", 0.5);
  }
  const std::vector<std::string> expected{"inner", "outer", "there"};  // as they end, by thread
  BOOST_TEST(spans_of(path) == expected, boost::test_tools::per_element());
  const std::string text = contents(path);
  BOOST_TEST(text.find("\"args\":{\"number\":3,\"bytes\":100}") != text.npos);
  BOOST_TEST(text.find("\"args\":{\"loss\":0.5}") != text.npos);
  BOOST_TEST(text.find("lockstep test") != text.npos);
}

BOOST_AUTO_TEST_CASE(nothing_is_recorded_where_nobody_asks_or_after_the_end) {
  {
    const Trace::Span alone({"alone"});
  }
  const TemporaryFolder folder;
  Session session = detail::join_alone();
  for (const char* name : {"first.json", "second.json"}) {
    {
      const TraceRecording recording(session, folder / name);
    }
    const Trace::Span after({"after"});
    BOOST_TEST(spans_of(folder / name).empty());
  }
  const TraceRecording none(session, std::string());
  BOOST_TEST(detail::Tracer::of_thread() == nullptr);
}

BOOST_AUTO_TEST_CASE(what_is_too_much_is_left_out_and_counted) {
  const TemporaryFolder folder;
  Session session = detail::join_alone();
  const std::string path = folder / "trace.json";
  {
    const TraceRecording recording(session, {.path = path, .most_events = 10});
    for (int i = 0; i != 25; ++i) const Trace::Span span({"one"});
  }
  BOOST_TEST(spans_of(path).size() == 10u);
  BOOST_TEST(contents(path).find("15 events are left out") != std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
