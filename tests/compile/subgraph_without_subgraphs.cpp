// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this job declares no sub-graphs
#include "job.hpp"

using namespace lockstep;

#ifdef REJECT
void train(job::Job& job, const job::Points::batch_type& batch) { job.step<"short"_s>(batch); }
#else
void train(job::Job& job, const job::Points::batch_type& batch) { job.step(batch); }
#endif
