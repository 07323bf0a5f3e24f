// SPDX-License-Identifier: Apache-2.0
// Batch norms of LibTorch modules over real processes, against LibTorch's own norm on the union.
#include "lockstep/detail/torch/sync_batch_norm.hpp"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/instancenorm.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch/norm_ranks.hpp"

BOOST_AUTO_TEST_SUITE(torch_sync_batch_norm)

namespace {

using namespace synced_ranks;
using lockstep::detail::NormMark;
namespace nn = ::torch::nn;

/// A norm's input on all ranks, and how each has its part.
struct Union {
  std::vector<std::int64_t> samples;  // of each rank
  std::vector<std::int64_t> sample;   // channels and positions
  at::ScalarType type = at::kDouble;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;

  at::Tensor numbers(std::int64_t seed) const {
    std::int64_t all = 0;
    for (const std::int64_t count : samples) all += count;
    std::vector<std::int64_t> sizes{all};
    sizes.insert(sizes.end(), sample.begin(), sample.end());
    const at::Tensor index =
        at::arange(all * c10::multiply_integers(sample), at::kDouble).view(sizes);
    return ((index * 0.61 + seed).sin() * 2 + (index * 0.013).cos() + 0.7).to(type);
  }
  at::Tensor part(const at::Tensor& all, std::size_t rank) const {
    std::int64_t first = 0;
    for (std::size_t r = 0; r != rank; ++r) first += samples[r];
    const at::Tensor own = all.narrow(0, first, samples[rank]).contiguous();
    return sample.size() == 3 ? own.contiguous(format) : own;
  }
};

/// The weight and bias of tests, where a norm has them.
void set_affine(auto& norm) {
  const at::NoGradGuard quiet;
  if (!norm->options.affine()) return;
  const at::Tensor index = at::arange(norm->weight.numel(), at::kDouble);
  norm->weight.copy_((index + 3).sin());
  norm->bias.copy_((index + 4).sin());
}

/// Two steps of a norm on the union, in one process and over ranks.
template <class Norm>
void check_union(ranks::Shared& comm, const Union& all, const nn::BatchNormOptions& options,
                 double within, at::ScalarType norm_type) {
  Norm alone(options);
  Norm synced(options);
  for (Norm* norm : {&alone, &synced}) {
    set_affine(*norm);
    (*norm)->to(norm_type);
  }
  lockstep::detail::SyncedNorms norms;
  const std::size_t me = comm.rank().value();
  for (std::int64_t seed : {1, 2}) {
    const at::Tensor whole = all.numbers(seed).requires_grad_();
    const at::Tensor dy = all.numbers(seed + 10);
    const at::Tensor y = alone->forward(whole);
    y.backward(dy);
    const at::Tensor part = all.part(whole.detach(), me).requires_grad_();
    at::Tensor own;
    {
      const auto open = norms.open<true>(*synced, CommRanks{&comm});
      own = synced->forward(part);
    }
    require(own.scalar_type() == all.type, "y has another type");
    require(own.is_contiguous(all.sample.size() == 3 ? all.format : at::MemoryFormat::Contiguous) ||
                own.numel() == 0,
            "y has another order in memory");
    own.backward(all.part(dy, me));  // the ranks travel with the graph
    require_close(own, all.part(y, me), "y", within);
    require_close(part.grad(), all.part(whole.grad(), me), "dx", within);
  }
  if (options.affine()) {
    const auto sum = [&](const at::Tensor& own) {
      at::Tensor all_ranks = own.to(at::kDouble).contiguous();
      comm.all_reduce(std::span<double>(all_ranks.data_ptr<double>(),
                                        static_cast<std::size_t>(all_ranks.numel())),
                      Sum{});
      return all_ranks;
    };
    require(synced->weight.grad().scalar_type() == norm_type, "dweight has another type");
    require_close(sum(synced->weight.grad()), alone->weight.grad(), "dweight", within * 10);
    require_close(sum(synced->bias.grad()), alone->bias.grad(), "dbias", within * 10);
  }
  if (options.track_running_stats()) {
    // Those of 16-bit numbers are floats, and as exact.
    const double of_running = norm_type == at::kFloat ? 1e-5 : within;
    require_close(synced->running_mean, alone->running_mean, "running_mean", of_running);
    require_close(synced->running_var, alone->running_var, "running_var", of_running);
    require(synced->num_batches_tracked.template item<std::int64_t>() == 2, "batches tracked");
  }
}

/// The samples of each rank; with three ranks or more, rank 1 has none.
std::vector<std::int64_t> uneven(std::size_t world) {
  std::vector<std::int64_t> samples;
  for (std::size_t r = 0; r != world; ++r)
    samples.push_back(world > 2 && r == 1 ? 0 : static_cast<std::int64_t>(3 + 2 * r));
  return samples;
}

void check_kinds(ranks::Shared& comm) {
  const std::size_t world = comm.world_size().value();
  const auto samples = uneven(world);
  const auto last = at::MemoryFormat::ChannelsLast;
  const auto first = at::MemoryFormat::Contiguous;
  const auto options = [](std::int64_t n) { return nn::BatchNormOptions(n); };
  const Union rows{samples, {5}};
  const Union lines{samples, {3, 7}};
  const Union images{samples, {6, 4, 5}};
  const Union last_images{samples, {6, 4, 5}, at::kDouble, last};
  const Union volumes{samples, {4, 2, 3, 2}};
  constexpr double exact = 1e-10;
  check_union<nn::BatchNorm1d>(comm, rows, options(5), exact, at::kDouble);
  check_union<nn::BatchNorm1d>(comm, lines, options(3), exact, at::kDouble);
  check_union<nn::BatchNorm2d>(comm, images, options(6), exact, at::kDouble);
  check_union<nn::BatchNorm2d>(comm, last_images, options(6), exact, at::kDouble);
  check_union<nn::BatchNorm3d>(comm, volumes, options(4), exact, at::kDouble);
  // One rank has one value of each channel, which LibTorch's own norm rejects.
  std::vector<std::int64_t> one = samples;
  one.front() = 1;
  if (world != 1) {
    check_union<nn::BatchNorm1d>(comm, {one, {5}}, options(5), exact, at::kDouble);
    check_union<nn::BatchNorm1d>(comm, {one, {5}}, options(5).track_running_stats(false), exact,
                                 at::kDouble);
    check_union<nn::BatchNorm2d>(comm, {one, {5, 1, 1}}, options(5).momentum(std::nullopt), exact,
                                 at::kDouble);
  }
  // Options.
  check_union<nn::BatchNorm2d>(comm, images, options(6).momentum(std::nullopt).eps(1e-3), exact,
                               at::kDouble);
  check_union<nn::BatchNorm2d>(comm, images, options(6).momentum(0.3), exact, at::kDouble);
  check_union<nn::BatchNorm2d>(comm, images, options(6).affine(false), exact, at::kDouble);
  check_union<nn::BatchNorm2d>(comm, images, options(6).track_running_stats(false), exact,
                               at::kDouble);
  check_union<nn::BatchNorm2d>(comm, images, options(6).affine(false).track_running_stats(false),
                               exact, at::kDouble);
  // Types; a norm of floats takes halves.
  for (const auto format : {first, last}) {
    check_union<nn::BatchNorm2d>(comm, {samples, {6, 4, 5}, at::kFloat, format}, options(6), 1e-5,
                                 at::kFloat);
    check_union<nn::BatchNorm2d>(comm, {samples, {6, 4, 5}, at::kBFloat16, format}, options(6),
                                 2e-2, at::kFloat);
    check_union<nn::BatchNorm2d>(comm, {samples, {6, 4, 5}, at::kHalf, format}, options(6), 3e-3,
                                 at::kFloat);
  }
  check_union<nn::BatchNorm2d>(comm, {samples, {6, 4, 5}, at::kBFloat16, first}, options(6), 3e-2,
                               at::kBFloat16);
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_find_what_one_process_finds_on_the_union) {
  for (const std::size_t world : {1u, 2u, 4u})
    expect_fine(on_ranks(world, [](ranks::Shared& comm) { check_kinds(comm); }));
}

BOOST_AUTO_TEST_CASE(a_graph_of_gradients_through_norms_of_all_ranks_is_rejected) {
  expect_fine(on_ranks(2, [](ranks::Shared& comm) {
    const Union all{{3, 5}, {4, 3, 3}};
    nn::BatchNorm2d norm(4);
    norm->to(at::kDouble);
    lockstep::detail::SyncedNorms norms;
    const auto open = norms.open<true>(*norm, CommRanks{&comm});
    const at::Tensor part = all.part(all.numbers(1), comm.rank().value()).requires_grad_();
    const at::Tensor y = norm->forward(part);
    std::string words;
    try {
      ::torch::autograd::grad({(y * y).sum()}, {part}, {}, true, /*create_graph=*/true);
    } catch (const std::exception& error) {
      words = error.what();
    }
    require(words.find("which has no second derivatives") != std::string::npos, words);
  }));
}

BOOST_AUTO_TEST_CASE(backward_may_run_on_another_thread_and_inputs_may_need_no_gradient) {
  expect_fine(on_ranks(2, [](ranks::Shared& comm) {
    const Union all{{3, 5}, {4, 3, 3}};
    const std::size_t me = comm.rank().value();
    const at::Tensor whole = all.numbers(1);
    nn::BatchNorm2d alone(4), norm(4);
    alone->to(at::kDouble);
    norm->to(at::kDouble);
    const at::Tensor dy = all.numbers(5);
    alone->forward(whole).backward(dy);
    lockstep::detail::SyncedNorms norms;
    at::Tensor y;
    const std::uint32_t version = norm->running_mean._version();
    {
      const auto open = norms.open<true>(*norm, CommRanks{&comm});
      y = norm->forward(all.part(whole, me));
    }
    require(norm->running_mean._version() > version, "autograd does not see the new statistics");
    std::string words;
    std::thread([&] {
      try {
        y.backward(all.part(dy, me));
      } catch (const std::exception& error) {
        words = error.what();
      }
    }).join();
    require(words.empty(), words);
    at::Tensor sum = norm->weight.grad().clone();
    comm.all_reduce(std::span<double>(sum.data_ptr<double>(), 4), Sum{});
    require_close(sum, alone->weight.grad(), "dweight", 1e-10);
  }));
}

BOOST_AUTO_TEST_CASE(evaluation_and_other_norms_stay_with_their_rank) {
  expect_fine(on_ranks(2, [](ranks::Shared& comm) {
    const Union all{{3, 5}, {4, 3, 3}};
    const at::Tensor part = all.part(all.numbers(1), comm.rank().value());
    const auto same = [&](auto marked, auto plain, const std::string& what) {
      marked->to(at::kDouble);
      plain->to(at::kDouble);
      require_close(marked->forward(part), plain->forward(part), what, 1e-12);
    };
    const auto no_statistics = nn::BatchNormOptions(4).track_running_stats(false);
    lockstep::detail::SyncedNorms norms;
    nn::BatchNorm2d evaluated(4), bare(no_statistics), unmarked(4),
        bare_of_all(nn::BatchNormOptions(4).track_running_stats(false).affine(false));
    nn::Sequential marked(evaluated, bare, bare_of_all);
    {
      const auto open = norms.open<true>(*marked, CommRanks{&comm});
      for (const at::Tensor& mean :
           {evaluated->running_mean, bare->running_mean, bare_of_all->running_mean})
        require(NormMark::of(mean) != nullptr, "a norm is not marked");
    }
    marked->eval();
    const auto open = norms.open<true>(*marked, CommRanks{&comm});
    nn::BatchNorm2d plain(4);
    plain->eval();
    same(evaluated, plain, "an evaluated norm");
    same(bare, nn::BatchNorm2d(no_statistics), "an evaluated norm without running statistics");
    same(bare_of_all, nn::BatchNorm2d(no_statistics), "an evaluated norm without any tensors");
    same(unmarked, nn::BatchNorm2d(4), "a norm of another module");
    nn::InstanceNorm2d instance(nn::InstanceNorm2dOptions(4));
    const at::Tensor normal = instance->forward(part);
    require(normal.mean({2, 3}).abs().max().item<double>() < 1e-9, "an instance norm");
  }));
}

BOOST_AUTO_TEST_CASE(norms_know_the_ranks_of_their_own_job_until_it_ends) {
  const auto check = [](ranks::Shared& comm, bool leaves_step) {
    const Union all{{3, 5}, {4, 3, 3}};
    const at::Tensor part = all.part(all.numbers(1), comm.rank().value());
    nn::BatchNorm2d first(4), second(4), plain(4);
    for (nn::BatchNorm2d* norm : {&first, &second, &plain}) (*norm)->to(at::kDouble);
    {
      lockstep::detail::SyncedNorms norms;
      {
        const auto open = norms.open<true>(*first, CommRanks{&comm});
      }
      lockstep::detail::SyncedNorms copied(norms);  // with the model, for another module
      const auto open = copied.open<true>(*second, CommRanks{&comm});
      require(NormMark::of(second->running_mean) != nullptr,
              "that of a copied model is not marked");
      if (leaves_step) first->forward(part);
      first->eval();
      require_close(first->forward(part), part / std::sqrt(1 + 1e-5), "an evaluation", 1e-12);
      first->train();
    }
    for (const at::Tensor& mean : {first->running_mean, second->running_mean})
      require(NormMark::of(mean) == nullptr, "a mark outlives its job");
    require_close(first->forward(part), plain->forward(part), "a norm after the job", 1e-12);
    nn::BatchNorm2d copy(std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(second->clone()));
    require_close(copy->forward(part), plain->forward(part), "a copied norm", 1e-12);
  };
  expect_fine(on_ranks(2, [&](ranks::Shared& comm) { check(comm, false); }));
  expect_all_say(on_ranks(2, [&](ranks::Shared& comm) { check(comm, true); }),
                 "trains outside of a step of its job");
}

// What a program, its optimizers and its files see of a norm does not change.
BOOST_AUTO_TEST_CASE(a_marked_running_mean_is_a_tensor_like_any_other) {
  nn::BatchNorm1d inner(3);
  nn::BatchNorm1dImpl& norm = *inner;
  nn::Sequential net(inner);
  const nn::Sequential same = convert_sync_batchnorm(net);
  BOOST_TEST(same.ptr() == net.ptr());
  const NormMark* const mark = NormMark::of(norm.running_mean);
  BOOST_REQUIRE(mark != nullptr);
  convert_sync_batchnorm(net);
  BOOST_TEST((NormMark::of(norm.running_mean) == mark));  // and not one around it

  const at::Tensor x = at::arange(12, at::kFloat).view({4, 3});
  nn::BatchNorm1d plain(3);
  for (int pass = 0; pass != 2; ++pass) BOOST_TEST(at::equal(norm.forward(x), plain(x)));
  BOOST_TEST(at::equal(norm.running_mean, plain->running_mean));
  BOOST_TEST(at::equal(norm.running_mean + 1, plain->running_mean + 1));
  BOOST_TEST(norm.running_mean.data_ptr<float>()[1] == plain->running_mean.data_ptr<float>()[1]);
  BOOST_TEST(norm.running_mean.toString() == plain->running_mean.toString());
  BOOST_TEST(at::equal(
      at::batch_norm(x, {}, {}, norm.running_mean.detach(), norm.running_var, false, 0.1, 1e-5,
                     false),
      at::batch_norm(x, {}, {}, plain->running_mean, plain->running_var, false, 0.1, 1e-5, false)));
  norm.running_mean.fill_(7);
  BOOST_TEST(at::equal(net->named_buffers()["0.running_mean"], at::full({3}, 7.0F)));
  BOOST_TEST(net->named_buffers().size() == 3u);
  net->to(at::kDouble);
  BOOST_TEST((norm.forward(x.to(at::kDouble)).scalar_type() == at::kDouble));
  const auto copy = std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(norm.clone());
  BOOST_TEST((NormMark::of(copy->running_mean) == nullptr));
}

BOOST_AUTO_TEST_CASE(batches_that_are_empty_everywhere_change_nothing) {
  expect_fine(on_ranks(2, [](ranks::Shared& comm) {
    nn::BatchNorm2d norm(3);
    lockstep::detail::SyncedNorms norms;
    const auto open = norms.open<true>(*norm, CommRanks{&comm});
    norm->forward(at::zeros({0, 3, 2, 2}).requires_grad_()).sum().backward();
    require_close(norm->running_mean, at::zeros({3}), "running_mean", 0);
    require_close(norm->running_var, at::ones({3}), "running_var", 0);
    require_close(norm->weight.grad(), at::zeros({3}), "dweight", 0);
  }));
}

BOOST_AUTO_TEST_CASE(one_value_of_all_ranks_is_rejected_on_all) {
  expect_all_say(on_ranks(2,
                          [](ranks::Shared& comm) {
                            nn::BatchNorm1d norm(3);
                            lockstep::detail::SyncedNorms norms;
                            const auto open = norms.open<true>(*norm, CommRanks{&comm});
                            const auto mine = static_cast<std::int64_t>(comm.rank().value());
                            norm->forward(at::zeros({mine, 3}));
                          }),
                 "expected more than 1 value per channel");
}

BOOST_AUTO_TEST_CASE(backward_after_the_job_has_ended_is_rejected) {
  expect_all_say(on_ranks(2,
                          [](ranks::Shared& comm) {
                            nn::Sequential net(nn::BatchNorm2d(3));
                            at::Tensor y;
                            {
                              lockstep::detail::SyncedNorms norms;
                              const auto open = norms.open<true>(*net, CommRanks{&comm});
                              y = net->forward(at::ones({2, 3, 2, 2}));
                            }
                            y.sum().backward();
                          }),
                 "runs after its job has ended");
}

BOOST_AUTO_TEST_CASE(a_norm_without_tensors_gets_none_that_is_seen) {
  expect_fine(on_ranks(2, [](ranks::Shared& comm) {
    nn::BatchNorm1d bare(nn::BatchNormOptions(3).affine(false).track_running_stats(false));
    lockstep::detail::SyncedNorms norms;
    const auto open = norms.open<true>(*bare, CommRanks{&comm});
    require(bare->parameters().empty(), "a parameter was added");
    require(bare->named_buffers().is_empty(), "a buffer was added");
    nn::BatchNorm1d copy(std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(bare->clone()));
    require(!copy->weight.defined(), "the tag was copied");
  }));
}

BOOST_AUTO_TEST_SUITE_END()
