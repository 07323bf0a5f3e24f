// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/launch/environment.hpp"

#include <boost/test/unit_test.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "launch/watchdog.hpp"
#include "lockstep/detail/launch/host.hpp"
#include "lockstep/detail/launch/program_options.hpp"
#include "temporary_folder.hpp"

using namespace lockstep;
using lockstep::detail::Endpoint;
using lockstep::detail::first_slurm_host;
using lockstep::detail::LaunchEnvironment;
using lockstep::detail::LaunchOptions;
using lockstep::detail::parse_options;
using lockstep::detail::RankPlacement;
using lockstep::detail::slurm_tasks_on;

namespace {

using Variables = std::map<std::string, std::string>;

/// What the reader looks at: the variables of the newest `reader`.
Variables looked_up;

LaunchEnvironment reader(Variables variables, std::optional<Endpoint> rendezvous = std::nullopt) {
  looked_up = std::move(variables);
  return LaunchEnvironment(std::move(rendezvous), [](const char* name) -> const char* {
    const auto found = looked_up.find(name);
    return found == looked_up.end() ? nullptr : found->second.c_str();
  });
}

RankPlacement place(Variables variables) {
  return reader(std::move(variables)).placement().value();
}

std::string text(const RankPlacement& p) {
  return std::to_string(p.rank.value()) + "/" + std::to_string(p.world.value()) + " local " +
         std::to_string(p.local_rank) + "/" + std::to_string(p.local_world) + " at " + p.host;
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Variables by_hand{
    {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};
const Variables torchrun = with(by_hand, {{"LOCAL_RANK", "1"},
                                          {"LOCAL_WORLD_SIZE", "2"},
                                          {"TORCHELASTIC_RUN_ID", "run"},
                                          {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
const Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                         {"PMIX_NAMESPACE", "prterun-host-123@1"}};
const Variables mpich{
    {"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "3"}};
const Variables slurm{{"SLURM_PROCID", "5"},
                      {"SLURM_NTASKS", "7"},
                      {"SLURM_LOCALID", "1"},
                      {"SLURM_NODEID", "2"},
                      {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                      {"SLURM_JOB_ID", "77"},
                      {"SLURM_STEP_ID", "0"},
                      {"SLURM_STEP_NODELIST", "gpu[07-09,12]"}};

LaunchOptions options(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "trainer");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return parse_options(static_cast<int>(argv.size()), argv.data());
}

}  // namespace

BOOST_FIXTURE_TEST_SUITE(environment, Watchdog)

BOOST_AUTO_TEST_CASE(without_variables_there_is_no_place) {
  BOOST_TEST(!reader({}).placement().has_value());
  BOOST_TEST(!reader({{"MASTER_ADDR", "x"}}).placement().has_value());
  // A batch script, not a task that srun has started.
  BOOST_TEST(!reader({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).placement().has_value());
}

BOOST_AUTO_TEST_CASE(locksteps_own_variables_come_first) {
  const RankPlacement p = place(with(torchrun, {{"LOCKSTEP_RANK", "3"},
                                                {"LOCKSTEP_WORLD_SIZE", "8"},
                                                {"LOCKSTEP_LOCAL_RANK", "1"},
                                                {"LOCKSTEP_LOCAL_WORLD_SIZE", "2"},
                                                {"LOCKSTEP_STORE", "[::1]:1234"},
                                                {"LOCKSTEP_JOB", "abc"},
                                                {"LOCKSTEP_SECRET_FD", "9"}}));
  BOOST_TEST(text(p) == "3/8 local 1/2 at ::1");
  BOOST_TEST(p.ports.at(0) == 1234);
  BOOST_TEST(p.hosted);
  BOOST_TEST(p.job == "abc");
  BOOST_TEST(p.secret_fd == 9);
}

BOOST_AUTO_TEST_CASE(variables_set_by_hand_mean_what_they_mean_to_pytorch) {
  const RankPlacement p = place(by_hand);
  BOOST_TEST(text(p) == "1/4 local 0/0 at node0");
  BOOST_TEST((p.ports == std::vector<std::uint16_t>{29500}));
  BOOST_TEST(place(with(by_hand, {{"MASTER_ADDR", "localhost"}})).host == "127.0.0.1");
  BOOST_TEST(p.secret == place(with(by_hand, {{"RANK", "0"}})).secret);
}

BOOST_AUTO_TEST_CASE(a_secret_comes_from_a_file_that_only_its_owner_can_read) {
  using std::filesystem::perms;
  const TemporaryFolder folder;
  const std::string path = folder / "secret";
  const auto write = [&](std::string_view text, perms mode) {
    std::ofstream(path) << text;
    std::filesystem::permissions(path, mode);
  };
  const auto secret = [](const Variables& launcher, const std::string& file) {
    return place(with(launcher, {{"LOCKSTEP_SECRET_FILE", file}})).secret;
  };
  constexpr perms own = perms::owner_read | perms::owner_write;
  write("open sesame\n", own);
  for (const Variables& launcher : {by_hand, torchrun, open_mpi, slurm}) {
    const std::string found = secret(launcher, path);
    BOOST_TEST(found.ends_with(" open sesame"));
    BOOST_TEST(found != place(launcher).secret);  // another secret is another job
  }
  write("open sesame", perms::owner_read);
  BOOST_TEST(secret(by_hand, path).ends_with(" open sesame"));
  for (const perms open : {perms::group_read, perms::others_read, perms::others_write}) {
    write("open sesame", own | open);
    expect_error([&] { secret(by_hand, path); }, "launch: '" + path + "'", "rank 1",
                 "open to other users", "run chmod 600 '" + path + "'");
  }
  write("\n", own);
  expect_error([&] { secret(by_hand, path); }, "rank 1", path, "it is empty", "openssl rand");
  expect_error([&] { secret(by_hand, folder.path); }, "rank 1", folder.path, "it is no file");
  expect_error([&] { secret(by_hand, folder / "none"); }, "rank 1", folder / "none", "No such file",
               "umask 077");
  expect_error([&] { place(with(by_hand, {{"LOCKSTEP_SECRET", "open sesame"}})); }, "rank 1",
               "LOCKSTEP_SECRET is set", "LOCKSTEP_SECRET_FILE");
}

BOOST_AUTO_TEST_CASE(under_torchrun_the_agents_port_is_left_alone) {
  const RankPlacement p = place(torchrun);
  BOOST_TEST(text(p) == "1/4 local 1/2 at node0");
  BOOST_TEST(p.ports.size() == 8u);
  for (std::uint16_t port : p.ports) BOOST_TEST((port >= 20000 && port < 32000));
  BOOST_TEST((place(with(torchrun, {{"RANK", "0"}, {"LOCAL_RANK", "0"}})).ports == p.ports));
  BOOST_TEST((place(with(torchrun, {{"MASTER_PORT", "1"}})).ports != p.ports));
  BOOST_TEST(place(with(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).secret != p.secret);
  BOOST_TEST(place(with(torchrun, {{"LOCAL_WORLD_SIZE", "4"}})).host == "127.0.0.1");
  const RankPlacement own = place(with(torchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}}));
  BOOST_TEST((own.ports == std::vector<std::uint16_t>{29500}));
}

BOOST_AUTO_TEST_CASE(open_mpis_variables_are_read) {
  BOOST_TEST(text(place(open_mpi)) == "2/3 local 2/3 at 127.0.0.1");
  BOOST_TEST(place(open_mpi).ports.size() == 8u);
  const Variables far =
      with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  expect_error([&] { place(far); }, "several hosts", "MASTER_ADDR", "--rendezvous");
  const Variables told = with(far, {{"MASTER_ADDR", "n0"}, {"MASTER_PORT", "5000"}});
  BOOST_TEST(text(place(told)) == "2/3 local 0/1 at n0");
  BOOST_TEST((place(told).ports == std::vector<std::uint16_t>{5000}));
  const auto met = reader(far, Endpoint{"n7", 5001}).placement();
  BOOST_TEST_REQUIRE(met.has_value());
  BOOST_TEST(met->host == "n7");
}

BOOST_AUTO_TEST_CASE(slurms_variables_are_read) {
  BOOST_TEST(text(place(slurm)) == "5/7 local 1/2 at gpu07");
  BOOST_TEST(place(slurm).ports.size() == 8u);
  BOOST_TEST(place(with(slurm, {{"SLURM_STEP_ID", "1"}})).secret != place(slurm).secret);
  BOOST_TEST(place(with(slurm, {{"SLURM_RESTART_COUNT", "1"}})).secret != place(slurm).secret);
  BOOST_TEST(text(place({{"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "2"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NTASKS_PER_NODE", "2"},
                         {"SLURM_STEP_ID", "0"}})) == "1/2 local 1/2 at 127.0.0.1");
}

BOOST_AUTO_TEST_CASE(restarts_of_all_launchers_are_counted) {
  BOOST_TEST(reader({}).restarts() == 0u);
  BOOST_TEST(reader({{"LOCKSTEP_RESTART", "2"}}).restarts() == 2u);
  BOOST_TEST(reader(with(torchrun, {{"TORCHELASTIC_RESTART_COUNT", "3"}})).restarts() == 3u);
  BOOST_TEST(reader(with(slurm, {{"SLURM_RESTART_COUNT", "1"}})).restarts() == 1u);
  BOOST_TEST(reader({{"LOCKSTEP_RESTART", "2"}, {"SLURM_RESTART_COUNT", "1"}}).restarts() == 3u);
  expect_error([] { reader({{"LOCKSTEP_RESTART", "x"}}).restarts(); }, "LOCKSTEP_RESTART", "'x'");
}

BOOST_AUTO_TEST_CASE(slurms_lists_are_understood) {
  BOOST_TEST(first_slurm_host("node1") == "node1");
  BOOST_TEST(first_slurm_host("node1,node2") == "node1");
  BOOST_TEST(first_slurm_host("node[01-03,07],login") == "node01");
  BOOST_TEST(first_slurm_host("n[5,7]") == "n5");
  BOOST_TEST(first_slurm_host("rack[1-2]n[3-4]-ib,x") == "rack1n3-ib");
  BOOST_TEST(first_slurm_host("") == "");
  BOOST_TEST(slurm_tasks_on("V", "4", 0) == 4u);
  BOOST_TEST(slurm_tasks_on("V", "2(x3),1", 2) == 2u);
  BOOST_TEST(slurm_tasks_on("V", "2(x3),1", 3) == 1u);
  expect_error([] { slurm_tasks_on("V", "2(x3),1", 4); }, "V is '2(x3),1'", "no node 4");
}

BOOST_AUTO_TEST_CASE(bad_values_are_named) {
  expect_error([] { place({{"RANK", "0"}}); }, "RANK is set and WORLD_SIZE is not");
  expect_error([] { place({{"WORLD_SIZE", "2"}}); }, "WORLD_SIZE is set and RANK is not");
  expect_error([] { place({{"RANK", "0"}, {"WORLD_SIZE", "2"}}); }, "MASTER_ADDR is not");
  expect_error([] { place(with(by_hand, {{"RANK", "one"}})); }, "RANK is 'one'", "number");
  expect_error([] { place(with(by_hand, {{"RANK", "-1"}})); }, "RANK is '-1'");
  expect_error([] { place(with(by_hand, {{"RANK", ""}})); }, "RANK is ''");
  expect_error([] { place(with(by_hand, {{"RANK", "4"}})); }, "rank 4 of a world of 4");
  expect_error([] { place(with(by_hand, {{"WORLD_SIZE", "0"}})); }, "zero ranks");
  expect_error([] { place(with(by_hand, {{"MASTER_PORT", "70000"}})); }, "MASTER_PORT", "65535");
  expect_error([] { place(with(torchrun, {{"LOCAL_RANK", "2"}})); }, "local rank 2 of 2");
  expect_error([] { place(with(by_hand, {{"LOCAL_RANK", "x"}})); }, "LOCAL_RANK is 'x'");
  expect_error([] { place({{"OMPI_COMM_WORLD_RANK", "0"}}); }, "OMPI_COMM_WORLD_SIZE is not");
  expect_error([] { place({{"LOCKSTEP_RANK", "0"}}); }, "LOCKSTEP_WORLD_SIZE is not");
  expect_error([] { place({{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}}); }, "SLURM_NTASKS");
  expect_error([] { reader({{"LOCKSTEP_TIMEOUT", "soon"}}).timeout(); }, "LOCKSTEP_TIMEOUT");
  BOOST_TEST((reader({{"LOCKSTEP_TIMEOUT", "1.5"}}).timeout() == std::chrono::milliseconds(1500)));
  BOOST_TEST((place(with(by_hand, {{"LOCKSTEP_DEVICES", "3,1"}})).devices ==
              std::vector<std::size_t>{3, 1}));
  BOOST_TEST(place(by_hand).devices.empty());
}

BOOST_AUTO_TEST_CASE(the_launchers_options_are_taken_and_the_programs_left) {
  const LaunchOptions o =
      options({"--ranks", "4", "--epochs=3", "--timeout=2.5", "x", "--", "--ranks", "9"});
  BOOST_TEST((o.ranks == 4u));
  BOOST_TEST((o.timeout == std::chrono::milliseconds(2500)));
  BOOST_TEST(
      (o.rest == std::vector<std::string>{"trainer", "--epochs=3", "x", "--", "--ranks", "9"}));
  BOOST_TEST(!options({}).ranks.has_value());
  BOOST_TEST(o.max_restarts == 0u);
  BOOST_TEST(options({"--max_restarts=3", "--ranks", "2"}).max_restarts == 3u);
  expect_error([] { options({"--max-restart", "3"}); }, "did you mean --max-restarts");
  const LaunchOptions chosen = options({"--ranks", "gpu", "--devices=1,3", "--device", "cuda"});
  BOOST_TEST((chosen.ranks == 2u && chosen.devices == std::vector<std::size_t>{1, 3}));
  BOOST_TEST((chosen.rest == std::vector<std::string>{"trainer", "--device", "cuda"}));
  const LaunchOptions n = options({"--ranks=2", "--rendezvous", "[::1]:99"});
  BOOST_TEST((n.rendezvous->host == "::1" && n.rendezvous->port == 99));
}

BOOST_AUTO_TEST_CASE(options_that_make_no_sense_are_errors) {
  expect_error([] { options({"--ranks", "0"}); }, "--ranks is 0");
  expect_error([] { options({"--ranks", "x"}); }, "--ranks is 'x'");
  expect_error([] { options({"--ranks", "-2"}); }, "--ranks is '-2'");
  expect_error([] { options({"--ranks", "gpus"}); }, "--ranks is 'gpus'", "gpu, cpu or auto");
  expect_error([] { options({"--ranks"}); }, "--ranks has no value");
  expect_error([] { options({"--ranks=1", "--nodes=2"}); },
               "--nodes is given, and --ranks starts ranks on this host only; start a job of "
               "several hosts with torchrun, srun or mpirun");
  expect_error([] { options({"--node_rank", "0"}); }, "--node-rank is given", "torchrun");
  expect_error([] { options({"--nnodes", "2"}); }, "--nnodes is given", "torchrun");
  expect_error([] { options({"--rendezvous", "host"}); }, "host:port");
  expect_error([] { options({"--timeout", "0"}); }, "--timeout", "above 0");
}

BOOST_AUTO_TEST_CASE(misspelt_and_doubled_options_are_errors) {
  expect_error([] { options({"--rank", "2"}); }, "no option --rank; did you mean --ranks?");
  expect_error([] { options({"-ranks", "2"}); }, "no option -ranks; did you mean --ranks?");
  expect_error([] { options({"--rnaks=2"}); }, "no option --rnaks; did you mean --ranks?");
  expect_error([] { options({"--rendevous", "a:1"}); }, "did you mean --rendezvous?");
  expect_error([] { options({"--nproc_per_node", "2"}); }, "did you mean --ranks?", "behind --");
  expect_error([] { options({"-np", "2"}); }, "did you mean --ranks?");
  expect_error([] { options({"--verson"}); }, "did you mean --version?");
  expect_error([] { options({"--ranks", "2", "x", "--ranks=2"}); }, "--ranks is given twice");
  expect_error([] { options({"--max-restarts=0", "--max_restarts=0"}); },
               "--max-restarts is given twice");
  expect_error([] { options({"--progress", "loud"}); }, "--progress is 'loud'", "bar, lines");
}

BOOST_AUTO_TEST_CASE(options_of_the_programs_own_pass) {
  const std::vector<std::string> own = {"--epochs", "3",      "--lr=0.1",  "-v",        "--model",
                                        "--batch",  "--date", "--speed",   "--session", "--loss",
                                        "-",        "-2",     "--process", "--modes",   "4"};
  std::vector<std::string> rest = options(own).rest;
  rest.erase(rest.begin());
  BOOST_TEST(rest == own, boost::test_tools::per_element());
  BOOST_TEST((options({"--", "--rank", "--ranks=2", "--ranks=3"}).rest ==
              std::vector<std::string>{"trainer", "--", "--rank", "--ranks=2", "--ranks=3"}));
}

BOOST_AUTO_TEST_CASE(a_local_rank_is_taken_in_both_spellings) {
  BOOST_TEST((options({"--local_rank=3", "x"}).local_rank == 3u));
  BOOST_TEST(
      (options({"--local-rank", "0", "x"}).rest == std::vector<std::string>{"trainer", "x"}));
}

BOOST_AUTO_TEST_CASE(a_jobs_options_are_left_for_it_and_checked) {
  const detail::Flag flags[] = {{"--seed", "N", "of everything"}};
  const auto cut = [&](std::vector<std::string_view> words) {
    words.insert(words.begin(), "trainer");
    return detail::cut_arguments(words, detail::launch_flags, flags).rest;
  };
  BOOST_TEST((cut({"--seed", "--ranks", "--ranks", "2", "--sede"}) ==
              std::vector<std::string>{"trainer", "--seed", "--ranks", "--sede"}));
  expect_error([&] { cut({"--seeds", "2"}); }, "did you mean --seed?");
  expect_error([&] { cut({"--seed", "2", "--seed=2"}); }, "--seed is given twice");
  expect_error([&] { cut({"--help=1"}); }, "--help takes no value");
  const std::string help = detail::help_text("/usr/bin/trainer", flags, {});
  BOOST_TEST(help.starts_with("usage: trainer [OPTIONS]"));
  for (const char* part : {"  --seed N ", "  --ranks N ", "  --version  ", "own"}) {
    BOOST_TEST(help.find(part) != std::string::npos, part);
  }
}

BOOST_AUTO_TEST_CASE(variables_for_shared_gpus_are_ready_and_unread_until_they_are_wanted) {
  const auto clear = [] {
    for (const char* name : {"LOCKSTEP_SHARE_GPUS", "LCCL_HOSTID", "LCCL_SOCKET_IFNAME",
                             "NCCL_HOSTID", "NCCL_SOCKET_IFNAME"}) {
      ::unsetenv(name);
    }
  };
  clear();
  std::vector<std::string> variables;
  detail::add_shared_gpu_variables(variables, "job", Rank{3});
  BOOST_TEST(variables.empty());
  BOOST_TEST(!detail::use_shared_gpu_variable("NCCL_HOSTID"));  // nothing was made ready
  ::setenv("LOCKSTEP_SHARE_GPUS", "1", 1);
  detail::add_shared_gpu_variables(variables, "job", Rank{3});
  BOOST_TEST_REQUIRE(variables.size() == 2u);
  BOOST_TEST(variables[0] == "LCCL_HOSTID=job.3");
  for (std::string& variable : variables) ::putenv(variable.data());
  BOOST_TEST(::getenv("NCCL_HOSTID") == nullptr);
  BOOST_TEST(detail::use_shared_gpu_variable("NCCL_HOSTID"));
  BOOST_TEST(::getenv("NCCL_HOSTID") == std::string("job.3"));
  BOOST_TEST(::getenv("NCCL_SOCKET_IFNAME") == nullptr);
  ::setenv("NCCL_SOCKET_IFNAME", "eth0", 1);
  BOOST_TEST(detail::use_shared_gpu_variable("NCCL_SOCKET_IFNAME"));
  BOOST_TEST(::getenv("NCCL_SOCKET_IFNAME") == std::string("eth0"));  // the user's own choice
  clear();
}

// MPI itself is not there: what it would be asked is known before.
BOOST_AUTO_TEST_CASE(a_program_with_mpi_asks_it_where_the_store_is) {
  expect_error([] { place(mpich); }, "mpiexec does not say which job this is", "MASTER_ADDR");
  static constexpr detail::MpiRendezvous some{};
  struct Registered {
    Registered() { detail::mpi_rendezvous = &some; }
    ~Registered() { detail::mpi_rendezvous = nullptr; }
  } const registered;
  const RankPlacement p = place(mpich);
  BOOST_TEST(text(p) == "1/3 local 1/3 at 127.0.0.1");
  BOOST_TEST((p.asks_mpi && p.ports.empty()));
  const RankPlacement other_host = place(
      with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}));
  BOOST_TEST((other_host.asks_mpi && other_host.host.empty()));
  BOOST_TEST(place(open_mpi).asks_mpi);
  BOOST_TEST(!place(by_hand).asks_mpi);
  BOOST_TEST(!place(with(mpich, {{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}})).asks_mpi);
}

BOOST_AUTO_TEST_SUITE_END()
