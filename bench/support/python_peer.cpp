// SPDX-License-Identifier: Apache-2.0
#include "python_peer.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>

namespace bench {

PythonPeer::PythonPeer(const std::string& script, const std::vector<std::string>& arguments) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return;
  std::vector<std::string> words = {std::string(torch) + "/python3", script};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
  child_ = fork();
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(ends[1], 0);
    dup2(ends[1], 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(ends[1]);
  const timeval limit{300, 0};
  setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  input_ = fdopen(ends[0], "r");
  output_ = fdopen(fcntl(ends[0], F_DUPFD_CLOEXEC, 0), "w");
  hello_ = answer();
}

PythonPeer::~PythonPeer() {
  if (output_ != nullptr) std::fclose(output_);
  if (input_ != nullptr) std::fclose(input_);  // the script's loop ends
  if (child_ > 0) waitpid(child_, nullptr, 0);
}

nlohmann::json PythonPeer::ask(const std::string& line) {
  std::fprintf(output_, "%s\n", line.c_str());
  std::fflush(output_);
  nlohmann::json said = answer();
  if (!said.is_object()) throw std::runtime_error(line + ": Python has ended");
  if (said.contains("error")) {
    throw std::runtime_error(line + ": " + said["error"].get<std::string>());
  }
  return said;
}

nlohmann::json PythonPeer::answer() {
  char line[4096] = "";
  if (std::fgets(line, sizeof line, input_) == nullptr) return nullptr;
  return nlohmann::json::parse(line, nullptr, false);
}

}  // namespace bench
