// SPDX-License-Identifier: Apache-2.0
/// @file All programs of this folder and of examples/torch but GPT-2 as one, because LibTorch's
/// headers take most of the time: each is run under its own name. What they include stands here
/// first, so that it is in no program's namespace.
#include <torch/torch.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "fashion_mnist.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/lmdb.hpp"
#include "lockstep/torch.hpp"
#include "lockstep/torch_checkpoint.hpp"
#include "lockstep/torch_optim.hpp"
#include "lockstep/trainer.hpp"
#if LOCKSTEP_HAS_GLOO
#include "lockstep/gloo.hpp"
#endif

namespace minimal_ddp {
#include "minimal_ddp.cpp"
}
namespace minimal_ddp_spawn {
#include "minimal_ddp_spawn.cpp"
}
namespace dp_flag {
#include "dp_flag.cpp"
}
namespace train {
#include "train.cpp"
}
namespace sync_batch_norm {
#include "sync_batch_norm.cpp"
}
namespace rl_seeds {
#include "rl_seeds.cpp"
}
namespace log_loss {
#include "log_loss.cpp"
}
#if LOCKSTEP_HAS_GLOO
namespace groups {
#include "groups.cpp"
}
namespace fully_shard {
#include "fully_shard.cpp"
}
#endif
namespace lmdb_leaders {
#include "lmdb_leaders.cpp"
}

namespace amp {
#include "../torch/amp.cpp"
}
namespace own_loop {
#include "../torch/own_loop.cpp"
}
namespace data_parallel {
#include "../torch/data_parallel.cpp"
}
namespace clothes {
#include "../torch/fashion_mnist.cpp"
}

int main(int argc, char** argv) {
  const std::string_view path = argv[0];
  const std::string_view name = path.substr(path.rfind('/') + 1);
  if (name == "minimal_ddp") return minimal_ddp::main(argc, argv);
  if (name == "minimal_ddp_spawn") return minimal_ddp_spawn::main();
  if (name == "dp_flag") return dp_flag::main(argc, argv);
  if (name == "train") return train::main(argc, argv);
  if (name == "sync_batch_norm") return sync_batch_norm::main(argc, argv);
  if (name == "rl_seeds") return rl_seeds::main(argc, argv);
  if (name == "log_loss") return log_loss::main(argc, argv);
#if LOCKSTEP_HAS_GLOO
  if (name == "groups") return groups::main(argc, argv);
  if (name == "fully_shard") return fully_shard::main(argc, argv);
#endif
  if (name == "lmdb_leaders") return lmdb_leaders::main(argc, argv);
  if (name == "amp") return amp::main(argc, argv);
  if (name == "own_loop") return own_loop::main(argc, argv);
  if (name == "data_parallel") return data_parallel::main(argc, argv);
  if (name == "fashion_mnist") return clothes::main(argc, argv);
  std::fprintf(stderr, "no such program: %s\n", argv[0]);
  return 2;
}
