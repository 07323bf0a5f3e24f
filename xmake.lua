-- lockstep is header-only: the one target users need is `lockstep`; the rest is its tests, examples
-- and benchmarks. `./x` calls this file with what it found; plain `xmake` works too.
set_project("lockstep")
set_xmakever("2.8.5")

set_languages("c++20")
set_warnings("all", "extra", "error")
add_rules("mode.release", "mode.debug")
set_defaultmode("release")
set_policy("build.ccache", false)  -- it would preprocess everything first, for a cache that a fresh clone does not have

option("gpu")
    set_showmenu(true)
    set_description("Compile and link the CUDA parts (found or not, unless said)")
    set_default(os.isfile("/usr/local/cuda/bin/nvcc"))
option_end()

option("nccl")
    set_showmenu(true)
    set_description("Compile what needs NCCL")
    set_default(os.isfile("/usr/local/cuda/include/nccl.h") or os.isfile("/usr/include/nccl.h"))
option_end()

option("cccl")
    set_showmenu(true)
    set_description("The folder that holds CCCL's cuda/std")
    set_default(os.getenv("LOCKSTEP_CCCL") or "/usr/local/cuda/include/cccl")
option_end()

option("gloo")
    set_showmenu(true)
    set_description("Compile what needs Gloo")
    set_default(os.isfile("/usr/include/gloo/allreduce.h"))
option_end()

option("eigen")
    set_showmenu(true)
    set_description("The folder that holds Eigen/Core, for the examples' matrix products")
    set_default(os.getenv("LOCKSTEP_EIGEN") or "/usr/include/eigen3")
option_end()

-- The library: headers, and what else a program needs to include them.
target("lockstep")
    set_kind("headeronly")
    on_load(function (target)  -- version.hpp is the one source of the version
        local header = io.readfile(path.join(os.projectdir(), "include/lockstep/version.hpp"))
        target:set("version", header:match('version = "([%d%.]+)"'))
    end)
    add_headerfiles("include/(lockstep/**.hpp)", "include/(lockstep/**.cuh)")
    add_includedirs("include", {public = true})
    add_sysincludedirs("$(cccl)", {public = true})
    -- A square root that may set errno is not vectorised, which makes Adam three times as slow on a CPU.
    add_cxxflags("-fno-math-errno", {public = true})
    -- `find_package(lockstep)` for CMake and `pkg-config lockstep`. Both name the CCCL headers that this
    -- installation was configured with; lockstep_CCCL and --define-variable=cccl choose others.
    after_install(function (target)
        local cmakedir = path.join(target:installdir(), "lib/cmake/lockstep")
        local values = {VERSION = target:version(), CCCL = get_config("cccl")}
        local function write(file, text)
            io.writefile(file, (text:gsub("@(%u+)@", values)))
        end
        write(path.join(cmakedir, "lockstepConfig.cmake"), [[
set(lockstep_CCCL "@CCCL@" CACHE PATH "The folder that holds CCCL's cuda/std")
if(NOT EXISTS "${lockstep_CCCL}/cuda/std/mdspan")
  set(lockstep_FOUND FALSE)
  set(lockstep_NOT_FOUND_MESSAGE "no CCCL headers in ${lockstep_CCCL}; set lockstep_CCCL")
  return()
endif()
if(NOT TARGET lockstep::lockstep)
  get_filename_component(lockstep_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(lockstep::lockstep INTERFACE IMPORTED)
  target_compile_features(lockstep::lockstep INTERFACE cxx_std_20)
  target_compile_options(lockstep::lockstep INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno>")
  target_include_directories(lockstep::lockstep INTERFACE "${lockstep_prefix}/include")
  target_include_directories(lockstep::lockstep SYSTEM INTERFACE "${lockstep_CCCL}")
endif()
]])
        -- below 1.0, a minor version may break what an earlier one promised
        write(path.join(cmakedir, "lockstepConfigVersion.cmake"), [[
set(PACKAGE_VERSION "@VERSION@")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" lockstep_series "${PACKAGE_VERSION}")
if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION AND "${PACKAGE_FIND_VERSION}." MATCHES "^${lockstep_series}\\.")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
]])
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep.pc"), [[
prefix=${pcfiledir}/../..
cccl=@CCCL@

Name: lockstep
Description: Synchronous data-parallel training for C++ and CUDA, decided by the compiler
Version: @VERSION@
Cflags: -std=c++20 -fno-math-errno -I${prefix}/include -I${cccl}
]])
    end)
target_end()

includes("tests", "examples", "bench")
