// SPDX-License-Identifier: Apache-2.0
// The library `lockstep::compiled`: the definitions that are no templates, compiled once instead of
// in every program. It is compiled with LOCKSTEP_COMPILED defined, as the programs that link it
// are.
#include "lockstep/checkpoint/json.ipp"
#include "lockstep/checkpoint/json_cursor.ipp"
#include "lockstep/checkpoint/reader.ipp"
#include "lockstep/checkpoint/safetensors.ipp"
#include "lockstep/checkpoint/safetensors_file.ipp"
#include "lockstep/checkpoint/write_file.ipp"
#include "lockstep/comm/backends/shm/engine.ipp"
#include "lockstep/comm/backends/shm/memory_file.ipp"
#include "lockstep/comm/call.ipp"
#include "lockstep/comm/fault/sentences.ipp"
#include "lockstep/comm/group_membership.ipp"
#include "lockstep/core/checksum.ipp"
#include "lockstep/core/error.ipp"
#include "lockstep/core/json_string.ipp"
#include "lockstep/core/text.ipp"
#include "lockstep/core/thread.ipp"
#include "lockstep/data/generated_dataset.ipp"
#include "lockstep/data/image_dataset.ipp"
#include "lockstep/device/lazy_pages.ipp"
#include "lockstep/device/numa.ipp"
#include "lockstep/launch/deadline.ipp"
#include "lockstep/launch/descriptor.ipp"
#include "lockstep/launch/failure.ipp"
#include "lockstep/launch/flags.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/names.ipp"
#include "lockstep/launch/open_files.ipp"
#include "lockstep/launch/parse.ipp"
#include "lockstep/launch/rendezvous.ipp"
#include "lockstep/launch/spawn.ipp"
#include "lockstep/launch/store.ipp"
#include "lockstep/launch/terminal.ipp"
#include "lockstep/observe/epoch_summary.ipp"
#include "lockstep/observe/json_line.ipp"
#include "lockstep/observe/log_file.ipp"
#include "lockstep/observe/number_text.ipp"
#include "lockstep/observe/progress_display.ipp"
#include "lockstep/observe/progress_line.ipp"
#include "lockstep/observe/scores.ipp"
#include "lockstep/observe/tally.ipp"
#include "lockstep/strategy/agreement.ipp"
#include "lockstep/trainer/log_fields.ipp"
#include "lockstep/trainer/options.ipp"
#include "lockstep/trainer/run_log.ipp"

template class lockstep::detail::BasicProgressDisplay<std::chrono::steady_clock>;

template <>
const char lockstep::detail::LibraryOfThisVersion<lockstep::detail::hash_of(
    lockstep::version)>::is_linked = 1;
