// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parts of norms_gpu: a file for each way in which ranks communicate, because compilers
/// take minutes for each.

namespace norm_test {

int run_threads(int argc, char** argv);
int run_nccl(int argc, char** argv);
int run_nodes(int argc, char** argv);
int run_gloo(int argc, char** argv);
int run_hosts(int argc, char** argv);

}  // namespace norm_test
