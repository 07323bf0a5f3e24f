// SPDX-License-Identifier: Apache-2.0
#include "peer.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace bench {

PythonPeer::PythonPeer(std::size_t width, const std::string& device) {
  const char* const torch = std::getenv("LOCKSTEP_TORCH");
  if (torch == nullptr) return;
  const std::string python = std::string(torch) + "/python3";
  const std::string script = LOCKSTEP_SOURCE_DIR "/bench/checkpoint/peers.py";
  const std::string size = std::to_string(width);
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
  child_ = fork();
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(ends[1], 0);
    dup2(ends[1], 1);
    execl(python.c_str(), python.c_str(), script.c_str(), size.c_str(), device.c_str(), nullptr);
    _exit(127);
  }
  close(ends[1]);
  const timeval limit{300, 0};
  setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  input_ = fdopen(ends[0], "r");
  output_ = fdopen(fcntl(ends[0], F_DUPFD_CLOEXEC, 0), "w");
  const nlohmann::json hello = nlohmann::json::parse(answer(), nullptr, false);
  if (!hello.is_object()) return;
  torch_ = hello["torch"];
  if (hello["safetensors"].is_string()) safetensors_ = hello["safetensors"];
  parameters_ = hello["parameters"];
}

PythonPeer::~PythonPeer() {
  if (output_ != nullptr) std::fclose(output_);
  if (input_ != nullptr) std::fclose(input_);  // the script's loop ends
  if (child_ > 0) waitpid(child_, nullptr, 0);
}

std::string PythonPeer::text() const {
  if (!has_torch()) return "no PyTorch here: its columns stay empty";
  return "PyTorch " + torch_ +
         (has_safetensors() ? ", safetensors " + safetensors_ : ", no safetensors");
}

double PythonPeer::run(const std::string& command, const std::string& path) {
  std::fprintf(output_, "%s %s\n", command.c_str(), path.c_str());
  std::fflush(output_);
  const nlohmann::json said = nlohmann::json::parse(answer(), nullptr, false);
  if (!said.is_object()) throw std::runtime_error(command + ": Python has ended");
  if (said.contains("error")) {
    throw std::runtime_error(command + ": " + said["error"].get<std::string>());
  }
  return said["seconds"];
}

std::string PythonPeer::answer() {
  char line[4096] = "";
  return std::fgets(line, sizeof line, input_) == nullptr ? "" : line;
}

}  // namespace bench
