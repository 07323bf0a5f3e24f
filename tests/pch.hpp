// SPDX-License-Identifier: Apache-2.0
// What nearly every test includes, precompiled once for each binary. No headers of the library:
// tests include what they use.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cuda/std/mdspan>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>
