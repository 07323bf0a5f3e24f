// SPDX-License-Identifier: Apache-2.0
// The part of `lockstep::compiled` that needs liblmdb: linked only into programs that write LMDB
// files.
#if __has_include(<lmdb.h>)
#include "lockstep/detail/data/write_lmdb.ipp"
#endif
