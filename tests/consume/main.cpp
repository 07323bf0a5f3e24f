// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <lockstep/lockstep.hpp>
using namespace lockstep;

struct Linear {
  using Parameters = ParameterList<Parameter<"weight", float, 1, 10>, Parameter<"bias", float, 1>>;
};
using Job = Trainer<Linear, ParallelStrategy<DDP>, Backend<Shm>, World<2>>;

int main() { std::printf("%016llx\n", static_cast<unsigned long long>(Job::fingerprint())); }
