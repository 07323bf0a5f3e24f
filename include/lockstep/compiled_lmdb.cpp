// SPDX-License-Identifier: Apache-2.0
// The part of `lockstep::compiled` that needs liblmdb: linked only into programs that read or write
// LMDB files.
#if __has_include(<lmdb.h>)
#include "lockstep/data/labelled_record.ipp"
#include "lockstep/data/lmdb.ipp"
#include "lockstep/data/lmdb_header.ipp"
#include "lockstep/data/lmdb_pages.ipp"
#include "lockstep/data/lmdb_writer.ipp"
#endif
