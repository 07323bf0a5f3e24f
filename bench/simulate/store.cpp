// SPDX-License-Identifier: Apache-2.0
// What joining costs a rank at the job's store: the emulated clients of tests/store meet as so many
// ranks do. bench/simulate/run starts this in a network namespace of its own, whose loopback
// carries nothing else: store RANKS
#include <net/if.h>
#include <sys/ioctl.h>

#include <cstdio>
#include <fstream>
#include <string>

#include "lockstep/detail/core/file.hpp"
#include "lockstep/lockstep.hpp"
#include "store/many_clients.hpp"

namespace {

/// The loopback of a new network namespace is down.
void raise_loopback() {
  const int socket = ::socket(AF_INET, SOCK_DGRAM, 0);
  ifreq lo{};
  lo.ifr_name[0] = 'l';
  lo.ifr_name[1] = 'o';
  ::ioctl(socket, SIOCGIFFLAGS, &lo);
  lo.ifr_flags |= IFF_UP;
  ::ioctl(socket, SIOCSIFFLAGS, &lo);
  ::close(socket);
}

double loopback_bytes() {
  std::ifstream devices("/proc/self/net/dev");
  double bytes = 0;
  for (std::string word; devices >> word;)
    if (word == "lo:") devices >> bytes;
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::size_t ranks = std::stoul(argv[1]);
  raise_loopback();
  lockstep::detail::prefer_open_files(2 * ranks + 256);
  const double before = loopback_bytes();
  const many_clients::Times times = many_clients::play(ranks);
  std::printf("{\"ranks\": %zu, \"requests\": %llu, \"bytes\": %.0f, \"seconds\": %.3f}\n", ranks,
              static_cast<unsigned long long>(times.requests), loopback_bytes() - before,
              times.meet() + times.notice);
}
