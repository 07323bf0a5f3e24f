// SPDX-License-Identifier: Apache-2.0
// The part of `lockstep::compiled` that needs zlib: linked only into programs that read IDX files.
#if __has_include(<zlib.h>)
#include "lockstep/data/fashion_mnist.ipp"
#include "lockstep/data/idx.ipp"
#include "lockstep/data/idx_dataset.ipp"
#include "lockstep/data/stage_unpacked.ipp"
#endif
