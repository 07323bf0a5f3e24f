// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Error messages of samplers and loaders; file formats are in `files.ipp`.

#include "lockstep/detail/data/loader.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

LOCKSTEP_INLINE void require_same_draws(const SamplerState& own, const SamplerState& saved) {
  const auto require = [](std::uint64_t here, std::uint64_t there, const char* what,
                          const char* advice) {
    if (here == there) return;
    fail("DistributedSampler",
         {"the saved state has ", what, " ", there, ", this sampler has ", here}, advice);
  };
  require(own.samples, saved.samples, "sample count", "resume with the same data set");
  require(own.seed.value(), saved.seed.value(), "seed", "resume with the same seed");
  if (own.rule != saved.rule) {
    fail("DistributedSampler", {"the saved state was drawn by another rule"},
         "resume with the same remainder policy, order and shuffle option");
  }
}

LOCKSTEP_INLINE LoaderOptions checked_loading(LoaderOptions options, std::size_t samples,
                                              std::size_t drawn_from) {
  if (options.batch_size == 0)
    fail("DataLoader", {"batches of no samples"}, "set batch_size to 1 or more");
  if (samples == 0 && !options.may_be_empty)
    fail("DataLoader", {"the data set has no samples"}, "check what it was made from");
  if (options.workers != 0 && options.prefetch == 0)
    fail("DataLoader", {"workers that load nothing ahead"},
         "set prefetch to 1 or more, or workers to 0");
  if (drawn_from != samples)
    fail("DataLoader",
         {"the sampler draws from ", drawn_from, " samples and the data set has ", samples},
         "make the sampler with the size of this data set");
  return options;
}

inline constexpr const char* sample_advice =
    "look at this sample, and at the functions that read and change it";
inline constexpr const char* batch_advice = "look at these samples, and at what loads them";

/// The current exception as an error of `operation`; `about` precedes its message. Rethrows
/// `Stopped`.
LOCKSTEP_INLINE Error handled_error(std::string_view operation, std::string_view about,
                                    std::string_view advice) {
  try {
    throw;
  } catch (const Error& error) {
    const std::string inner = error.operation() == operation ? "" : text({error.operation(), ": "});
    const Error named(operation, text({about, ": ", inner, error.problem()}), error.advice());
    return error.is_consequence() ? named.as_consequence() : named;
  } catch (const Stopped&) {
    throw;
  } catch (const std::exception& error) {
    return {operation, text({about, ": ", error.what()}), advice};
  } catch (...) {
    return {operation, text({about, ": an exception that is no std::exception"}), advice};
  }
}

/// "samples 3, 7, 9", or the first and the last of many.
LOCKSTEP_INLINE std::string names_of(std::span<const std::size_t> indices) {
  if (indices.empty()) return "no samples";
  const bool is_long = indices.size() > 8;
  return text({indices.size() == 1 ? "sample " : "samples ",
               joined(is_long ? indices.first(3) : indices),
               is_long ? text({", ... ", indices.back()}) : ""});
}

LOCKSTEP_INLINE void rethrow_as(std::string_view operation, std::string_view about,
                                std::string_view advice) {
  std::throw_with_nested(handled_error(operation, about, advice));
}

/// The exception of one sample, nested, with the sample's number and its position in the batch.
struct SampleError : Error {
  SampleError(std::size_t sample, std::size_t draw, const Error& error)
      : Error(error), sample(sample), draw(draw) {}

  std::size_t sample;
  std::size_t draw;
};

LOCKSTEP_INLINE void rethrow_of_sample(std::size_t sample, std::size_t draw) {
  std::throw_with_nested(
      SampleError(sample, draw, handled_error("load", text({"sample ", sample}), sample_advice)));
}

LOCKSTEP_INLINE void rethrow_of_batch(std::span<const std::size_t> indices, Epoch epoch,
                                      std::size_t number) {
  const auto rethrow = [&](std::string_view names, const char* advice) {
    rethrow_as("DataLoader", text({names, "batch ", number, " of epoch ", epoch, ")"}), advice);
  };
  try {
    throw;
  } catch (const SampleError& error) {
    // A data set may load from another one, whose samples have other numbers.
    if (error.draw >= indices.size() || indices[error.draw] != error.sample)
      rethrow(text({names_of(indices), " ("}), batch_advice);
    try {
      std::rethrow_if_nested(error);
    } catch (...) {
      rethrow(text({"sample ", error.sample, " (draw ", error.draw, " of "}), sample_advice);
    }
  } catch (...) {
    rethrow(text({names_of(indices), " ("}), batch_advice);
  }
  std::terminate();  // every handler throws
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
