// SPDX-License-Identifier: Apache-2.0
/// @file The examples that take less time than their compiler as one program, each run under its
/// own name: most of that time goes into headers and templates that they share. What they include
/// stands here first, so that it is in no program's namespace.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "fashion_mnist.hpp"
#include "image_dataset.hpp"
#include "lockstep/lockstep.hpp"
#include "mlp.hpp"
#if LOCKSTEP_HAS_LMDB
#include "lockstep/lmdb.hpp"
#endif
#if LOCKSTEP_HAS_GLOO
#include "lockstep/gloo.hpp"
#endif

namespace one_process {
#include "00_one_process.cpp"
}
namespace minimal_ddp {
#include "01_minimal_ddp.cpp"
}
namespace collectives {
#include "02_collectives.cpp"
}
namespace feeding_groups {
#include "05_feeding_groups.cpp"
}
#if LOCKSTEP_HAS_LMDB
namespace lmdb {
#include "08_lmdb.cpp"
}
#endif
namespace checkpoints {
#include "10_checkpoints.cpp"
}
namespace zero {
#include "11_zero.cpp"
}
namespace hooks {
#include "12_hooks.cpp"
}
namespace uneven_inputs {
#include "13_uneven_inputs.cpp"
}
namespace subgraphs {
#include "14_subgraphs.cpp"
}
namespace reinforcement_learning {
#include "15_reinforcement_learning.cpp"
}
namespace early_stopping {
#include "16_early_stopping.cpp"
}
namespace hand_written_dp {
#include "17_hand_written_dp.cpp"
}
#if LOCKSTEP_HAS_GLOO
namespace fully_sharded {
#include "18_fully_sharded.cpp"
}
#endif

int main(int argc, char** argv) {
  const std::string_view path = argv[0];
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name == "one_process") return one_process::main();
  if (name == "minimal_ddp") return minimal_ddp::main(argc, argv);
  if (name == "collectives") return collectives::main(argc, argv);
  if (name == "feeding_groups") return feeding_groups::main(argc, argv);
#if LOCKSTEP_HAS_LMDB
  if (name == "lmdb") return lmdb::main(argc, argv);
#endif
  if (name == "checkpoints") return checkpoints::main(argc, argv);
  if (name == "zero") return zero::main(argc, argv);
  if (name == "hooks") return hooks::main(argc, argv);
  if (name == "uneven_inputs") return uneven_inputs::main(argc, argv);
  if (name == "subgraphs") return subgraphs::main(argc, argv);
  if (name == "reinforcement_learning") return reinforcement_learning::main(argc, argv);
  if (name == "early_stopping") return early_stopping::main(argc, argv);
  if (name == "hand_written_dp") return hand_written_dp::main(argc, argv);
#if LOCKSTEP_HAS_GLOO
  if (name == "fully_sharded") return fully_sharded::main(argc, argv);
#endif
  std::fprintf(stderr, "no such example: %s\n", argv[0]);
  return 2;
}
