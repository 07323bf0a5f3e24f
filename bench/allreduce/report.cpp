// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bench {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value < 10 ? "%.3f" : value < 1000 ? "%.1f" : "%.0f", value);
  return text;
}

std::string number(std::optional<double> value) { return value ? number(*value) : "-"; }

std::string size_name(std::size_t bytes) {
  return bytes < 1_MiB ? std::to_string(bytes >> 10) + " KiB"
                       : std::to_string(bytes >> 20) + " MiB";
}

std::optional<double> median_of(const Times& times) {
  return times.known ? std::optional(times.median) : std::nullopt;
}
std::optional<double> minimum_of(const Times& times) {
  return times.known ? std::optional(times.minimum) : std::nullopt;
}
std::optional<double> over(std::optional<double> a, std::optional<double> b) {
  return a && b ? std::optional(*a / *b) : std::nullopt;
}

nlohmann::json json(std::optional<double> value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

/// A line of the results. Targets at least 2 are speedups, to be reached; the rest are shares, not
/// to be exceeded.
struct Line {
  std::string measure;
  std::optional<double> lockstep{};
  std::optional<double> peer{};
  std::optional<double> ratio{};
  std::optional<double> target{};

  bool is_speedup() const { return target && *target >= 2; }
  bool met() const {
    return !target || (ratio && (is_speedup() ? *ratio >= *target : *ratio <= *target));
  }
};

const Row& row_of(const Results& results, std::size_t ranks, std::size_t bytes) {
  const auto w = std::find(worlds.begin(), worlds.end(), ranks) - worlds.begin();
  const auto s = std::find(sizes.begin(), sizes.end(), bytes) - sizes.begin();
  return results.rows[static_cast<std::size_t>(w)][static_cast<std::size_t>(s)];
}

std::vector<Line> targets(const Results& results, const MpiResults& through_mpi) {
  const auto speedup = [](std::string measure, std::optional<double> lockstep,
                          std::optional<double> peer, double target) {
    return Line{std::move(measure), lockstep, peer, over(peer, lockstep), target};
  };
  const auto share = [](std::string measure, std::optional<double> lockstep,
                        std::optional<double> peer, double target) {
    return Line{std::move(measure), lockstep, peer, over(lockstep, peer), target};
  };
  const Row& large = row_of(results, 2, 25_MiB);
  const Row& small = row_of(results, 2, 1_KiB);
  std::vector<Line> lines = {
      speedup("#1: 25 MiB, W=2, Gloo / lockstep, medians", median_of(large[arena]),
              median_of(large[gloo]), 12),
      share("#3: 25 MiB, W=2, lockstep / concurrent memcpy, medians", median_of(large[arena]),
            median_of(large[copying]), 0.85),
      speedup("#4: 1 KiB, W=2, Gloo's minimum / lockstep's median", median_of(small[arena]),
              minimum_of(small[gloo]), 200),
      share("safety: 1 MiB, W=2, with / without comparing calls, medians",
            median_of(results.checked), median_of(results.unchecked), 1.02),
  };
  for (std::size_t w = 0; w < mpi_worlds.size(); ++w) {
    for (std::size_t s = 0; s < sizes.size(); ++s) {
      const MpiRow& row = through_mpi[w][s];
      if (sizes[s] < 25_MiB || !row[mpi].known) continue;
      lines.push_back(share("MPI: " + size_name(sizes[s]) + ", W=" + std::to_string(mpi_worlds[w]) +
                                ", Backend<Mpi> / MPI_Allreduce, medians",
                            median_of(row[mpi]), median_of(row[plain_mpi]), 1.03));
    }
  }
  return lines;
}

std::vector<Line> comparisons(const Results& results, const MpiResults& through_mpi) {
  static constexpr std::array<const char*, lanes> names = {
      "lockstep", "lockstep, staged", "plain staged", "Gloo", "concurrent memcpy"};
  std::vector<Line> lines;
  for (const std::size_t ranks : worlds) {
    for (const std::size_t bytes : sizes) {
      const Row& row = row_of(results, ranks, bytes);
      const auto own = median_of(row[arena]);
      for (const Lane peer : {staged, plain, gloo, copying}) {
        const auto other = median_of(row[peer]);
        lines.push_back(
            {size_name(bytes) + ", W=" + std::to_string(ranks) + ", us, against " + names[peer],
             own, other, over(other, own)});
      }
    }
  }
  for (std::size_t w = 0; w < mpi_worlds.size(); ++w) {
    for (std::size_t s = 0; s < sizes.size(); ++s) {
      const MpiRow& row = through_mpi[w][s];
      if (!row[mpi].known) continue;
      const auto own = median_of(row[mpi]);
      static constexpr std::array<const char*, mpi_lanes> beside = {"", "Backend<MpiAnyOrder>",
                                                                    "MPI_Allreduce", "Gloo"};
      for (const MpiLane peer : {mpi_any_order, plain_mpi, gloo_beside_mpi}) {
        const auto other = median_of(row[peer]);
        lines.push_back({size_name(sizes[s]) + ", W=" + std::to_string(mpi_worlds[w]) +
                             ", us, Backend<Mpi> against " + beside[peer],
                         own, other, over(other, own)});
      }
    }
  }
  return lines;
}

}  // namespace

void print_mpi(const MpiResults& results) {
  if (!results[0][0][mpi].known && !results[1][0][mpi].known) {
    std::printf(
        "\nskipped: rows through MPI (no MPI was found when this was compiled, or no "
        "mpirun is here)\n");
    return;
  }
  std::printf(
      "\n| W | bytes | Backend<Mpi> median (us) | min | Backend<MpiAnyOrder> | "
      "MPI_Allreduce | min | Gloo | Backend<Mpi> / MPI_Allreduce |\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  for (std::size_t w = 0; w < mpi_worlds.size(); ++w) {
    for (std::size_t s = 0; s < sizes.size(); ++s) {
      const MpiRow& row = results[w][s];
      if (!row[mpi].known) continue;
      std::printf("| %zu | %s |", mpi_worlds[w], size_name(sizes[s]).c_str());
      for (const auto value :
           {median_of(row[mpi]), minimum_of(row[mpi]), median_of(row[mpi_any_order]),
            median_of(row[plain_mpi]), minimum_of(row[plain_mpi]), median_of(row[gloo_beside_mpi]),
            over(median_of(row[mpi]), median_of(row[plain_mpi]))}) {
        std::printf(" %s |", number(value).c_str());
      }
      std::printf("\n");
    }
  }
}

void print_heading() {
  std::printf(
      "| W | bytes | lockstep median (us) | min | staged lockstep | plain staged | Gloo median | "
      "min "
      "| memcpy median | Gloo / lockstep | lockstep / memcpy |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|\n");
}

void print_row(std::size_t ranks, std::size_t bytes, const Row& row) {
  const auto own = median_of(row[arena]);
  std::printf("| %zu | %s |", ranks, size_name(bytes).c_str());
  for (const auto value :
       {own, minimum_of(row[arena]), median_of(row[staged]), median_of(row[plain]),
        median_of(row[gloo]), minimum_of(row[gloo]), median_of(row[copying]),
        over(median_of(row[gloo]), own), over(own, median_of(row[copying]))}) {
    std::printf(" %s |", number(value).c_str());
  }
  std::printf("\n");
  std::fflush(stdout);
}

void report(const Results& results, const MpiResults& through_mpi,
            const std::filesystem::path& file) {
  nlohmann::json rows = nlohmann::json::array();
  const auto write = [&](const Line& line) {
    rows.push_back({{"measure", line.measure},
                    {"lockstep", json(line.lockstep)},
                    {"peer", json(line.peer)},
                    {"ratio", json(line.ratio)},
                    {"target", json(line.target)},
                    {"met", line.met()}});
  };
  std::printf("\n| target | lockstep (us) | peer (us) | ratio | target | met |\n");
  std::printf("|---|---|---|---|---|---|\n");
  for (const Line& line : targets(results, through_mpi)) {
    std::printf(
        "| %s | %s | %s | %s | %s %s | %s |\n", line.measure.c_str(), number(line.lockstep).c_str(),
        number(line.peer).c_str(), number(line.ratio).c_str(),
        line.is_speedup() ? ">=" : "<=", number(line.target).c_str(), line.met() ? "yes" : "no");
    write(line);
  }
  for (const Line& line : comparisons(results, through_mpi)) write(line);
  std::filesystem::create_directories(file.parent_path());
  std::ofstream(file) << rows.dump(2) << "\n";
}

}  // namespace bench
