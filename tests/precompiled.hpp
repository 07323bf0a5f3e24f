// SPDX-License-Identifier: Apache-2.0
/// @file What most tests include, compiled once before all batches of a program. Each test includes
/// what it uses nevertheless. There is no `#pragma once`: compilers warn of one in a header that
/// they compile by itself.

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "lockstep/lockstep.hpp"
