// SPDX-License-Identifier: Apache-2.0
// Members that the other programs do not use.
// expect: lockstep: Accumulate<0> would never step
#include "job.hpp"
#include "lockstep/checkpoint.hpp"

using namespace lockstep;

#ifdef REJECT
using Job = Trainer<job::Line, Accumulate<0>, World<2>>;
#else
using Job = job::Job;
#endif

std::string use(Session& session, const job::Points& points) {
  TrainerOptions options;
  Job job(session, {}, options);
  Job made(session, [](Session&) { return job::Line{}; });
  Job ready(session, job::Line{}, options);
  [[maybe_unused]] const auto on = made.on_device();
  job.sampler_options().seed = Seed{3};
  job.loader_options().workers = 2;
  job.ddp().set_epoch(1);
  job.model().error = 0;
  job.resume(job.position());
  double best = 0;
  job.keep("best", best);
  job.checkpoints({.folder = "run", .every_steps = 100});
  if (!job.resume()) best = job.resume("run").best.value_or(0);
  job.save("file", {.asynchronous = true});
  best += static_cast<double>(job.load("file").missing.size());
  job.load_parameters("file", {.strict = false});
  job.finish_saves();
  Tally tally;
  tally.add("error", 1, job.random().uniform(0., 1.));
  const Scores scores = job.reduce_metrics(tally);
  job.barrier();
  for (auto epoch : job.epochs(2)) {
    auto batches = epoch.batches(points, 2);
    if (epoch.number() + batches.size() == 0) break;
  }
  const std::size_t place = job.rank().value() + job.world_size().value() + job.seed().value() +
                            job.membership().local_world + job.ddp().updates() +
                            ready.rank().value();
  return job.checkpoints()->latest().value_or("none") + job.data() + job.summary().text() +
         std::to_string(place + scores.size());
}
