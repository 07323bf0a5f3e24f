// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Observers<Nvtx>`: the phases of steps as NVTX ranges, which Nsight Systems shows.

#include <nvtx3/nvToolsExt.h>

#include "lockstep/detail/observe/observers.hpp"

namespace lockstep {

/// Phases as ranges of the calling thread, in NVTX's domain "lockstep".
struct Nvtx : Observer<Nvtx> {
  class Span {
   public:
    explicit Span(const SpanName& name) {
      nvtxEventAttributes_t event{};
      event.version = NVTX_VERSION;
      event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
      event.messageType = NVTX_MESSAGE_TYPE_ASCII;
      event.message.ascii = name.name;
      if (name.number != SpanName::no_number) {
        event.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
        event.payload.ullValue = name.number;
      }
      nvtxDomainRangePushEx(domain(), &event);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() { nvtxDomainRangePop(domain()); }

   private:
    static nvtxDomainHandle_t domain() {
      static const nvtxDomainHandle_t domain = nvtxDomainCreateA("lockstep");
      return domain;
    }
  };
};

}  // namespace lockstep
